"""The page: complete in itself, and opened in a real browser without a network its numbers are those of the JSON."""

from __future__ import annotations

import html as html_module
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hocket_trace import table
from hocket_trace.as_json import to_json
from hocket_trace.data import RankTrace, Step
from hocket_trace.exposure import report
from hocket_trace.page import html
from hocket_trace.picture import COLORS
from hocket_trace.table import headline
from tests.trace.reports import Row, busy, step_of, tax, trace
from tests.trace.reports import report as made

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def page_of(traces: list[RankTrace]) -> str:
    return html(report(traces), traces)


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def opened(page: str, folder: Path, address: str = "", width: int = 1300) -> str:
    """The document after its scripts have run, in a browser that reaches no host."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed: looked for chromium, google-chrome and chrome on PATH")
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=5000"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    program = [str(BROWSER), *flags, f"{path.as_uri()}{address}"]
    return subprocess.run(program, capture_output=True, text=True, timeout=50, check=True).stdout


def attribute(document: str, name: str) -> str:
    found = re.search(rf'<body[^>]*\bdata-{name}="([^"]*)"', document)
    assert found, f"the page did not come to data-{name}"
    return html_module.unescape(found.group(1))


def text_of(document: str, name: str) -> str:
    """The text of the element with this id."""
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(?:span|p|div)>', document, re.DOTALL)
    assert found
    return html_module.unescape(re.sub(r"<[^>]+>", "", found.group(1)))


# ------------------------------------------------------------------------------------------------- in a browser


def test_numbers_computed_by_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    traces = [busy(400, rank=rank, world=2) for rank in range(2)]
    document = opened(page_of(traces), tmp_path)
    computed = {(row["rank"], row["step"]): row for row in json.loads(attribute(document, "figures"))}
    told = to_json(report(traces))
    assert len(computed) == 4
    for row in told["by_rank_and_step"]:
        for name in ("rank_seconds", "compute_seconds", "communication_seconds", "exposed_seconds"):
            seconds = computed[row["rank"], row["step"]][name]
            assert seconds == pytest.approx(row[name], abs=2e-6), name  # the page counts whole nanoseconds
            assert seconds > 0
    assert int(attribute(document, "rows")) == sum(map(len, traces))
    assert html_module.unescape(document).replace("\N{NO-BREAK SPACE}", " ").count(headline(told)) == 1


def test_the_page_shows_the_stretch_that_its_address_names(tmp_path: Path) -> None:
    """From 10 to 20 ms: compute in 4, a gather in all 10."""
    rows: list[Row] = [
        (0, 14, "compute", "compute", "mm", "fwd attn m0 c0 l0"),
        (8, 24, "gather", "gather", "all_gather", "gather dense t0 c0 l1"),
        (30, 60, "compute", "compute", "mm", "bwd attn m0 c0 l0"),
    ]
    one = trace(rows, (Step(3, 0.0, 0.1),))
    document = opened(page_of([one]), tmp_path, "#step=3&from=10&to=20&find=gather")
    assert text_of(document, "view") == "in view 10 ms: compute 40.0 %, exposed 60.0 %, 40.0 % of communication hidden"
    assert text_of(document, "found") == "1 found, 16 ms together"
    assert '<option value="3">3</option>' in document
    assert [name for name in ("fwd", "bwd", "gather", "exposed comm.", "a2a") if f"</i>{name}</span>" in document] == [
        "fwd",
        "bwd",
        "gather",
        "exposed comm.",
    ]


HANDS = """
<script>
const seen = {}, at = (x, y) => ({ clientX: lanesCanvas.getBoundingClientRect().left + x,
  clientY: lanesCanvas.getBoundingClientRect().top + y, bubbles: true, cancelable: true, button: 0, pointerId: 1 });
const state = () => ({ from: view.from, to: view.to });
const key = name => document.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true }));
scroll.setPointerCapture = () => {};
seen.start = state();
const middle = Math.round((GUTTER + width) / 2), held = timeOf(middle);
scroll.dispatchEvent(new WheelEvent('wheel', { ...at(middle, 20), deltaY: -200 }));
seen.wheel = { ...state(), held, now: timeOf(middle) };
scroll.dispatchEvent(new PointerEvent('pointerdown', at(500, 20)));
scroll.dispatchEvent(new PointerEvent('pointermove', at(400, 20)));
scroll.dispatchEvent(new PointerEvent('pointerup', at(400, 20)));
seen.drag = { ...state(), pixels: 100 / (width - GUTTER) };
key('ArrowLeft');
seen.left = state();
scroll.dispatchEvent(new MouseEvent('dblclick', at(500, 20)));
seen.fit = state();
key('+');
seen.plus = state();
key('0');
scroll.dispatchEvent(new PointerEvent('pointermove', at(xOf(10e6), 20)));
seen.tip = tip.hidden ? '' : tip.innerText;
scroll.dispatchEvent(new PointerEvent('pointermove', at(xOf(20e6), 31)));
seen.exposed = tip.hidden ? '' : tip.innerText;
scroll.dispatchEvent(new PointerEvent('pointermove', at(xOf(90e6), 20)));
seen.nothing = tip.hidden ? '' : tip.innerText;
find('find').value = 'bwd'; find('find').oninput({ target: find('find') });
key('Enter');
seen.next = { ...state(), marked: word(what.op[view.marked.lane.what[view.marked.i]]) };
choose(4);
seen.step = state();
document.body.dataset.seen = JSON.stringify(seen);
</script></body>
"""


def test_the_page_can_be_handled(tmp_path: Path) -> None:
    """Wheel, drag, keys, double-click, pointing, finding and choosing a step, one after the other."""
    rows: list[Row] = [
        (0, 14, "compute", "compute", "mm", "fwd attn m0 c0 l0"),
        (8, 24, "gather", "gather", "all_gather", "gather dense t0 c0 l1"),
        (30, 60, "compute", "compute", "mm", "bwd attn m0 c0 l0"),
        (100, 160, "compute", "compute", "mm", "step all"),
    ]
    page = page_of([trace(rows, (Step(3, 0.0, 0.1), Step(4, 0.1, 0.2)))])
    seen = json.loads(attribute(opened(page.replace("</body>", HANDS), tmp_path), "seen"))
    length = {name: view["to"] - view["from"] for name, view in seen.items() if isinstance(view, dict)}
    assert length["start"] == pytest.approx(101e6)
    assert length["wheel"] == pytest.approx(101e6 * 2.718281828**-0.6)
    assert seen["wheel"]["now"] == pytest.approx(seen["wheel"]["held"])  # what is under the pointer stays there
    moved = seen["drag"]["from"] - seen["wheel"]["from"]
    assert moved == pytest.approx(seen["drag"]["pixels"] * length["wheel"])
    assert seen["left"]["from"] == pytest.approx(seen["drag"]["from"] - 0.15 * length["drag"])
    assert seen["fit"] == seen["start"]
    assert length["plus"] == pytest.approx(0.7 * 101e6)
    for text in ("fwd attn m0 c0 l0", "14 ms", "aten::mm", "compute, gemm", "layer"):
        assert text in seen["tip"], text
    assert "exposed" in seen["exposed"]
    assert "10 ms" in seen["exposed"]
    assert seen["nothing"] == ""
    assert seen["next"]["marked"] == "bwd attn m0 c0 l0"
    assert (seen["next"]["from"] + seen["next"]["to"]) / 2 == pytest.approx(45e6)
    assert seen["step"]["from"] == pytest.approx(100e6 - 0.5e6)


@pytest.mark.parametrize("steps", [(), (Step(0, 0.0, 0.0),)], ids=["none", "empty"])
def test_a_page_without_steps_opens(steps: tuple[Step, ...], tmp_path: Path) -> None:
    rows: list[Row] = [(0, 14, "compute", "compute", "mm", "")]
    document = opened(page_of([trace(rows, steps)]), tmp_path)
    assert "The traces contain no step." in document
    assert len(json.loads(attribute(document, "figures"))) == len(steps)


STRIPS = """<script>
const spans = name => [...ranks[0][name].start].map((from, i) => [from / 1e6, ranks[0][name].end[i] / 1e6]);
const wide = [...document.querySelectorAll('.tables section')].map(s => s.scrollWidth - s.clientWidth);
document.body.dataset.seen = JSON.stringify({
  alone: spans('alone'), beside: spans('beside'), wide: Math.max(...wide), page: document.documentElement.scrollWidth,
  keys: [...document.querySelectorAll('.keys .swatch')].map(s => s.style.background),
  legend: Object.fromEntries([...document.querySelectorAll('#legend span')].map(
    s => [s.textContent, s.firstChild.style.background])) });
</script></body>"""


def test_the_strip_below_compute_has_the_parts_and_colours_of_the_summary_and_tables_fit(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 14, "compute", "compute", "mm", "fwd attn m0 c0 l0"),
        (8, 24, "gather", "gather", "all_gather", "gather dense t0 c0 l1"),
        (30, 60, "compute", "compute", "mm", "bwd attn m0 c0 l0"),
    ]
    page = page_of([trace(rows, (Step(3, 0.0, 0.1),))]).replace("</body>", STRIPS)
    seen = json.loads(attribute(opened(page, tmp_path, width=600), "seen"))
    assert (seen["alone"], seen["beside"]) == ([[0, 8], [30, 60]], [[8, 14]])
    parts = ("compute alone", "compute + comm.", "exposed comm.", "host late")
    assert [seen["legend"][name] for name in parts] == seen["keys"][:4]
    assert seen["wide"] <= 0
    assert seen["page"] <= 600


def lab(color: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour, in which distances are differences that eyes see. 2 is hardly one."""
    linear = [(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in (
        int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)
    )]  # fmt: skip
    weights = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (sum(w * c for w, c in zip(row, linear, strict=True)) ** (1 / 3) for row in weights)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_what_says_why_nothing_computes_looks_like_nothing_else() -> None:
    for name in ("late", "exposed"):
        for other in COLORS.keys() - {name}:
            assert math.dist(lab(COLORS[name]), lab(COLORS[other])) > 35, (name, other)


def test_columns_in_which_nothing_is_known_are_left_out() -> None:
    """As in a plan's page: predictions know no late peers."""
    rows: list[Row] = [
        (0, 14, "compute", "compute", "mm", "fwd attn m0 c0 l0"),
        (8, 24, "gather", "gather", "all_gather", "gather dense t0 c0 l1"),
    ]
    one = trace(rows, (Step(3, 0.0, 0.1),))
    page = page_of([one])
    (kinds,) = re.findall(r"<h2>Communication.*?</table>", page, re.DOTALL)
    heads = re.findall("<th>(.*?)</th>", kinds)
    assert {"kind", "time", "hidden"} <= set(heads)
    for row in re.findall("<tr>(<td.*?)</tr>", kinds):
        assert len(re.findall("<td", row)) == len(heads)
    shown = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(<td.*?)</tr>", kinds)]
    assert all(any(cell != "\N{EN DASH}" for cell in column) for column in zip(*shown, strict=True))
    assert len(heads) < len(table.kind_rows(to_json(report([one])))[0])


def test_a_page_opens_where_it_is_told_to_and_its_address_comes_first(tmp_path: Path) -> None:
    traces = [busy(400)]
    page = html(report(traces), traces, title="<b>", about=["one <i>", "two"], first=(0.001, 0.003))
    assert "one &lt;i&gt;<br>two" in page
    assert text_of(opened(page, tmp_path), "view").startswith("in view 2 ms:")
    assert text_of(opened(page, tmp_path, "#from=0&to=1"), "view").startswith("in view 1 ms:")


# ------------------------------------------------------------------------------------------------- in the file


class Reader(HTMLParser):
    """All text outside scripts and styles, and all that a page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tag, self.words, self.loads = "", list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        self.loads += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        if self.tag not in ("script", "style") and data.strip():
            self.words.append(data.strip())


def test_the_page_loads_nothing() -> None:
    page = page_of([busy(50)])
    assert not Reader(page).loads
    code = page.replace(str(data(page)), "")
    assert not re.findall(r"https?:|url\(|@import|\bfetch\(|XMLHttp|import\(", code)


def test_tables_have_the_numbers_of_the_terminal() -> None:
    words = Reader(html(made(steps=(step_of(0, 1), step_of(1, 1))), [busy(50)], tax())).words
    for text in ("Tax of communication", "+10.1 %", "310", "elementwise"):
        assert text in words, text
    assert "Traces of ranks 4 to 7 are missing: waiting for them counts as transfer." in words


def test_names_cannot_break_the_page() -> None:
    evil = "</script><script>alert(1)</script> {{style}} {{data}} & \"quoted\" 'too'"
    one = trace([(0, 50, "compute", "compute", evil, "")], (Step(1, 0.0, 0.1),))
    page = html(made(steps=(step_of(0, 1),), notes=(evil,)), [one])
    assert evil in data(page)["words"]
    assert page.count("<script") == 2
    assert any(evil in word for word in Reader(page).words)
    assert "--bg: #ffffff" in page.partition("</style>")[0]


def test_loud_words_are_on_the_page() -> None:
    page = html(made(steps=(step_of(0, 1),), transport="null"), [busy(50)])
    assert "NULL TRANSPORT: no communication, not training" in " ".join(Reader(page).words)


def test_activities_take_little_room() -> None:
    """What the columns say is what the trace says, in under 20 bytes for each."""
    many = busy(20_000)
    page = page_of([many])
    held = data(page)
    assert len(page) < 20 * len(many) + 100_000
    rank, what = held["ranks"][0], held["what"]
    assert sum(rank["gap"]) + rank["length"][-1] == pytest.approx(many.end[-1] * 1e9, abs=1)
    row = len(many) // 2
    n = rank["what"][row]
    assert held["words"][what["op"][n]] == many.text(many.op)[row]
    assert what["layer"][n] == many.layer[row]
    assert rank["length"][row] == pytest.approx((many.end[row] - many.start[row]) * 1e9, abs=1)


def test_what_ran_outside_all_steps_stays_out() -> None:
    one = busy(100)
    first = replace(one, steps=one.steps[:1])
    held = data(page_of([first]))
    assert len(held["ranks"][0]["gap"]) == int((one.start < one.steps[0].end).sum())
    assert held["to"] == 100_000_000

"""Pictures and numbers of a predicted step."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import hocket
from hocket.predict.simulate import Timeline, simulate
from hocket.program.lower import build_program, choose_order
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding
from hocket.timeline import (
    as_traces,
    html_timeline,
    letter,
    merged_period,
    merged_share,
    summary,
    svg_timeline,
    text_timeline,
)
from hocket_trace.exposure import exposed, report
from hocket_trace.picture import COLORS, GUTTER
from tests.helpers.costs import Table
from tests.helpers.plans import merged_share as merged_steps
from tests.helpers.plans import planned

COSTS = Table(
    {
        ("fwd", "attn"): 1.0, ("bwd", "attn"): 1.3, ("wgrad", "attn"): 0.7, ("fwd", "mlp"): 1.1, ("bwd", "mlp"): 1.0,
        ("wgrad", "mlp"): 0.9, ("fwd", "experts"): 1.0, ("bwd", "experts"): 1.0, ("wgrad", "experts"): 1.0,
        ("fwd", "dispatch"): 0.7, ("bwd", "dispatch"): 0.7, ("fwd", "combine"): 0.7, ("bwd", "combine"): 0.7,
        ("recv", "act"): 0.6, ("recv", "grad"): 0.6, ("gather", "dense"): 0.4, ("gather", "experts"): 0.5,
        ("reduce", "dense"): 0.4, ("reduce", "experts"): 0.6, ("step", "all"): 2.0, ("fwd", "head"): 0.3,
    }
)  # fmt: skip
NAMESPACE = "{http://www.w3.org/2000/svg}"


def toy() -> tuple[Timeline, Program]:
    """gather 0..2; attn 2..6 beside reduce 2..3; dispatch 6..9; step 9..10."""
    ops = (
        Op("gather", "dense", 0, 0, 0, "gather"),
        Op("fwd", "attn", 3, 0, 0, deps=(0,)),
        Op("reduce", "dense", 0, 0, 0, "reduce", deps=(0,)),
        Op("fwd", "dispatch", 3, 0, 0, "a2a", deps=(1,)),
        Op("step", "all", deps=(3,)),
    )
    costs = {("gather", "dense"): 2, ("fwd", "attn"): 4, ("reduce", "dense"): 1, ("fwd", "dispatch"): 3}
    built = Program(Layout(kinds=("moe",), ep=2), 1, (ops,))
    return simulate(built, Table({**costs, ("step", "all"): 1})), built


def real(microbatches: int = 6, merge: str = "on") -> tuple[Timeline, Program]:
    layout = Layout(kinds=("moe", "dense", "moe", "moe", "dense", "moe", "moe", "moe"), pp=2, chunks=2, ep=2)
    plan = planned(chunks=2, merge="on" if merge == "on" else "off")
    built = build_program(layout, microbatches, plan, Sharding(dense=4, experts=2))
    return simulate(built, COSTS), built


def test_text_of_a_toy_is_exactly_this() -> None:
    lines = text_timeline(*toy(), width=37).splitlines()
    assert lines[:6] == [
        "                 0               10 s",
        "rank 0 compute   ····AAAAAAAA······SS",
        "       exposed   !!!!        !!!!!!  ",
        "       a2a       ············DDDDDD··",
        "       gather    gggg················",
        "       reduce    ····rr··············",
    ]
    assert lines[6] == "one character is 500 ms"


def test_text_shows_what_runs_longest_in_a_column_and_rest_where_rest_is_longer() -> None:
    lines = text_timeline(*toy(), width=22).splitlines()  # five columns of 2 s do not fit, so it takes ten of 1 s
    assert lines[1] == "rank 0 compute   ··AAAA···S"
    timeline, built = toy()
    coarse = Timeline(timeline.spans, 30, timeline.ranks)
    row = text_timeline(coarse, built, width=27).splitlines()[1]
    assert row == "rank 0 compute   ·A········"  # a column is 3 s: attn fills 1 s and 3 s of two, the step 1 s


@pytest.mark.parametrize(
    ("seconds", "exposed", "gather"), [(0.5, " ", "'"), (2, ":", "g"), (6, "!", "g")], ids=["little", "some", "much"]
)
def test_text_shows_communication_that_is_short_beside_a_character(seconds: float, exposed: str, gather: str) -> None:
    """Ten times a gather and the compute that waits for it, 10 s together: a character stands for 10 s."""
    ops: list[Op] = []
    for n in range(10):
        ops.append(Op("gather", "dense", n, 0, 0, "gather", deps=(len(ops) - 1,) if n else ()))
        ops.append(Op("fwd", "attn", n, 0, 0, deps=(len(ops) - 1,)))
    built = Program(Layout(kinds=("dense",)), 10, (tuple(ops),))
    timeline = simulate(built, Table({("gather", "dense"): seconds, ("fwd", "attn"): 10 - seconds}))
    rows = [line[17:] for line in text_timeline(timeline, built, width=27).splitlines()[1:4]]
    assert rows == ["AAAAAAAAAA" if seconds < 5 else "··········", 10 * exposed, 10 * gather]


@pytest.mark.parametrize("width", [40, 100, 173])
def test_text_rows_have_the_asked_width_and_name_every_lane(width: int) -> None:
    timeline, built = real()
    lines = text_timeline(timeline, built, width).splitlines()
    rows = [line for line in lines if re.match(r"(rank \d| {6}) (\w+) ", line)]
    assert {len(row) for row in rows} == {width}
    assert [row[7:17].strip() for row in rows[:7]] == [
        "compute", "exposed", "a2a", "recv_act", "recv_grad", "gather", "reduce",
    ]  # fmt: skip
    assert len(rows) == 14


def test_letters_tell_forward_from_backward_and_parts_apart() -> None:
    _, built = real()
    shown = {letter(op, built.layout) for _, _, op in built if op.verb not in ("send", "release")}
    assert shown == set("ADEMCUH") | {"I"} | set("ademcuh") | {"i", "w", "g", "r", "S", ">", "<"}
    legend = text_timeline(*real()).splitlines()[-4:]
    assert all(f"{mark} " in " ".join(legend) for mark in (*"IADEMCUHwgrS", ">", "<", "!", ":", "·", "'"))


def bars(svg: str) -> dict[str, ElementTree.Element]:
    """Bars by title; those of the legend have none."""
    found = [e for e in ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect") if e.get("class") == "op"]
    return {title: e for e in found if (title := e.findtext(f"{NAMESPACE}title"))}


def test_svg_draws_every_op_where_it_runs() -> None:
    timeline, built = toy()
    svg = svg_timeline(timeline, built, GUTTER + 12 + 1000)  # 100 pixels a second
    found = bars(svg)
    attn = found["fwd attn m3 c0 l0: 4 s, 2 s to 6 s"]
    assert (float(attn.get("x", "")), float(attn.get("width", ""))) == (GUTTER + 200, 399.5)
    assert attn.get("fill") == COLORS["fwd"]
    assert found["fwd dispatch m3 c0 l0: 3 s, 6 s to 9 s"].get("fill") == COLORS["a2a"]
    assert [e.get("fill") for title, e in found.items() if "exposed" in title] == [COLORS["exposed"]] * 2
    assert len(found) == 7
    labels = [e for e in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text") if e.get("class") == "in"]
    assert [(e.text, float(e.get("x", ""))) for e in labels] == [("A3", GUTTER + 399.8), ("S", GUTTER + 949.8)]


def test_svg_of_a_real_program_has_a_bar_per_op_and_stays_inside() -> None:
    timeline, built = real()
    width = 4000
    root = ElementTree.fromstring(svg_timeline(timeline, built, width))
    drawn = [e for e in root.iter(f"{NAMESPACE}rect") if e.findtext(f"{NAMESPACE}title")]
    took_time = sum(span.end > span.start for spans in timeline.spans for span in spans)
    alone = sum(len(exposed(trace, 0, float(timeline.makespan))) for trace in as_traces(timeline, built))
    assert len(drawn) == took_time + alone
    assert max(float(e.get("x", "")) + float(e.get("width", "")) for e in drawn) <= width


def test_svg_draws_ops_too_narrow_to_be_seen_as_one() -> None:
    timeline, built = real(microbatches=60)
    small, large = svg_timeline(timeline, built, 250), svg_timeline(timeline, built, 40_000)
    assert "short activities" in small
    assert "short activities" not in large
    assert small.count("<rect") < large.count("<rect") / 3


def test_a_report_on_the_predicted_step_has_the_numbers_of_the_simulator() -> None:
    timeline, built = real()
    for step, use in zip(report(as_traces(timeline, built)).steps, timeline.ranks, strict=True):
        assert step.seconds == float(timeline.makespan)
        assert step.compute == pytest.approx(float(use.busy))
        assert step.exposed == pytest.approx(float(use.exposed_total))
        assert step.idle == pytest.approx(float(use.idle))
        assert step.exposed_for == pytest.approx({k: float(v) for k, v in use.exposed.items() if k in step.kinds})
        assert step.host_bound == 0


class Page(HTMLParser):
    """Collects what a page refers to and the cells of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_html_needs_no_other_file_and_shows_the_numbers() -> None:
    timeline, built = real()
    text = html_timeline(timeline, built, "a <b> & c")
    page = Page()
    page.feed(text)
    assert page.references == []
    assert "url(" not in text
    assert "@import" not in text
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert page.cells[:3] == ["rank", "step", "compute"]
    assert f"{1e3 * float(timeline.ranks[0].busy):,.2f}" in page.cells
    assert f"{timeline.ranks[1].peak_bytes / 2**30:.2f} GiB at its peak" in text
    for ops, spans in zip(built.ranks, timeline.spans, strict=True):
        assert all(f'"{op}"' in text for op, span in zip(ops, spans, strict=True) if span.end > span.start)


def test_summary_is_json_and_agrees_with_plan_and_timeline() -> None:
    timeline, built = real()
    numbers = json.loads(json.dumps(summary(timeline, built)))
    order, _ = choose_order(built.layout, built.microbatches, planned(chunks=2, merge="on"))
    assert numbers["step_seconds"] == float(timeline.makespan)
    assert sum(numbers["ops"].values()) == len(built)
    assert numbers["ops"]["step"] == 2
    for rank, row in enumerate(numbers["ranks"]):
        assert row["merged"] == pytest.approx(merged_steps(order[rank]))
        assert row["busy"] + row["exposed_total"] + row["idle"] == pytest.approx(numbers["step_seconds"])
        assert sum(row["exposed"].values()) == pytest.approx(row["exposed_total"])
        assert row["in_flight"] == built.in_flight[rank]
    assert 0 < numbers["merged"] < 1


def test_nothing_is_merged_in_a_plan_without_merging() -> None:
    _, built = real(merge="off")
    assert [merged_share(ops) for ops in built.ranks] == [0, 0]


def test_a_page_of_a_real_step_says_what_it_is_of_and_opens_on_one_merged_period() -> None:
    step = hocket.plan("moe_8gpu")
    timeline = hocket.simulate(step)
    period = merged_period(timeline, step.program)
    assert period is not None
    start, end = period
    assert 0 < end - start < float(timeline.makespan) / 8
    spans = zip(step.program.ranks[0], timeline.spans[0], strict=True)
    inside = {op.verb for op, span in spans if op.lane == "compute" and start <= float(span.start) < end}
    assert {"fwd", "bwd", "wgrad"} <= inside
    page = hocket.draw(step, "html")
    for text in ("<h1>moe_8gpu: predicted step</h1>", "8 ranks = pp 2 x dp 4", "predicted for h200, bf16"):
        assert text in page
    assert f'"first":[{round(start * 1e9)},{round(end * 1e9)}]' in page
    assert '"first":null' in hocket.draw(hocket.plan("tiny"), "html")  # all of it can be seen
    sequential = hocket.plan("tiny", {"overlap.ep.merge": "off", "plan.order": "1f1b", "plan.chunks": 1})
    assert merged_period(hocket.simulate(sequential), sequential.program) is None

"""The page that `hocket runs --html` makes, and its curves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.commands.runs import Curve, chart, page
from tests.helpers.command import command
from tests.trace.test_page import Reader, attribute, opened


def run_in(folder: Path, steps: int = 300, spike: float = 9.0, **more: Any) -> Path:
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        norm = spike if step == steps // 2 else 1.0
        write(folder, step=step, loss=2 + 3 / step, grad_norm=norm, load=0.0, tokens_per_second=1e4, lr=1e-3, **more)
    write(folder, step=steps, validation_loss=2.5)
    return folder


def write(folder: Path, **record: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_lines_that_are_no_numbers_of_a_step_are_left_out(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "a", 3)
    write(folder, step=4, loss=None, grad_norm=float("inf"), tokens_per_second="many")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"loss": 3.0}\n{"step": 5, "loss": 1.5}\n{"step": 6, "lo')
    made = page([folder])
    assert "<td>5</td><td>1.5</td><td>2.5</td><td>1e+04</td>" in made.replace("10,000", "1e+04")
    assert made.count("<figure>") == 4, "a model without experts has no load"


def lines(made: str) -> list[tuple[str, list[tuple[float, ...]]]]:
    """The look of each curve, and its points."""
    found = re.findall(r'<polyline fill="none" (stroke[^>]*?) points="([^"]*)"', made)
    return [(look, [tuple(map(float, point.split(","))) for point in points.split()]) for look, points in found]


def test_a_picture_has_every_curve_at_its_place() -> None:
    made = chart("loss", [Curve([0, 10], [0.0, 4.0]), Curve([0], [4.0], "bwd", True)])
    (_, first), (look, second) = lines(made)
    assert [round(y) for _, y in first] == [218, 30]
    assert second == [(64.0, 30.0)]
    assert "dasharray" in look
    assert all(f">{word}</text>" in made for word in ("loss", "0", "10"))


def test_dense_curves_show_means_in_front_of_extremes() -> None:
    values = np.where(np.arange(10_000) % 2, 1.0, 0.0).tolist()
    (faint, extremes), (_, mean) = lines(chart("x", [Curve(range(10_000), values)]))
    assert "opacity" in faint
    assert {round(y) for _, y in extremes} == {30, 218}
    assert all(100 < y < 150 for _, y in mean[:-1])


MEASURE = """<script>
const beyond = [...document.querySelectorAll('svg, table, h1, .wide')].map(e => e.getBoundingClientRect().right);
document.body.dataset.seen = JSON.stringify({
  page: document.documentElement.scrollWidth, window: window.innerWidth, beyond: Math.max(...beyond) });
</script></body>"""


def test_the_page_of_runs_fits_a_narrow_window_and_loads_nothing(tmp_path: Path) -> None:
    folders = [run_in(tmp_path / name) for name in ("one", "two <b>&", "three")]
    made = page(folders)
    assert not Reader(made).loads
    assert "two &lt;b&gt;&amp;" in made
    assert not re.findall(r"https?://(?!www.w3.org/2000/svg)|url\(|@import|<script|two <b>", made)
    assert made.count("<figure>") == 4
    assert made.count('stroke-dasharray="5 4"') == 3
    seen = json.loads(attribute(opened(made.replace("</body>", MEASURE), tmp_path, width=600), "seen"))
    assert seen["window"] == 600
    assert seen["page"] <= 600
    assert seen["beyond"] <= 600


def test_runs_draws_what_it_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_in(tmp_path / "runs/a")
    run_in(tmp_path / "runs/b")
    (tmp_path / "runs/b/about.json").write_bytes(b"\xff")  # damaged, which hides no other run
    target = tmp_path / "out.html"
    assert command(capsys, "runs", tmp_path / "runs", "--html", target)[0] == 0
    assert target.read_text().count("swatch") - target.read_text().count(".swatch") == 2
    assert command(capsys, "runs", tmp_path / "runs/a", f"--html={target}")[0] == 0
    assert ">a</td>" in target.read_text()
    assert ">b</td>" not in target.read_text()
    code, out, _ = command(capsys, "runs", tmp_path / "runs/a", tmp_path / "runs")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["name", "a", "a", "b"])
    for n in range(9):
        run_in(tmp_path / f"many/{n}", 1)
    code, _, err = command(capsys, "runs", tmp_path / "many", "--html", target)
    assert (code, "9 runs: colours tell 8 apart; fix:" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "--html"], "argument --html: expected one argument; fix:"),
        (["runs", "--html", "a", "--html", "b"], "argument --html: given twice; fix:"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, *words)
    assert (code, len(err.splitlines()), message in err) == (2, 1, True)

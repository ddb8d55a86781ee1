"""Curves of runs: in the terminal as they grow, and as a page of several runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.commands.watch import drawn
from hocket.train.curves import History, page
from hocket_trace.chart import Curve, chart, text_chart
from hocket_trace.picture import png_of
from tests.helpers.command import command, in_a_terminal
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


def history(folder: Path) -> History:
    found = History(folder)
    found.update()
    return found


def test_what_grows_is_read_once_and_what_is_rewritten_anew(tmp_path: Path) -> None:
    found = history(run_in(tmp_path / "a", 3))
    write(tmp_path / "a", step=4, loss=None, grad_norm=float("inf"))
    write(tmp_path / "a", step=5, loss=1.5)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    found.update()
    assert (found.curve("loss").steps, found.last("loss")) == ([1, 2, 3, 5], 1.5)
    assert found.curve("grad_norm").steps == [1, 2, 3]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.25}\nnonsense\n[1]\n')
    found.update()
    assert found.last("loss") == 1.25
    shorter = tmp_path / "shorter"
    shorter.write_text('{"step": 1, "loss": 7.0}\n')  # as a run that goes on from an earlier checkpoint writes it
    shorter.replace(tmp_path / "a" / "metrics.jsonl")
    found.update()
    assert found.curve("loss").values == [7.0]


def test_steps_back_are_told(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "a", 3)
    assert history(folder).rewound == ""
    write(folder, step=2, rewound_from=40)
    assert drawn(history(folder), 120, 40).splitlines()[0] == "a: step 3, went back from step 40 to 2"
    write(folder, step=2, rewound_from=30)
    assert "went back from step 30 to 2, 2 times in all</td>" in page([folder])


@given(width=st.integers(20, 300), height=st.integers(5, 120), steps=st.integers(1, 40))
def test_text_fits_whatever_the_terminal(tmp_path_factory, width: int, height: int, steps: int) -> None:
    found = history(run_in(tmp_path_factory.mktemp("runs") / "a", steps))
    lines = drawn(found, width, height).splitlines()
    assert max(map(len, lines)) <= width
    titles = [line for line in lines if "loss" in line or "gradient" in line]
    assert titles
    assert not [line for line in lines if "busiest expert" in line]  # this model has no experts


def test_a_curve_is_where_its_values_are_and_keeps_its_spikes() -> None:
    steps = list(range(2000))
    rising = text_chart(Curve(steps, steps), None, 60, 8)
    assert [line[:11] for line in (rising[0], rising[-1])] == ["      1999┤", "         0┤"]
    heights = [max(n for n, line in enumerate(rising) if line[at : at + 1].strip()) for at in range(12, 58)]
    assert heights == sorted(heights, reverse=True)
    spiked = [100.0 if step == 777 else 1.0 for step in steps]
    assert all(line[11:].strip() for line in text_chart(Curve(steps, spiked), None, 60, 8))
    marked = text_chart(Curve([1, 100], [1.0, 1.0]), Curve([50], [3.0]), 60, 8)
    assert [line.count("●") for line in marked] == [1, *[0] * 7]


def test_a_picture_has_every_curve_at_its_place() -> None:
    scene = chart("loss", [Curve([0, 10], [0.0, 4.0]), Curve([0, 10], [4.0, float("nan")], "bwd", True)], 500, 300)
    first, second = (line for line in scene.lines if line.color != "line")
    assert [round(y) for _, y in first.points] == [278, 30]
    assert second.points == ((64.0, 30.0),)
    assert {word.text for word in scene.words} >= {"loss", "0", "10"}
    assert png_of(scene)[:4] == b"\x89PNG"


def test_dense_curves_show_means_in_front_of_extremes() -> None:
    values = np.where(np.arange(10_000) % 2, 1.0, 0.0).tolist()
    faint, mean = (line for line in chart("x", [Curve(range(10_000), values)]).lines if line.color != "line")
    assert (faint.opacity < 0.5, mean.opacity) == (True, 1.0)
    assert {round(y) for _, y in faint.points} == {30, 218}
    assert all(100 < y < 150 for _, y in mean.points[:-1])


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
        (["watch"], "takes one run; fix:"),
        (["watch", "a", "b"], "takes one run; fix:"),
        (["watch", "--twice"], "takes one run; fix:"),
        (["watch", "nowhere"], "nowhere (command line): has no metrics (No such file"),
        (["runs", "--html"], "takes folders, and --html FILE once; fix:"),
        (["runs", "--html", "a", "--html", "b"], "takes folders, and --html FILE once; fix:"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, *words)
    assert (code, len(err.splitlines()), message in err) == (2, 1, True)


def test_it_draws_while_the_run_goes_on_and_ends_with_it(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "a", 5)
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    process, ours = in_a_terminal(tmp_path, "watch", "a")
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    seen += os.read(ours, 1 << 16).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert text in seen, seen

    until("a: step 5, running")
    write(folder, step=6, loss=2.0)
    until("a: step 6, running")
    lock.close()
    until("a: step 6\r\n")
    assert process.wait(30) == 0
    os.close(ours)

"""`hocket trace` from the command line: what it reads, what it writes, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket_trace import load, report
from hocket_trace.as_json import to_json
from hocket_trace.cli import only, parser, trace_files
from hocket_trace.table import render
from tests.helpers.command import command, environment
from tests.trace.build import Trace
from tests.trace.reports import busy


def build(rank: int, folder: Path, steps: int = 2, shift: float = 0.0, speed: float = 1.0, **about: Any) -> Path:
    """A rank with steps of 100 µs: a gemm for 60 µs, and a gather beside it of which 20 µs are exposed."""
    made = Trace(rank=rank, world=2).group("gather_dense", (0, 1)).metadata(**about)
    for n in range(steps):
        begin = 100.0 * n
        made.annotation(f"hocket step {n + 5}", begin, begin + 100)
        made.kernel("nvjet_sm90", begin, begin + 60 * speed, op="aten::mm", plan_op=f"fwd attn m0 c0 l{n}")
        start = begin + 40 + shift
        if speed == 1:
            made.collective(
                "_allgather_base", "gather_dense", start, begin + 80, launched=start, sent=512, received=1024
            )
        made.kernel("nvjet_sm90", begin + 85, begin + 100, op="aten::mm", plan_op=f"bwd attn m0 c0 l{n}")
    return Path(made.write(folder / f"rank{rank}.json.gz"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "traces").mkdir(parents=True)
    build(0, tmp_path / "run" / "traces")
    build(1, tmp_path / "run" / "traces", shift=10)
    (tmp_path / "run" / "metrics.json").write_text("{}")
    return tmp_path / "run"


def test_a_folder_stands_for_its_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "trace", folder)
    assert (code, err) == (0, "")
    assert out.startswith("hocket trace: 2 ranks, NVIDIA H200, steps 5, 6\n")
    assert out.strip() == render(report(load(trace_files([str(folder / "traces")])))).strip()


def test_json_has_the_figures_of_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = command(capsys, "trace", folder, "--json")
    figures = json.loads(out)
    assert figures == to_json(report(load(trace_files([str(folder)]))))
    assert figures["step"]["step_seconds"] == pytest.approx(100e-6)
    assert figures["step"]["exposed_seconds"] == pytest.approx(20e-6)
    assert figures["kinds"][0]["waiting_seconds"] == pytest.approx(5e-6)  # rank 0 waits 10 µs for rank 1


def test_step_looks_at_one_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(command(capsys, "trace", folder, "--json", "--step", 6)[1])
    assert figures["steps"] == [6]
    assert {row["step"] for row in figures["by_rank_and_step"]} == {6}
    code, _, err = command(capsys, "trace", folder, "--step", 7)
    assert code == 2
    assert "--step 7 (command line): not in " in err
    assert "fix: one of its steps: 5, 6" in err


def test_a_step_alone_has_the_figures_that_it_has_among_others() -> None:
    traces = (busy(300, rank=0, world=2), busy(300, rank=1, world=2))
    whole = [row for row in to_json(report(traces))["by_rank_and_step"] if row["step"] == 2]
    alone = to_json(report([only(trace, 2) for trace in traces]))["by_rank_and_step"]
    assert alone == [{name: pytest.approx(value) for name, value in row.items()} for row in whole]


def test_all_files_are_written_and_the_table_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {name: folder / f"out.{name}" for name in ("html", "svg")}
    words = [word for name, path in targets.items() for word in (f"--{name}", path)]
    code, out, err = command(capsys, "trace", folder / "traces" / "rank0.json.gz", *words)
    assert (code, out) == (0, "")
    assert [line.split()[0] for line in err.splitlines()] == ["wrote"] * 2
    assert targets["html"].read_text().startswith("<!doctype html>")
    assert targets["svg"].read_text().startswith("<svg")


def test_null_adds_the_tax(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "null").mkdir()
    for rank in (0, 1):
        build(rank, tmp_path / "null", speed=0.5)
    code, out, err = command(capsys, "trace", folder, "--null", tmp_path / "null")
    assert (code, err) == (0, "")
    assert "Tax of communication" in out
    figures = json.loads(command(capsys, "trace", "--null", tmp_path / "null", "--json", folder)[1])
    gemm = next(row for row in figures["tax"]["classes"] if row["class"] == "gemm")
    assert gemm["slowdown_share"] == pytest.approx(75 / 45 - 1)


def test_a_run_of_another_version_is_reported_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"version": 99, "transport": "slow", "rank": 0}
    code, out, _ = command(capsys, "trace", build(0, tmp_path, hocket=run))
    assert code == 0
    assert "EMULATED NETWORK" in out


def test_the_order_of_words_does_not_matter() -> None:
    words = ["a.json", "--step=3", "--null", "n1.json", "n2.json", "--html", "x.html", "b.json", "--json"]
    asked = parser().parse_intermixed_args(words)
    assert (asked.traces, asked.null) == (["a.json", "b.json"], ["n1.json", "n2.json"])
    assert parser().parse_intermixed_args(["a", "--null", "n1", "--null", "n2"]).null == ["n1", "n2"]
    assert (asked.step, asked.json, asked.html, asked.svg) == (3, True, "x.html", "")


def test_a_reader_that_leaves_and_a_terminal_without_width_are_no_failures(folder: Path) -> None:
    shell = ["bash", "-c", 'set -o pipefail; "$0" -m hocket trace "$1" | head -1', sys.executable, str(folder)]
    for columns in ("80", "0"):
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=environment(COLUMNS=columns))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("hocket trace: 2 ranks")


def test_help_and_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "trace", "--help")[0] == 0
    code, out, _ = command(capsys, "trace")
    assert code == 2
    assert "--html FILE" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--colour"], "unrecognized arguments: --colour (command line); fix: hocket trace --help"),
        (["-x", "{run}"], "unrecognized arguments: -x"),
        (["--json"], "the following arguments are required: FILE"),
        (["{run}/none.json"], "none.json (command line): no such file"),
        (
            ["{run}/empty"],
            "no traces in this folder: it is of a run that was not profiled; fix: hocket train ... --prof",
        ),
        (["{run}/traces/none"], "no traces in this folder; fix: a folder with the .json"),
        (["{run}", "{run}/traces/rank0.json.gz"], "rank0.json.gz (command line): is given twice"),
        (["{run}", "--null"], "argument --null: expected at least one argument"),
        (["{run}", "--null", "--json"], "argument --null: expected at least one argument"),
        (["x" * 300], "cannot be read (File name too long); fix: another name"),
        (["{run}", "--null", "{run}"], "is given as the run and with --null; fix: traces of two runs"),
        (["{run}", "--html"], "argument --html: expected one argument"),
        (["{run}", "--html", "--json"], "argument --html: expected one argument"),
        (["{run}", "--step", "two"], "argument --step: invalid int value: 'two'"),
        (["{run}", "--svg", "{run}/a", "--html", "{run}/a"], "would overwrite a file that is read or written; fix:"),
        (["{run}", "--json=1"], "argument --json: ignored explicit argument '1'"),
        (["{run}", "--html", "{run}/none/x.html"], "cannot be written (No such file or directory)"),
        (["{run}", "--svg", "{run}/empty"], "cannot be written (Is a directory)"),
        (["{run}/metrics.json"], "metrics.json"),
        (["{run}", "--step", "²"], "argument --step: invalid int value"),
        ([""], "'' (command line): names no trace"),
        (["{run}", "--svg", "{run}/a", "--html", "{run}/./a"], "would overwrite a file that is read or written"),
        (["{run}", "--html", "{run}/traces/rank1.json.gz"], "would overwrite a file that is read or written"),
    ],
)
def test_mistakes_are_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "traces" / "none").mkdir()
    (folder / "empty" / "about.json").write_text("{}")
    (folder / "empty" / "explanation.json").write_text("{}")  # as a run without --profile leaves it
    code, out, err = command(capsys, "trace", *(word.format(run=folder) for word in words))
    assert code == 2
    assert said in err
    assert err.startswith("hocket: ")
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_null_trace_that_communicates_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    for rank in (0, 1):
        build(rank, tmp_path / "other")
    code, _, err = command(capsys, "trace", folder, "--null", tmp_path / "other")
    assert code == 2
    assert "no run without communication" in err


def test_traces_do_not_wait_for_torch() -> None:
    code = "import sys, hocket.cli, hocket_trace.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


EVIL = "\x1b]0;x\x07</script><img src=x onerror=alert(1)>\x9b31m"


def test_names_that_others_gave_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    """In the terminal, in messages, on the page and in the picture: names of kernels, groups, threads and files."""
    one = (
        Trace(rank=0, world=1, device=f"GPU{EVIL}")
        .group(f"g{EVIL}", (0,))
        .annotation("hocket step 1", 0, 100)
        .annotation(f"span{EVIL}", 1, 90)
        .kernel(f"k{EVIL}", 10, 30, op=f"aten::{EVIL}")
        .collective("_allgather_base", f"g{EVIL}", 20, 50, launched=5, sent=512, received=1024)
    )
    path = one.write(tmp_path / f"rank0{EVIL.replace('/', '')}.json")
    files = {name: tmp_path / f"out.{name}" for name in ("html", "svg")}
    for words in ([], [f"--{name}={file}" for name, file in files.items()]):
        ended = subprocess.run(
            [sys.executable, "-m", "hocket_trace", str(path), *words], capture_output=True, text=True, timeout=50
        )
        assert ended.returncode == 0, ended
        assert not set("\x1b\x07\x9b") & set(ended.stdout + ended.stderr)
    for file in files.values():
        text = file.read_text(encoding="utf-8")
        assert not set("\x1b\x07\x9b") & set(text)
        assert "<img" not in text
    path.write_text("{")
    ended = subprocess.run([sys.executable, "-m", "hocket_trace", str(path)], capture_output=True, text=True)
    assert ended.returncode == 2
    assert not set("\x1b\x07\x9b") & set(ended.stderr)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_a_trace_without_an_end_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="may have no end; fix:"):
        load([tmp_path / name])

"""Reading is lean: a tenth of the size that `benchmarks/trace_reading.py` aims at, which also times it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fresh import in_fresh_process
from benchmarks.trace_reading import STEPS, write_trace
from hocket_trace import load, report
from tests.helpers.calls import calls

READING = "benchmarks.trace_reading"
MEGABYTES = 10


def test_a_tenth_of_the_target(tmp_path: Path) -> None:
    """The target for 100 MB is 2 GiB; the interpreter and numpy alone hold some 30 MiB."""
    path = tmp_path / "rank0.json"
    write_trace(path, MEGABYTES)
    assert abs(path.stat().st_size / 1e6 - MEGABYTES) < 1
    found = in_fresh_process(READING, str(path), repeats=1)
    assert found["peak_mib"] - found["start_mib"] < 200


def test_work_grows_with_the_events_not_faster(tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    write_trace(small, 1)
    write_trace(large, 5)
    few, many = (calls(lambda p=path: report(load([p]))) for path in (small, large))
    assert many < 6 * few


def test_the_made_up_trace_is_read_as_meant(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    write_trace(path, 1)
    (trace,) = load([path])
    found = report([trace])
    assert [step.step for step in found.steps] == list(range(STEPS))
    gather = found.steps[1].kinds["gather"]
    assert gather.bytes == gather.count * 2 * (1 << 23) * 7 / 8
    assert set(found.steps[1].classes) == {"gemm", "elementwise"}
    assert set(trace.layer.tolist()) == set(range(32))

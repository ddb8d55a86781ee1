"""Reading is quick and lean: a tenth of the size that `benchmarks/trace_reading.py` aims at."""

from __future__ import annotations

from pathlib import Path

from benchmarks.trace_reading import STEPS, in_fresh_process, write_trace
from hocket.trace import load, report

MEGABYTES = 10


def test_a_tenth_of_the_target(tmp_path: Path) -> None:
    """The target for 100 MB is 10 s and 2 GiB; the interpreter and numpy alone hold some 30 MiB."""
    path = tmp_path / "rank0.json"
    write_trace(path, MEGABYTES)
    assert abs(path.stat().st_size / 1e6 - MEGABYTES) < 1
    found = in_fresh_process(path, repeats=2)
    assert found["read_s"] + found["report_s"] < 1.0
    assert found["peak_mib"] - found["start_mib"] < 200


def test_time_grows_with_the_events_not_faster(tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    write_trace(small, MEGABYTES / 5)
    write_trace(large, MEGABYTES)
    times = [sum(in_fresh_process(path, 3)[key] for key in ("read_s", "report_s")) for path in (small, large)]
    assert times[1] < 12 * times[0]


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

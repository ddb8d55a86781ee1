"""Timing: turns, steps that count, and that the slowest rank decides."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.bench import measure
from benchmarks.bench.contender import blame
from benchmarks.bench.gate import Verdict
from benchmarks.bench.measure import Block, Gauge, Timer, nvml, take_turns
from benchmarks.bench.report import Measured, as_json, settings_text, table, verdict_text
from benchmarks.bench.run import Bench
from tests.bench.setup import CPU, workload
from tests.helpers.ranks import run_ranks

LOG: list[str] = []
CLOCK = [0.0]


class Sleeper:
    """Takes a while per step, on `CLOCK`; its first step after another contender's is slow."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.settings = {"seconds": str(seconds)}

    def step(self, microbatches: object) -> Tensor:
        switched = not LOG or LOG[-1] != self.name
        LOG.append(self.name)
        assert not gc.isenabled()
        CLOCK[0] += self.seconds + 0.2 * switched
        return torch.zeros(())

    def close(self) -> None:
        pass


def turns(rank: int) -> tuple[list[str], dict[str, list[tuple[float, ...]]], list[float]]:
    LOG.clear()
    # Rank 1 is the slow one of a, rank 0 of b.
    contenders = {"a": Sleeper("a", 0.01 + 0.04 * rank), "b": Sleeper("b", 0.05 - 0.04 * rank)}
    clock = SimpleNamespace(perf_counter=lambda: CLOCK[0], monotonic=lambda: CLOCK[0])
    with mock.patch.object(measure, "time", clock):
        rounds = list(
            take_turns(contenders, [], dict.fromkeys(contenders, 1.0), Bench((), (), 3, 2), Timer(CPU), Gauge(None))
        )
    assert gc.isenabled()
    seconds = {name: [found[name].seconds for found in rounds] for name in contenders}
    return LOG, seconds, [block.host_seconds for found in rounds for block in found.values()]


def test_contenders_take_turns_and_the_slowest_rank_counts():
    (order, seconds, hosts), (_, others, _) = run_ranks(turns, 2)
    assert "".join(order) == "aaabbb" + "bbbaaa" + "aaabbb", "the order turns around; one step more than is timed"
    assert seconds == others, "all ranks know the same figures"
    times = [t for blocks in seconds.values() for block in blocks for t in block]
    assert len(times) == 2 * 3 * 2
    assert times == pytest.approx([0.05] * 12), "the slow first step does not count"
    assert hosts == pytest.approx([0.05] * 6)


def test_blocks_on_gpus_begin_with_a_second_that_does_not_count():
    timer = Timer(torch.device("cuda"))
    assert [timer.uncounted(seconds) for seconds in (2.0, 0.8, 0.3, 0.01)] == [2, 2, 4, 100]
    assert Timer(CPU).uncounted(0.3) == 1


class Breaks(Sleeper):
    def step(self, microbatches: object) -> Tensor:
        raise KeyError("bucket")


def broken(rank: int) -> None:
    contenders = {"a": Sleeper("a", 0.0), "b": Breaks("b", 0.0)}
    list(take_turns(contenders, [], dict.fromkeys(contenders, 1.0), Bench((), (), 2, 1), Timer(CPU), Gauge(None)))


def test_who_breaks_is_named_with_what_it_did():
    with pytest.raises(RuntimeError, match="b failed while being measured: KeyError: 'bucket'"):
        run_ranks(broken, 1)
    with (
        pytest.raises(ValueError, match=r"^against = x .command line.: it is not so; fix: do"),
        blame("x", "being built"),
    ):
        raise ValueError("against = x (command line): it is not so; fix: do")


def test_clock_and_power_are_those_of_the_span():
    readings = iter([(1000.0, 500.0), None, (1200.0, 700.0)])
    with Gauge(lambda: next(readings, None)) as gauge:
        start = time.monotonic()
        assert gauge.between(start - 10, start - 5) == (None, None)
        while gauge.between(start, time.monotonic())[0] != 1100.0:
            assert time.monotonic() < start + 20
            time.sleep(0.01)
        assert gauge.between(start, time.monotonic()) == (1100.0, 600.0)
    assert nvml(CPU) is None


def report(rank: int) -> tuple[str, dict]:
    contenders = {"hocket": Sleeper("hocket", 0.01), "fsdp2": Sleeper("fsdp2", 0.02), "bound": Sleeper("bound", 0.005)}
    blocks = {name: [Block((one.seconds,), None, None, 0, one.seconds / 2)] * 2 for name, one in contenders.items()}
    verdict = Verdict({"hocket": [4.0, 3.0], "fsdp2": [4.0, 3.0]}, 1e-4, 0.0, 0.25, 3)
    settings = {name: contender.settings for name, contender in contenders.items()}
    measured = Measured(workload(1), verdict, settings, blocks, dict.fromkeys(contenders, 0), {}, "CPU")
    text = "\n".join([verdict_text(verdict), settings_text(settings), table(measured)])
    return text, as_json(measured)


def test_the_report_has_every_figure():
    ((text, result),) = run_ranks(report, 1)
    assert "share of bound" in text
    assert "speed over fsdp2" in text
    assert "hocket, fsdp2: same losses over 2 steps of 3 layers" in text
    assert "seconds: 0.02" in text
    rows = result["contenders"]
    assert list(rows) == ["hocket", "fsdp2", "bound"]
    assert result["bound"] == "bound"
    assert result["best_peer"] == "fsdp2"
    faster = rows["hocket"]["speed_over"]["fsdp2"]
    assert faster["low"] == faster["median"] == faster["high"] == 2.0
    assert rows["hocket"]["speed_over"]["bound"]["median"] == 0.5
    assert rows["fsdp2"]["tokens_per_second"] * rows["fsdp2"]["seconds"] == result["tokens_per_step"]
    assert rows["fsdp2"]["host_seconds"] == 0.01
    assert all(len(row["blocks"]) == 2 and row["settings"] for row in rows.values())

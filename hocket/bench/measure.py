"""Timing of contenders that take turns in blocks.

A block is several steps without a pause, timed by events between them on the compute stream (by the clock of the host
on a CPU); the first step after a switch does not count. A step's time is that of the slowest rank. The order of
contenders is turned around every round.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hocket.bench.contender import Contender
from hocket.runtime.actions import Microbatch

PERIOD_MS = 100
"""Time between two samples of clock and power."""


@dataclass(frozen=True)
class Block:
    """Some steps of one contender in a row."""

    seconds: tuple[float, ...]
    """Each step's time on the slowest rank."""
    clock_mhz: float | None
    """Median SM clock of rank 0's GPU while it ran; None where that is not known."""
    watts: float | None
    """Mean power of that GPU while it ran."""
    peak_bytes: int
    """Largest memory in use during the block beyond what was in use before it, on the rank with the most."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Gauge:
    """Reads clock and power of a GPU through `nvidia-smi`, where there is one. Without a GPU it reads nothing."""

    def __init__(self, device: torch.device | None) -> None:
        self._samples: list[tuple[float, float, float]] = []
        """(time, MHz, W)."""
        self._process: subprocess.Popen[str] | None = None
        on_gpu = device is not None and device.type == "cuda"
        program = shutil.which("nvidia-smi") if on_gpu else None
        if program:
            # By its UUID: numbers are those of the machine, not of the GPUs that this process may see.
            gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
            query = [gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}"]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                threading.Thread(target=self._read, name="gauge", daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # `[N/A]`
                clock, power = map(float, line.split(","))
                self._samples.append((time.monotonic(), clock, power))

    def between(self, start: float, end: float) -> tuple[float | None, float | None]:
        """(median MHz, mean W) of the samples in a span of `time.monotonic`."""
        found = [(clock, power) for at, clock, power in list(self._samples) if start <= at <= end]
        if not found:
            return None, None
        return statistics.median(clock for clock, _ in found), statistics.fmean(power for _, power in found)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Timer:
    """Times steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def settle(self) -> None:
        """Wait until every rank has finished what it was doing, and give memory back."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        dist.all_reduce(torch.zeros(1))  # of a CPU tensor: gloo, which leaves the GPU alone

    def steps(self, step: Callable[[], object], count: int) -> list[float]:
        """Seconds of `count` steps in a row on this rank."""
        if not self.on_gpu:
            times = [time.perf_counter()]
            for _ in range(count):
                step()
                times.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(times)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]

    def block(self, contender: Contender, microbatches: Sequence[Microbatch], steps: int, gauge: Gauge) -> Block:
        """One block, after a step that does not count. Every rank calls this."""
        self.settle()
        before = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.monotonic()
        _, *mine = self.steps(lambda: contender.step(microbatches), 1 + steps)
        clock, watts = gauge.between(start, time.monotonic())
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.on_gpu else 0
        *seconds, peak = slowest([*mine, float(peak)])
        return Block(tuple(seconds), clock, watts, int(peak))


def slowest(mine: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, one by one. Every rank calls this."""
    worst = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from interrupting steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def take_turns(
    contenders: Mapping[str, Contender],
    microbatches: Sequence[Microbatch],
    rounds: int,
    steps: int,
    device: torch.device,
    gauge: Gauge,
) -> dict[str, list[Block]]:
    """`rounds` blocks of every contender, the order turned around every round."""
    timer, found = Timer(device), {name: [] for name in contenders}
    with no_collection():
        for number in range(rounds):
            for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(timer.block(contenders[name], microbatches, steps, gauge))
    return found

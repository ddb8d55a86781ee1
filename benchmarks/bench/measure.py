"""Timing of contenders that take turns in blocks.

A block is several steps without a pause, timed by events between them on the compute stream (by the clock of the host
on a CPU). A step's time is that of the slowest rank. The order of contenders is turned around every round.

Note: [Steps that do not count]
The first steps after a switch make their memory anew. And a GPU at its power limit begins fast: its clock is lowered
only after most of a second of full load. Llama-3 8B on an H200 had steps of 370 ms until then, and of 400 ms
ever after. So a block begins with a second of steps that do not count, two at least: all contenders are timed in the
state that a long run is in, however long their steps are.

Note: [What the host costs]
The host issues a step and does not wait for the GPU, but a GPU takes in about a thousand kernels only, and then the
host stands still until there is room. So the time in which it issues a step is what it costs, or more: the shortest
one of a block is closest, often the first, which finds the GPU idle. Where the GPU has little to do, as with few
tokens, it is the cost itself, and the step takes as long.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.bench.contender import Contender, Resting, blame
from hocket.collector import no_collection
from hocket.model.documents import Microbatch

PERIOD = 0.05
"""Seconds between two samples of clock and power."""
SETTLE = 1.0
"""Seconds of steps at the start of a block that do not count, on GPUs. See Note: [Steps that do not count]."""


@dataclass(frozen=True)
class Block:
    """Some steps of one contender in a row."""

    seconds: tuple[float, ...]
    """Each step's time on the slowest rank."""
    clock_mhz: float | None
    """Median SM clock of rank 0's GPU during these steps; None where that is not known."""
    watts: float | None
    """Mean power of that GPU during these steps."""
    peak_bytes: int
    """Largest memory in use during the block beyond what was in use before it, on the rank with the most."""
    host_seconds: float
    """The shortest time in which the host has issued a step, on the slowest rank. See Note: [What the host costs]."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Reading = Callable[[], tuple[float, float] | None]
"""Reads (SM clock in MHz, power in W) now; None if that fails."""


def nvml(device: torch.device) -> Reading | None:
    """How to read a GPU, through the library of its driver; None for a CPU, or where there is no such library."""
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    # By its UUID: numbers are those of the machine, not of the GPUs that this process may see.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    clock, milliwatts, of_sm = ctypes.c_uint(), ctypes.c_uint(), 1  # NVML_CLOCK_SM

    def read() -> tuple[float, float] | None:
        failed = library.nvmlDeviceGetClockInfo(handle, of_sm, ctypes.byref(clock))
        failed = library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) or failed
        return None if failed else (float(clock.value), milliwatts.value / 1e3)

    return read


class Gauge:
    """Reads clock and power again and again in a thread of its own, if there is a way to."""

    def __init__(self, read: Reading | None) -> None:
        self._samples: list[tuple[float, float, float]] = []
        """(time, MHz, W)."""
        self._stop = threading.Event()
        if read is not None:
            threading.Thread(target=self._watch, args=(read,), name="gauge", daemon=True).start()

    def _watch(self, read: Reading) -> None:
        while not self._stop.wait(PERIOD):
            found = read()
            if found is not None:
                self._samples.append((time.monotonic(), *found))

    def between(self, start: float, end: float) -> tuple[float | None, float | None]:
        """(median MHz, mean W) of the samples in a span of `time.monotonic`; None without samples."""
        found = [(clock, power) for at, clock, power in list(self._samples) if start <= at <= end]
        if not found:
            return None, None
        return statistics.median(clock for clock, _ in found), statistics.fmean(power for _, power in found)

    def __enter__(self) -> Gauge:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()


class Timer:
    """Times steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.host_seconds = math.inf
        """Of the last `steps`: the shortest time in which this rank's host has issued one."""

    def settle(self) -> None:
        """Wait until every rank has finished what it was doing, and give memory back."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        dist.all_reduce(torch.zeros(1))  # of a CPU tensor: gloo, which leaves the GPU alone

    def steps(self, step: Callable[[], object], count: int) -> list[float]:
        """Seconds of `count` steps in a row on this rank."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] if self.on_gpu else []
        mark = iter(marks)
        times = [time.perf_counter()]
        if marks:
            next(mark).record()
        for _ in range(count):
            step()
            times.append(time.perf_counter())
            if marks:
                next(mark).record()
        issued = [after - before for before, after in itertools.pairwise(times)]
        self.host_seconds = min(issued)
        if not marks:
            return issued
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]

    def uncounted(self, seconds: float) -> int:
        """How many steps of this length at the start of a block do not count."""
        return max(2, math.ceil(SETTLE / seconds)) if self.on_gpu else 1

    def block(self, step: Callable[[], object], uncounted: int, steps: int, gauge: Gauge) -> Block:
        """One block, after steps that do not count. Every rank calls this."""
        self.settle()
        before = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        mine = self.steps(step, uncounted + steps)[uncounted:]
        end = time.monotonic()
        clock, watts = gauge.between(end - sum(mine), end)
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.on_gpu else 0
        *seconds, peak, host = slowest([*mine, float(peak), self.host_seconds])
        return Block(tuple(seconds), clock, watts, int(peak), host)


def slowest(mine: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, one by one. Every rank calls this."""
    worst = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


class Rounds(Protocol):
    """How much to measure."""

    @property
    def blocks(self) -> int:
        """Blocks of each contender."""
        ...

    @property
    def steps(self) -> int:
        """Timed steps of a block."""
        ...


def take_turns(
    contenders: Mapping[str, Contender],
    microbatches: Sequence[Microbatch],
    seconds: Mapping[str, float],
    rounds: Rounds,
    timer: Timer,
    gauge: Gauge,
) -> Generator[dict[str, Block], None, None]:
    """One block of every contender, round after round, the order turned around every round.

    `seconds` of a step, about, by contender, must be the same on all ranks.
    """
    with no_collection():
        for number in range(rounds.blocks):
            found = {}
            for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                with blame(name, "being measured"):
                    step = functools.partial(contenders[name].step, microbatches)
                    found[name] = timer.block(step, timer.uncounted(seconds[name]), rounds.steps, gauge)
                    if isinstance(resting := contenders[name], Resting):
                        resting.rest()
            yield {name: found[name] for name in contenders}

"""One rank of a benchmark: build the contenders, compare their numbers, warm up, let them take turns, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import gate, resumed
from benchmarks.bench.contender import Contender, blame, entry, load
from benchmarks.bench.measure import Block, Gauge, Timer, nvml, slowest, take_turns
from benchmarks.bench.record import provenance, save
from benchmarks.bench.report import Measured, as_json, settings_text, table, verdict_text, workload_text
from benchmarks.bench.workload import Workload, batches
from hocket.model.documents import Microbatch
from hocket.resolve import Settings, without_copies

WARM_UP = 3
"""Steps of each contender before it is timed: kernels are chosen, connections and memory made."""

LEFT = 1 << 30
"""Bytes that closed contenders may leave allocated: handles and workspaces of libraries."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sized:
    """The settings of one sequence length: what is chosen by costs depends on it."""

    settings: Settings
    variants: Mapping[str, Settings] = field(default_factory=dict)
    """Contender -> its settings, of those that have their own."""


@dataclass(frozen=True)
class Bench:
    """What to measure, beside the configuration."""

    names: tuple[str, ...]
    """Contenders, in the order of the first round."""
    sized: tuple[Sized, ...]
    """What is measured one after the other: a workload of its own for each sequence length."""
    blocks: int = 6
    """Blocks of each contender."""
    steps: int = 3
    """Timed steps of a block."""
    gate_steps: int = 8
    """Steps of the numerics gate."""
    optimizer: bool = True
    compile: bool = False
    out: str = ""
    """File for the result; empty writes none."""
    commit: str = ""
    """What to call this version, where there is no repository to ask."""
    until: float = math.inf
    """By `time.monotonic` of this host: no round begins that would probably end later."""
    former: tuple[Mapping[str, Any], ...] = ()
    """Workloads of an earlier run, as the result file has them, which stay in it."""
    alone: bool = False
    """Whether each contender is built anew for each of its blocks, with nothing beside it in memory."""


@dataclass
class Session:
    """One rank's run of one workload after the other."""

    bench: Bench
    rank: int
    device: torch.device
    say: Say
    verdict: gate.Verdict | None = None
    """Of the gate, once it has been passed."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the current workload."""

    def __post_init__(self) -> None:
        self.timer = Timer(self.device)
        self.on_gpu = self.timer.on_gpu

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and say so."""
        start = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start
        self.say(f"{name:9} {self.phases[name]:.1f} s")

    def build(self, name: str, workload: Workload) -> Contender:
        with blame(name, "being built"):
            return load(name)(workload.of(name), self.rank, self.device)

    def compare(self, workload: Workload) -> gate.Verdict:
        """The gate, on small models of its own. Raises NumericsError if contenders disagree."""
        compared, curves = gate.small(workload), {}
        for name in [name for name in self.bench.names if not entry(name).bound]:
            contender = self.build(name, compared)
            with blame(name, "being compared"):
                curves[name] = gate.curve(contender, compared, self.rank, self.device, self.bench.gate_steps)
            self.close(contender)
            del contender
        return gate.judge(curves, compared)

    def close(self, contender: Contender) -> None:
        """Close a contender, and give its memory back as far as nothing else refers to it."""
        contender.close()
        del contender
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def say_left(self) -> None:
        """Say what memory closed contenders did not give back."""
        if (left := self.allocated()) > LEFT:
            self.say(f"WARNING  {left / 2**30:.1f} GiB stay allocated after contenders were closed")

    def run(self, workload: Workload, keep: Callable[[Measured], None]) -> Measured:
        """Measure one workload, and have `keep` take what there is after every round.

        Raises NumericsError before anything is timed if contenders disagree.
        """
        self.phases = {}
        self.say("\n" + workload_text(workload))
        if self.verdict is None:  # of the first workload: the others differ in length alone
            with self.phase("gate"):
                self.verdict = self.compare(workload)
            self.say(verdict_text(self.verdict))
        microbatches = batches(workload, self.rank, 0, self.device)
        contenders, resident, settings = dict[str, Contender](), dict[str, int](), dict[str, dict[str, str]]()
        blocks: dict[str, list[Block]] = {name: [] for name in self.bench.names}
        found = Measured(workload, self.verdict, settings, blocks, resident, self.phases, hardware_name(self.device))
        with Gauge(nvml(self.device) if self.rank == 0 else None) as gauge:
            if self.bench.alone:
                turns = self.alone(found, microbatches, gauge)
            else:
                contenders, seconds = self.ready(self.bench.names, found, microbatches)
                turns = take_turns(contenders, microbatches, seconds, self.bench, self.timer, gauge)
            with contextlib.nullcontext() if self.bench.alone else self.phase("measure"):
                for number, blocks_of_round in enumerate(self.in_time(turns), 1):
                    settings.update({name: dict(contender.settings) for name, contender in contenders.items()})
                    for name, block in blocks_of_round.items():
                        blocks[name].append(block)
                    times = ", ".join(f"{name} {1e3 * block.median:.1f}" for name, block in blocks_of_round.items())
                    self.say(f"round {number} of {self.bench.blocks}, ms: {times}")
                    keep(dataclasses.replace(found, complete=False))
        while contenders:
            self.close(contenders.popitem()[1])
            if not contenders:
                self.say_left()
        if workload.compile:
            torch.compiler.reset()  # the next workload has other shapes
        return dataclasses.replace(found, complete=all(len(each) == self.bench.blocks for each in blocks.values()))

    def ready(
        self, names: Sequence[str], found: Measured, microbatches: Sequence[Microbatch]
    ) -> tuple[dict[str, Contender], dict[str, float]]:
        """Contenders, built and warmed up, and about how long a step of each is, in seconds."""
        contenders, new = {}, [name for name in names if name not in found.settings]
        with self.phase("build"):
            for name in names:
                before = self.allocated()
                contenders[name] = self.build(name, found.workload)
                found.resident[name] = self.allocated() - before
                found.settings[name] = dict(contenders[name].settings)
        if new:
            self.say(settings_text({name: found.settings[name] for name in new}))
        with self.phase("warm-up"):
            return contenders, self.warm_up(contenders, microbatches, found.resident)

    def alone(
        self, found: Measured, microbatches: Sequence[Microbatch], gauge: Gauge
    ) -> Generator[dict[str, Block], None, None]:
        """As `take_turns`, with every contender built anew for every block and closed after it."""
        one = dataclasses.replace(self.bench, blocks=1)
        for number in range(self.bench.blocks):
            blocks = {}
            for name in self.bench.names[:: 1 if number % 2 == 0 else -1]:
                contenders, seconds = self.ready([name], found, microbatches)
                with self.phase("measure"):
                    for turn in take_turns(contenders, microbatches, seconds, one, self.timer, gauge):
                        blocks |= turn
                found.settings[name] = dict(contenders[name].settings)
                self.close(contenders.pop(name))
                self.say_left()
            yield {name: blocks[name] for name in self.bench.names}

    def in_time(self, turns: Generator[dict[str, Block], None, None]) -> Iterator[dict[str, Block]]:
        """Rounds until the time is up: none begins that would end later, if it is as long as the longest one was."""
        longest, began = 0.0, time.monotonic()
        with contextlib.closing(turns):
            for number, blocks in enumerate(turns, 1):
                yield blocks
                now = time.monotonic()
                longest, began = max(longest, now - began), now
                if number < self.bench.blocks and self.late(longest):
                    return

    def late(self, more: float = 0.0) -> bool:
        """Whether the time is up, or will be in so many seconds. Every rank calls this."""
        (beyond,) = slowest([time.monotonic() + more - self.bench.until])
        if beyond > 0:
            self.say("the time is up: --resume measures what is left")
        return beyond > 0

    def warm_up(
        self, contenders: Mapping[str, Contender], microbatches: Sequence[Microbatch], resident: dict[str, int]
    ) -> dict[str, float]:
        """About how long a step of each contender is, in seconds. What its first steps keep is added to `resident`."""
        seconds = {}
        for name, contender in contenders.items():
            self.timer.settle()
            before = self.allocated()
            with blame(name, "warming up"):
                mine = self.timer.steps(functools.partial(contender.step, microbatches), WARM_UP)
            (seconds[name],) = slowest(mine[-1:])
            gc.collect()
            resident[name] += self.allocated() - before  # AdamW makes its state late
        a_round = sum(second * (self.timer.uncounted(second) + self.bench.steps) for second in seconds.values())
        self.say(f"measuring {self.bench.blocks} rounds of about {a_round:.0f} s and the switches")
        return seconds

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0


def hardware_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def workload_of(sized: Sized, bench: Bench) -> Workload:
    """What all contenders do at one sequence length."""
    # Weights that hardly move keep GPUs as busy as those of a real run, and all contenders with the same numbers.
    return gate.gentle(Workload(sized.settings, bench.optimizer, bench.compile, sized.variants))


def without(bench: Bench, reason: str) -> Bench:
    """A benchmark on ranks that copy engines cannot serve, for such a reason: who chose them is on NCCL."""
    sized = (
        Sized(without_copies(one.settings, reason), {n: without_copies(s, reason) for n, s in one.variants.items()})
        for one in bench.sized
    )
    return dataclasses.replace(bench, sized=tuple(sized)) if reason else bench


def bench_rank(bench: Bench, say: Say, settings: Settings, rank: int, device: Any) -> None:
    """The job of a worker: measure every workload, and let rank 0 print and write what came out."""
    bench = without(bench, settings.host.no_copy_engine)
    session = Session(bench, rank, device, say if rank == 0 else lambda text: None)
    found: list[Measured] = []
    origin = provenance(settings.host.workers, bench.commit) if rank == 0 else {}

    def keep(newest: Measured) -> None:
        if rank == 0 and bench.out:  # after every round, so that an interrupted run leaves what it has
            write(bench, origin, [*found, newest])

    for sized in bench.sized:
        workload = workload_of(sized, bench)
        there = rank == 0 and resumed.has(bench.former, workload, bench.names, bench.blocks)
        if slowest([there])[0]:  # rank 0's file decides
            session.say(f"\n{workload_text(workload)}\nmeasured already: it stays in {bench.out}")
            continue
        if session.late():
            break
        for decision in sized.settings.decisions:
            session.say(f"note     {decision}")
        measured = session.run(workload, keep)
        keep(measured)
        found.append(measured)
        session.say(table(measured))
    if rank == 0 and bench.out and found:
        say(f"\nwrote {bench.out}")


def write(bench: Bench, origin: dict[str, Any], found: Sequence[Measured]) -> None:
    """Write the result file: what this run has measured, and what stays of an earlier one."""
    asked = {"blocks": bench.blocks, "steps": bench.steps, "origin": origin}
    workloads = {resumed.length(former): former for former in bench.former}
    workloads |= {resumed.length(one): one for one in ({**asked, **as_json(measured)} for measured in found)}
    save(Path(bench.out), {**origin, "workloads": [workloads[length] for length in sorted(workloads)]})

"""One rank of a benchmark: build the contenders, compare their numbers, warm up, let them take turns, report."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hocket.bench import gate
from hocket.bench.contender import CONTENDERS, Contender, load
from hocket.bench.measure import Gauge, Timer, nvml, take_turns
from hocket.bench.record import provenance
from hocket.bench.report import Measured, as_json, settings_text, table, verdict_text, workload_text
from hocket.bench.workload import Workload, batches
from hocket.resolve import Settings, replace_leaf

WARM_UP = 3
"""Steps of each contender before it is timed: kernels are chosen, connections and memory made."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What to measure, beside the configuration."""

    names: tuple[str, ...]
    """Contenders, in the order of the first round."""
    lengths: tuple[int, ...]
    """Sequence lengths, each a workload of its own."""
    blocks: int = 4
    """Blocks of each contender."""
    steps: int = 4
    """Timed steps of a block."""
    gate_steps: int = 8
    """Steps of the numerics gate."""
    optimizer: bool = True
    compile: bool = False
    out: str = ""
    """File for the result; empty writes none."""
    commit: str = ""
    """What to call this version, where there is no repository to ask."""


@dataclass
class Session:
    """One rank's run of one workload after the other."""

    bench: Bench
    rank: int
    device: torch.device
    say: Say
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the current workload."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and say so."""
        start = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start
        self.say(f"{name:9} {self.phases[name]:.1f} s")

    def build(self, name: str, workload: Workload) -> Contender:
        return load(name)(workload, self.rank, self.device)

    def compare(self, workload: Workload, contenders: dict[str, Contender]) -> gate.Verdict:
        """The gate: on the contenders themselves if they have an optimizer, else on smaller ones that do."""
        names = [name for name in self.bench.names if not CONTENDERS[name].bound]
        compared = workload if workload.optimizer else gate.small(workload)
        curves = {}
        for name in names:
            contender = contenders[name] if workload.optimizer else self.build(name, compared)
            curves[name] = gate.curve(contender, compared, self.rank, self.device, self.bench.gate_steps)
            if not workload.optimizer:
                self.close(contender)
        return gate.judge(curves, compared)

    def close(self, contender: Contender) -> None:
        contender.close()
        del contender
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, workload: Workload) -> Measured:
        """Measure one workload. Raises NumericsError before anything is timed if contenders disagree."""
        self.phases = {}
        self.say("\n" + workload_text(workload))
        verdict = None
        if not workload.optimizer:
            with self.phase("gate"):
                verdict = self.compare(workload, {})
        contenders, resident = {}, {}
        with self.phase("build"):
            for name in self.bench.names:
                before = self.allocated()
                contenders[name] = self.build(name, workload)
                resident[name] = self.allocated() - before
        if verdict is None:
            with self.phase("gate"):
                verdict = self.compare(workload, contenders)
        self.say(verdict_text(verdict))
        settings = {name: dict(contender.settings) for name, contender in contenders.items()}
        self.say(settings_text(settings))
        microbatches = batches(workload, self.rank, 0, self.device)
        timer = Timer(self.device)
        with self.phase("warm-up"):
            for contender in contenders.values():
                timer.settle()
                last = timer.steps(lambda c=contender: c.step(microbatches), WARM_UP)[-1]
                self.phases["estimate"] = self.phases.get("estimate", 0.0) + last
        estimate = self.phases.pop("estimate") * self.bench.blocks * (1 + self.bench.steps)
        self.say(f"measuring about {estimate:.0f} s and the switches")
        gauge = Gauge(nvml(self.device) if self.rank == 0 else None)
        try:
            with self.phase("measure"):
                blocks = take_turns(contenders, microbatches, self.bench.blocks, self.bench.steps, self.device, gauge)
        finally:
            gauge.close()
        while contenders:
            self.close(contenders.popitem()[1])
        if workload.compile:
            torch.compiler.reset()  # the next workload has other shapes
        return Measured(workload, verdict, settings, blocks, resident, dict(self.phases), hardware_name(self.device))

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def hardware_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def workloads(settings: Settings, bench: Bench) -> list[Workload]:
    """One workload per sequence length."""
    made = []
    for length in bench.lengths:
        config = replace_leaf(settings, "data.sequence_length", length)
        made.append(gate.sensitive(Workload(config, bench.optimizer, bench.compile)))
    return made


def bench_rank(bench: Bench, say: Say, settings: Settings, rank: int, device: Any) -> None:
    """The job of a worker: measure every workload, and let rank 0 print and write what came out."""
    session = Session(bench, rank, device, say if rank == 0 else lambda text: None)
    for decision in settings.decisions:
        session.say(f"note     {decision}")
    found: list[Measured] = []
    for workload in workloads(settings, bench):
        measured = session.run(workload)
        found.append(measured)
        session.say(table(measured))
        if rank == 0 and bench.out:  # after each, so that an interrupted run leaves what it has
            write(bench, settings, found)
    if rank == 0 and bench.out:
        say(f"\nwrote {bench.out}")


def write(bench: Bench, settings: Settings, found: Sequence[Measured]) -> None:
    origin = provenance(settings.host.workers, bench.commit)
    about = {"blocks": bench.blocks, "steps": bench.steps, "workloads": [as_json(measured) for measured in found]}
    path = Path(bench.out)
    path.write_text(json.dumps({**origin, **about}, indent=1) + "\n")

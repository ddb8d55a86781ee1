"""What the benchmarks of dense pipelines share: sizes, several plans on one engine's weights, and options.

One pipeline rank per process, nothing sharded, no optimizer: whatever differs between two plans is their order of ops.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench.measure import Timer, slowest
from benchmarks.bench.ours import Signal
from benchmarks.options import arguments as common
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.config.rule import Host
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.program.check import assert_valid
from hocket.program.lower import build_program
from hocket.program.ops import Program
from hocket.program.stages import sharding_of
from hocket.resolve import resolve
from hocket.runtime.comm import Groups
from hocket.runtime.lanes import spinner
from hocket.runtime.transports import Link, Slow
from hocket.runtime.world import join_world

LLAMA = ModelConfig(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=8192)
"""Layers of Llama-3 8B's widths; so few words that the head weighs on no rank."""
SMALL = ModelConfig(hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=64)


def arguments(doc: str | None, microbatches: int) -> argparse.ArgumentParser:
    """The options of such a benchmark."""
    parser = common(doc)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--microbatches", type=int, default=microbatches)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    return parser


def start(cpu: bool) -> tuple[int, torch.device]:
    """Join the ranks that torchrun started."""
    if not cpu:
        return join()
    torch.set_num_threads(1)
    join_world(False, 120.0)
    return dist.get_rank(), torch.device("cpu")


def finish(name: str, result: dict[str, Any] | None, options: argparse.Namespace) -> None:
    """Write the result, which rank 0 has, and end this process."""
    if result is not None:
        print(write(f"{name}_cpu" if options.cpu else name, result, options.out, options.commit), flush=True)
    dist.barrier()
    os._exit(0)  # groups that are still there may hang torch's own shutdown


def sized(options: argparse.Namespace, ranks: int, layers: int, microbatches: int, config: Config) -> Config:
    """A configuration with a dense model of so many layers per rank, resolved."""
    train = TrainConfig(
        microbatches=microbatches, sequences=1,
        device="cpu" if options.cpu else "cuda", transport="gloo" if options.cpu else "nccl", hang_timeout=60.0,
    )  # fmt: skip
    model = replace(SMALL if options.cpu else LLAMA, layers=ranks * layers)
    data, mesh = DataConfig(sequence_length=64 if options.cpu else options.tokens), MeshConfig(pp=ranks)
    precision = PrecisionConfig(compute="fp32" if options.cpu else "bf16")
    changes = dict(model=model, mesh=mesh, precision=precision, data=data, train=train)
    return resolve(replace(config, **changes), Host(gpus=ranks))


def same_model(config: Config, was: Mapping[str, Any]) -> None:
    """Assert that a configuration has the model and the batch of a result's, whatever has a new name since."""
    now = asdict(config)
    for section, names in (("model", was["model"]), ("mesh", was["mesh"]), ("data", ["sequence_length"])):
        changed = [name for name in names if name in now[section] and now[section][name] != _listed(was[section][name])]
        assert not changed, f"no longer what was measured: {section}.{', '.join(changed)}"


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass
class Bench:
    """One rank: an engine whose weights and groups every plan uses."""

    engine: Engine
    programs: dict[str, Program]
    device: torch.device

    def __post_init__(self) -> None:
        engine = self.engine
        self.executors = {n: engine.executor_for(p, engine.sharded.forget_grads) for n, p in self.programs.items()}
        self.real = [(group, group.transport) for group in engine.groups.edges()]

    def use(self, link: str, slow: Link | None = None) -> None:
        """Send on the real link, on the slow one, or (signal) next to nothing."""
        spin = spinner(self.device) if link == "slow" and self.device.type == "cuda" else None
        for group, real in self.real:
            group.transport = real
            if link == "slow":
                assert slow is not None
                group.transport = Slow(real, slow, group.rank, 60.0, spin)
            elif link == "signal":
                group.transport = Signal(group.size, group.rank, self.device, real)

    def step(self, name: str, microbatches: Sequence[Microbatch]) -> list[float]:
        """One step of a plan. Returns the losses of its microbatches, if this rank has them."""
        executor = self.executors[name]
        losses = executor.run(self.engine.with_loss_weights(microbatches, executor))
        return [loss.item() for loss in losses]

    def block(self, name: str, microbatches: Sequence[Microbatch], timer: Timer, steps: int) -> list[float]:
        """Seconds of steps of a plan on the slowest rank, without the first."""
        executor = self.executors[name]
        run: Callable[[Sequence[Microbatch]], object] = executor.run
        microbatches = self.engine.with_loss_weights(microbatches, executor)
        return slowest(timer.steps(lambda: run(microbatches), steps + 1))[1:]


def bench_of(
    chosen: Mapping[str, tuple[Config, int]], rank: int, device: torch.device, groups: Groups | None = None
) -> Bench:
    """One engine with a program for each configuration and number of microbatches. All place layers alike."""
    first = Engine(next(iter(chosen.values()))[0], rank, device, groups=groups, update=False)
    programs = {
        name: build_program(first.layout, microbatches, config, sharding_of(config))
        for name, (config, microbatches) in chosen.items()
    }
    for program in programs.values():
        assert_valid(program)
    groups = first.groups
    engine = Engine(chosen[_most_slots(programs)][0], rank, device, groups=groups, update=False)
    engine.init_weights()
    return Bench(engine, programs, device)


def _most_slots(programs: Mapping[str, Program]) -> str:
    """The plan whose gradient slots are enough for all."""
    name = max(programs, key=lambda name: sum(programs[name].grad_slots.values()))
    for other in programs.values():
        for unit, count in other.grad_slots.items():
            assert count <= programs[name].grad_slots[unit], "no plan has slots enough for all"
    return name

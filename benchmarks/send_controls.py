"""What the three controls of pipeline sends are worth: every combination, on the real link and on an emulated slow one.

    torchrun --nproc-per-node 4 -m benchmarks.send_controls
    torchrun --nproc-per-node 2 -m benchmarks.send_controls --cpu

One pipeline rank per process, a dense model of Llama-3 8B's widths, two chunks of two layers per rank, merged 1F1B. All
plans run on the same weights and groups and take turns, so that nothing but the order of ops and the link differs.
Beside them: what `auto` picks, a stride of 3, the classic interleaved order, and a step whose hops are free. On the
emulated link every send is late by latency and bytes over bandwidth.

About 90 s on 4 H200, of which 15 are the start. The small CPU form shows that everything works, and what slow hops do
to each plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import join
from benchmarks.record import write
from hocket.bench.measure import Timer, slowest
from hocket.bench.workload import Workload, batches
from hocket.config import (
    Config,
    DataConfig,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PipelineOverlap,
    PlanConfig,
    Switch,
    TrainConfig,
)
from hocket.engine import Engine
from hocket.leaves import changed
from hocket.parallel.stages import costs_of, hardware_of, sharding_of
from hocket.plan.check import assert_valid
from hocket.plan.hops import Parts
from hocket.plan.linearize import linearize
from hocket.plan.lower import build_program
from hocket.plan.ops import Program
from hocket.plan.simulate import simulate
from hocket.resolve import resolve
from hocket.rules import Host
from hocket.runtime.actions import Actions, Activation, Microbatch
from hocket.runtime.collection import no_collection
from hocket.runtime.comm import Group, join_world
from hocket.runtime.executor import Executor
from hocket.runtime.lanes import spinner
from hocket.runtime.pretended import Link, Null, Slow
from hocket.runtime.recorder import Recorder
from hocket.runtime.transports import Transport

LAYERS = 2
"""Of one chunk."""
CHUNKS = 2
CONTROLS = ("overlap.pp.backward_lane", "overlap.pp.defer_layers", "overlap.pp.defer_parts")
LANES: tuple[Switch, ...] = ("off", "on")
COUNTS = (0, 1, LAYERS)
PARTS: tuple[Parts, ...] = ("attn", "all")
LLAMA = ModelConfig(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=8192)
SMALL = ModelConfig(hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=64)
Blocks = dict[str, dict[str, list[list[float]]]]
"""Seconds of the steps of every block, by link and plan."""
EDGES = ("send_act", "recv_act", "send_grad", "recv_grad")


def settings(options: argparse.Namespace, ranks: int) -> Config:
    """The configuration that all plans share; its plan is the field's default of the controls."""
    model = replace(SMALL if options.cpu else LLAMA, layers=ranks * CHUNKS * LAYERS)
    sends = PipelineOverlap(backward_lane="off", defer_layers=1, defer_parts="attn")
    overlap = OverlapConfig(pp=sends, ep=ExpertOverlap(merge="on"), defer_wgrad="on")
    plan = PlanConfig(order="interleaved", chunks=CHUNKS)
    train = TrainConfig(
        microbatches=options.microbatches, sequences=1, dtype="fp32" if options.cpu else "bf16",
        device="cpu" if options.cpu else "cuda", transport="gloo" if options.cpu else "nccl", hang_timeout=60.0,
    )  # fmt: skip
    length = 64 if options.cpu else options.tokens
    data, mesh = DataConfig(sequence_length=length), MeshConfig(pp=ranks)
    config = Config(model=model, mesh=mesh, plan=plan, overlap=overlap, data=data, train=train)
    return resolve(config, Host(gpus=ranks))


def on_slow_link(config: Config, link: Link) -> Config:
    """The same on the emulated link, for predictions and for what `auto` picks there."""
    train = replace(
        config.train, transport="slow", slow_groups=("pp_fwd", "pp_bwd"), slow_latency=(link.latency,),
        slow_bandwidth=(link.bandwidth,),
    )  # fmt: skip
    return replace(config, train=train)


def plans(config: Config, links: Mapping[str, Config]) -> dict[str, Config]:
    """Everybody who takes part, by name: every combination of the controls, then the others."""
    found = {
        f"lane {lane}, {count} layers, {parts}": changed(config, dict(zip(CONTROLS, (lane, count, parts), strict=True)))
        for lane, count, parts in product(LANES, COUNTS, PARTS)
        if count or parts == "attn"  # of no layer, all parts are the same as attention
    }
    for name, on in links.items():
        chosen = resolve(changed(on, dict.fromkeys(CONTROLS, "auto")), Host(gpus=config.mesh.pp))
        found[f"auto for the {name} link"] = replace(config, overlap=chosen.overlap)
    wide = -(-3 * config.mesh.pp // 2)
    if config.train.microbatches >= wide:
        found["stride 3"] = changed(config, {"overlap.pp.backward_lane": "on", "plan.stride": 3, "plan.group": wide})
    found["not merged"] = changed(config, {"overlap.pp.backward_lane": "on", "overlap.ep.merge": "off"})
    found["not merged, nothing deferred"] = changed(
        found["not merged"], {"overlap.defer_wgrad": "off", "overlap.pp.defer_layers": 0}
    )
    return found


@dataclass
class Bench:
    """One rank: an engine whose weights and groups every plan uses."""

    engine: Engine
    programs: dict[str, Program]
    device: torch.device

    def __post_init__(self) -> None:
        self.executors = {name: self._executor(program) for name, program in self.programs.items()}
        self.real = {name: group.transport for name, group in self._edges()}

    def _edges(self) -> Iterator[tuple[str, Group]]:
        for name in EDGES:
            group = getattr(self.engine.groups, name)
            if group is not None:
                yield name, group

    def _executor(self, program: Program) -> Executor:
        engine, config, pp = self.engine, self.engine.config, self.engine.where.pp
        shape = (config.train.sequences, config.data.sequence_length, config.model.hidden)
        actions = Actions(
            engine.layout,
            engine.chunks,
            engine.sharded.units,
            engine.groups,
            Activation(shape, engine.dtype, self.device),
            engine.sharded.forget_grads,
        )
        order = [p for rank, p in linearize(program, None) if rank == pp]
        return Executor(program, pp, actions, engine.lanes, Recorder(program.ranks[pp], 64), order)

    def use(self, link: str, slow: Link) -> None:
        """Send on the real link, the slow one, or none."""
        spin = spinner(self.device) if link == "slow" and self.device.type == "cuda" else None
        for name, group in self._edges():
            real: Transport = self.real[name]
            if link == "slow":
                group.transport = Slow(real, slow, group.rank, 60.0, spin)
            else:
                group.transport = Null(group.size, group.rank, self.device) if link == "free" else real

    def step(self, name: str, microbatches: list[Microbatch]) -> list[float]:
        """One step of a plan; the losses of its microbatches, unless somebody else has them."""
        losses = self.executors[name].run(microbatches)
        return [loss.item() for loss in losses]


def most_slots(programs: Mapping[str, Program]) -> str:
    """The plan whose gradient slots are enough for all."""
    name = max(programs, key=lambda name: sum(programs[name].grad_slots.values()))
    for other in programs.values():
        for unit, count in other.grad_slots.items():
            assert count <= programs[name].grad_slots[unit], "no plan has slots enough for all"
    return name


def prepare(options: argparse.Namespace, rank: int, device: torch.device) -> tuple[Bench, dict[str, Config], Link]:
    """An engine with every plan, the configuration for each link, and the slow link."""
    slow = Link(options.latency, options.bandwidth)
    config = settings(options, dist.get_world_size())
    links = {"real": config, "slow": on_slow_link(config, slow)}
    chosen = plans(config, links)
    layout_and_rest = Engine(chosen["not merged"], rank, device, update=False)
    programs = {
        name: build_program(layout_and_rest.layout, config.train.microbatches, plan, sharding_of(config))
        for name, plan in chosen.items()
    }
    for program in programs.values():
        assert_valid(program)
    groups = layout_and_rest.groups
    layout_and_rest.sharded.close()
    engine = Engine(chosen[most_slots(programs)], rank, device, groups=groups, update=False)
    engine.init_weights()
    return Bench(engine, programs, device), links, slow


def measure(options: argparse.Namespace, bench: Bench, slow: Link, rank: int) -> Blocks:
    """Seconds of steps by link and plan, block by block. Fails if two plans have different losses."""
    config, timer = bench.engine.config, Timer(bench.device)
    microbatches = batches(Workload(config), rank, 0, bench.device)
    losses = {name: bench.step(name, microbatches) for name in bench.programs}  # on a GPU also their rehearsal
    assert_same(losses, 0.0 if bench.device.type == "cpu" else 1e-3)
    found: Blocks = {link: {name: [] for name in bench.programs} for link in ("real", "slow", "free")}
    with no_collection():
        for number in range(options.blocks):
            for link, rows in found.items():
                bench.use(link, slow)
                for name in list(rows)[:: 1 if number % 2 == 0 else -1]:
                    if link == "free" and not name.startswith("auto for the real"):
                        continue  # with free hops one is as good as the other
                    run = bench.executors[name].run
                    times = timer.steps(lambda run=run: run(microbatches), options.steps + 1)
                    rows[name].append(slowest(times)[1:])
    bench.use("real", slow)
    return found


def assert_same(losses: Mapping[str, list[float]], tolerance: float) -> None:
    """Fail if a plan's losses of a step differ from another's by more than `tolerance`."""
    first = next(iter(losses.values()))
    for name, found in losses.items():
        worst = max((abs(a - b) for a, b in zip(first, found, strict=True)), default=0.0)
        assert worst <= tolerance, f"{name} computes something else: losses differ by {worst}"


def report(bench: Bench, links: Mapping[str, Config], slow: Link, found: Blocks) -> dict[str, Any]:
    """What is written: every plan's steps on every link, with the prediction, the shortest first."""
    rows = []
    for link, by_plan in found.items():
        costs = costs_of(links.get(link, links["real"]), hardware_of(links["real"]))
        for name, blocks in by_plan.items():
            if not blocks:
                continue
            predicted = None if link == "free" else float(simulate(bench.programs[name], costs).makespan)
            seconds = statistics.median(statistics.median(block) for block in blocks)
            rows.append({"link": link, "plan": name, "seconds": seconds, "predicted": predicted, "blocks": blocks})
    config = links["real"]
    hop = {link: float(costs_of(on, hardware_of(on)).table["recv", "grad", ""].seconds) for link, on in links.items()}
    return {
        "config": asdict(config),
        "slow_link": {**asdict(slow), "emulated": True},
        "predicted_hop_seconds": hop,
        "in_flight": {name: list(program.in_flight) for name, program in bench.programs.items()},
        "rows": rows,
    }


def start(cpu: bool) -> tuple[int, torch.device]:
    """Join the ranks that torchrun started."""
    if not cpu:
        return join()
    torch.set_num_threads(1)
    join_world(False, 120.0)
    return dist.get_rank(), torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--latency", type=float, default=30e-6)
    parser.add_argument("--bandwidth", type=float, default=25e9)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = start(options.cpu)
    bench, links, slow = prepare(options, rank, device)
    found = measure(options, bench, slow, rank)
    if rank == 0:
        result = report(bench, links, slow, found)
        for row in sorted(result["rows"], key=lambda row: (row["link"], row["seconds"])):
            predicted = "" if row["predicted"] is None else f"predicted {1e3 * row['predicted']:8.2f} ms"
            print(f"{row['link']:5} {row['plan']:32} {1e3 * row['seconds']:8.2f} ms  {predicted}", flush=True)
        name = "send_controls_cpu" if options.cpu else "send_controls"
        print(write(name, result, options.out, options.commit), flush=True)
    dist.barrier()
    os._exit(0)  # groups that are still there may hang torch's own shutdown


if __name__ == "__main__":
    main()

"""The bubble of every order of microbatches, measured beside what the simulator says: zero-bubble orders and 1F1B.

    torchrun --nproc-per-node 4 -m benchmarks.orders
    torchrun --nproc-per-node 2 -m benchmarks.orders --cpu

One pipeline rank per process, a dense model of Llama-3 8B's widths with four layers per rank. Every order runs M and
2 M microbatches. The longer step has M microbatches more in its steady state, so what a step takes apart from its
microbatches is `2 * T(M) - T(2 M)`: the bubble, and the end of the step, in which nothing is updated here. Orders that
place layers alike share an engine and take turns.

About 80 s on 4 H200, of which 15 are the start. The small CPU form shows that everything works.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bubbles import ORDERS, config_of
from benchmarks.record import write
from benchmarks.send_controls import LLAMA, SMALL, Bench, start
from hocket.bench.measure import Timer, slowest
from hocket.bench.workload import Workload, batches
from hocket.config import Config, DataConfig, MeshConfig, TrainConfig
from hocket.engine import Engine
from hocket.parallel.stages import costs_of, hardware_of, sharding_of
from hocket.plan.check import assert_valid
from hocket.plan.lower import build_program
from hocket.plan.ops import Program
from hocket.plan.simulate import simulate
from hocket.resolve import resolve
from hocket.rules import Host
from hocket.runtime.collection import no_collection
from hocket.runtime.comm import Groups

LAYERS = 4
"""Of one rank."""
Named = tuple[str, int]
"""Order and number of microbatches."""


def settings(options: argparse.Namespace, ranks: int, config: Config) -> Config:
    """The configuration of an order."""
    model = replace(SMALL if options.cpu else LLAMA, layers=ranks * LAYERS)
    train = TrainConfig(
        microbatches=2 * options.microbatches, sequences=1, dtype="fp32" if options.cpu else "bf16",
        device="cpu" if options.cpu else "cuda", transport="gloo" if options.cpu else "nccl", hang_timeout=60.0,
    )  # fmt: skip
    data = DataConfig(sequence_length=64 if options.cpu else options.tokens)
    return resolve(replace(config, model=model, mesh=MeshConfig(pp=ranks), data=data, train=train), Host(gpus=ranks))


def placements(options: argparse.Namespace, ranks: int) -> Iterator[dict[str, Config]]:
    """The orders, those together that place layers alike."""
    found: dict[tuple[int, bool], dict[str, Config]] = {}
    for name, changes in ORDERS.items():
        config = settings(options, ranks, config_of(changes))
        found.setdefault((config.plan.chunks, config.plan.order == "zb_v"), {})[name] = config
    yield from found.values()


def bench_of(
    options: argparse.Namespace, orders: dict[str, Config], rank: int, device: torch.device, groups: Groups | None
) -> Bench:
    """One engine with the programs of some orders, each for M and 2 M microbatches."""
    programs: dict[Named, Program] = {}
    first = next(iter(orders.values()))
    engine = Engine(first, rank, device, groups=groups, update=False)
    for name, config in orders.items():
        for count in (options.microbatches, 2 * options.microbatches):
            program = build_program(engine.layout, count, config, sharding_of(config))
            assert_valid(program)
            programs[name, count] = program
    most = max(programs, key=lambda key: sum(programs[key].grad_slots.values()))
    groups = engine.groups
    engine.sharded.close()
    engine = Engine(orders[most[0]], rank, device, groups=groups, update=False)
    engine.init_weights()
    return Bench(engine, {f"{name}, {count}": program for (name, count), program in programs.items()}, device)


def measure(options: argparse.Namespace, bench: Bench, rank: int) -> dict[str, list[list[float]]]:
    """Seconds of steps by order and number of microbatches, block by block."""
    timer = Timer(bench.device)
    tokens = batches(Workload(bench.engine.config), rank, 0, bench.device)
    used = {name: tokens[: program.microbatches] for name, program in bench.programs.items()}
    for name, microbatches in used.items():
        bench.step(name, microbatches)  # on a GPU the rehearsal
    found: dict[str, list[list[float]]] = {name: [] for name in bench.programs}
    with no_collection():
        for number in range(options.blocks):
            for name in list(found)[:: 1 if number % 2 == 0 else -1]:
                run = bench.executors[name].run
                times = timer.steps(lambda run=run, name=name: run(used[name]), options.steps + 1)
                found[name].append(slowest(times)[1:])
    return found


def rows_of(
    options: argparse.Namespace, bench: Bench, orders: dict[str, Config], found: dict[str, list[list[float]]]
) -> Iterator[dict[str, Any]]:
    """One row per order."""
    costs = costs_of(bench.engine.config, hardware_of(bench.engine.config))
    for name in orders:
        keys = [f"{name}, {count}" for count in (options.microbatches, 2 * options.microbatches)]
        measured = [statistics.median(statistics.median(block) for block in found[key]) for key in keys]
        predicted = [float(simulate(bench.programs[key], costs).makespan) for key in keys]
        yield {
            "order": name,
            "seconds": measured,
            "predicted": predicted,
            "in_flight": max(bench.programs[keys[1]].in_flight),
            "blocks": [found[key] for key in keys],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = start(options.cpu)
    rows: list[dict[str, Any]] = []
    groups: dict[bool, Groups] = {}
    config: Config | None = None
    for orders in placements(options, dist.get_world_size()):
        turns = any(each.plan.order == "zb_v" for each in orders.values())
        bench = bench_of(options, orders, rank, device, groups.get(turns))
        groups[turns], config = bench.engine.groups, bench.engine.config
        rows += rows_of(options, bench, orders, measure(options, bench, rank))
        bench.engine.sharded.close()
    if rank == 0 and config is not None:
        for row in rows:
            bubbles = [2 * few - many for few, many in (row["seconds"], row["predicted"])]
            times = f"{1e3 * row['seconds'][0]:8.2f} ms, predicted {1e3 * row['predicted'][0]:8.2f} ms"
            print(
                f"{row['order']:52} {times}; bubble {1e3 * bubbles[0]:7.2f} and {1e3 * bubbles[1]:7.2f} ms", flush=True
            )
        result = {"config": asdict(config), "microbatches": options.microbatches, "rows": rows}
        print(write("orders_cpu" if options.cpu else "orders", result, options.out, options.commit), flush=True)
    dist.barrier()
    os._exit(0)  # groups that are still there may hang torch's own shutdown


if __name__ == "__main__":
    main()

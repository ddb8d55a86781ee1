"""The bubble of every order of microbatches, measured beside what the simulator says: zero-bubble orders and 1F1B.

    torchrun --nproc-per-node 4 -m benchmarks.orders
    torchrun --nproc-per-node 2 -m benchmarks.orders --cpu

One pipeline rank per process, a dense model of Llama-3 8B's widths with four layers per rank. Every order runs M and
2 M microbatches. The longer step has M microbatches more in its steady state, so what a step takes apart from its
microbatches is `2 * T(M) - T(2 M)`: the bubble, and the end of the step, in which nothing is updated here. The same
step with p2p transfers that carry one element has the bubble and no sends. Orders that place layers alike share an
engine and take turns.

About 90 s on 4 H200, of which 15 are the start. The small CPU form shows that everything works.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from benchmarks.bench.measure import Timer
from benchmarks.bench.workload import Workload, batches
from benchmarks.bubbles import ORDERS, config_of
from benchmarks.pipelines import Bench, arguments, bench_of, finish, same_model, sized, start
from hocket.collector import no_collection
from hocket.config import Config
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import simulate
from hocket.program.lower import build_program
from hocket.program.stages import layout_of, sharding_of
from hocket.runtime.comm import Groups

LAYERS = 4
"""Of one rank."""
Named = tuple[str, int]
"""Order and number of microbatches."""


def placements(options: argparse.Namespace, ranks: int) -> Iterator[dict[str, Config]]:
    """The orders, those together that place layers alike."""
    found: dict[tuple[int, bool], dict[str, Config]] = {}
    for name, changes in ORDERS.items():
        config = sized(options, ranks, LAYERS, 2 * options.microbatches, config_of(changes))
        found.setdefault((config.plan.chunks, config.plan.turning), {})[name] = config
    yield from found.values()


def keys_of(options: argparse.Namespace, order: str) -> tuple[str, str]:
    """Names of an order's programs: of M and of 2 M microbatches."""
    return f"{order}, {options.microbatches}", f"{order}, {2 * options.microbatches}"


def programs_of(options: argparse.Namespace, orders: Mapping[str, Config]) -> dict[str, tuple[Config, int]]:
    """What runs, by name: each order with M and with 2 M microbatches."""
    found: dict[str, tuple[Config, int]] = {}
    for name, config in orders.items():
        few, many = keys_of(options, name)
        found |= {few: (config, options.microbatches), many: (config, 2 * options.microbatches)}
    return found


def measure(options: argparse.Namespace, bench: Bench, rank: int) -> dict[str, list[list[float]]]:
    """Seconds of steps by order and number of microbatches, block by block; `signal`: p2p transfers of an element."""
    timer = Timer(bench.device)
    tokens = batches(Workload(bench.engine.config), rank, 0, bench.device)
    used = {name: tokens[: program.microbatches] for name, program in bench.programs.items()}
    for name, microbatches in used.items():
        bench.step(name, microbatches)  # on a GPU the rehearsal
    turns = [(name, "real") for name in used]
    turns += [(name, "signal") for name, microbatches in used.items() if len(microbatches) == options.microbatches]
    found: dict[str, list[list[float]]] = {f"{name}{_mark(link)}": [] for name, link in turns}
    with no_collection():
        for number in range(options.blocks):
            for name, link in turns[:: 1 if number % 2 == 0 else -1]:
                bench.use(link)
                found[f"{name}{_mark(link)}"].append(bench.block(name, used[name], timer, options.steps))
    bench.use("real")
    return found


def _mark(link: str) -> str:
    return "" if link == "real" else f", {link}"


def rows_of(
    options: argparse.Namespace, bench: Bench, orders: dict[str, Config], found: dict[str, list[list[float]]]
) -> Iterator[dict[str, Any]]:
    """One row per order."""
    for name in orders:
        keys = keys_of(options, name)
        measured = [median(found[key]) for key in keys]
        yield {
            "order": name,
            "seconds": measured,
            "signal_seconds": median(found[f"{keys[0]}, signal"]),
            "in_flight": max(bench.programs[keys[1]].in_flight),
            "blocks": [found[key] for key in keys],
        }


def predicted(options: argparse.Namespace, ranks: int) -> dict[str, list[float]]:
    """Seconds of an order's two steps, as the cost model has them."""
    found = {}
    for orders in placements(options, ranks):
        first = next(iter(orders.values()))
        layout, costs = layout_of(first), costs_of(first, hardware_of(first))
        for name, config in orders.items():
            counts = (options.microbatches, 2 * options.microbatches)
            steps = [build_program(layout, count, config, sharding_of(config)) for count in counts]
            found[name] = [float(simulate(step, costs).makespan) for step in steps]
    return found


def of_result(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """`predicted` of the orders of a result."""
    was, microbatches = result["config"], result["microbatches"]
    options = argparse.Namespace(
        cpu=was["train"]["device"] == "cpu", microbatches=microbatches, tokens=was["data"]["sequence_length"]
    )
    for config in next(placements(options, was["mesh"]["pp"])).values():
        same_model(config, was)
    return predicted(options, was["mesh"]["pp"])


def median(blocks: Sequence[Sequence[float]]) -> float:
    return statistics.median(statistics.median(block) for block in blocks)


def main() -> None:
    options = arguments(__doc__, microbatches=8).parse_args()
    rank, device = start(options.cpu)
    rows: list[dict[str, Any]] = []
    groups: dict[bool, Groups] = {}
    config: Config | None = None
    for orders in placements(options, dist.get_world_size()):
        turns = any(each.plan.turning for each in orders.values())
        bench = bench_of(programs_of(options, orders), rank, device, groups.get(turns))
        groups[turns], config = bench.engine.groups, bench.engine.config
        rows += rows_of(options, bench, orders, measure(options, bench, rank))
    assert config is not None
    model = predicted(options, dist.get_world_size()) if rank == 0 else {}
    for row in rows if rank == 0 else ():
        few, said = 1e3 * row["seconds"][0], 1e3 * model[row["order"]][0]
        p2p = row["seconds"][0] / row["signal_seconds"] - 1
        print(f"{row['order']:52} {few:8.2f} ms, predicted {said:8.2f} ms; p2p transfers {p2p:+.1%}", flush=True)
    result = {"config": asdict(config), "microbatches": options.microbatches, "rows": rows}
    finish("orders", result if rank == 0 else None, options)


if __name__ == "__main__":
    main()

"""How long does one optimizer step take: sequential, classic interleaved, merged, and without communication?

    torchrun --nproc-per-node 8 -m benchmarks.step_time

Plans of one recipe take turns as the contenders of `hocket bench` do. `bound` is the merged plan with the null
transport: the same kernels, no communication. `merged again` is the merged plan a second time: how far its ratio is
from 1 is the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from typing import Any

import torch.distributed as dist

from benchmarks.bench.gate import curve
from benchmarks.bench.measure import Gauge, Timer, slowest, take_turns
from benchmarks.bench.ours import Planned
from benchmarks.bench.stats import ratio
from benchmarks.bench.workload import Workload, batches
from benchmarks.options import arguments
from benchmarks.ranks import for_world, join
from benchmarks.record import write
from hocket.config import Config
from hocket.config.schema import changed
from hocket.recipes import PLAIN, recipe


def contenders(config: Config) -> dict[str, Config]:
    """The settings of the contenders, by name."""
    everything = {"overlap.pp.defer_layers": -1}
    return {
        "sequential": changed(config, {"plan.order": "sequential", **PLAIN}),
        "interleaved": changed(config, {"plan.order": "auto", **PLAIN}),
        "merged": config,
        "merged, defer all": changed(config, everything),
        "bound": changed(config, {"train.transport": "null"}),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=0)
    options = parser.parse_args()
    rank, device = join()
    config = for_world(recipe(options.recipe), dist.get_world_size())
    changes = {name: getattr(options, name) for name in ("microbatches", "sequences") if getattr(options, name)}
    train = dataclasses.replace(config.train, transport="nccl", **changes)
    workload = Workload(changed(dataclasses.replace(config, train=train), {"precision.compute": "bf16"}))
    plans = contenders(workload.config)
    engines = {name: Planned(workload, rank, device, settings) for name, settings in plans.items()}
    losses = {name: curve(planned, workload, rank, device, 3) for name, planned in engines.items()}  # also warms up
    losses["bound"] = []  # it computes on rubbish
    losses["merged again"], engines["merged again"] = [], engines["merged"]
    microbatches, timer = batches(workload, rank, 0, device), Timer(device)
    seconds = {name: slowest(timer.steps(lambda p=p: p.step(microbatches), 2))[-1] for name, p in engines.items()}
    rounds = list(take_turns(engines, microbatches, seconds, options, timer, Gauge(None)))
    if rank == 0:
        report(options, workload, {name: [found[name].seconds for found in rounds] for name in engines}, losses)
    dist.barrier()
    os._exit(0)  # groups that are still there may hang torch's own shutdown


def report(
    options: argparse.Namespace,
    workload: Workload,
    blocks: dict[str, list[tuple[float, ...]]],
    losses: dict[str, list[float]],
) -> None:
    """Print a table and write the result file."""
    medians = {name: [statistics.median(times) for times in runs] for name, runs in blocks.items()}
    rows: dict[str, Any] = {}
    for name, runs in medians.items():
        seconds = statistics.median(runs)
        others = {"speed_up_over_sequential": "sequential", "speed_up_over_interleaved": "interleaved"}
        over = {key: ratio(medians[other], runs) for key, other in {**others, "fraction_of_bound": "bound"}.items()}
        rows[name] = {
            "seconds": seconds,
            "tokens_per_second": workload.tokens / seconds,
            "tflops_per_gpu": workload.flops / seconds / workload.mesh.world / 1e12,
            **{key: dataclasses.asdict(value) for key, value in over.items()},
            "blocks": blocks[name],
            "first_losses": losses[name],
        }
        print(f"{name:22} {1e3 * seconds:8.1f} ms  {over}  losses {losses[name]}", flush=True)
    result = {
        "config": dataclasses.asdict(workload.config),
        "tokens_per_step": workload.tokens,
        "contenders": rows,
    }
    print(write("step_time", result, options.out, options.commit), flush=True)


if __name__ == "__main__":
    main()

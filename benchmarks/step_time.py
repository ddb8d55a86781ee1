"""How long does one optimizer step take: sequential, classic interleaved, merged, and without communication?

    torchrun --nproc-per-node 8 -m benchmarks.step_time

All contenders stay resident in one job, on the same ranks, and take turns in blocks. A step's time is that of the
slowest rank, measured with CUDA events. Figures are medians; ratios are of medians of neighbouring blocks, with a
bootstrap interval. `bound` is the merged plan with the null transport: the same kernels, no communication.
`merged again` is the merged plan a second time: how far its ratio is from 1 is the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write
from hocket.config import Config
from hocket.engine import Engine
from hocket.plan.cost import model_flops_per_token
from hocket.recipes import recipe
from hocket.runtime.actions import Microbatch


def contenders(config: Config) -> dict[str, Config]:
    """The settings of everybody who takes part, by name."""
    plain = dict(merge="off", defer_wgrad="off", p2p_defer_layers=0)

    def plan(**changes: Any) -> Config:
        return dataclasses.replace(config, plan=dataclasses.replace(config.plan, **changes))

    null = dataclasses.replace(config, train=dataclasses.replace(config.train, transport="null"))
    return {
        "sequential": plan(order="sequential", **plain),
        "interleaved": plan(order="auto", **plain),
        "merged": config,
        "merged, defer all": plan(p2p_defer_layers=-1, p2p_defer_parts="all"),
        "bound": null,
    }


def join() -> tuple[int, torch.device]:
    """Join the ranks that torchrun started. Returns this one's number and GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return dist.get_rank(), device


def for_world(config: Config, world: int) -> Config:
    """A recipe on another number of ranks: fewer or more data-parallel ranks."""
    dp = world // config.mesh.pp
    mesh = dataclasses.replace(config.mesh, dp=dp, ep=min(config.mesh.ep, dp))
    return dataclasses.replace(config, mesh=mesh)


def batch(engine: Engine, seed: int) -> list[Microbatch]:
    """Random tokens, the same for all contenders."""
    config = engine.config
    generator = torch.Generator().manual_seed(1000 * seed + engine.where.dp)
    shape = (config.train.sequences, config.data.sequence_length + 1)
    ids = [torch.randint(config.model.vocab, shape, generator=generator) for _ in range(config.train.microbatches)]
    return [Microbatch(*(half.contiguous().to(engine.device) for half in (i[:, :-1], i[:, 1:]))) for i in ids]


def timed_block(engine: Engine, microbatches: list[Microbatch], steps: int) -> list[float]:
    """Seconds of each step on the slowest rank, after one step that does not count."""
    times = []
    for n in range(steps + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        engine.train_step(microbatches, 1e-4)
        end.record()
        torch.cuda.synchronize()
        seconds = torch.tensor(start.elapsed_time(end) / 1e3, device=engine.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if n:
            times.append(float(seconds))
    return times


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Median of `slow / fast` over blocks, and its 95 % bootstrap interval."""
    pairs = np.array(slow) / np.array(fast)
    chooser = np.random.default_rng(0)
    samples = np.median(chooser.choice(pairs, (2000, len(pairs))), axis=1)
    low, high = np.percentile(samples, [2.5, 97.5])
    return {"median": float(np.median(pairs)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()

    config = for_world(recipe(options.recipe), dist.get_world_size())
    changes = {name: getattr(options, name) for name in ("microbatches", "sequences") if getattr(options, name)}
    train = dataclasses.replace(config.train, transport="nccl", dtype="bf16", **changes)
    config = dataclasses.replace(config, train=train)
    engines: dict[str, Engine] = {}
    groups = None
    for name, settings in contenders(config).items():
        engines[name] = Engine(settings, rank, device, groups=None if name == "bound" else groups)
        groups = groups or engines[name].groups
        engines[name].init_weights()
    engines["merged again"] = engines["merged"]
    microbatches = batch(engines["merged"], 0)
    losses = {}
    for name, engine in engines.items():  # warm up, and show that the plans agree
        if name in ("bound", "merged again"):  # one computes on rubbish, the other has been here before
            losses[name] = []
            engine.train_step(microbatches, 1e-4)
            engine.train_step(microbatches, 1e-4)
            continue
        steps = [engine.train_step(microbatches, 1e-4).loss for _ in range(3)]
        losses[name] = [engine.agree(loss)[0] for loss in steps]
    blocks: dict[str, list[list[float]]] = {name: [] for name in engines}
    for n in range(options.blocks):
        order = list(engines) if n % 2 == 0 else list(reversed(engines))
        for name in order:
            blocks[name].append(timed_block(engines[name], microbatches, options.steps))
    if rank == 0:
        report(options, config, blocks, losses)
    dist.barrier()
    dist.destroy_process_group()


def report(
    options: argparse.Namespace, config: Config, blocks: dict[str, list[list[float]]], losses: dict[str, list[float]]
) -> None:
    """Print a table and write the result file."""
    medians = {name: [statistics.median(times) for times in runs] for name, runs in blocks.items()}
    tokens = config.mesh.dp * config.train.microbatches * config.train.sequences * config.data.sequence_length
    flops = model_flops_per_token(config.model, config.data.sequence_length) * tokens
    world = config.mesh.pp * config.mesh.dp
    rows: dict[str, Any] = {}
    for name, runs in medians.items():
        seconds = statistics.median(runs)
        rows[name] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_gpu": flops / seconds / world / 1e12,
            "speed_up_over_sequential": ratio(medians["sequential"], runs),
            "speed_up_over_interleaved": ratio(medians["interleaved"], runs),
            "fraction_of_bound": ratio(medians["bound"], runs),
            "blocks": blocks[name],
            "first_losses": losses[name],
        }
        print(
            f"{name:22} {1e3 * seconds:8.1f} ms  {rows[name]['tflops_per_gpu']:6.1f} TFLOP/s/GPU  "
            f"x{rows[name]['speed_up_over_sequential']['median']:.3f} sequential  "
            f"x{rows[name]['speed_up_over_interleaved']['median']:.3f} interleaved  "
            f"{rows[name]['fraction_of_bound']['median']:.3f} of the bound  losses {losses[name]}",
            flush=True,
        )
    result = {"config": dataclasses.asdict(config), "tokens_per_step": tokens, "contenders": rows}
    print(write("step_time", result, options.out, options.commit))


if __name__ == "__main__":
    main()

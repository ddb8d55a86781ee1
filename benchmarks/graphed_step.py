"""What does a CUDA graph of a step buy? Steps issued op by op, and replayed as one graph, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.graphed_step --tokens 1024

A small mixture of experts, which the host cannot issue as fast as a GPU computes; splits are known to the devices
alone, so that no host waits. Whole steps with AdamW: of the GPU, and of the host until it has issued all. Losses must
have the same bits. A minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks import batch, join
from benchmarks.record import write
from hocket.config import (
    Config,
    DataConfig,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PlanConfig,
    PrecisionConfig,
    TrainConfig,
)
from hocket.engine import Engine
from hocket.settings.leaves import changed

STEPS, ROUNDS = 5, 6


def config(tokens: int, world: int) -> Config:
    """Sixteen narrow layers on `world` ranks, experts on all of them; `tokens` in each of two microbatches."""
    ep = ExpertOverlap(merge="on", splits="device", copies="per_expert", room=float(world))
    return Config(
        model=ModelConfig(
            vocab=4096, hidden=1024, layers=16, heads=8, kv_heads=4, head_dim=128, experts=32, top_k=4, expert_ffn=512
        ),
        mesh=MeshConfig(dp=world, ep=world),
        plan=PlanConfig(order="1f1b"),
        overlap=OverlapConfig(ep=ep, defer_wgrad="on"),
        data=DataConfig(sequence_length=tokens),
        precision=PrecisionConfig(compute="bf16"),
        train=TrainConfig(microbatches=2, transport="nccl", hang_timeout=60.0),
    )


def block(engine: Engine, seed: int) -> tuple[float, float, list[float]]:
    """(seconds of a step on the GPU, of the host, losses), of a few steps."""
    batches = [batch(engine, seed + step) for step in range(STEPS)]
    torch.cuda.synchronize()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    start.record()
    losses = [engine.train_step(microbatches, 1e-4).loss for microbatches in batches]
    end.record()
    host = (time.perf_counter() - began) / STEPS
    end.synchronize()
    engine.executor.recorder.end()
    return start.elapsed_time(end) / 1e3 / STEPS, host, [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()
    base = config(options.tokens, dist.get_world_size())
    issued = Engine(base, rank, device)
    graph = Engine(changed(base, {"plan.graphs": "on"}), rank, device, groups=issued.groups)
    engines = {"issued": issued, "graph": graph}
    for engine in engines.values():
        engine.init_weights()
    times: dict[str, dict[str, list[float]]] = {name: {"gpu": [], "host": []} for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            gpu, host, found = block(engine, STEPS * turn)
            losses[name] += found
            if turn:  # in the first block steps are rehearsed and recorded
                times[name]["gpu"].append(gpu)
                times[name]["host"].append(host)
    same = losses["issued"] == losses["graph"]
    medians = {name: {of: statistics.median(values) for of, values in each.items()} for name, each in times.items()}
    if rank == 0:
        for name, each in medians.items():
            print(f"{name:8} {1e3 * each['gpu']:7.2f} ms a step, {1e3 * each['host']:7.2f} ms of the host")
        print("losses have the same bits" if same else f"losses differ: {losses}")
        result = {"tokens": options.tokens, "seconds": medians, "same": same}
        print(write("graphed_step", result, options.out, options.commit))
    dist.barrier()


if __name__ == "__main__":
    main()

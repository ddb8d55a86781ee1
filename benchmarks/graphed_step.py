"""What would a CUDA graph of a whole step buy? Steps issued op by op, and the same step as one graph, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.graphed_step --tokens 1024

A small mixture of experts, which the host cannot issue as fast as a GPU computes; splits are known to the devices
alone, so that no host waits. Forwards and backwards with gathers and reductions, without an optimizer: its update
counts steps on the host. The first steps run as ever; then the calls that the lanes' streams get in one more of them
are recorded, and replayed. Losses must have the same bits. A minute.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

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
    TrainConfig,
)
from hocket.engine import Engine
from hocket.runtime.lanes import CudaLanes

WARM_UP, STEPS, ROUNDS = 4, 5, 6


def config(tokens: int, world: int) -> Config:
    """Sixteen narrow layers on `world` ranks, experts on all of them; `tokens` in each of two microbatches."""
    return Config(
        model=ModelConfig(
            vocab=4096, hidden=1024, layers=16, heads=8, kv_heads=4, head_dim=128, experts=32, top_k=4, expert_ffn=512
        ),
        mesh=MeshConfig(dp=world, ep=world),
        plan=PlanConfig(order="1f1b"),
        overlap=OverlapConfig(ep=ExpertOverlap(merge="on", splits="device", capacity=float(world)), defer_wgrad="on"),
        data=DataConfig(sequence_length=tokens),
        train=TrainConfig(microbatches=2, dtype="bf16", transport="nccl", hang_timeout=60.0),
    )


def recorded(engine: Engine, microbatches: list[Any]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """The graph of a step and the losses that it writes.

    A stream's call that waits for another stream's makes both part of the recording; in the end the first must wait for
    all, for the work of each belongs to the graph.
    """
    lanes = engine.lanes
    assert isinstance(lanes, CudaLanes)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        losses = engine.executor.run(microbatches)
        for stream in lanes._streams.values():
            torch.cuda.current_stream().wait_stream(stream)
    return graph, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()
    engine = Engine(config(options.tokens, dist.get_world_size()), rank, device, update=False)
    engine.init_weights()
    microbatches = batch(engine, 0)

    def issued() -> list[torch.Tensor]:
        losses = engine.executor.run(microbatches)
        engine.executor.recorder.end()
        return losses

    for _ in range(WARM_UP):
        issued()
    wanted = torch.stack(issued()).clone()
    graph, losses = recorded(engine, microbatches)
    engine.executor.recorder.end()
    times: dict[str, list[float]] = {"issued": [], "graph": []}
    for turn in range(ROUNDS + 1):
        for name, step in (("issued", issued), ("graph", graph.replay)):
            torch.cuda.synchronize()
            dist.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(STEPS):
                step()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) / 1e3 / STEPS)
    same = torch.equal(torch.stack(losses), wanted)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if rank == 0:
        for name, seconds in medians.items():
            print(f"{name:8} {1e3 * seconds:7.2f} ms a step")
        print("losses have the same bits" if same else f"losses differ: {losses} and {wanted}")
        print(write("graphed_step", {"tokens": options.tokens, "seconds": medians, "same": same}, options.out,
                    options.commit))  # fmt: skip
    assert same
    dist.barrier()


if __name__ == "__main__":
    main()

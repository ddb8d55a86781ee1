"""Does communication run beside compute? One profiled step of the merged plan, lane by lane.

    torchrun --nproc-per-node 8 -m benchmarks.overlap_trace

Every op shows under its name in the trace, so each CUDA stream can be told by the ops that ran on it. For every
communication lane: how long its kernels ran, and how much of that time some compute kernel ran too (unions of
intervals). A receive's kernel runs from when it is posted, so its time holds the wait for the sender.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import write
from benchmarks.step_time import batch, for_world
from hocket.engine import Engine
from hocket.recipes import recipe

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """Length of the intersection of two unions."""
    total, j = 0.0, 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            total += min(end, b[k][1]) - max(start, b[k][0])
            k += 1
    return total


def lane_of(name: str) -> str:
    """The lane of an op by its name, such as `fwd dispatch m0 c0 l1`."""
    verb, part = name.split()[:2]
    if verb in ("send", "recv"):
        return f"{verb}_{part}"
    if verb in ("gather", "reduce"):
        return verb
    return "a2a" if part in ("dispatch", "combine") else "compute"


def analyse(events: list[dict[str, Any]], names: set[str]) -> dict[str, Any]:
    """Busy and hidden milliseconds of every lane, from the events of a Chrome trace."""
    votes: dict[Any, Counter[str]] = defaultdict(Counter)
    kernels: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and event["name"] in names:
            votes[event["tid"]][lane_of(event["name"])] += 1
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    lane = {stream: counts.most_common(1)[0][0] for stream, counts in votes.items()}
    by_lane: dict[str, list[Interval]] = defaultdict(list)
    for stream, intervals in kernels.items():
        by_lane[lane.get(stream, "other")] += intervals
    busy = {name: union(intervals) for name, intervals in by_lane.items()}
    compute = busy["compute"]
    everything = union([i for intervals in busy.values() for i in intervals])
    result: dict[str, Any] = {"step_ms": (everything[-1][1] - everything[0][0]) / 1e3, "lanes": {}}
    for name, intervals in busy.items():
        total = sum(end - start for start, end in intervals)
        hidden = overlap(intervals, compute)
        streams = [stream for stream, where in lane.items() if where == name]
        result["lanes"][name] = {
            "streams": streams, "kernels": len(by_lane[name]), "busy_ms": total / 1e3, "hidden_ms": hidden / 1e3,
            "hidden_fraction": hidden / total if total else 1.0,
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    config = for_world(recipe(options.recipe), dist.get_world_size())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, transport="nccl", dtype="bf16"))
    engine = Engine(config, rank, device)
    engine.init_weights()
    engine.executor.annotate()
    microbatches = batch(engine, 0)
    for _ in range(3):
        engine.train_step(microbatches, 1e-4)
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine.train_step(microbatches, 1e-4)
        torch.cuda.synchronize()
    names = {str(op) for op in engine.program.ranks[engine.where.pp]}
    results: list[Any] = [None] * dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes()
    dist.all_gather_object(results, analyse(json.loads(text)["traceEvents"], names))
    if rank == 0:
        for r in (0, config.mesh.dp):
            print(f"rank {r}: step {results[r]['step_ms']:.1f} ms")
            for name, row in results[r]["lanes"].items():
                print(
                    f"  {name:10} stream {row['streams']}  {row['kernels']:5} kernels  busy {row['busy_ms']:8.2f} ms  "
                    f"hidden {100 * row['hidden_fraction']:5.1f} %"
                )
        print(
            write(
                "overlap_trace", {"config": dataclasses.asdict(config), "ranks": results}, options.out, options.commit
            )
        )
        if options.out:
            (options.out / "trace_rank0.json.gz").write_bytes(gzip.compress(text))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Does communication run beside compute? One profiled step of the merged plan, lane by lane.

    torchrun --nproc-per-node 8 -m benchmarks.overlap_trace

A second profiled step, in which every op shows under its name, tells which CUDA stream is which lane. For every
communication lane: how long its kernels ran, and how much of that time some compute kernel ran too (unions of
intervals). A receive's kernel runs from when it is posted, so its time holds the wait for the sender.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import gzip
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import write
from benchmarks.step_time import batch, for_world, join
from hocket.engine import Engine
from hocket.recipes import recipe
from hocket.runtime.actions import Microbatch

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


def lanes_of_streams(events: list[dict[str, Any]], names: set[str]) -> dict[Any, str]:
    """The lane of every CUDA stream: that of the op during which the host launched most of its kernels."""
    ops = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("name") in names and is_host(e))
    starts = [start for start, _, _ in ops]
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat", "").startswith("cuda_")}
    votes: dict[Any, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.get("cat") == "kernel" and event["args"].get("correlation") in launched:
            at = launched[event["args"]["correlation"]]
            i = bisect.bisect_right(starts, at) - 1
            if i >= 0 and at <= ops[i][1]:
                votes[event["tid"]][lane_of(ops[i][2])] += 1
    return {stream: counts.most_common(1)[0][0] for stream, counts in votes.items()}


def is_host(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def analyse(events: list[dict[str, Any]], lane: dict[Any, str]) -> dict[str, Any]:
    """Busy and hidden milliseconds of every lane, from the events of a Chrome trace."""
    by_lane: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_lane[lane.get(event["tid"], "other")].append((event["ts"], event["ts"] + event["dur"]))
    busy = {name: union(intervals) for name, intervals in by_lane.items()}
    compute = busy["compute"]
    everything = union([i for intervals in busy.values() for i in intervals])
    result: dict[str, Any] = {"step_ms": (everything[-1][1] - everything[0][0]) / 1e3, "lanes": {}}
    for name, intervals in sorted(busy.items()):
        total = sum(end - start for start, end in intervals)
        hidden = overlap(intervals, compute)
        result["lanes"][name] = {
            "streams": [stream for stream, where in lane.items() if where == name],
            "kernels": len(by_lane[name]),
            "busy_ms": total / 1e3,
            "hidden_ms": hidden / 1e3,
            "hidden_fraction": hidden / total if total else 1.0,
        }
    return result


def profiled_step(engine: Engine, microbatches: list[Microbatch], activities: list[ProfilerActivity]) -> bytes:
    """The Chrome trace of one step."""
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=activities, acc_events=True) as profiler:
        engine.train_step(microbatches, 1e-4)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()
    config = for_world(recipe(options.recipe), dist.get_world_size())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, transport="nccl", dtype="bf16"))
    engine = Engine(config, rank, device)
    engine.init_weights()
    microbatches = batch(engine, 0)
    for _ in range(4):
        engine.train_step(microbatches, 1e-4)
    # Timed without the host's side of the profiler, which would slow the step down; explained by a second step.
    text = profiled_step(engine, microbatches, [ProfilerActivity.CUDA])
    engine.executor.annotate()
    named = profiled_step(engine, microbatches, [ProfilerActivity.CPU, ProfilerActivity.CUDA])
    lane = lanes_of_streams(json.loads(named)["traceEvents"], {str(op) for op in engine.program.ranks[engine.where.pp]})
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, analyse(json.loads(text)["traceEvents"], lane))
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
            (options.out / "trace_rank0.json.gz").write_bytes(gzip.compress(named))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

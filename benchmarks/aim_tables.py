"""What is aimed at where experts and pipelines communicate, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.bench.contender import entry
from benchmarks.contender_tables import tokens_of, workloads
from benchmarks.markdown import Result, table
from benchmarks.sharding_tables import verdict


@dataclass(frozen=True)
class Aim:
    """Of one shape on eight GPUs."""

    words: str
    share: float
    """Of the bound: the slowest of `bounds`."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """How many times as fast as whom."""
    bounds: tuple[str, ...] = ("bound",)
    """Where there is a `bound_graph`, it stands for `bound`."""


QWEN, PIPELINE = "experts of Qwen3-30B-A3B's sizes", "Llama-3 8B in a pipeline"
ORDER = ("hocket_signal",)
AIMS = {
    ("expert_parallel", "8,192"): Aim(f"{QWEN}, 8,192 tokens", 0.92, {"torchtitan": 1.35, "megatron_core": 1.15}),
    ("expert_parallel", "4,096"): Aim(f"{QWEN}, 4,096 tokens", 0.88, {"torchtitan": 1.3, "megatron_core": 1.1}),
    ("shared_expert", "8,192"): Aim("16B with a shared expert, 8,192 tokens", 0.93, {"fsdp2_tuned": 1.25}),
    ("skinny", "16,384"): Aim("narrow experts, 16,384 tokens", 0.88, {"ep_sync": 1.5}, ("bound", "exchanges")),
    ("pipeline_dense_8", "4,096"): Aim(f"{PIPELINE}, 8 microbatches", 0.97, {"pipelining_interleaved": 1.03}, ORDER),
    ("pipeline_dense_16", "4,096"): Aim(f"{PIPELINE}, 16 microbatches", 0.97, {"pipelining_interleaved": 1.03}, ORDER),
    ("everything", "8,192"): Aim("pipeline, experts and full sharding", 0.85, {}, ORDER),
}
"""By preset of `benchmarks/baselines.py` and tokens of a microbatch."""


def expert_aims(*results: Result) -> str:
    """A line per shape that was measured, of hocket at its fastest."""
    rows = []
    for result in results:
        preset = result["command"].split("benchmarks.baselines ")[1].split()[0]
        gpus = f"{result['hardware'].split()[0]} GPUs"
        rows += [_row(AIMS[preset, tokens_of(found)], gpus, found["contenders"]) for found in workloads([result])]
    return table(["shape", "fastest", "step", "share of the bound", "speed over others"], rows)


def _row(aim: Aim, gpus: str, by_name: Mapping[str, Result]) -> list[str]:
    ours = [name for name in by_name if entry(name).ours and not entry(name).bound]
    best = min(ours, key=lambda name: by_name[name]["seconds"])
    over = by_name[best]["speed_over"]
    bounds = ["bound_graph" if name == "bound" and "bound_graph" in by_name else name for name in aim.bounds]
    bound = max((name for name in bounds if name in by_name), key=lambda name: by_name[name]["seconds"])
    faster = [
        f"{name}: {verdict(over[name], wanted) if name in over else f'not measured, aim {wanted:.2f}'}"
        for name, wanted in aim.peers.items()
    ]
    share = verdict(over[bound], aim.share)
    return [
        f"{aim.words}, {gpus}",
        f"*{best}*",
        f"{1e3 * by_name[best]['seconds']:,.1f} ms",
        share,
        "; ".join(faster) or "none runs",
    ]

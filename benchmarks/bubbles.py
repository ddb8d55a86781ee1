"""How much of a step pipeline ranks rest, and what they hold: the zero-bubble orders beside 1F1B. Needs no GPU.

`python -m benchmarks.tables bubbles bubbles_of_8b` prints these rows; docs/overlap.md has the first table. Both are
predictions by the simulator, of programs as they are run. In *units* p2p transfers take nothing, and forward, input
gradient and weight gradient of a layer are as long in proportion as a transformer's, so what is left is the order's own
bubble; activations count layers, from their forward to their weight gradient. On *hardware* the costs are those of
Llama-3 8B's layers on H200s, p2p transfers and gathers included, with a vocabulary small enough for the head not to
weigh on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hocket.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from hocket.config.plan import ZERO_BUBBLE
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.hardware import H200
from hocket.predict.simulate import OpCost, simulate
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.pipeline import TRANSFORMER
from hocket.program.shard import Sharding
from hocket.recipes import LLAMA3_8B
from hocket.resolve import resolve

CHUNKS: dict[str, Any] = {"plan.order": "interleaved", "plan.chunks": 2}
ORDERS: dict[str, dict[str, Any]] = {
    "1F1B": {"plan.order": "1f1b", "overlap.defer_wgrad": "off"},
    "1F1B, weight gradients behind the send": {"plan.order": "1f1b", "overlap.defer_wgrad": "on"},
    "interleaved 1F1B": {**CHUNKS, "overlap.defer_wgrad": "off"},
    "interleaved 1F1B, weight gradients behind the send": {**CHUNKS, "overlap.defer_wgrad": "on"},
    "interleaved 1F1B, merged": {**CHUNKS, "overlap.ep.merge": "on", "overlap.defer_wgrad": "on"},
    "ZB-H1": {"plan.order": "zb_h1", "overlap.defer_wgrad": "on"},
    "V": {"plan.order": "zb_v", "plan.chunks": 2, "overlap.defer_wgrad": "on"},
    "V, merged": {"plan.order": "merged_v", "plan.chunks": 2, "overlap.ep.merge": "on", "overlap.defer_wgrad": "on"},
}
"""Settings by the name of the order. Nothing is merged unless it says so."""
BEHIND_SENDS: dict[str, Any] = {"overlap.pp.defer_layers": -1}
OPEN: dict[str, Any] = dict.fromkeys(BEHIND_SENDS, "auto")
SIZES = ((4, 8), (4, 16), (8, 16), (8, 32))
"""Pipeline ranks and microbatches."""
LAYERS = 4
"""Layers of a rank, in units."""


@dataclass(frozen=True)
class Units:
    """Costs in units; the MLP stands for its layer."""

    def of(self, op: Op) -> OpCost:
        if op.part != "mlp":
            return OpCost(0)
        return OpCost(getattr(TRANSFORMER, op.verb), saved_bytes=int(op.verb in ("fwd", "bwd")))

    def fixed_bytes(self, program: Program, rank: int) -> int:
        return 0


def config_of(settings: dict[str, Any]) -> Config:
    """An order with all weight gradients behind sends, where it defers any and has no steps for them."""
    config = changed(Config(), {"overlap.ep.merge": "off", **settings})
    idle = config.overlap.defer_wgrad == "off" or config.plan.order in ZERO_BUBBLE
    return changed(config, OPEN if idle else BEHIND_SENDS)


def in_units(pp: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """One row per order."""
    for name, settings in ORDERS.items():
        config = config_of(settings)
        plan = config.plan
        layout = Layout(("dense",) * (pp * LAYERS), pp=pp, chunks=plan.chunks, turning=plan.turning)
        timeline = simulate(build_program(layout, microbatches, config, Sharding()), Units())
        step, work = int(timeline.makespan), sum(TRANSFORMER) * LAYERS * microbatches
        held = max(rank.peak_bytes for rank in timeline.ranks)
        yield {"order": name, "pp": pp, "microbatches": microbatches, "step": step, "work": work, "held_layers": held}


def on_hardware(microbatches: int, pp: int = 4, dp: int = 2) -> Iterator[dict[str, Any]]:
    """The same orders with the costs of Llama-3 8B on 8 GPUs."""
    model = replace(LLAMA3_8B, vocab=8192)
    train, precision = TrainConfig(microbatches=microbatches), PrecisionConfig(compute="bf16")
    for name, settings in ORDERS.items():
        config = config_of(settings)
        data, mesh = DataConfig(sequence_length=4096), MeshConfig(pp=pp, dp=dp)
        changes = dict(model=model, mesh=mesh, precision=precision, data=data, train=train)
        chosen = resolve(replace(config, **changes), Host(gpus=pp * dp))
        timeline = predict(chosen, program_of(chosen), H200)
        step = float(timeline.makespan)
        yield {
            "order": name,
            "pp": pp,
            "dp": dp,
            "microbatches": microbatches,
            "seconds": step,
            "busy": [float(rank.busy) / step for rank in timeline.ranks],
            "exposed_sends": [float(rank.exposed["pp"]) / step for rank in timeline.ranks],
            "peak_bytes": [rank.peak_bytes for rank in timeline.ranks],
        }

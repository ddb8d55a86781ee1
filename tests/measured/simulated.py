"""Traces as a run would leave them that behaves exactly as simulated: one per pipeline rank, every op one kernel."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hocket.config import Config, MeshConfig, ModelConfig, TrainConfig
from hocket.config.rule import Host
from hocket.measured import describe
from hocket.planning import program_of
from hocket.predict.hardware import H200
from hocket.predict.simulate import KIND_OF, NO_OVERHEADS, Overheads, Timeline, cost_key
from hocket.program.ops import LANES, Op, Program
from hocket.resolve import Settings, resolve
from tests.helpers.plans import planned
from tests.trace.build import Trace

MODEL = ModelConfig(layers=4, experts=8, top_k=2, dense_layers=(0,))
MICRO = 1e6
"""Microseconds in a second: the unit of traces."""
SOON = 7e-7
"""Seconds from one launch to the next of a host that needs no time: traces tell orders by times."""

QUICK = dataclasses.replace(H200, issue=0.0, counts=0.0, beside_kernels=0.0, beside_copies=0.0)
"""GPUs that never wait for a host and that nothing slows down: these ops are shorter than issuing one takes."""

_COLLECTIVES = {"gather": "_all_gather_base", "reduce": "_reduce_scatter_base", "a2a": "all_to_allv"}
_GROUPS = {"gather": "gather_dense", "reduce": "reduce_dense", "a2a": "a2a"}


DP = 2
"""Data-parallel ranks of every pipeline rank; the first of each is traced."""


def settings_for(pp: int = 2, ep: int = 2, microbatches: int = 4, **plan: Any) -> Settings:
    """A small MoE on a mesh, resolved as on GPUs."""
    config = Config(
        model=MODEL,
        mesh=MeshConfig(pp=pp, dp=DP, ep=ep),
        train=TrainConfig(microbatches=microbatches, sequences=8),
    )
    return resolve(planned(config, **{"update": "end", **plan}), Host(gpus=pp * DP))


def about(settings: Settings, pp_rank: int, transport: str = "nccl") -> dict[str, Any]:
    """What a run says about itself in its traces."""
    return {
        **describe(settings, program_of(settings), pp_rank),
        "transport": transport,
        "rank": pp_rank * settings.mesh.dp,
        "pp_rank": pp_rank,
    }


def issued_at(ops: tuple[Op, ...], starts: list[float], kinds: tuple[str, ...], overheads: Overheads) -> list[float]:
    """When the host comes to every op; see `predict/simulate.py`."""
    now, found = 0.0, []
    for op, start in zip(ops, starts, strict=True):
        found.append(now)
        now += float(overheads.issue.get(cost_key(op, kinds), 0.0)) + SOON
        if overheads.counts is not None and op.verb == "fwd" and op.part == "dispatch":
            now = max(now, start + float(overheads.counts))
    return found


def traces_of(
    settings: Settings,
    timeline: Timeline,
    folder: Path,
    overheads: Overheads = NO_OVERHEADS,
    *,
    steps: int = 1,
    transport: str = "nccl",
) -> list[Path]:
    """Write a trace of every pipeline rank's first data-parallel rank."""
    program, folder_of = program_of(settings), folder / transport
    folder_of.mkdir(exist_ok=True)
    paths = []
    for rank in range(len(program.ranks)):
        trace = _groups(Trace(rank * settings.mesh.dp, settings.world), settings)
        trace.metadata(hocket=about(settings, rank, transport))
        for number in range(steps):
            _one_step(trace, program, timeline, rank, (number, transport == "null", overheads))
        paths.append(trace.write(folder_of / f"rank{trace.rank}.json.gz"))
    return paths


def _groups(trace: Trace, settings: Settings) -> Trace:
    dp = settings.mesh.dp
    first = trace.rank // dp * dp
    for purpose in _GROUPS.values():
        trace.group(purpose, range(first, first + dp))
    for edge in range(settings.mesh.pp if settings.mesh.pp > 1 else 0):
        ends = sorted((edge * dp, (edge + 1) % settings.mesh.pp * dp))
        for direction in ("pp_fwd", "pp_bwd") if trace.rank in ends else ():
            trace.group(f"{direction} {edge}", ends)
    return trace


def _one_step(trace: Trace, program: Program, timeline: Timeline, rank: int, how: tuple[int, bool, Overheads]) -> None:
    number, null, overheads = how
    ops, spans = program.ranks[rank], timeline.spans[rank]
    zero = number * float(timeline.makespan) * MICRO
    issued = issued_at(ops, [float(s.start) for s in spans], program.layout.kinds, overheads)
    for op, span, at in zip(ops, spans, issued, strict=True):
        start, end = zero + float(span.start) * MICRO, zero + float(span.end) * MICRO
        if op.verb == "send":  # lasts as long as the p2p transfer to its receiver
            other, key = program.layout.peer(op, rank)
            p2p = next(s for o, s in zip(program.ranks[other], timeline.spans[other], strict=True) if o.key == key)
            start, end = zero + float(p2p.start) * MICRO, zero + float(p2p.end) * MICRO
        if end > start:
            _kernel(trace, op, (start, end), zero + at * MICRO, null)
    trace.annotation(f"hocket step {number + 1}", zero - 1, zero - 2 + float(timeline.makespan) * MICRO)


def _kernel(trace: Trace, op: Op, span: tuple[float, float], launched: float, null: bool) -> None:
    more: dict[str, Any] = {"launched": launched, "plan_op": str(op), "stream": 10 + LANES.index(op.lane)}
    kind = KIND_OF.get(op.lane)
    if kind is None:
        trace.kernel("nvjet_sm90", *span, op="aten::mm", **more)
    elif null:
        trace.kernel("vectorized_elementwise_kernel", *span, op="aten::copy_", **more)
    elif kind == "pp":
        stages, stage = trace.world // DP, trace.rank // DP
        edge = (stage if (op.part == "act") == (op.verb == "send") else stage - 1) % stages
        trace.collective(op.verb, f"pp_{'fwd' if op.part == 'act' else 'bwd'} {edge}", *span, **more)
    else:
        trace.collective(_COLLECTIVES[kind], _GROUPS[kind], *span, **more)

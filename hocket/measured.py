"""A run's description in its traces, and whether a plan does the same work."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hocket.config import Config
from hocket.config.rule import leaf
from hocket.config.schema import flat, types
from hocket.predict.cost import purpose_of
from hocket.predict.hardware import KIND_OF_GROUPS
from hocket.predict.simulate import cost_key
from hocket.program.ops import COMPUTING, Program
from hocket_trace import load, report
from hocket_trace.as_json import to_json as figures_of
from hocket_trace.cpu import UNSEEN
from hocket_trace.data import RankTrace
from hocket_trace.table import headline, warnings

VERSION = 2
"""Version of the description in a trace. Increase it whenever a part changes its meaning."""

WORK = ("model", "mesh", "train.sequences", "precision.compute", "data.sequence_length")
"""Settings, or whole sections, that define what an op of a plan computes."""

WAYS = (
    "plan.loss_pieces", "overlap.dp.strategy", "overlap.ep.copies", "overlap.ep.splits",
    "overlap.ep.room", "overlap.tp", "precision", "train.transport", "network",
)  # fmt: skip
"""Settings, or whole sections, that define how an op of a plan does its work."""


def describe(settings: Config, program: Program, pp_rank: int) -> dict[str, Any]:
    """What a trace of this pipeline rank stores under the key `hocket`, as JSON values.

    `plan` describes its ops for readers of the trace (`hocket_trace/parse.py`); `settings` are all settings, nested;
    `work` names settings, or whole sections, that change the work of ops.
    """
    return {
        "version": VERSION,
        "plan": named(program, pp_rank, tensors=settings.mesh.tp > 1),
        "settings": json.loads(json.dumps({f.name: asdict(getattr(settings, f.name)) for f in fields(Config)})),
        "work": list(WORK),
    }


def named(program: Program, pp_rank: int, tensors: bool) -> dict[str, Any]:
    """The ops of a pipeline rank by name, in the form that `hocket_trace/parse.py` reads; `tensors`: tp is above 1."""
    inside = ("tp", "tp") if tensors else ("compute", "")
    ops = {}
    for op in program.ranks[pp_rank]:
        key = ("recv", op.part, "") if op.verb == "send" else cost_key(op, program.layout.kinds)
        group = purpose_of(key, program.layout)
        kind_group = (KIND_OF_GROUPS[group], group) if group else ("control", "") if op.verb == "step" else inside
        ops[str(op)] = [op.lane, *kind_group, op.layer]
    return {"lanes": list(program.layout.lanes), "computing": list(COMPUTING), "ops": ops}


def checked(trace: RankTrace) -> Mapping[str, Any]:
    """A trace's description of its run. Raises ValueError if it is not of hocket, or of another version."""
    if not trace.run:
        raise ValueError(
            f"{trace.source}: says nothing about settings, so it is not of a hocket run or was cut; "
            "fix: a trace written by hocket train --train.profile"
        )
    version = trace.run.get("version")
    if version != VERSION:
        raise ValueError(
            f"{trace.source}: its metadata has version {version}, this hocket reads version {VERSION}; "
            "fix: read it with the hocket that wrote it"
        )
    return trace.run


def other_work(planned: Config, measured: RankTrace) -> list[tuple[str, Any, Any]]:
    """Name and both values of every setting by which the work of a plan's ops differs from that of a traced run.

    Raises ValueError if the trace does not store settings.
    """
    return _different(WORK, planned, measured)


def other_ways(planned: Config, measured: RankTrace) -> list[str]:
    """Notes on settings by which a plan's ops do the same work in another way than a traced run."""
    return [
        f"{name} = {here}, measured with {there}: ops that this changes take other times than in the traces"
        for name, here, there in _different(WAYS, planned, measured)
    ]


def _different(settings: Sequence[str], planned: Config, measured: RankTrace) -> list[tuple[str, Any, Any]]:
    stored = checked(measured).get("settings")
    if not isinstance(stored, Mapping):
        fix = "fix: a trace written by hocket train --train.profile"
        raise ValueError(f"{measured.source}: its metadata has no settings; {fix}")
    there = flat(stored)
    names = [name for name in types() if any(f"{name}.".startswith(f"{setting}.") for setting in settings)]
    here = {name: leaf(planned, name) for name in names}
    here = {name: list(value) if isinstance(value, tuple) else value for name, value in here.items()}
    return [(name, value, there.get(name)) for name, value in here.items() if there.get(name) != value]


def trace_summary(paths: Sequence[Path]) -> tuple[str, float | None]:
    """A few lines about traces of a run, and the exposed share of their steps. Raises TraceError.

    Lowers the priority of its process, so that the run's ranks, which go on, come first.
    """
    os.nice(10)
    figures = figures_of(report(load(paths)))
    lines = [*warnings(figures), headline(figures), *([UNSEEN] if UNSEEN in figures["notes"] else [])]
    return "\n".join(lines), figures["step"].get("exposed_share")

"""What a recorded run stores of its plan, and how it is read again: program, costs, and what its ops have to do.

A trace holds it under the key `hocket`, as JSON:

    version     of all this
    plan        what the ops of this rank are, for readers of the trace (`hocket_trace/plan.py`)
    program     the ops of all pipeline ranks: JSON of `program/text.py`, packed by zlib, in base64
    costs       `contention`: by what factor each kind of communication slowed compute down in the prediction
    settings    all of them, nested
    work        settings, or whole sections of them, by which an op has other work to do
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from hocket.config import Config
from hocket.program.hardware import KIND_OF_GROUPS
from hocket.program.network import hardware_of
from hocket.program.ops import COMPUTING, Op, Program
from hocket.program.overheads import overheads_of
from hocket.program.schedule import Kind, cost_key
from hocket.program.stages import carried_by, costs_of
from hocket.program.text import from_json, to_json
from hocket.settings.schema import changed, flat, leaf, types
from hocket_trace.data import RankTrace

VERSION = 2
"""Of what a trace says about its run. Changes whenever a part of it changes its meaning."""

WORK = ("model", "mesh", "train.sequences", "precision.compute", "data.sequence_length")
"""Settings, or whole sections of them, that say what one op of a plan has to do."""

WAYS = (
    "plan.loss_pieces", "overlap.dp.strategy", "overlap.ep.copies", "overlap.ep.splits",
    "overlap.ep.room", "overlap.tp", "precision.gather", "precision.wire", "train.transport",
    "network",
)  # fmt: skip
"""Settings, or whole sections of them, that say how an op of a plan does what it has to."""


@dataclass(frozen=True)
class Stored:
    """A run's plan, as its trace has it."""

    program: Program
    contention: Mapping[Kind, float]
    """By what factor each kind of communication was predicted to slow compute down."""


BEFORE = {"plan.loss_pieces": 1, "precision.gather": "bf16"}
"""Settings that the oldest traces do not have -> what their runs did."""


def describe(settings: Config, program: Program, pp_rank: int) -> dict[str, Any]:
    """What a trace of this pipeline rank stores, as JSON values."""
    text, hardware = json.dumps(to_json(program), separators=(",", ":")), hardware_of(settings)
    overheads = overheads_of(changed(settings, {"plan.graphs": "off"}), hardware, costs_of(settings, hardware).table)
    return {
        "version": VERSION,
        "plan": named(program, pp_rank, tensors=settings.mesh.tp > 1),
        "program": base64.b64encode(zlib.compress(text.encode(), 9)).decode(),
        "costs": {"contention": {kind: float(factor) for kind, factor in overheads.contention.items()}},
        "settings": json.loads(json.dumps({f.name: asdict(getattr(settings, f.name)) for f in fields(Config)})),
        "work": list(WORK),
    }


def named(program: Program, pp_rank: int, tensors: bool) -> dict[str, Any]:
    """The ops of a pipeline rank under their names, as `hocket_trace/plan.py` has them; `tensors`: tp is above 1."""
    inside = ("tp", "tp") if tensors else ("compute", "")
    ops = {}
    for op in program.ranks[pp_rank]:
        key = ("recv", op.part, "") if op.verb == "send" else cost_key(op, program.layout.kinds)
        group = carried_by(key, program.layout)
        told = (KIND_OF_GROUPS[group], group) if group else ("control", "") if op.verb == "step" else inside
        ops[str(op)] = [op.lane, *told, op.layer]
    return {"lanes": list(program.layout.lanes), "computing": list(COMPUTING), "ops": ops}


def stored_in(trace: RankTrace) -> Stored:
    """What a trace stores of its run's plan. Raises ValueError if it stores none, or as another hocket does."""
    run = checked(trace)
    try:
        program = from_json(zlib.decompress(base64.b64decode(run["program"])).decode())
        contention = {cast(Kind, kind): float(factor) for kind, factor in run["costs"]["contention"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ValueError(
            f"{trace.source}: its program cannot be read ({type(error).__name__} {error}), so it was edited; fix: the "
            "trace as hocket train --train.profile wrote it"
        ) from None
    pp_rank, pp = run.get("pp_rank", 0), program.layout.pp
    if pp_rank not in range(pp):
        raise ValueError(
            f"{trace.source}: its metadata has pp_rank {pp_rank} of {pp}, so it was edited; "
            "fix: the trace as hocket train --train.profile wrote it"
        )
    return Stored(program, contention)


def checked(trace: RankTrace) -> Mapping[str, Any]:
    """What a trace says about its run. Raises ValueError if it is not of a hocket run, or of another hocket's."""
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


def pipeline_rank(trace: RankTrace) -> int:
    """Whose program it ran."""
    return int(trace.run.get("pp_rank", 0))


def ops_by_name(program: Program, rank: int) -> dict[str, Op]:
    """The ops of a pipeline rank by the names that they have in a trace."""
    return {str(op): op for op in program.ranks[rank]}


def other_work(planned: Config, measured: RankTrace) -> list[tuple[str, Any, Any]]:
    """Name and both values of every setting by which the ops of a plan have to do something else than a traced run's.

    Raises ValueError if the trace does not tell.
    """
    return _different(WORK, planned, measured)


def other_ways(planned: Config, measured: RankTrace) -> list[str]:
    """Notes on settings by which the ops of a plan do in another way what those of a traced run did."""
    return [
        f"{name} = {here}, measured with {there}: ops that this changes take other times than in the traces"
        for name, here, there in _different(WAYS, planned, measured)
    ]


def _different(settings: Sequence[str], planned: Config, measured: RankTrace) -> list[tuple[str, Any, Any]]:
    stored = checked(measured).get("settings")
    if not isinstance(stored, Mapping):
        fix = "fix: a trace written by hocket train --train.profile"
        raise ValueError(f"{measured.source}: its metadata has no settings; {fix}")
    there = BEFORE | flat(stored)
    names = [name for name in types() if any(f"{name}.".startswith(f"{setting}.") for setting in settings)]
    here = {name: leaf(planned, name) for name in names}
    here = {name: list(value) if isinstance(value, tuple) else value for name, value in here.items()}
    return [(name, value, there.get(name)) for name, value in here.items() if there.get(name) != value]

"""What recorded runs have shown about a plan's ops: measured costs, and a prediction beside what was measured."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from hocket.config import Config
from hocket.config.rule import leaf
from hocket.config.schema import changed, flat, types
from hocket.predict.cost import Measurement, carried_by, costs_of, overheads_of
from hocket.predict.hardware import KIND_OF_GROUPS, hardware_of
from hocket.predict.simulate import KINDS, CostKey, Kind, Overheads, Time, cost_key
from hocket.program.ops import COMPUTING, Layout, Op, Program, stops_host
from hocket.program.text import from_json, to_json
from hocket.sizes import several
from hocket_trace import load, report
from hocket_trace.as_json import to_json as figures_of
from hocket_trace.cpu import UNSEEN
from hocket_trace.data import COMMUNICATION, Floats, Ints, RankTrace
from hocket_trace.exposure import last_starts, waits
from hocket_trace.intervals import covered, union
from hocket_trace.table import headline, warnings

# -- stored ------------------------------------------------------------------------------------------------------------
# What a recorded run stores of its plan, and how it is read again: program, costs, and what its ops have to do.
#
# A trace holds it under the key `hocket`, as JSON:
#
#     version     of all this
#     plan        what the ops of this rank are, for readers of the trace (`hocket_trace/parse.py`)
#     program     the ops of all pipeline ranks: JSON of `program/text.py`, packed by zlib, in base64
#     costs       `contention`: by what factor each kind of communication slowed compute down in the prediction
#     settings    all of them, nested
#     work        settings, or whole sections of them, by which an op has other work to do

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
    """The ops of a pipeline rank under their names, as `hocket_trace/parse.py` has them; `tensors`: tp is above 1."""
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


def shortly(paths: Sequence[Path]) -> tuple[str, float | None]:
    """What traces of a run say in a few lines, and the exposed share of their steps. Raises TraceError.

    For a process of its own, to which the ranks of the run that goes on come first.
    """
    os.nice(10)
    figures = figures_of(report(load(paths)))
    lines = [*warnings(figures), headline(figures), *([UNSEEN] if UNSEEN in figures["notes"] else [])]
    return "\n".join(lines), figures["step"].get("exposed_share")


# -- planops -----------------------------------------------------------------------------------------------------------
# How long every op of a plan really took: the kernels of an op put together, waiting and the host's lateness apart.
#
#     seconds of an op = from its first kernel to its last, without waiting for peers, without gaps due to the host
#
# Waiting is the time of a collective before the last rank of its group had started it; it is known only if the traces
# of the whole group are given. A gap is due to the host as far as the next kernel had not been launched. A dispatch
# stops the host in its midst by design (it needs the counts), so there such a gap counts as the op's own time.


@dataclass(frozen=True)
class PlanOps:
    """What ran of a plan on one rank, one row per op and step, in the order in which the host issued them."""

    rank: int
    pp_rank: int
    ops: tuple[Op, ...]
    step: Ints
    """Index into the trace's steps."""
    start: Floats
    end: Floats
    waiting: Floats
    """Seconds in which all that ran of it waited for peers; nan if not known."""
    late: Floats
    """Seconds of gaps in it that are due to the host."""
    seconds: Floats
    """On its lane, without both; with the waiting if that is not known."""
    first_launch: Floats
    """When its first kernel was launched; nan on a CPU."""
    earlier_launch: Floats
    """When the last but one was; of an op with one kernel, when that was."""

    def __len__(self) -> int:
        return len(self.ops)

    def take(self, index: Ints) -> PlanOps:
        """These rows, in this order."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in _NO_COLUMNS}
        return replace(self, ops=tuple(self.ops[n] for n in index.tolist()), **columns)


_NO_COLUMNS = ("rank", "pp_rank", "ops")


def all_plan_ops(traces: Sequence[RankTrace], program: Program) -> tuple[PlanOps, ...]:
    """The plan's ops in every trace of a run. Raises ValueError if there are none in one of them."""
    found = []
    for trace, waiting in zip(traces, _waiting_of(traces), strict=True):
        pp_rank = pipeline_rank(trace)
        rows = _plan_ops(trace, waiting, ops_by_name(program, pp_rank), program.layout)
        if not rows:
            raise ValueError(
                f"{trace.source}: none of the ops of its plan is in a step of it; fix: a trace written by hocket train "
                "--train.profile --plan.graphs off, which names ops and steps"
            )
        found.append(rows)
    return tuple(found)


def _waiting_of(traces: Sequence[RankTrace]) -> list[Floats]:
    """For every row of every trace: seconds until the last rank of its group had started.

    0 for what is no communication, nan where the rows of other ranks are missing.
    """
    found = []
    for trace, last in zip(traces, last_starts(traces), strict=True):
        waiting = np.minimum(np.maximum(last - trace.start, 0.0), trace.end - trace.start)
        found.append(np.where(trace.of_kind(*COMMUNICATION), waiting, 0.0))
    return found


def _plan_ops(trace: RankTrace, waiting: Floats, known: dict[str, Op], layout: Layout) -> PlanOps:
    """The ops of a plan in a trace. `known` are those of its pipeline rank by name; other rows are left out."""
    of_word = [known.get(word) for word in trace.words]
    is_op = np.array([op is not None for op in of_word], dtype=bool)
    rows = np.flatnonzero(is_op[trace.op] & (trace.step >= 0))
    rows = rows[np.lexsort((trace.start[rows], trace.op[rows], trace.step[rows]))]
    key = trace.step[rows] * len(trace.words) + trace.op[rows]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    group = np.repeat(np.arange(len(first)), np.diff([*first, len(rows)]))
    start, end, launched = trace.start[rows], trace.end[rows], trace.launched[rows]
    ops = tuple(op for op in (of_word[word] for word in trace.op[rows[first]].tolist()) if op is not None)
    begin, stop = start[first], _by_group(np.maximum, end, first)
    awaited = _waiting(start, end, waiting[rows], first)
    late = _by_group(np.add, _late(start, end, launched, group), first)
    own = np.array([stops_host(op, layout) for op in ops], dtype=bool)
    late = np.where(own, 0.0, late)
    found = PlanOps(
        rank=trace.rank,
        pp_rank=pipeline_rank(trace),
        ops=ops,
        step=trace.step[rows[first]],
        start=begin,
        end=stop,
        waiting=awaited,
        late=late,
        seconds=np.maximum(stop - begin - np.nan_to_num(awaited) - late, 0.0),
        first_launch=_by_group(np.fmin, launched, first),
        earlier_launch=_earlier(launched, group, first),
    )
    return found.take(np.lexsort((found.start, found.first_launch, found.step)))


def _by_group(join: np.ufunc, values: Floats, first: Ints) -> Floats:
    return join.reduceat(values, first) if len(values) else values


def _waiting(start: Floats, end: Floats, waiting: Floats, first: Ints) -> Floats:
    """For every op: seconds in which nothing of it ran but what waited; nan if that is not known of all of it."""
    if not len(start):
        return start
    count = np.diff([*first, len(start)])
    apart = np.repeat((end.max() - start.min() + 1.0) * np.arange(len(first)), count)  # ops one after the other
    start, end = start + apart, end + apart
    seconds = covered(start[first], _by_group(np.maximum, end, first), waits(start, end, start + waiting))
    return np.where(_by_group(np.maximum, np.isnan(waiting), first), np.nan, seconds)


def _late(start: Floats, end: Floats, launched: Floats, group: Ints) -> Floats:
    """For every kernel: seconds in which nothing of its op ran before it because it had not been launched yet."""
    if not len(start):
        return start
    apart = (end.max() - start.min() + 1.0) * group  # keeps the groups apart in one running maximum
    done = np.maximum.accumulate(end + apart) - apart
    before = np.concatenate([start[:1], done[:-1]])
    same = np.concatenate([[False], group[1:] == group[:-1]])
    gap = np.where(same, np.minimum(start, np.nan_to_num(launched, nan=-np.inf)) - before, 0.0)
    return np.maximum(gap, 0.0)


def _earlier(launched: Floats, group: Ints, first: Ints) -> Floats:
    """The launch before the last of every group; the only one if there is no other."""
    order = np.lexsort((launched, group))
    last = np.append(first[1:], len(launched)) - 1
    return launched[order][np.maximum(last - 1, first)] if len(launched) else launched


# -- calibrate ---------------------------------------------------------------------------------------------------------
# Costs of a plan's ops as a run has shown them, to predict other plans of the same sizes with.
#
# - Compute: the op's time on its lane, without what contention added (see below), as a mean over the ops of the ranks
#   that decide. Of ranks that run the same list, that is the one that computes longest: the others wait for it in their
#   collectives.
# - Communication: without waiting for peers, as a median over ops. If the waiting is not known, because not all ranks
#   of a group are given, the tenth percentile counts: the ops that happened to wait least.
# - A p2p transfer: from when both sides have started to the end of the receive. It is not measured if the sender's
#   trace is not given, since a receive is posted early and mostly waits, nor if it goes by copies, which do not tell
#   whose they are.
# - The host: from an op's first launch to the next op's; at a dispatch, from its start until the host goes on.
#
# A mean, not a median, for compute: the step is a sum of ops, and a mean keeps the sum. Who computes longest is asked
# over a whole step, not for every op: with uneven routing the slower rank changes from op to op, and what is hidden
# under other compute lets such differences even out. The profiler itself slows the host down, so its times are upper
# bounds.
#
# While the kinds S of communication run, compute gets on at 1 / (1 + sum of their factors), as in the simulator
# (`predict/simulate.py`). The factors are those of the model of hardware with which the run was predicted.

QUIET = 0.1
"""Quantile that stands for an op without waiting where waiting is not known."""


def calibrate(traces: Sequence[RankTrace]) -> Measurement:
    """What a run shows about its ops. Raises ValueError if the traces are not of hocket."""
    stored = stored_in(traces[0])
    program, contention = stored.program, stored.contention
    kinds = program.layout.kinds
    runs = all_plan_ops(traces, program)
    compute = _compute(traces, runs, kinds, contention)
    communication, unknown = _communication(runs, kinds)
    notes: list[str] = []
    if unknown:
        notes.append(
            "not all ranks are given, or copies do not tell whom they wait for, so waiting for peers is not known "
            f"({', '.join(sorted(unknown))}): the tenth percentile of those ops counts, and for a recv the hardware's "
            "figures"
        )
    on_gpu = traces[0].device != "cpu"  # on a CPU, issuing is computing
    issue, counts = _host(runs, program.layout) if on_gpu else ({}, None)
    overheads = Overheads(contention, issue, counts)
    return Measurement(
        source=several([trace.source for trace in traces]),
        seconds=compute | communication,
        overheads=overheads,
        notes=tuple(notes),
    )


def _compute(
    traces: Sequence[RankTrace], runs: Sequence[PlanOps], kinds: Sequence[str], contention: Mapping[Kind, Time]
) -> dict[CostKey, float]:
    """Seconds of compute ops without contention, by key: means over the ranks that decide."""
    longest = dict[int, tuple[float, dict[CostKey, list[float]]]]()
    for trace, rows in zip(traces, runs, strict=True):
        moments, lost = _lost(trace, contention)
        slowed = np.interp(rows.end, moments, lost) - np.interp(rows.start, moments, lost)
        alone = rows.seconds * (1.0 - slowed / np.maximum(rows.end - rows.start, 1e-12))
        found = defaultdict[CostKey, list[float]](list)
        for op, seconds in zip(rows.ops, alone.tolist(), strict=True):
            if op.lane == "compute":
                found[cost_key(op, kinds)].append(max(seconds, 1e-9))
        whole = sum(map(sum, found.values())) / len(np.unique(rows.step))
        if whole > longest.get(rows.pp_rank, (-1.0, {}))[0]:
            longest[rows.pp_rank] = whole, found
    deciding = defaultdict[CostKey, list[float]](list)
    for _, found in longest.values():
        for key, values in found.items():
            deciding[key] += values
    return {key: float(np.mean(values)) for key, values in deciding.items()}  # a trace may lack activities


def _lost(trace: RankTrace, contention: Mapping[Kind, Time]) -> tuple[Floats, Floats]:
    """Moments on the trace's rank, and how many seconds of compute contention has cost up to each."""
    spans = {kind: union(trace.start[rows], trace.end[rows]) for kind in KINDS if len(rows := trace.of_kind(kind))}
    turns = [np.tile([1.0, -1.0], len(span)) * float(contention.get(kind, 0.0)) for kind, span in spans.items()]
    edges = np.concatenate([np.zeros(1), *(span.ravel() for span in spans.values())])
    order = np.argsort(edges, kind="stable")
    slower = np.cumsum(np.concatenate([np.zeros(1), *turns])[order])
    rate = slower / (1.0 + slower)
    return edges[order], np.concatenate([np.zeros(1), np.cumsum(rate[:-1] * np.diff(edges[order]))])


def _communication(runs: Sequence[PlanOps], kinds: Sequence[str]) -> tuple[dict[CostKey, float], set[str]]:
    """Seconds by key of ops beside the compute lane, and the kinds of those whose waiting is not known."""
    found: dict[CostKey, list[float]] = defaultdict(list)
    unsure: set[CostKey] = set()
    for rows in runs:
        for op, seconds, waiting in zip(rows.ops, rows.seconds.tolist(), rows.waiting.tolist(), strict=True):
            if op.lane != "compute" and op.verb != "send":
                key = cost_key(op, kinds)
                found[key].append(seconds)
                if np.isnan(waiting):
                    unsure.add(key)
    medians = {
        key: float(np.quantile(values, QUIET) if key in unsure else np.median(values))
        for key, values in found.items()
        if key[0] != "recv" or key not in unsure
    }
    return medians, {key[0] if key[0] in ("gather", "reduce", "recv") else "all-to-all" for key in unsure}


def _host(runs: Sequence[PlanOps], layout: Layout) -> tuple[dict[CostKey, float], float | None]:
    """Seconds to issue an op, by key, and from a dispatch's start until the host goes on: medians."""
    issue: dict[CostKey, list[float]] = defaultdict(list)
    counts: list[float] = []
    for rows in runs:
        goes_on = np.append(rows.first_launch[1:], np.nan)  # the first launch of the op behind it in its step
        goes_on[:-1][np.diff(rows.step) != 0] = np.nan
        for n, op in enumerate(rows.ops):
            done = rows.earlier_launch[n] if stops_host(op, layout) else goes_on[n]
            if np.isfinite(done - rows.first_launch[n]):
                issue[cost_key(op, layout.kinds)].append(max(float(done - rows.first_launch[n]), 0.0))
            if stops_host(op, layout) and np.isfinite(goes_on[n]):
                counts.append(float(goes_on[n] - rows.start[n] - np.nan_to_num(rows.waiting[n])))
    medians = {key: float(np.median(values)) for key, values in issue.items()}
    return medians, float(np.median(counts)) if counts else None

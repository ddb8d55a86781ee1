"""Costs of a plan's ops as a run has shown them, to predict other plans of the same sizes with.

    compute          the op's time on its lane, without what contention added (`contention.py`): mean over the ops of
                     the ranks that decide. Of ranks that run the same list, that is the one that computes longest: the
                     others wait for it in their collectives
    communication    without waiting for peers: median over ops. If the waiting is not known, because not all ranks of a
                     group are given, the tenth percentile: the ops that happened to wait least
    a p2p transfer            from when both sides have started to the end of the receive; not measured if the sender's
    trace is
                     not given, since a receive is posted early and mostly waits, nor of a p2p transfer by copies, which
                     do not tell whose they are
    the host         from an op's first launch to the next op's; at a dispatch, from its start until the host goes on

A mean, not a median, for compute: the step is a sum of ops, and a mean keeps the sum. Who computes longest is asked
over a whole step, not for every op: with uneven routing the slower rank changes from op to op, and what is hidden under
other compute lets such differences even out. The profiler itself slows the host down, so its times are upper bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hocket.measured.contention import Overlaps, factors_of, joined, named, numbers_of, progress, shares_beside
from hocket.measured.planops import PlanOps, all_plan_ops
from hocket.measured.stored import stored_in
from hocket.program.cost import Measurement
from hocket.program.ops import Layout
from hocket.program.schedule import KINDS, CostKey, Overheads, cost_key, stops_host
from hocket_trace.columns import several
from hocket_trace.compare import assert_same_work
from hocket_trace.data import Floats, RankTrace

QUIET = 0.1
"""Quantile that stands for an op without waiting where waiting is not known."""
_STILL = 0.05
"""Share of an op that gaps due to the host may take before it says nothing about contention."""


def calibrate(traces: Sequence[RankTrace], null: Sequence[RankTrace] = ()) -> Measurement:
    """What a run shows about its ops. `null` are traces of the same run with the null transport.

    Raises ValueError if the traces are not of hocket, or not of one run and its null run.
    """
    program = stored_in(traces[0]).program
    if null:
        _assert_null(traces[0], null[0])
    kinds = program.layout.kinds
    runs = all_plan_ops(traces, program)
    alone = all_plan_ops(null, stored_in(null[0]).program) if null else ()
    factors, compute = _compute(traces, runs, alone, kinds)
    communication, unknown = _communication(runs, kinds)
    notes: list[str] = []
    if unknown:
        notes.append(
            "not all ranks are given, or copies do not tell whom they wait for, so waiting for peers is not known "
            f"({', '.join(sorted(unknown))}): the tenth percentile of those ops counts, and for a recv the hardware's "
            "figures"
        )
    if not null:
        notes.append("no null trace: contention was found by comparing ops of this run with each other")
    contention = named(factors)
    absent = [kind for kind in KINDS if kind not in contention]
    if absent:
        notes.append(f"no contention was found with {', '.join(absent)}")
    on_gpu = traces[0].device != "cpu"  # on a CPU, issuing is computing
    issue, counts = _host(runs, program.layout) if on_gpu else ({}, None)
    overheads = Overheads(contention, issue, counts)
    return Measurement(
        source=several([trace.source for trace in traces]),
        seconds=compute | communication,
        overheads=overheads,
        notes=tuple(notes),
    )


def _assert_null(real: RankTrace, null: RankTrace) -> None:
    """Raise ValueError unless `null` is of a run with the null transport whose ops do the same as those of `real`."""
    if null.run.get("transport") != "null":
        raise ValueError(
            f"{null.source}: its transport is {null.run.get('transport') or 'not known'}, not null, so it is no run "
            "without communication; fix: a trace of the same run with --train.transport null"
        )
    assert_same_work(real, null)


def _compute(
    traces: Sequence[RankTrace], runs: Sequence[PlanOps], alone: Sequence[PlanOps], kinds: Sequence[str]
) -> tuple[Floats, dict[CostKey, float]]:
    """Factors of contention, and the works of compute ops by key."""
    numbers = numbers_of([cost_key(op, kinds) for rows in runs for op in rows.ops if op.lane == "compute"])
    parts, steady = [], []
    for trace, rows in zip(traces, runs, strict=True):
        mine = rows.take(np.array([n for n, op in enumerate(rows.ops) if op.lane == "compute"], dtype=np.int64))
        key = np.array([numbers[cost_key(op, kinds)] for op in mine.ops], dtype=np.int64)
        parts.append(Overlaps(key, np.maximum(mine.seconds, 1e-9), shares_beside(trace, mine.start, mine.end)))
        calm = mine.late <= _STILL * (mine.end - mine.start)
        steady.append(calm & np.array([op.verb not in ("step", "update", "release") for op in mine.ops], dtype=bool))
    known = {numbers[key]: value for key, value in _undisturbed(alone, kinds).items() if key in numbers}
    factors = factors_of(joined([part.take(kept) for part, kept in zip(parts, steady, strict=True)]), known)
    deciding = joined([parts[n] for n in _deciding(runs, parts, factors)])
    works, count = deciding.seconds * progress(deciding.shares, factors), len(numbers)
    times = np.bincount(deciding.key, minlength=count)
    mean = np.bincount(deciding.key, works, count) / np.maximum(times, 1)
    return factors, {key: float(mean[n]) for key, n in numbers.items() if times[n]}  # a trace may lack activities


def _deciding(runs: Sequence[PlanOps], parts: Sequence[Overlaps], factors: Floats) -> list[int]:
    """Which run of every pipeline rank has most to compute in a step."""
    longest: dict[int, tuple[float, int]] = {}
    for n, (rows, part) in enumerate(zip(runs, parts, strict=True)):
        work = float((part.seconds * progress(part.shares, factors)).sum()) / len(np.unique(rows.step))
        longest[rows.pp_rank] = max(longest.get(rows.pp_rank, (0.0, n)), (work, n))
    return [n for _, n in longest.values()]


def _undisturbed(alone: Sequence[PlanOps], kinds: Sequence[str]) -> dict[CostKey, float]:
    """Seconds of compute ops without communication by key: geometric means, since `factors_of` compares logarithms."""
    found: dict[CostKey, list[float]] = defaultdict(list)
    for rows in alone:
        for op, seconds in zip(rows.ops, rows.seconds.tolist(), strict=True):
            if op.lane == "compute" and seconds > 0:
                found[cost_key(op, kinds)].append(float(np.log(seconds)))
    return {key: float(np.exp(np.mean(values))) for key, values in found.items()}


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

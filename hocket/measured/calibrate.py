"""Costs of a plan's ops as a run has shown them, to predict other plans of the same sizes with.

    compute          the op's time on its lane, without what contention added (see below): mean over the ops of
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

While the kinds S of communication run, compute gets on at 1 / (1 + sum of their factors), as in the simulator
(`program/schedule.py`). The factors are those of the model of hardware with which the run was predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hocket.measured.planops import PlanOps, all_plan_ops
from hocket.measured.stored import stored_in
from hocket.program.cost import Measurement
from hocket.program.ops import Layout
from hocket.program.schedule import KINDS, CostKey, Kind, Overheads, Time, cost_key, stops_host
from hocket_trace.columns import several
from hocket_trace.data import Floats, RankTrace
from hocket_trace.intervals import union

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

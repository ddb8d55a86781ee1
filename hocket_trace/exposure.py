"""The cost of communication: how long each kind ran, and how much of that no compute kernel overlapped.

Definitions are those of `docs/explain.md`. A step's window includes all activities in it, of any step, cut to the
window, so compute, exposed communication and idle time add up to the step. Counts and bytes are those of the activities
that the step launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hocket_trace.columns import listed
from hocket_trace.data import COMMUNICATION, Floats, Kind, RankTrace, Report, Share, StepReport
from hocket_trace.intervals import Spans, clip, covered, intersect, length, subtract, union

Rows = NDArray[np.bool_]


def report(traces: Sequence[RankTrace]) -> Report:
    """The report on the traces of one run, as returned by `load`."""
    assert traces, "a report needs a trace"
    last = last_starts(traces)
    steps = [
        _step_report(trace, index, late)
        for trace, late in zip(traces, last, strict=True)
        for index in range(len(trace.steps))
    ]
    notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
    return Report(
        sources=tuple(trace.source for trace in traces),
        device=traces[0].device,
        transport=str(traces[0].run.get("transport", "")),
        world=_world(traces),
        steps=tuple(sorted(steps, key=lambda step: (step.step, step.rank))),
        notes=(*notes, *_missing(traces)),
        stages={trace.rank: int(trace.run["pp_rank"]) for trace in traces if "pp_rank" in trace.run},
    )


def last_starts(traces: Sequence[RankTrace]) -> tuple[Floats, ...]:
    """When the last rank of each activity's collective started, per trace; nan if not all ranks are known."""
    latest: dict[int, float] = {}
    for trace in traces:
        rows = np.flatnonzero(trace.match >= 0)
        first: dict[int, float] = {}  # of the activities of one collective, which ascend by start
        for match, start in zip(trace.match[rows].tolist(), trace.start[rows].tolist(), strict=True):
            first.setdefault(match, start)
        for match, start in first.items():
            latest[match] = max(start, latest.get(match, start))
    found = []
    for trace in traces:
        last = np.array([latest.get(match, np.nan) for match in trace.match.tolist()], np.float64)
        alone = np.array([len(trace.groups.get(word, ())) == 1 for word in trace.words], bool)[trace.group]
        found.append(np.where(alone, trace.start, last))
    return tuple(found)


def _step_report(trace: RankTrace, index: int, last: Floats) -> StepReport:
    step = trace.steps[index]
    window = np.array([[step.start, step.end]])
    inside = (trace.start < step.end) & (trace.end > step.start)
    own = trace.step == index
    compute_rows = trace.of_kind("compute")
    compute = intersect(_spans(trace, inside & compute_rows), window)
    communication = intersect(_spans(trace, inside & ~compute_rows), window)
    alone = subtract(communication, compute)
    nothing = subtract(window, union(*_edges(compute, communication)))
    waiting, exposed_waiting = _waits(trace, inside & ~compute_rows, np.where(own, last, np.nan), alone, window)

    def share(rows: Rows) -> Share:
        mine, spans = rows & own, intersect(_spans(trace, rows), window)
        late, known = last[mine], bool(mine.any()) and not np.isnan(last[mine]).any()
        waited = intersect(waits(trace.start[mine], trace.end[mine], late), window) if known else None
        return Share(
            count=_calls(trace, mine),
            seconds=length(spans),
            waiting=float("nan") if waited is None else length(waited),
            exposed=length(subtract(spans, compute)),
            bytes=float(trace.bytes[mine].sum()),
        )

    kinds: dict[Kind, Share] = {}
    layers: dict[int, dict[Kind, Share]] = {}
    for kind in COMMUNICATION:
        rows = inside & trace.of_kind(kind)
        if not rows.any():
            continue
        kinds[kind] = share(rows)
        for layer in np.unique(trace.layer[rows & (trace.layer >= 0)]).tolist():
            layers.setdefault(layer, {})[kind] = share(rows & (trace.layer == layer))
    return StepReport(
        rank=trace.rank,
        step=step.number,
        seconds=step.end - step.start,
        compute=length(compute),
        communication=length(communication),
        exposed=length(alone),
        idle=length(nothing),
        host_bound=length(_late_host(trace, nothing)),
        kinds=kinds,
        exposed_for=_attributed(trace, inside & ~compute_rows, alone),
        layers=dict(sorted(layers.items())),
        classes=_classes(trace, own & compute_rows),
        waiting=waiting,
        exposed_waiting=exposed_waiting,
    )


def _spans(trace: RankTrace, rows: Rows) -> Spans:
    return union(trace.start[rows], trace.end[rows])


def _edges(*spans: Spans) -> tuple[Floats, Floats]:
    whole = np.concatenate(spans)
    return whole[:, 0], whole[:, 1]


def waits(start: Floats, end: Floats, last: Floats) -> Spans:
    """Intervals in which all running activities wait for late peers.

    `last` is when the last rank of each started; where it is nan, data moves from `start` on.
    """
    moves = np.where(np.isnan(last), start, np.clip(last, start, end))
    return subtract(union(start, moves), union(moves, end))


def _waits(trace: RankTrace, rows: Rows, last: Floats, exposed: Spans, window: Spans) -> tuple[float, float]:
    """Seconds of waiting in a step, and seconds of exposed time with nothing but waiting; 0 without rows."""
    start, end, last = trace.start[rows], trace.end[rows], last[rows]
    if len(start) and np.isnan(last).all():
        return float("nan"), float("nan")
    found = waits(start, end, last)
    return length(intersect(found, window)), length(intersect(found, exposed))


def _calls(trace: RankTrace, rows: Rows) -> int:
    """Collectives among the rows: the activities of one call count once, those of unknown calls each."""
    calls = trace.calls[rows]
    return int((calls < 0).sum()) + len(np.unique(calls[calls >= 0]))


def _attributed(trace: RankTrace, rows: Rows, exposed: Spans) -> Mapping[Kind, float]:
    """Exposed time by kind: each moment is attributed to the running communication that ends last."""
    index = np.flatnonzero(rows)
    index = index[np.lexsort((trace.start[index], -trace.end[index]))]
    start, end, which = _last_ending(trace.start[index], trace.end[index])
    seconds = covered(start, end, exposed)
    masks = {kind: trace.of_kind(kind) for kind in COMMUNICATION}
    return {kind: float(seconds[mask[index][which]].sum()) for kind, mask in masks.items() if (mask & rows).any()}


def _last_ending(start: Floats, end: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Disjoint intervals in which one of the running activities is the last to end: (start, end, which).

    The inputs are sorted by falling end. Those before i end later and, if they start before the end of i, are the last
    to end from their start on. So i is the last from its start to its end, or to the earliest start among those before
    it.
    """
    if not len(start):
        return start, end, np.empty(0, np.int64)
    earliest = np.minimum.accumulate(np.concatenate([[np.inf], start[:-1]]))
    stop = np.minimum(end, earliest)
    kept = np.flatnonzero(stop > start)
    return start[kept], stop[kept], kept


def exposed(trace: RankTrace, start: float, end: float) -> Spans:
    """Intervals between two times in which a rank communicates and runs no compute kernel."""
    computes = trace.of_kind("compute")
    return clip(subtract(_spans(trace, ~computes), _spans(trace, computes)), start, end)


def idle(trace: RankTrace, start: float, end: float) -> Spans:
    """Intervals between two times in which a rank runs nothing."""
    return subtract(np.array([[start, end]]), union(trace.start, trace.end))


def late(trace: RankTrace, start: float, end: float) -> Spans:
    """The parts of idle intervals before the host had launched the next activity."""
    return _late_host(trace, idle(trace, start, end))


def _late_host(trace: RankTrace, idle: Spans) -> Spans:
    """The parts of idle intervals before the host had launched the activity that follows."""
    following = np.searchsorted(trace.start, idle[:, 1], side="left")
    launched = np.append(trace.launched, np.nan)[following]
    return union(idle[:, 0], np.clip(np.nan_to_num(launched, nan=-np.inf), idle[:, 0], idle[:, 1]))


def _classes(trace: RankTrace, rows: Rows) -> Mapping[str, float]:
    seconds = np.bincount(trace.kernel_class[rows], (trace.end - trace.start)[rows], minlength=len(trace.words))
    used = np.flatnonzero(seconds)
    return {trace.words[i]: float(seconds[i]) for i in used[np.argsort(-seconds[used])]}


def _world(traces: Sequence[RankTrace]) -> int:
    """The run's number of ranks, or the largest rank's number + 1 if that is more."""
    return max(max(trace.world, trace.rank + 1) for trace in traces)


def _missing(traces: Sequence[RankTrace]) -> list[str]:
    world, given = _world(traces), {trace.rank for trace in traces}
    missing = sorted(set(range(world)) - given)
    if not missing:
        return []
    said = f"traces of {len(given)} of {world} ranks were given (missing: {listed('rank', missing)})"
    return [f"{said}: in groups that are not complete, waiting for late peers cannot be told from transfer"]

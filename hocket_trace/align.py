"""Traces of several ranks: aligns their clocks, and matches collectives across ranks.

Note: [One clock]

Ranks of one host share a clock, and their traces give its origin. Clocks of different hosts differ by milliseconds. A
collective ends on no rank before it started on all, and it ends on all ranks at nearly the same time. A send and its
receive end at nearly the same time too, though a small send may end before its receive starts. So the clock of another
host is moved by the median difference between the ends of all activities that it shares with hosts whose clocks are
already aligned, beginning with the host that shares most. Sends of gloo are ignored, since the trace shows them until
the host waits for them. The remaining error, some microseconds, affects only `waiting` and the ends of gloo's sends: no
other figure compares clocks of two ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket_trace.columns import listed
from hocket_trace.cpu import UNSEEN
from hocket_trace.data import Ints, RankTrace
from hocket_trace.label import collective_of
from hocket_trace.parse import TraceError
from hocket_trace.read import read

# -- match -------------------------------------------------------------------------------------------------------------
# The k-th call of a collective in a group and step is the same collective on all ranks.
#
# A rank's k-th send to a peer is matched with the peer's k-th receive from it. If ranks of a group differ in the number
# of calls, none of that collective, group and step is matched.

MUTUAL = ("allgather", "reducescatter", "allreduce", "alltoall", "barrier")
"""Collectives that end on no rank before all ranks have started them."""

Series = tuple[int, str, tuple[int, ...], str]
"""Step number, group, its ranks (of a send: from, to), collective. Each rank numbers a series' calls from 0."""


@dataclass(frozen=True)
class Calls:
    """One rank's calls of collectives with other ranks, in order of launch."""

    series: tuple[Series, ...]
    rows: tuple[Ints, ...]
    """The activities of each call."""


@dataclass(frozen=True)
class Matched:
    """One collective: index of a trace -> its activities there."""

    series: Series
    rows: dict[int, Ints]


def calls_of(trace: RankTrace) -> Calls:
    """The calls of one rank with known groups."""
    rows = np.flatnonzero(~trace.of_kind("compute") & (trace.step >= 0))
    known = {i: collective_of(trace.words[i]) for i in np.unique(trace.launcher[rows]).tolist()}
    at = np.where(np.isnan(trace.launched), trace.start, trace.launched)
    calls: dict[tuple[bool, int], list[int]] = {}
    for row in rows[np.argsort(at[rows], kind="stable")].tolist():
        call = int(trace.calls[row])
        calls.setdefault((call >= 0, call if call >= 0 else row), []).append(row)
    series: list[Series] = []
    found: list[Ints] = []
    for together in calls.values():
        row = together[0]
        collective = known[int(trace.launcher[row])] or collective_of(trace.words[trace.name[row]])
        if (named := _series(trace, row, collective)) is not None:
            series.append(named)
            found.append(np.array(together, np.int64))
    return Calls(tuple(series), tuple(found))


def _series(trace: RankTrace, row: int, collective: str) -> Series | None:
    group = trace.words[trace.group[row]]
    ranks = trace.groups.get(group, ())
    number = trace.steps[trace.step[row]].number
    title = group.partition(" #")[0]
    if len(ranks) < 2 or not collective or collective == "sendrecv":
        return None
    if collective not in ("send", "recv"):
        return number, title, ranks, collective
    peer = _peer(trace.words[trace.launcher[row]], ranks, trace.rank)
    if peer is None:
        return None
    return number, title, (trace.rank, peer) if collective == "send" else (peer, trace.rank), "send"


def _peer(launcher: str, ranks: tuple[int, ...], rank: int) -> int | None:
    """The peer's rank, from an annotation such as `nccl:recv 0<-1`, whose numbers are ranks within the group."""
    found = re.search(r"\d+ ?(?:->|<-) ?(\d+)", launcher)
    if len(ranks) == 2:
        return ranks[1] if ranks[0] == rank else ranks[0]
    return ranks[int(found[1])] if found and int(found[1]) < len(ranks) else None


def match(traces: Sequence[RankTrace]) -> tuple[list[Matched], list[str]]:
    """The collectives that at least two of the traces share, and notes on those that can't be matched."""
    by_series: dict[Series, dict[int, list[Ints]]] = defaultdict(lambda: defaultdict(list))
    for i, trace in enumerate(traces):
        calls = calls_of(trace)
        for series, rows in zip(calls.series, calls.rows, strict=True):
            by_series[series][i].append(rows)
    recorded = [{step.number for step in trace.steps} for trace in traces]
    notes = _missing_steps(traces, recorded)
    named = {i for calls_by_trace in by_series.values() for i in calls_by_trace}
    ungrouped = [i for i, trace in enumerate(traces) if i not in named and _communicates(trace)] if named else []
    if ungrouped:
        said = listed("rank", [traces[i].rank for i in ungrouped])
        notes.append(f"{said}: collectives do not tell their groups, as in a replay: who waits for whom is not known")
    place = {trace.rank: i for i, trace in enumerate(traces) if i not in ungrouped}
    found: list[Matched] = []
    differ: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for series, calls_by_trace in by_series.items():
        number, title, ranks, collective = series
        around = [place[rank] for rank in dict.fromkeys(ranks) if rank in place]
        present = [i for i in around if number in recorded[i]]
        counts = {i: len(calls_by_trace.get(i, ())) for i in present}
        if len(present) < 2:
            continue
        if len(set(counts.values())) == 1:
            calls = zip(*(calls_by_trace[i] for i in present), strict=True)
            found += [Matched(series, dict(zip(present, together, strict=True))) for together in calls]
        elif not (collective == "send" and any(UNSEEN in traces[i].notes for i in present)):
            said = ", ".join(f"{count} on rank {traces[i].rank}" for i, count in counts.items())
            differ[title, collective, said].append(number)
    notes += [
        f"{listed('step', numbers)}: calls of {collective} in group {title} do not match: {said}"
        for (title, collective, said), numbers in differ.items()
    ]
    return found, notes


def _communicates(trace: RankTrace) -> bool:
    return bool((~trace.of_kind("compute") & (trace.step >= 0)).any())


def _missing_steps(traces: Sequence[RankTrace], recorded: Sequence[set[int]]) -> list[str]:
    """Notes on steps that some traces lack."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for trace, there in zip(traces, recorded, strict=True):
        ranks[tuple(sorted(set().union(*recorded) - there))].append(trace.rank)
    return [
        f"{listed('step', steps)}: not in the trace of {listed('rank', of)}" for steps, of in ranks.items() if steps
    ]


# -- align -------------------------------------------------------------------------------------------------------------

SHARED = 50e-6
"""Differences in seconds between the ends of transfers up to which clocks are not moved."""


def load(paths: Sequence[Path | str]) -> tuple[RankTrace, ...]:
    """Read the traces of one run, sort them by rank, align clocks, and match collectives. Raises TraceError."""
    if not paths:
        raise TraceError("no trace was given; fix: name at least one file")
    return align([read(path) for path in paths])


def align(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Sort traces by rank, move them to the first's clock, and match collectives. Raises TraceError for two runs."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    for a, b in pairwise(traces):
        _assert_one_run(a, b)
    traces = [_shifted(trace, (trace.origin - traces[0].origin) * 1e-9, traces[0].origin) for trace in traces]
    found, notes = match(traces)
    columns = [trace.match.copy() for trace in traces]
    for number, matched in enumerate(found):
        if len(matched.rows) == len(set(matched.series[2])):
            for i, rows in matched.rows.items():
                columns[i][rows] = number
    traces = [replace(trace, match=column) for trace, column in zip(traces, columns, strict=True)]
    if len(traces) > 1:
        moves, clock = _clocks(traces, found)
        notes += clock
        traces = [_shifted(trace, move, traces[0].origin) for trace, move in zip(traces, moves, strict=True)]
        notes += _clock_doubts(traces, np.array([matched.series[3] in MUTUAL for matched in found], bool))
        traces = _trim_sends(traces, found)
    return (replace(traces[0], notes=(*traces[0].notes, *notes)), *traces[1:])


def _assert_one_run(a: RankTrace, b: RankTrace) -> None:
    """Raise TraceError if two traces are from different runs, or from the same rank."""
    fix = "fix: one trace of each rank, all of one run"
    if a.rank == b.rank:
        raise TraceError(f"{b.source}: of rank {b.rank}, as is {a.source}; {fix}")
    if a.world and b.world and a.world != b.world:
        raise TraceError(f"{b.source}: of a run of {b.world} ranks, {a.source} of one of {a.world}; {fix}")
    if a.run and b.run and any(a.run.get(told) != b.run.get(told) for told in ("transport", "settings")):
        raise TraceError(f"{b.source}: of a run with other settings than {a.source}; {fix}")


def _shifted(trace: RankTrace, by: float, origin: int) -> RankTrace:
    """The trace with all times increased by `by` seconds."""
    if not by:
        return trace
    return replace(
        trace,
        start=trace.start + by,
        end=trace.end + by,
        launched=trace.launched + by,
        steps=tuple(replace(step, start=step.start + by, end=step.end + by) for step in trace.steps),
        origin=origin,
    )


def _clocks(traces: Sequence[RankTrace], found: Sequence[Matched]) -> tuple[list[float], list[str]]:
    """Seconds to add to each trace's times, and notes for the reader. See Note: [One clock]."""
    hosts = [trace.host or f"the host of rank {trace.rank}" for trace in traces]
    comparable = (*MUTUAL, "send") if traces[0].device != "cpu" else MUTUAL
    ends = [
        {i: float(traces[i].end[rows].max()) for i, rows in matched.rows.items()}
        for matched in found
        if matched.series[3] in comparable
    ]
    moves, notes = {hosts[0]: 0.0}, list[str]()
    while len(moves) < len(set(hosts)):
        offsets: dict[str, list[float]] = defaultdict(list)
        for together in ends:
            known = next((end + moves[hosts[i]] for i, end in together.items() if hosts[i] in moves), None)
            for i, end in together.items():
                if known is not None and hosts[i] not in moves:
                    offsets[hosts[i]].append(known - end)
        if not offsets:
            break
        host, gaps = max(offsets.items(), key=lambda row: len(row[1]))
        by = float(np.median(gaps))
        moves[host] = by if abs(by) > SHARED else 0.0
        if moves[host]:
            ranks = listed("rank", [trace.rank for trace, its in zip(traces, hosts, strict=True) if its == host])
            what = f"{len(gaps)} transfers shared with other hosts end together (median)"
            what = what if len(gaps) > 1 else "the one transfer shared with other hosts ends together"
            notes.append(f"{ranks}: the clock was moved by {1e3 * by:+.3f} ms, so that {what}")
    if lost := [trace.rank for trace, host in zip(traces, hosts, strict=True) if host not in moves]:
        notes.append(
            f"the clock of {listed('rank', lost)} could not be compared: no transfer is shared with the others"
        )
    return [moves.get(host, 0.0) for host in hosts], notes


def _clock_doubts(traces: Sequence[RankTrace], mutual: NDArray[np.bool_]) -> list[str]:
    """A note if collectives end on a rank before they start on another. `mutual`: those that can't, by match number."""
    starts, ends = np.full(len(mutual), -np.inf), np.full(len(mutual), np.inf)
    for trace in traces:
        rows = np.flatnonzero(trace.match >= 0)
        first, last = np.full(len(mutual), np.inf), np.full(len(mutual), -np.inf)
        np.minimum.at(first, trace.match[rows], trace.start[rows])
        np.maximum.at(last, trace.match[rows], trace.end[rows])
        here = np.isfinite(first)
        starts[here], ends[here] = np.maximum(starts, first)[here], np.minimum(ends, last)[here]
    by = (starts - ends)[mutual]
    wrong = by[np.isfinite(by) & (by > SHARED)]
    if not len(wrong):
        return []
    said = f"{len(wrong)} of {int(mutual.sum())} collectives end on a rank before they start on another"
    return [f"{said}, by up to {1e3 * wrong.max():.3f} ms: a clock drifts or jumped, so waiting for peers is rough"]


def _trim_sends(traces: Sequence[RankTrace], found: Sequence[Matched]) -> list[RankTrace]:
    """Trim sends of gloo to the ends of their receives: the trace shows them until the host waits for them."""
    ends = [trace.end.copy() for trace in traces]
    place = {trace.rank: i for i, trace in enumerate(traces) if trace.device == "cpu"}
    for matched in found:
        if matched.series[3] == "send" and set(matched.rows) <= set(place.values()):
            sender, receiver = (place[rank] for rank in matched.series[2])
            rows, arrived = matched.rows[sender], traces[receiver].end[matched.rows[receiver]].max()
            ends[sender][rows] = np.clip(arrived, traces[sender].start[rows], traces[sender].end[rows])
    return [replace(trace, end=end) for trace, end in zip(traces, ends, strict=True)]

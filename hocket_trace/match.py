"""The same collective on several ranks: the k-th of its kind in a group and step is one and the same on all of them.

A send is matched with the receive of its peer, k-th with k-th. Where ranks of a group differ in how many they ran,
nothing of that kind, group and step is matched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket_trace.columns import listed
from hocket_trace.cpu import UNSEEN
from hocket_trace.data import Ints, RankTrace
from hocket_trace.label import collective_of

MUTUAL = ("allgather", "reducescatter", "allreduce", "alltoall", "barrier")
"""Collectives that end on no rank before they started on all."""

Series = tuple[int, str, tuple[int, ...], str]
"""Step number, group, its ranks (of a send: from, to), collective: what is counted from 0 on every rank."""


@dataclass(frozen=True)
class Calls:
    """The calls of collectives of one rank that other ranks take part in, in order of launch."""

    series: tuple[Series, ...]
    rows: tuple[Ints, ...]
    """The activities of each call."""


@dataclass(frozen=True)
class Matched:
    """One collective: trace -> its activities there."""

    series: Series
    rows: dict[int, Ints]


def calls_of(trace: RankTrace) -> Calls:
    """The calls of one rank whose group is known."""
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
    """The other end, from an annotation such as `nccl:recv 0<-1`, whose numbers count within the group."""
    found = re.search(r"\d+ ?(?:->|<-) ?(\d+)", launcher)
    if len(ranks) == 2:
        return ranks[1] if ranks[0] == rank else ranks[0]
    return ranks[int(found[1])] if found and int(found[1]) < len(ranks) else None


def match(traces: Sequence[RankTrace]) -> tuple[list[Matched], list[str]]:
    """The collectives that at least two of the traces share, and notes on those that do not agree."""
    by_series: dict[Series, dict[int, list[Ints]]] = defaultdict(lambda: defaultdict(list))
    for i, trace in enumerate(traces):
        calls = calls_of(trace)
        for series, rows in zip(calls.series, calls.rows, strict=True):
            by_series[series][i].append(rows)
    recorded = [{step.number for step in trace.steps} for trace in traces]
    notes = _lacking(traces, recorded)
    named = {i for calls_by_trace in by_series.values() for i in calls_by_trace}
    nameless = [i for i, trace in enumerate(traces) if i not in named and _communicates(trace)] if named else []
    if nameless:
        said = listed("rank", [traces[i].rank for i in nameless])
        notes.append(f"{said}: collectives do not tell their groups, as in a replay: who waits for whom is not known")
    place = {trace.rank: i for i, trace in enumerate(traces) if i not in nameless}
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


def _lacking(traces: Sequence[RankTrace], recorded: Sequence[set[int]]) -> list[str]:
    """Notes on steps that not all of the traces have."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for trace, there in zip(traces, recorded, strict=True):
        ranks[tuple(sorted(set().union(*recorded) - there))].append(trace.rank)
    return [
        f"{listed('step', steps)}: not in the trace of {listed('rank', of)}" for steps, of in ranks.items() if steps
    ]

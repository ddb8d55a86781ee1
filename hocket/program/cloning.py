"""Which experts are cloned on which ranks, and how rows are divided between owners and clones.

With natural routing the ranks of an expert-parallel group get unequal numbers of rows, and all wait for the fullest.
So ranks have room for *clones* of other ranks' experts (known as ECHO in Megatron-LM). `choose` decides which, from the
rows of the step before, which all ranks know. `divide` moves rows from owners to clones.

Note: [Each rank divides its own rows]
A rank divides the rows that it sends, from its own counts of the microbatch, so that it sends as many to each rank as
the clones allow. No rank has to know the counts of others before it sorts its rows. If every rank sends as many rows to
each, every rank gets as many. What one rank cannot even out, others may have too little of to matter: the fullest rank
of the sum never has more than the sum of what the ranks give their fullest.

Note: [The most even division]
`divide` goes over the clones again and again. Each time it moves rows between an owner and one clone until the two
ranks have as many, or none is left to move. A sum of squares falls with each move, and its least value belongs to the
most even loads there are: they have the smallest maximum too. A few rounds come within some rows of it.

Note: [The next step has other rows]
Clones are chosen by the rows of the step before, and routers change. A clone that those rows did not need may be the
one that the next step needs, and room for it is there in any case. `benchmarks.clone_balance` counts how even rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

ROUNDS = 6
"""How often `divide` goes over all clones."""


class Clone(NamedTuple):
    """A copy of an expert on a rank that does not own it."""

    expert: int
    """Number of the expert among all."""
    rank: int
    """Where the copy is."""
    seat: int
    """Number of the copy among those of its rank."""


Clones = tuple[Clone, ...]
"""Those of one layer, in the order in which they were chosen."""


def owner_of(expert: int, experts: int, ranks: int) -> int:
    """The rank that an expert belongs to."""
    return expert // (experts // ranks)


def rank_loads(counts: Sequence[int], ranks: int) -> list[int]:
    """Rows of every rank without clones, of rows by expert."""
    local = len(counts) // ranks
    return [sum(counts[rank * local : (rank + 1) * local]) for rank in range(ranks)]


def choose(counts: Sequence[int], ranks: int, room: int) -> Clones:
    """The clones that even out ranks' rows, of rows by expert: `room` on each rank, where there are so many experts.

    The hottest expert of the fullest rank goes to the emptiest rank with room, until nothing is gained. Then the
    hottest experts take what room is left: see Note: [The next step has other rows].
    """
    loads, kept, seats = rank_loads(counts, ranks), list(counts), [0] * ranks
    local, mean, chosen = len(counts) // ranks, sum(counts) // ranks, list[Clone]()
    there = set[tuple[int, int]]()
    while True:
        full = max(range(ranks), key=lambda rank: loads[rank])
        idle = _emptiest(loads, [rank for rank in range(ranks) if seats[rank] < room and rank != full])
        mine = range(full * local, (full + 1) * local)
        hot = max((e for e in mine if (e, idle) not in there), key=lambda e: kept[e], default=-1)
        rows = 0 if hot < 0 or idle < 0 else min(kept[hot], loads[full] - mean, mean - loads[idle])
        if rows <= 0:
            break
        chosen.append(Clone(hot, idle, seats[idle]))
        there.add((hot, idle))
        seats[idle] += 1
        kept[hot] -= rows
        loads[full] -= rows
        loads[idle] += rows
    hottest = [(-rows, expert) for expert, rows in enumerate(kept) if rows]
    heapify(hottest)
    while hottest:
        rows, hot = heappop(hottest)
        free = [rank for rank in range(ranks) if seats[rank] < room and (hot, rank) not in there]
        idle = _emptiest(loads, [rank for rank in free if rank != hot // local])
        if idle >= 0:
            chosen.append(Clone(hot, idle, seats[idle]))
            there.add((hot, idle))
            seats[idle] += 1
            heappush(hottest, (rows // 2, hot))  # as if owner and clone shared them
    return tuple(chosen)


def _emptiest(loads: Sequence[int], among: Sequence[int]) -> int:
    """The rank with the fewest rows, the first of several; -1 if there is none."""
    return min(among, key=lambda rank: loads[rank], default=-1)


def divide(counts: Sequence[int], clones: Clones, ranks: int) -> list[int]:
    """Rows that each clone gets, of rows by expert; the owner keeps the others. See Note: [The most even division]."""
    loads, kept, given = rank_loads(counts, ranks), list(counts), [0] * len(clones)
    for _ in range(ROUNDS):
        for n, (expert, rank, _) in enumerate(clones):
            owner = owner_of(expert, len(counts), ranks)
            half = abs(loads[owner] - loads[rank]) // 2
            rows = min(half, kept[expert]) if loads[owner] > loads[rank] else -min(half, given[n])
            given[n] += rows
            kept[expert] -= rows
            loads[owner] -= rows
            loads[rank] += rows
    return given


def loads_with(counts: Sequence[int], clones: Clones, ranks: int) -> list[int]:
    """Rows of every rank with clones, of rows by expert."""
    loads = rank_loads(counts, ranks)
    for (expert, rank, _), rows in zip(clones, divide(counts, clones, ranks), strict=True):
        loads[owner_of(expert, len(counts), ranks)] -= rows
        loads[rank] += rows
    return loads


def fullest(loads: Sequence[int]) -> float:
    """Rows of the fullest rank over the mean; 1 if there are none."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

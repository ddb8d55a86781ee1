"""Which tokens context-parallel ranks get: as many each, and as much attention.

Zigzag chunks balance attention over whole sequences. Documents that share sequences break that: their first tokens
attend to little, and a long one may lie in the chunks of one rank. So such sequences are cut into equal chunks and
these are dealt out by what their attention costs all layers, those with windows too: the dearest first, always to the
rank with the least so far that still has room. Then ranks exchange pairs of chunks. There are as few chunks as the
tolerance needs, since each costs a call of attention. This is integer arithmetic on what every rank knows, so all ranks
find the same without a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hocket.program.documents import FULL, Attending

MOST_CHUNKS = 128
"""Of one rank, before neighbours are joined."""

SMALLEST = 16
"""Tokens of a chunk: smaller ones are less than a block of any attention kernel."""

TOLERANCE = 0.05
"""How much more than the mean the busiest rank may have."""


Chunks = tuple[range, ...]
"""Tokens that a rank has, in the order in which it has them; each chunk lies within a sequence."""


def zigzag(batch: int, length: int, ranks: int) -> tuple[Chunks, ...]:
    """Chunks of every rank: of 2 * ranks chunks of a sequence rank r has r and 2 * ranks - 1 - r.

    An early chunk, which attends to little, stands beside a late one, so causal attention takes all ranks as long.
    """
    size, rest = divmod(length, 2 * ranks)
    if rest:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {2 * ranks} chunks of one length")

    def chunk(sequence: int, number: int) -> range:
        first = sequence * length + number * size
        return range(first, first + size)

    return tuple(
        tuple(chunk(b, n) for b in range(batch) for n in (rank, 2 * ranks - 1 - rank)) for rank in range(ranks)
    )


@dataclass(frozen=True)
class Shares:
    """Which tokens ranks have, and how even their attention is."""

    chunks: tuple[Chunks, ...]
    """Of every rank, in the order of sequences; none crosses the end of a sequence."""
    work: tuple[int, ...]
    """What attention costs each rank, in units of an `Attending`."""

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest rank has: 0.05 is 5 %."""
        return imbalance_of([self.work])


def shares(bounds: Sequence[int], length: int, ranks: int, attending: Attending = FULL) -> Shares:
    """Tokens of every rank, as many each, with the fewest chunks whose attention is within the tolerance.

    Without such chunks, those with the least imbalance. `bounds` are where documents of all sequences begin and end,
    one after the other, from 0; sequences have `length` tokens each, so the ends of sequences are among the bounds.
    `attending` is what layers do.

    Raises: ValueError if documents do not fill sequences, cross their ends, or ranks cannot have as many tokens each.

    """
    _refuse(bounds, length, ranks)
    per_rank = max(2, bounds[-1] // length)
    size = bounds[-1] // (ranks * per_rank)
    best = _dealt(bounds, length, size, ranks, attending)
    cuts, most = 1, min(MOST_CHUNKS // per_rank, size // SMALLEST)
    while best.imbalance > TOLERANCE and (more := [n for n in range(2 * cuts, most + 1) if size % n == 0]):
        cuts = more[0]
        found = _dealt(bounds, length, size // cuts, ranks, attending)
        best = min(best, found, key=lambda s: s.imbalance)
    return best


def imbalance_of(batches: Sequence[Sequence[int]]) -> float:
    """How much longer than with even work ranks need that wait for each other after every batch; 0.05 is 5 %.

    `batches` has the work of every rank in each batch.
    """
    total = sum(map(sum, batches))
    return sum(max(work) * len(work) for work in batches) / total - 1 if total else 0.0


def work_of(bounds: Sequence[int], chunks: Sequence[Sequence[range]], attending: Attending = FULL) -> tuple[int, ...]:
    """What causal attention inside documents costs each rank with these chunks."""
    until = _Until(bounds, attending)
    return tuple(sum(until(c.stop) - until(c.start) for c in mine) for mine in chunks)


def _refuse(bounds: Sequence[int], length: int, ranks: int) -> None:
    if ranks < 1 or length < 1:
        raise ValueError(f"ranks={ranks} and length={length} must be 1 or more")
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {2 * ranks} chunks of one length for {ranks} ranks: "
            f"make it a multiple of {2 * ranks}"
        )
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] % length or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"documents must follow each other from 0 and fill sequences of {length} tokens")
    if long := next((b - a for a, b in pairwise(bounds) if b - a > length), None):
        raise ValueError(f"a document of {long} tokens is longer than a sequence, which has {length}")
    if crossing := next((a for a, b in pairwise(bounds) if a // length != (b - 1) // length), None):
        raise ValueError(
            f"the document that begins at token {crossing} crosses the end of a sequence of {length} tokens"
        )


class _Until:
    """The cost of all queries before a token."""

    def __init__(self, bounds: Sequence[int], attending: Attending) -> None:
        self._bounds, self._attending = bounds, attending
        self._before = [0, *accumulate(attending.until(b - a) for a, b in pairwise(bounds))]
        """Of all documents before each."""

    def __call__(self, token: int) -> int:
        document = bisect_right(self._bounds, token) - 1
        return self._before[document] + self._attending.until(token - self._bounds[document])


def _dealt(bounds: Sequence[int], length: int, size: int, ranks: int, attending: Attending) -> Shares:
    """Chunks of one size, as many for every rank."""
    costs = [b - a for a, b in pairwise(map(_Until(bounds, attending), range(0, bounds[-1] + 1, size)))]
    room = len(costs) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for chunk in sorted(range(len(costs)), key=lambda c: (-costs[c], c)):
        rank = min((r for r in range(ranks) if len(held[r]) < room), key=lambda r: (work[r], r))
        held[rank].append(chunk)
        work[rank] += costs[chunk]
    _exchange(held, work, costs)
    chunks = tuple(tuple(_joined(sorted(mine), size, length)) for mine in held)
    return Shares(chunks, tuple(work))


def _exchange(held: list[list[int]], work: list[int], costs: list[int]) -> None:
    """Swap chunks of the busiest rank and the idlest one while that brings the two nearer to each other."""
    for _ in range(4 * len(work)):
        busy, idle = work.index(max(work)), work.index(min(work))
        gap = work[busy] - work[idle]
        theirs = sorted(range(len(held[idle])), key=lambda i: costs[held[idle][i]])
        sizes = [costs[held[idle][i]] for i in theirs]
        best, moved = gap, (0, 0, 0)
        for i, chunk in enumerate(held[busy]):
            at = bisect_right(sizes, costs[chunk] - gap // 2)
            for near in theirs[max(0, at - 1) : at + 1]:
                change = costs[chunk] - costs[held[idle][near]]
                if abs(gap - 2 * change) < best:
                    best, moved = abs(gap - 2 * change), (change, i, near)
        change, i, near = moved
        if not change:
            return
        held[busy][i], held[idle][near] = held[idle][near], held[busy][i]
        work[busy] -= change
        work[idle] += change


def _joined(chunks: Sequence[int], size: int, length: int) -> list[range]:
    """Ranges of tokens; neighbours within one sequence are one."""
    found: list[range] = []
    for chunk in chunks:
        start = chunk * size
        if found and found[-1].stop == start and start % length:
            found[-1] = range(found[-1].start, start + size)
        else:
            found.append(range(start, start + size))
    return found

"""Sequences that context-parallel ranks share: who has which tokens, and which keys these attend to.

A microbatch's sequences, one after the other, are cut into chunks. Each rank has as many tokens as the others, in
chunks of its own. Keys and values of all ranks are gathered before attention, and put into the order of sequences. What
a chunk attends to is then one stretch of it: from where the document of its first token begins to its own last token.
So attention is that of documents whose queries are fewer than their keys, with both aligned at their ends, and no
partial results are put together.

Shapes: B sequences, S sequence length, T tokens of this rank, U tokens of all ranks (B * S), D width of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hocket.model.documents import Context, Documents, Microbatch, Span, whole_sequences
from hocket.program.documents import FULL, Attending
from hocket.runtime.segment import rebuild_in_backward

# -- chunks ------------------------------------------------------------------------------------------------------------
# Which tokens context-parallel ranks get: as many each, and as much attention.
#
# Zigzag chunks balance attention over whole sequences. Documents that share sequences break that: their first tokens
# attend to little, and a long one may lie in the chunks of one rank. So such sequences are cut into equal chunks and
# these are dealt out by what their attention costs all layers, those with windows too: the dearest first, always to the
# rank with the least so far that still has room. Then ranks exchange pairs of chunks. There are as few chunks as the
# tolerance needs, since each costs a call of attention. This is integer arithmetic on what every rank knows, so all
# ranks find the same without a word.

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

    Raises: ValueError if ranks cannot have as many tokens each.

    """
    if length < 1 or length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {2 * ranks} chunks of one length for {ranks} ranks: "
            f"make it a multiple of {2 * ranks}"
        )
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


# -- context -----------------------------------------------------------------------------------------------------------


def context_of(documents: Documents, chunks: Sequence[Chunks], rank: int) -> Context:
    """What one rank is told of a microbatch with these documents, whose tokens ranks have in `chunks`."""
    device = documents.position_T.device
    order = torch.tensor([token for of_rank in chunks for chunk in of_rank for token in chunk])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    mine = _tokens(chunks[rank], device)
    spans, first = [], 0
    for chunk in chunks[rank]:
        spans.append(_span(documents.bounds, chunk, first).to(device))
        first += len(chunk)
    real_T = None if documents.real_T is None else documents.real_T[mine]
    length, position_T = documents.ids_BS.shape[1], documents.position_T[mine]
    orders = places.to(device), order.to(device)
    return Context(length, position_T, *orders, tuple(spans), real_T, documents=documents, bounds=documents.bounds)


def _span(bounds: Sequence[int], chunk: range, first: int) -> Span:
    """The documents that a chunk has tokens of. `bounds` are where documents of all sequences begin and end."""
    met = [(lo, hi) for lo, hi in pairwise(bounds) if lo < chunk.stop and hi > chunk.start]
    begin, ends, key_ends = met[0][0], [0], [0]
    for _, hi in met:
        ends.append(min(hi, chunk.stop) - chunk.start)
        key_ends.append(min(hi, chunk.stop) - begin)
    mine, theirs = (torch.tensor(each, dtype=torch.int32) for each in (ends, key_ends))
    longest, key_longest = (int(each.diff().max()) for each in (mine, theirs))
    queries, keys = range(first, first + len(chunk)), range(begin, chunk.stop)
    return Span(queries, keys, mine, theirs, longest, key_longest)


def _tokens(chunks: Chunks, device: torch.device) -> Tensor:
    """The tokens of chunks, int64 [T]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


class Shared:
    """One context-parallel rank's part of microbatches of `batch` sequences.

    Whole sequences are cut in zigzag. Chunks of documents are chosen so that all ranks have as much attention, which
    costs `even`; without it, where ranks have all tokens of some heads, they are cut in zigzag too.
    """

    imbalance: float | None = None
    """How much longer than on average the busiest rank attends in the last microbatches; None of whole sequences."""

    def __init__(
        self, batch: int, length: int, ranks: int, rank: int, device: torch.device, even: Attending | None = FULL
    ) -> None:
        self._zigzag, self._ranks, self._rank, self.even = zigzag(batch, length, ranks), ranks, rank, even
        self._mine = _tokens(self._zigzag[rank], device)
        self.whole = replace(context_of(whole_sequences(batch, length, device), self._zigzag, rank), documents=None)
        """What layers are told of sequences that are one document each."""

    def parts(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The rank's tokens and targets, [B, S / ranks], of whole microbatches."""
        work: list[tuple[int, ...]] = []
        found = [self._part(microbatch, work) for microbatch in microbatches]
        self.imbalance = imbalance_of(work) if work else None
        return found

    def _part(self, microbatch: Microbatch, work: list[tuple[int, ...]]) -> Microbatch:
        documents = microbatch.documents
        assert isinstance(documents, Documents | None), "a microbatch has its sequences whole"
        chunks, mine, told = self._zigzag, self._mine, self.whole
        if documents is not None and self.even is not None:
            chosen = shares(documents.bounds, self.whole.length, self._ranks, self.even)
            chunks, mine = chosen.chunks, _tokens(chosen.chunks[self._rank], self._mine.device)
            work.append(chosen.work)
        if documents is not None:
            told = context_of(documents, chunks, self._rank)
        of_rank = [x.flatten()[mine].view(x.shape[0], -1) for x in (microbatch.ids, microbatch.targets)]
        return Microbatch(*of_rank, documents=told)


class _Rows(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, places_U: Tensor, back_U: Tensor) -> Tensor:
        ctx.back_U = back_U
        return rows_UD.index_select(0, places_U)

    @staticmethod
    def backward(ctx: Any, g_UD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return g_UD.index_select(0, ctx.back_U), None, None


def in_order(rows_UD: Tensor, context: Context) -> Tensor:
    """What was gathered, rank after rank, in the order of sequences. Shares no memory with it."""
    found_UD = _Rows.apply(rows_UD, context.order_U, context.place_U)
    rebuild_in_backward(found_UD, lambda rows_UD: rows_UD.index_select(0, context.order_U))
    return found_UD


def in_ranks(rows_UD: Tensor, context: Context) -> Tensor:
    """Rows in the order of sequences, rank after rank: the other way round than `in_order`."""
    return _Rows.apply(rows_UD, context.place_U, context.order_U)


def by_heads(x_THN: Tensor, ranks: int) -> Tensor:
    """What all heads have of a rank's tokens, as rows for each rank's heads, one rank after the other: [ranks * T, -1].

    Heads that are fewer than ranks go to several, so that each has one.
    """
    tokens, heads = x_THN.shape[:2]
    x_THN = x_THN.repeat_interleave(ranks // heads, 1) if heads < ranks else x_THN
    return x_THN.unflatten(1, (ranks, -1)).transpose(0, 1).reshape(ranks * tokens, -1)


def of_heads(rows_UX: Tensor, ranks: int) -> Tensor:
    """Rows of each rank's heads, one rank after the other, as those of the rank's own tokens: [T, ranks * X]."""
    return rows_UX.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)


def among(x_THN: Tensor, tokens: range) -> Tensor:
    """Of something that all tokens have, that of some neighbours."""
    return x_THN[tokens.start : tokens.stop]

"""Context parallelism: which tokens each rank has, and which keys they attend to.

The sequences of a microbatch, concatenated, are cut into chunks. All ranks have equally many tokens, each in its own
chunks. Keys and values of all ranks are gathered before attention and reordered into sequences. So the keys of a chunk
are one stretch: from the start of its first token's document to the chunk's last token. Attention is then that of
documents with fewer queries than keys, aligned at their ends, and no partial results have to be merged.

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
from hocket.program.documents import FULL, AttentionWork
from hocket.runtime.segment import rebuild_in_backward

# -- chunks ------------------------------------------------------------------------------------------------------------
# Which tokens context-parallel ranks get: equally many each, with equal attention work.
#
# Zigzag chunks balance attention over whole sequences. Packed documents break that balance: their first tokens attend
# to few keys, and a long document may be in the chunks of one rank. So packed sequences are cut into equal chunks,
# which are assigned by their attention work over all layers, including those with windows: the most expensive first,
# always to the rank with the least work that still has room. Then ranks swap pairs of chunks. There are as few chunks
# as the tolerance allows, since each costs a call of attention. This is integer arithmetic on what every rank knows, so
# all ranks agree without communication.

MOST_CHUNKS = 128
"""Chunks of one rank, before neighbours are joined."""

SMALLEST = 16
"""Tokens of a chunk: smaller chunks are less than a block of any attention kernel."""

TOLERANCE = 0.05
"""Accepted excess work of the busiest rank over the mean."""


Chunks = tuple[range, ...]
"""A rank's tokens, in its order; each chunk is within a sequence."""


def zigzag(batch: int, length: int, ranks: int) -> tuple[Chunks, ...]:
    """Chunks of every rank: each sequence has 2 * ranks chunks, and rank r has chunks r and 2 * ranks - 1 - r.

    An early chunk, with few keys, is paired with a late one, so causal attention takes all ranks equally long.
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
    """Tokens of every rank, and their attention work."""

    chunks: tuple[Chunks, ...]
    """Per rank, in the order of sequences; no chunk crosses the end of a sequence."""
    work: tuple[int, ...]
    """Attention work of each rank, in units of an `AttentionWork`."""

    @property
    def imbalance(self) -> float:
        """Excess work of the busiest rank over the mean: 0.05 is 5 %."""
        return imbalance_of([self.work])


def shares(bounds: Sequence[int], length: int, ranks: int, attending: AttentionWork = FULL) -> Shares:
    """Equally many tokens for every rank, with the fewest chunks whose attention is within the tolerance.

    If there are none, the chunks with the least imbalance. `bounds` are the starts and ends of documents in the
    concatenated sequences, from 0; sequences have `length` tokens each, and their ends are bounds too. `attending` is
    the layers' work.

    Raises ValueError if ranks cannot have equally many tokens.
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
    """Extra time, relative to even work, of ranks that wait for each other after every batch; 0.05 is 5 %.

    `batches` has the work of every rank in each batch.
    """
    total = sum(map(sum, batches))
    return sum(max(work) * len(work) for work in batches) / total - 1 if total else 0.0


def work_of(
    bounds: Sequence[int], chunks: Sequence[Sequence[range]], attending: AttentionWork = FULL
) -> tuple[int, ...]:
    """Work of causal attention inside documents for each rank with these chunks."""
    until = _WorkBefore(bounds, attending)
    return tuple(sum(until(c.stop) - until(c.start) for c in mine) for mine in chunks)


class _WorkBefore:
    """The work of all queries before a token."""

    def __init__(self, bounds: Sequence[int], attending: AttentionWork) -> None:
        self._bounds, self._attending = bounds, attending
        self._before = [0, *accumulate(attending.until(b - a) for a, b in pairwise(bounds))]
        """The work of all documents before each."""

    def __call__(self, token: int) -> int:
        document = bisect_right(self._bounds, token) - 1
        return self._before[document] + self._attending.until(token - self._bounds[document])


def _dealt(bounds: Sequence[int], length: int, size: int, ranks: int, attending: AttentionWork) -> Shares:
    """Assigns chunks of one size, equally many to every rank."""
    costs = [b - a for a, b in pairwise(map(_WorkBefore(bounds, attending), range(0, bounds[-1] + 1, size)))]
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
    """Swap chunks of the busiest and the idlest rank while that reduces their difference."""
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
    """Ranges of tokens; neighbours within one sequence are joined."""
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
    """The `Context` of one rank for a microbatch with these documents; `chunks` has the tokens of every rank."""
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
    """A chunk's queries and keys, by document. `bounds` are the starts and ends of documents of all sequences."""
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


class ContextRank:
    """One context-parallel rank's part of microbatches of `batch` sequences.

    Whole sequences are cut in zigzag. Packed sequences are cut so that ranks have equal work, measured by `even`;
    without `even`, as ranks that exchange heads have all tokens in attention, they are cut in zigzag too.
    """

    imbalance: float | None = None
    """Excess attention work of the busiest rank in the last microbatches; None for whole sequences."""

    def __init__(
        self, batch: int, length: int, ranks: int, rank: int, device: torch.device, even: AttentionWork | None = FULL
    ) -> None:
        self._zigzag, self._ranks, self._rank, self.even = zigzag(batch, length, ranks), ranks, rank, even
        self._mine = _tokens(self._zigzag[rank], device)
        self.whole = replace(context_of(whole_sequences(batch, length, device), self._zigzag, rank), documents=None)
        """The `Context` of sequences of one document each."""

    def parts(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The rank's tokens and targets, [B, S / ranks], of whole microbatches."""
        work: list[tuple[int, ...]] = []
        found = [self._part(microbatch, work) for microbatch in microbatches]
        self.imbalance = imbalance_of(work) if work else None
        return found

    def _part(self, microbatch: Microbatch, work: list[tuple[int, ...]]) -> Microbatch:
        documents = microbatch.documents
        assert isinstance(documents, Documents | None), "a microbatch has its sequences whole"
        chunks, mine, context = self._zigzag, self._mine, self.whole
        if documents is not None and self.even is not None:
            chosen = shares(documents.bounds, self.whole.length, self._ranks, self.even)
            chunks, mine = chosen.chunks, _tokens(chosen.chunks[self._rank], self._mine.device)
            work.append(chosen.work)
        if documents is not None:
            context = context_of(documents, chunks, self._rank)
        of_rank = [x.flatten()[mine].view(x.shape[0], -1) for x in (microbatch.ids, microbatch.targets)]
        return Microbatch(*of_rank, documents=context)


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
    """Gathered rows, sorted by rank, in the order of sequences. A copy."""
    found_UD = _Rows.apply(rows_UD, context.order_U, context.place_U)
    rebuild_in_backward(found_UD, lambda rows_UD: rows_UD.index_select(0, context.order_U))
    return found_UD


def in_ranks(rows_UD: Tensor, context: Context) -> Tensor:
    """Rows in the order of sequences, sorted by rank: the inverse of `in_order`."""
    return _Rows.apply(rows_UD, context.place_U, context.order_U)


def by_heads(x_THN: Tensor, ranks: int) -> Tensor:
    """All heads of a rank's tokens as rows for each rank's heads, sorted by rank: [ranks * T, -1].

    With fewer heads than ranks, each head goes to several ranks.
    """
    tokens, heads = x_THN.shape[:2]
    x_THN = x_THN.repeat_interleave(ranks // heads, 1) if heads < ranks else x_THN
    return x_THN.unflatten(1, (ranks, -1)).transpose(0, 1).reshape(ranks * tokens, -1)


def of_heads(rows_UX: Tensor, ranks: int) -> Tensor:
    """Rows of each rank's heads, sorted by rank, as rows of the rank's own tokens: [T, ranks * X]."""
    return rows_UX.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)


def token_range(x_THN: Tensor, tokens: range) -> Tensor:
    """A range of tokens out of all."""
    return x_THN[tokens.start : tokens.stop]

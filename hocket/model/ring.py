"""Attention in stages: what other ranks' keys and values a rank gets when, and who of its queries meets them.

Each rank begins with keys of its own tokens (stage 0). In a later stage it gets those of one rank or of several, of
which some query of it will see them, and adds what its queries find there: see `partial_attention.py`. Every block
comes from the rank that has made it, and its gradient goes back there, so nothing is handed on from rank to rank.

Keys of another chunk stand before all queries that may see them. So what a query's chunk sees of it is its end, from
where the document of the chunk's first token begins, or the window does; and the queries that see it are the beginning
of their chunk, to where that document ends. No mask is needed but that of windows.

Shapes: T tokens of this rank, U rows that came in a stage, H query heads, K key and value heads, N width of a head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hocket.model.chunks import Chunks
from hocket.model.context import Context, Span, among
from hocket.model.documents import Seen
from hocket.model.partial_attention import Meeting, found, gradients
from hocket.model.sinks import sink_gradient
from hocket.program.part_sizes import stage_shifts
from hocket.runtime.destinations import Destination
from hocket.runtime.weights import Product


@dataclass(frozen=True)
class Stage:
    """What one rank sends, gets and computes in a stage."""

    rows: tuple[tuple[int, ...], ...]
    """How many rows each rank sends to each."""
    sent: tuple[range, ...]
    """Which of this rank's tokens it sends: those for the first rank come first."""
    meetings: tuple[Meeting, ...]
    """Its queries, and the rows that came: those of the first rank come first."""


@lru_cache(maxsize=256)
def stage(
    chunks: tuple[Chunks, ...], bounds: tuple[int, ...], rank: int, window: int, stages: int, number: int
) -> Stage:
    """Stage `number` of `stages`, from 1, for ranks that have tokens in `chunks`, of documents within `bounds`.

    All ranks find the same table of rows. With a `window` a query sees its last tokens alone.
    """
    ranks = len(chunks)
    shifts = stage_shifts(ranks, stages)[number - 1]
    seen = {
        (source, taker): tuple(_ends(chunks[taker], chunks[source], bounds, window))
        for taker in range(ranks)
        for source in ((taker - shift) % ranks for shift in shifts)
    }
    rows = tuple(
        tuple(sum(map(len, seen.get((source, taker), ()))) for taker in range(ranks)) for source in range(ranks)
    )
    sent = [
        range(first + keys.start - chunk.start, first + keys.stop - chunk.start)
        for taker in range(ranks)
        for (chunk, first), keys in zip(_placed(chunks[rank]), seen.get((rank, taker), ()), strict=False)
        if keys
    ]
    came = [keys for source in range(ranks) for keys in seen.get((source, rank), ()) if keys]
    meetings = _meetings(chunks[rank], _placed(came), bounds, window)
    return Stage(rows, tuple(_joined(sent)), meetings if window else _merged(meetings))


@lru_cache(maxsize=256)
def own_meetings(chunks: Chunks, bounds: tuple[int, ...], window: int) -> tuple[Meeting, ...]:
    """Where queries of one chunk of a rank see keys of another one."""
    meetings = _meetings(chunks, _placed(chunks), bounds, window)
    return meetings if window else _merged(meetings)


def _placed(chunks: Iterable[range]) -> Iterator[tuple[range, int]]:
    """Stretches of tokens, each with its place if they stand one after the other."""
    first = 0
    for chunk in chunks:
        yield chunk, first
        first += len(chunk)


def _begin(queries: range, bounds: Sequence[int], window: int) -> int:
    """The first key that the first one of some neighbouring queries sees."""
    begin = bounds[bisect_right(bounds, queries.start) - 1]
    return max(begin, queries.start - window + 1) if window else begin


def _ends(queries: Chunks, keys: Chunks, bounds: Sequence[int], window: int) -> Iterator[range]:
    """Of each chunk of keys what some chunk of queries sees: its end, or nothing."""
    begins = [(chunk.start, _begin(chunk, bounds, window)) for chunk in queries]
    for chunk in keys:
        first = min((begin for start, begin in begins if start >= chunk.stop), default=chunk.stop)
        yield range(min(max(chunk.start, first), chunk.stop), chunk.stop)


def _meetings(
    queries: Chunks, keys: Iterable[tuple[range, int]], bounds: Sequence[int], window: int
) -> tuple[Meeting, ...]:
    """Who meets whom, for keys that have these places."""
    met: list[Meeting] = []
    for these, place in keys:
        for chunk, first in _placed(queries):
            begin = max(these.start, _begin(chunk, bounds, window))
            if chunk.start < these.stop or begin >= these.stop:
                continue
            end = min(chunk.stop, bounds[bisect_right(bounds, chunk.start)])
            end = min(end, these.stop - 1 + window) if window else end
            seen = range(place + begin - these.start, place + len(these))
            meeting = Meeting(range(first, first + end - chunk.start), seen, end - these.stop if window else 0)
            met += meeting.split(window) if window else (meeting,)
    return tuple(met)


def _merged(meetings: Sequence[Meeting]) -> tuple[Meeting, ...]:
    """The same in fewer calls: neighbouring keys that the same queries meet, then neighbouring queries."""
    by_queries: dict[range, list[range]] = {}
    for each in meetings:
        by_queries.setdefault(each.queries, []).append(each.keys)
    by_keys: dict[range, list[range]] = {}
    for queries, keys in by_queries.items():
        for joined in _joined(keys):
            by_keys.setdefault(joined, []).append(queries)
    return tuple(Meeting(queries, keys) for keys, several in by_keys.items() for queries in _joined(several))


def _joined(stretches: Iterable[range]) -> list[range]:
    """Stretches with each that begins where the one before ends made one with it."""
    joined: list[range] = []
    for each in stretches:
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return joined


def stage_of(context: Context, window: int, stages: int, number: int) -> Stage:
    """A stage of a microbatch, as `stage`."""
    return stage(context.chunks, context.bounds, context.rank, window, stages, number)


# -------------------------------------------------------------------------------------------------- what is computed


class Final:
    """Output and lse of all stages of a microbatch's attention, which backward of each of them needs."""

    out_THN: Tensor | None = None
    total_TH: Tensor | None = None


Met = tuple[Seen | Meeting, range, range]
"""What queries meet which keys, and their tokens: among those of the rank, and among the rows that came."""
_Asked = tuple[list[Met], int, Final]
"""Who meets whom, the window, and what backward will need."""


def own(q_THN: Tensor, kv_TX: Tensor, context: Context, window: int, final: Final) -> tuple[Tensor, Tensor]:
    """What queries find in keys and values of the rank's own tokens, [T, H, N], and its lse, [T, H].

    Both are in fp32 at least. A row of `kv` has all heads' keys, then their values.
    """
    asked = met_own(context, window), window, final
    return _Stage.apply(q_THN, kv_TX, *nothing(q_THN), asked)  # pyrefly: ignore[bad-return]


def nothing(q_THN: Tensor) -> tuple[Tensor, Tensor]:
    """What queries have found before they have met a key, and its lse, in fp32 at least."""
    exact = torch.promote_types(q_THN.dtype, torch.float32)
    nothing_THN = torch.zeros_like(q_THN, dtype=exact)
    return nothing_THN, nothing_THN.new_full(q_THN.shape[:2], -torch.inf)


def met_own(context: Context, window: int) -> list[Met]:
    """Who meets whom among the rank's own tokens."""
    alone = [(_alone(span), span.queries, span.queries) for span in context.spans]
    across = own_meetings(context.chunks[context.rank], context.bounds, window)
    return [*alone, *((each, each.queries, each.keys) for each in across)]


def met_in(stage: Stage) -> list[Met]:
    """Who meets whom among the rank's queries and the rows that come in a stage."""
    return [(each, each.queries, each.keys) for each in stage.meetings]


def _alone(span: Span) -> Span:
    """A chunk whose queries meet keys of the chunk alone."""
    return replace(span, keys=span.queries, key_ends=span.ends, key_longest=span.longest)


def more(
    q_THN: Tensor, kv_UX: Tensor, found_THN: Tensor, lse_TH: Tensor, stage: Stage, window: int, final: Final
) -> tuple[Tensor, Tensor]:
    """What queries have found and its lse, with what they find in a stage's keys and values."""
    return _Stage.apply(q_THN, kv_UX, found_THN, lse_TH, (met_in(stage), window, final))  # pyrefly: ignore[bad-return]


def _heads(kv_UX: Tensor, width: int) -> Tensor:
    """Keys and values, [U, 2, K, N]."""
    return kv_UX.view(len(kv_UX), 2, kv_UX.shape[1] // (2 * width), width)


def find(q_THN: Tensor, kv_UX: Tensor, out_THN: Tensor, lse_TH: Tensor, met: Sequence[Met], window: int) -> None:
    """Add what queries find in these keys and values to what they have found, and to its lse, in place."""
    k, v = _heads(kv_UX, q_THN.shape[-1]).unbind(1)
    for seen, queries, keys in met:
        here, lse_here = found((among(q_THN, queries), among(k, keys), among(v, keys)), seen, window)
        out, lse = among(out_THN, queries), among(lse_TH, queries)
        total = torch.logaddexp(lse, lse_here)
        out.mul_((lse - total).exp_().unsqueeze(-1)).add_(here * (lse_here - total).exp_().unsqueeze(-1))
        lse.copy_(total)


def back(
    g_THN: Tensor, q_THN: Tensor, kv_UX: Tensor, final: tuple[Tensor, Tensor], met: Sequence[Met], window: int
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and of these keys and values, from that of the whole. `final` is its output and lse."""
    width = q_THN.shape[-1]
    (k, v), dq, dkv = _heads(kv_UX, width).unbind(1), torch.zeros_like(q_THN), torch.zeros_like(kv_UX)
    dk, dv = _heads(dkv, width).unbind(1)
    for seen, queries, keys in met:
        given = among(q_THN, queries), among(k, keys), among(v, keys)
        out, total = (among(x, queries) for x in final)
        sums = gradients(among(g_THN, queries).to(q_THN.dtype), given, out, total, seen, window)
        for into, tokens, more in zip((dq, dk, dv), (queries, keys, keys), sums, strict=True):
            among(into, tokens).add_(more)
    return dq, dkv


class _Stage(torch.autograd.Function):
    """One stage. The gradient of what was found is that of the whole, whatever the stage: it is handed on as it is."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, before: Tensor, lse_before: Tensor, asked: _Asked
    ) -> tuple[Tensor, Tensor]:
        met, window, _ = asked
        out_THN, lse_TH = before.clone(), lse_before.clone()
        find(q, kv, out_THN, lse_TH, met, window)
        ctx.save_for_backward(q, kv)
        ctx.asked = asked
        ctx.mark_non_differentiable(lse_TH)
        return out_THN, lse_TH

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, kv = ctx.saved_tensors
        met, window, final = ctx.asked
        out_THN, total_TH = final.out_THN, final.total_TH
        assert out_THN is not None, "the whole is known ahead of the backward of its stages"
        assert total_TH is not None, "with its output"
        dq, dkv = back(g, q, kv, (out_THN, total_TH), met, window)
        return dq, dkv, g if ctx.needs_input_grad[2] else None, None, None


def whole(found_THN: Tensor, lse_TH: Tensor, sinks: Destination | None, dtype: torch.dtype, final: Final) -> Tensor:
    """What queries have found in all stages, in the dtype of queries, with each head's sink if there are any.

    Backward of all stages will need it: `final` keeps it for them.
    """
    given = None if sinks is None else sinks.given
    out_THN, total_TH = _Whole.apply(found_THN, lse_TH, given, sinks, dtype)  # pyrefly: ignore[not-iterable]
    if torch.is_grad_enabled():
        final.out_THN, final.total_TH = out_THN.detach(), total_TH
    return out_THN


class _Whole(torch.autograd.Function):
    """See `sinks.py` for what a sink does."""

    @staticmethod
    def forward(
        ctx: Any, found: Tensor, lse_TH: Tensor, given: Tensor | None, where: Destination | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.where, ctx.dtype, total_TH = where, found.dtype, lse_TH.clone()
        if where is not None:
            sink_H = where.value().to(lse_TH.dtype)
            torch.logaddexp(lse_TH, sink_H, out=total_TH)
            found = found * (lse_TH - total_TH).exp_().unsqueeze(-1)
            ctx.save_for_backward(found, (sink_H - total_TH).exp_())
        ctx.mark_non_differentiable(total_TH)
        return found.to(dtype, copy=where is None), total_TH

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        sinks = None
        if ctx.where is not None:
            found, share_TH = ctx.saved_tensors
            along_TH = (g.to(found.dtype) * found).sum(-1)
            sinks = ctx.where.contribute(ctx, 2, Product(partial(sink_gradient, share_TH * along_TH, g.dtype)))
        return g.to(ctx.dtype), None, sinks, None, None

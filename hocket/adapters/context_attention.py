"""Attention of models of transformers whose tokens context-parallel ranks share.

Models call attention by a name in transformers' `AttentionInterface`, and hand it whatever keywords they were called
with. So what ranks share of a batch travels as a keyword, through recomputation as well, and no module is changed.

Note: [Gathers behind attention of other heads]
Keys and values are gathered in as many parts of heads as `PARTS` says. All gathers start before the first attention, so
the later ones run beside it. In backward autograd runs what was made last first: attention of the last part, the start
of its sum over ranks, attention of the part before, and waits for sums at the very end, for `_Start` came first.

Shapes: T tokens of this rank, U tokens of all ranks, H query heads, K key and value heads, N width of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.model.context import Context, in_order, in_ranks
from hocket.model.documents import Documents, attend
from hocket.model.stretches import attend_stretch
from hocket.runtime.transports import exchange_flat, gather_flat, reduce_scatter_flat

PARTS = 2
"""Parts of heads that keys and values are gathered in, if heads divide."""

KEYWORD = "hocket_shared"
"""What layers hand to attention beside its tensors: a `SharedBatch`."""

UNKNOWN = ("s_aux", "softcap", "position_bias", "cache", "head_mask", "attention_bias")
"""Arguments of attention that change what it computes, and that this one does not know."""


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """What attention is told of a batch whose tokens ranks share."""

    documents: Documents
    context: Context
    group: dist.ProcessGroup
    method: str


class _Exchanged:
    """What the two ends of a gather share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None
        self.grad: Tensor | None = None

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


class _Start(torch.autograd.Function):
    """Starts to gather rows of all ranks, whose values are there after `_Finish`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchanged: _Exchanged) -> Tensor:
        ctx.exchanged, rows = exchanged, rows.contiguous()
        out = rows.new_empty(exchanged.group.size() * rows.shape[0], *rows.shape[1:])
        exchanged.work = gather_flat(out, rows, group=exchanged.group, async_op=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.exchanged.wait()
        return ctx.exchanged.grad, None


class _Finish(torch.autograd.Function):
    """Waits for the rows; in backward starts the sum of their gradients, each rank's part where it belongs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchanged: _Exchanged) -> Tensor:
        ctx.exchanged = exchanged
        exchanged.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        group, grad = ctx.exchanged.group, grad.contiguous()
        out = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        ctx.exchanged.work = reduce_scatter_flat(out, grad, group=group, async_op=True)
        ctx.exchanged.grad = out
        return grad, None  # the values that `_Start` returns are those of the sum


class _AllToAll(torch.autograd.Function):
    """Sends the r-th part of the first dimension to rank r."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, rows = group, rows.contiguous()
        out = torch.empty_like(rows)
        exchange_flat(out, rows, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return _AllToAll.apply(grad, ctx.group), None


def attend_shared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: from [1, heads, T, N] to [1, T, H, N], for this rank's tokens.

    Raises: ValueError for what this attention does not compute, such as dropout, masks and sinks.

    """
    shared = others.get(KEYWORD)
    name = type(module).__name__
    if not isinstance(shared, SharedBatch):
        raise ValueError(
            f"{name} computes attention outside of a call of the model given to hocket.context_parallel: "
            f"call that model, or undo it with .remove()"
        )
    causal, window = others.get("is_causal"), others.get("sliding_window") or 0
    causal = getattr(module, "is_causal", True) if causal is None else causal
    wrong = [key for key in UNKNOWN if others.get(key) is not None]
    wrong += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    if wrong or not causal:
        raise ValueError(
            f"{name} asks for {', '.join(wrong) or 'attention that is not causal'}: not with context_parallel"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return COMPUTED[shared.method](q, k, v, shared, window, scaling).unsqueeze(0), None


def _gathered(q: Tensor, k: Tensor, v: Tensor, shared: SharedBatch, window: int, scale: float | None) -> Tensor:
    """Keys and values of all ranks, for the rank's own queries. See Note: [Gathers behind attention of other heads]."""
    parts = PARTS if k.shape[1] % PARTS == 0 else 1
    widths = [k.shape[-1], v.shape[-1]]
    ends = [_Exchanged(shared.group) for _ in range(parts)]
    pairs = zip(k.chunk(parts, 1), v.chunk(parts, 1), ends, strict=True)
    rows = [_Start.apply(torch.cat([k_part, v_part], -1), end) for k_part, v_part, end in pairs]
    found = []
    for q_part, kv, end in zip(q.chunk(parts, 1), rows, ends, strict=True):
        kv_UKN = in_order(_Finish.apply(kv, end), shared.context)
        k_UKN, v_UKN = kv_UKN.split(widths, -1)
        found.append(_of_spans(q_part, k_UKN, v_UKN, shared.context, window, scale))
    return torch.cat(found, 1)


def _of_spans(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int, scale: float | None) -> Tensor:
    found = []
    for span in context.spans:
        queries, keys = (slice(r.start, r.stop) for r in (span.queries, span.keys))
        found.append(attend_stretch(q[queries], k[keys], v[keys], span, context.of_sequences, window, scale))
    return torch.cat(found)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, shared: SharedBatch, window: int, scale: float | None) -> Tensor:
    """A part of the heads, for all tokens."""
    ranks, context = shared.group.size(), shared.context
    heads = [x.shape[1] // ranks for x in (q, k, v)]
    sent = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q, k, v)], 2).transpose(0, 1)  # [ranks, T, heads, N]
    rows_UHN = in_order(_AllToAll.apply(sent, shared.group).flatten(0, 1), context)
    q_UHN, k_UKN, v_UKN = rows_UHN.split(heads, 1)
    out_UHN = attend(q_UHN, k_UKN, v_UKN, shared.documents, window, scale)
    back = in_ranks(out_UHN, context).unflatten(0, (ranks, -1))
    return _AllToAll.apply(back, shared.group).transpose(0, 1).flatten(1, 2)


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor, SharedBatch, int, float | None], Tensor]] = {
    "gather": _gathered,
    "heads": _by_heads,
}
"""Attention by method."""

"""Attention with a sink: a logit of each query head that takes part in the softmax and has no value.

A sink takes a share of the softmax away from the keys (gpt-oss; Xiao et al. 2023, "Efficient Streaming Language Models
with Attention Sinks", for the idea). With the logarithm `lse` of the sum of exponentials over keys, it makes

    lse'  = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

so any kernel that returns `lse` will do. Its backward needs no change either. It computes the weights as `exp(score -
lse)`, and the gradient of a score as the weight times (gradient of the weight - sum of gradient * out): with `out'` and
`lse'` in place of its own two, both are those of the softmax with the sink. The sink is one more score, whose weight
`exp(sink - lse')` has no value: its gradient is that weight times minus the sum of gradient * out'.

Shapes: T tokens, H query heads, K key and value heads, N width of a head, B sequences, S sequence length, G query heads
of a key head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.model.documents import Seen, has_flash
from hocket.runtime.destinations import Destination, Ordinary, queued
from hocket.runtime.weights import Product, put, weight_of

Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, N], keys and values [T, K, N], or their gradients."""


def attend_with_sinks(
    q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, param_H: Tensor, documents: Seen, window: int = 0
) -> Tensor:
    """`documents.attend` with a sink for each query head: [T, H, N]."""
    weight = weight_of(param_H)
    where: Destination = Ordinary(param_H) if weight is None else queued(q_THN, weight)
    return _Sinks.apply(q_THN, k_TKN, v_TKN, where.given, where, (documents, window))


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        given: Tensor | None,
        where: Destination,
        seen: tuple[Seen, int],
    ) -> Tensor:
        forward, ctx.backward_of = (_flash, _flash_backward) if has_flash(q) else (_plain, _plain_backward)
        out, lse_TH = forward((q, k, v), *seen)
        sink_H = where.value().to(lse_TH.dtype)
        total_TH = torch.logaddexp(lse_TH, sink_H)
        out.mul_((lse_TH - total_TH).exp_().unsqueeze(-1))
        ctx.save_for_backward(q, k, v, out, total_TH, (sink_H - total_TH).exp_())
        ctx.where, ctx.seen = where, seen
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, out, total_TH, share_TH = ctx.saved_tensors
        along_TH = (g.to(total_TH.dtype) * out).sum(-1)
        dq, dk, dv = ctx.backward_of(g, (q, k, v), out, total_TH, along_TH, *ctx.seen)
        sinks = ctx.where.contribute(ctx, 3, Product(partial(_sink_gradient, share_TH * along_TH, g.dtype)))
        return dq, dk, dv, sinks, None, None


def _sink_gradient(shares_TH: Tensor, dtype: torch.dtype, out_H: Tensor, add: bool, scale: float) -> None:
    put(-shares_TH.sum(0).to(dtype), out_H, add, scale)


# ---------------------------------------------------------------------------------------------------------- the kernel


def _lengths(documents: Seen) -> tuple[Tensor, Tensor, int, int]:
    return documents.ends, documents.key_ends, documents.longest, documents.key_longest


def _flash(qkv: Triple, documents: Seen, window: int) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the sums of exponentials, fp32 [T, H]."""
    found = torch.ops.aten._flash_attention_forward(
        *qkv, *_lengths(documents), 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )
    return found[0], found[1].t()


def _flash_backward(
    g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, along_TH: Tensor, documents: Seen, window: int
) -> Triple:
    unused = torch.zeros(2, dtype=torch.uint64, device=g.device)  # of random numbers, for dropout
    return torch.ops.aten._flash_attention_backward(
        g, *qkv, out, total_TH.t().contiguous(), *_lengths(documents), 0.0, True, unused, unused,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the formula


def _heads(x_THN: Tensor, documents: Seen, keys: int) -> Tensor:
    """[B, K, G, S, N], in fp32 at least; K is `keys`."""
    x_BSKGN = x_THN.reshape(documents.batch, x_THN.shape[0] // documents.batch, keys, -1, x_THN.shape[-1])
    return x_BSKGN.permute(0, 2, 3, 1, 4).to(torch.promote_types(x_THN.dtype, torch.float32))


def _tokens(x_BKGSN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, N] again."""
    return x_BKGSN.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).to(dtype)


def _scores(q_BKGSN: Tensor, k_BK1SN: Tensor, documents: Seen, window: int) -> Tensor:
    scores = q_BKGSN @ k_BK1SN.mT * q_BKGSN.shape[-1] ** -0.5
    return scores.masked_fill(~documents.within(window).unsqueeze(1), -torch.inf)


def _plain(qkv: Triple, documents: Seen, window: int) -> tuple[Tensor, Tensor]:
    """What `_flash` computes, in fp32."""
    keys = qkv[1].shape[1]
    q, k, v = (_heads(x, documents, keys) for x in qkv)
    scores = _scores(q, k, documents, window)
    lse_BKGS1 = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse_BKGS1).exp() @ v
    return _tokens(out, qkv[0].dtype), _tokens(lse_BKGS1, lse_BKGS1.dtype).squeeze(-1)


def _plain_backward(
    g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, along_TH: Tensor, documents: Seen, window: int
) -> Triple:
    keys, dtype = qkv[1].shape[1], g.dtype
    q, k, v, g, total, along = (
        _heads(x, documents, keys) for x in (*qkv, g, total_TH.unsqueeze(-1), along_TH.unsqueeze(-1))
    )
    weights = (_scores(q, k, documents, window) - total).exp()
    g_scores = weights * (g @ v.mT - along) * q.shape[-1] ** -0.5
    dk, dv = (g_scores.mT @ q).sum(2, keepdim=True), (weights.mT @ g).sum(2, keepdim=True)
    dq, dk, dv = (_tokens(x, dtype) for x in (g_scores @ k, dk, dv))
    return dq, dk, dv

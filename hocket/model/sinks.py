"""Attention with a sink: a logit of each query head that takes part in the softmax and has no value.

A sink takes a share of the softmax away from the keys (gpt-oss; Xiao et al. 2023, "Efficient Streaming Language Models
with Attention Sinks", for the idea). With the logarithm `lse` of the sum of exponentials over keys, it makes

    lse'  = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

so any kernel that returns `lse` will do. Its backward needs no change either, since it takes output and `lse` of the
whole (`partial_attention.py`): with `out'` and `lse'` they are those of the softmax with the sink. The sink
is one more score, whose weight `exp(sink - lse')` has no value: its gradient is that weight times minus the sum of
gradient * out'.

Shapes: T tokens, H query heads, K key and value heads, N width of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.model import partial_attention
from hocket.model.documents import Seen
from hocket.runtime.weights import Destination, Ordinary, Product, put, queued, weight_of


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
        out, lse_TH = partial_attention.found((q, k, v), *seen)
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
        dq, dk, dv = partial_attention.gradients(g, (q, k, v), out, total_TH, *ctx.seen)
        sinks = ctx.where.contribute(ctx, 3, Product(partial(sink_gradient, share_TH * along_TH, g.dtype)))
        return dq, dk, dv, sinks, None, None


def sink_gradient(shares_TH: Tensor, dtype: torch.dtype, out_H: Tensor, add: bool, scale: float) -> None:
    """Write the gradient of sinks from each token's share of it."""
    put(-shares_TH.sum(0).to(dtype), out_H, add, scale)

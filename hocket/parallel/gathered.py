"""Experts that take tokens and give tokens, where all rows stay on this rank: nobody makes rows, and nobody keeps them.

What `parallel/rows.py` and `runtime/experts.py` do one after the other, to the same bits: the first product and both
weight gradients gather their rows among the tokens, and so do the products of gradients. Only what experts give is
there as rows, until it is summed up.

Shapes: T tokens, K choices, R rows grouped by expert, D hidden, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph
from hocket.parallel.rows import total_of
from hocket.runtime.destinations import destination
from hocket.runtime.functional import grouped_mm
from hocket.runtime.weights import Product, put


def experts_of_tokens(
    x_TD: Tensor,
    weights_TK: Tensor,
    place_TK: Tensor,
    offsets_E: Tensor,
    params: tuple[Tensor, Tensor],
    more: tuple[Tensor, Tensor | None],
) -> Tensor:
    """`(sum over a token's choices of weight * expert(x)) [+ shared] + residual`, in the residual's shape.

    `params` are the weights of gates and ups and those behind, `more` is (residual, shared or None). `place` says
    which row in grouped order each choice is, and no two are the same. For what `runtime.experts.gates_itself` takes.
    """
    wheres = tuple(destination(x_TD, param) for param in params)
    given = (where.given for where in wheres)
    return _Tokens.apply(x_TD, *given, weights_TK, *more, place_TK, offsets_E, wheres)


def _weight_gradients(x: Any, g: Any, offsets_E: Tensor, out_EDF: Tensor, add: bool, scale: float) -> None:
    """As `runtime.functional.grouped_wgrad`, of gathered rows."""
    from hocket.kernels.grouped import weight_gradients

    if add and out_EDF.dtype is not torch.float32:
        made = torch.empty_like(out_EDF)
        weight_gradients(x, g, offsets_E, made)
        put(made, out_EDF, add, scale)
    else:
        weight_gradients(x, g, offsets_E, out_EDF, add, scale)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Any, given_down: Any, probs: Tensor, *others: Any) -> Tensor:
        from hocket.kernels.experts import up
        from hocket.kernels.rows import sources

        residual, shared, place, offsets, (ctx.where, ctx.where_down) = others
        source, weights = sources(probs, place, place.numel())
        gate_up, inner = up(x, source, ctx.where.value(), offsets, weights, len(source))
        ctx.save_for_backward(x, source, weights, gate_up, inner, place, offsets)
        ctx.has_shared = shared is not None
        return total_of(grouped_mm(inner, ctx.where_down.value(), offsets), None, place, residual, shared)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels import rows
        from hocket.kernels.experts import down_backward

        refuse_graph()
        x, source, weights, gate_up, inner, place, offsets = ctx.saved_tensors
        g_TD = g.reshape(-1, g.shape[-1]).contiguous()
        g_gate_up, g_weights = down_backward(g_TD, source, ctx.where_down.again(), offsets, weights, gate_up)
        work_down = partial(_weight_gradients, inner, (g_TD, source), offsets)
        dw_down = ctx.where_down.contribute(ctx, 2, Product(work_down))
        work = partial(_weight_gradients, (x.detach(), source), g_gate_up, offsets)
        dw = ctx.where.contribute(ctx, 1, Product(work))
        dx = total_of(grouped_mm(g_gate_up, ctx.where.again().transpose(1, 2), offsets), None, place)
        assert g_weights is not None
        g_probs = g_weights.new_empty(place.shape)
        rows.weights(g_probs, g_weights, place, back=True)
        return dx, dw, dw_down, g_probs, g, g if ctx.has_shared else None, None, None, None

"""Experts in bf16 on a GPU: two grouped products, with SwiGLU inside of them, forward and backward.

`kernels/experts.py` has the products that gate: the first one forward, and the second one's input gradient. The others
are torch's, and the weight gradients those of `kernels/grouped.py`. What is kept for backward is what single functions
would keep: rows, gates and ups, and what they make.

Shapes: R rows grouped by expert, D hidden, E local experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph, usable
from hocket.runtime.destinations import Destination, destination, value_of
from hocket.runtime.functional import grouped_mm, grouped_wgrad
from hocket.runtime.weights import Product


def gates_itself(rows_RD: Tensor, *params: Tensor) -> bool:
    """Whether there are products that gate these rows."""
    tensors = (rows_RD, *map(value_of, params))
    return usable(*tensors) and all(tensor.dtype is torch.bfloat16 for tensor in tensors)


def gated_experts(
    rows_RD: Tensor, p_gate_up: Tensor, p_down: Tensor, offsets_E: Tensor, weights_R: Tensor | None
) -> Tensor:
    """`silu(gate) * up` between two products of each expert's rows, [R, D]; with `weights`, fp32, times the row's.

    `offsets` as of `grouped_linear`. Rows behind the last one hold anything.
    """
    wheres = tuple(destination(rows_RD, param) for param in (p_gate_up, p_down))
    return _Experts.apply(rows_RD, *(where.given for where in wheres), weights_R, offsets_E, wheres)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Any,
        given_down: Any,
        weights: Tensor | None,
        offsets: Tensor,
        wheres: tuple[Destination, Destination],
    ) -> Tensor:
        from hocket.kernels.experts import up

        ctx.where, ctx.where_down = wheres
        gate_up, inner = up(x, None, ctx.where.value(), offsets, weights, len(x))
        ctx.save_for_backward(x, gate_up, inner, weights, offsets)
        return grouped_mm(inner, ctx.where_down.value(), offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels.experts import down_backward

        refuse_graph()
        x, gate_up, inner, weights, offsets = ctx.saved_tensors
        g = g.contiguous()
        g_gate_up, g_weights = down_backward(g, None, ctx.where_down.again(), offsets, weights, gate_up)
        dw_down = ctx.where_down.contribute(ctx, 2, Product(partial(grouped_wgrad, inner, g, offsets)))
        dw = ctx.where.contribute(ctx, 1, Product(partial(grouped_wgrad, x.detach(), g_gate_up, offsets)))
        dx = grouped_mm(g_gate_up, ctx.where.again().transpose(1, 2), offsets)
        return dx, dw, dw_down, g_weights, None, None

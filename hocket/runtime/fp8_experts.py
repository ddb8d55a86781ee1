"""Experts in fp8: SwiGLU between two grouped products, forward and input gradient. Weight gradients run in bf16.

Stacked weights are [E, D, F], with rows along the input gradient's sum. So there the scales of their rows are scales of
the result's columns, and forward, which reads the same bytes transposed, has them multiplied to its rows: the other
way round than in `fp8.py`, and from the scales of each row's own expert. Weight gradients of grouped rows would sum
over rows whose number only the device knows, which products in fp8 take in multiples of 16 alone: they run as they do
without fp8 (`kernels/grouped.py`), from rows that are kept in bf16.

Shapes: R rows grouped by expert, D input width, F output width, E local experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph, usable
from hocket.runtime.fp8 import (
    Products,
    Rows,
    cast_rows,
    cast_weights,
    ones,
    swiglu_rows,
    swiglu_rows_backward,
    where_of,
)
from hocket.runtime.functional import grouped_mm, grouped_wgrad
from hocket.runtime.weights import Product


def fp8_experts(
    x_RD: Tensor,
    p_gate_up: Tensor,
    p_down: Tensor,
    offsets_E: Tensor,
    of_rows: tuple[Tensor | None, Tensor | None],
    products: Products,
) -> Tensor:
    """SwiGLU of each expert on its rows: [R, D]. `offsets` as of `grouped_linear`, `of_rows` the count and the weights
    of `swiglu`.
    """
    wheres = where_of(x_RD, p_gate_up), where_of(x_RD, p_down)
    return _Experts.apply(x_RD, *(where.given for where in wheres), offsets_E, *of_rows, wheres, products)


def owners(rows: int, offsets_E: Tensor) -> Tensor:
    """The expert of every row, int32 [R]; rows behind the last one's have the last one."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets_E.device)
    found = torch.searchsorted(offsets_E, row, right=True, out_int32=True)
    return found.clamp_(max=len(offsets_E) - 1)


def grouped_product(a: Rows, b_ENK: Tensor, scale_EN: Tensor | None, offsets_E: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b[e].T` of each expert's rows, in fp8; columns of the result times `scale[e]`, if that is given."""
    if scale_EN is None:
        scale_EN = ones(b_ENK.shape[0] * b_ENK.shape[1], b_ENK.device).view(b_ENK.shape[:2])
    values, scale = a.values, a.scale
    if not values.shape[0]:  # no launch takes a matrix without rows
        return torch.empty(0, b_ENK.shape[1], dtype=dtype, device=values.device)
    if values.is_cuda and usable(scale, scale_EN):
        how: dict[str, Any] = {"offs": offsets_E, "out_dtype": dtype, "use_fast_accum": True}
        return torch._scaled_grouped_mm(values, b_ENK.transpose(1, 2), scale, scale_EN, **how)
    out, low = torch.zeros(values.shape[0], b_ENK.shape[1], dtype=dtype, device=values.device), 0
    for e, high in enumerate(offsets_E.tolist()):
        y = (values[low:high].float() @ b_ENK[e].float().t()) * scale[low:high, None] * scale_EN[e]
        out[low:high] = y.to(dtype)
        low = high
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: Any, given_down: Any, offsets: Tensor, count: Tensor | None, *how: Any
    ) -> Tensor:
        weights, (where, where_down), products = how
        ctx.where, ctx.where_down, ctx.products = where, where_down, products
        dtype = x.dtype
        inner = x.new_empty(x.shape[0], where_down.value().shape[1])
        if products.forward:
            owner_R = owners(x.shape[0], offsets)
            w, down = cast_weights([where]), cast_weights([where_down])
            rows = cast_rows([x], w.scale, owner_R, count)
            gate_up = grouped_product(rows, w.transposed(), None, offsets, dtype)
            rows = swiglu_rows(gate_up, down.scale, owner_R, count, inner, weights)
            y = grouped_product(rows, down.transposed(), None, offsets, dtype)
        else:
            gate_up = grouped_mm(x, where.value(), offsets)
            swiglu_rows(gate_up, count=count, wide=inner, weights_R=weights)
            y = grouped_mm(inner, where_down.value(), offsets)
        ctx.save_for_backward(x, gate_up, inner, offsets, count, weights)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        x, gate_up, inner, offsets, count, weights = ctx.saved_tensors
        g_weights = None if weights is None else torch.empty_like(weights)
        both = None if g_weights is None else (weights, g_weights)
        where, where_down, g = ctx.where, ctx.where_down, g.contiguous()
        g_gate_up = torch.empty_like(gate_up)
        if ctx.products.dgrad:
            w, down = cast_weights([where], again=True), cast_weights([where_down], again=True)
            g_inner = grouped_product(cast_rows([g], count=count), down.values, down.scale, offsets, g.dtype)
            rows = swiglu_rows_backward(g_inner, gate_up, None, count, g_gate_up, both)
            dx = grouped_product(rows, w.values, w.scale, offsets, g.dtype)
        else:
            g_inner = grouped_mm(g, where_down.again().transpose(1, 2), offsets)
            swiglu_rows_backward(g_inner, gate_up, None, count, g_gate_up, both)
            dx = grouped_mm(g_gate_up, where.again().transpose(1, 2), offsets)
        work = Product(partial(grouped_wgrad, x.detach(), g_gate_up, offsets))
        work_down = Product(partial(grouped_wgrad, inner, g, offsets))
        dw_down = where_down.contribute(ctx, 2, work_down)
        return dx, where.contribute(ctx, 1, work), dw_down, None, None, g_weights, None, None

"""A bias of each expert, added to its rows. Weights are read as in `functional.py`.

Shapes: R rows grouped by expert, F width, E local experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph, usable
from hocket.runtime.destinations import Destination, apply
from hocket.runtime.weights import Product, put


def add_bias_by_expert(x_RF: Tensor, p_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """`x + p[e]` of the rows `offsets[e - 1]:offsets[e]` of every expert; the rows behind the last one mean nothing.

    `offsets` is int32, on the device of `x`. On a GPU the result takes the memory of `x`. An expert without rows gets a
    zero gradient.
    """
    return apply(_AddBiasByExpert, x_RF, p_EF, offsets_E)


def sum_by_expert(g_RF: Tensor, offsets_E: Tensor, out_EF: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Write `scale` times the sum of every expert's rows to `out`, or add it."""
    if usable(g_RF, out_EF):
        from hocket.kernels.biases import row_sums

        row_sums(g_RF, offsets_E, out_EF, add, scale)
        return
    ends: list[int] = offsets_E.tolist()
    sums = [g_RF[lo:hi].sum(0) for lo, hi in zip([0, *ends[:-1]], ends, strict=True)]
    put(torch.stack(sums), out_EF, add, scale)


class _AddBiasByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.where, value_EF = where, where.value()
        if usable(x, value_EF):
            from hocket.kernels.biases import add_by_expert

            ctx.mark_dirty(x)
            return add_by_expert(x, value_EF, offsets)
        rows_R = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
        expert_R = torch.searchsorted(offsets, rows_R, right=True).clamp_(max=len(offsets) - 1)
        return x + value_EF[expert_R]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (offsets,) = ctx.saved_tensors
        if g.is_cuda:
            refuse_graph()
        return g, ctx.where.contribute(ctx, 1, Product(partial(sum_by_expert, g.contiguous(), offsets))), None, None

"""Root-mean-square norms and the operations next to them: residual additions and rotary positions.

Weights are read as in `functional.py`. Without a kernel, its formulas are used.

Shapes: T tokens or any leading dimensions, D width, B sequences, S sequence length, H heads, N width of a head,
R elements of a head that rotate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import usable
from hocket.layers.functional import scale
from hocket.runtime.weights import Destination, apply, save_input, saved_input, value_of


def rms_norm(x_TD: Tensor, p_D: Tensor, eps: float, one: bool = False) -> Tensor:
    """Root-mean-square normalisation over the last dimension, then `scale`; with `one`, by 1 + weight."""
    if _has_kernel(x_TD, p_D):
        return apply(_RmsNorm, x_TD, p_D, eps, one)
    return scale(F.rms_norm(x_TD, (x_TD.shape[-1],), None, eps), p_D, one)


def add_rms_norm(
    x_TD: Tensor, more_TD: Tensor | None, p_D: Tensor, eps: float, one: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream `x + more`, or just `x`, and its `rms_norm`.

    Callers use the first result in place of `x`, so that one kernel adds the gradients of its readers and of the norm.
    """
    alike = more_TD is None or (more_TD.dtype == x_TD.dtype and more_TD.shape == x_TD.shape and usable(more_TD))
    if alike and _has_kernel(x_TD, p_D):
        return apply(_AddNorm, x_TD, p_D, eps, one, more_TD)
    total_TD = x_TD if more_TD is None else x_TD + more_TD
    return total_TD, rms_norm(total_TD, p_D, eps, one)


def rotate(x_BSHN: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair (first half, second half) of every head's first R elements by its position's angle, in fp32.

    `table` has the cosines and sines of all positions' angles, [2, S, 1, R / 2].
    """
    if usable(x_BSHN, table):
        from hocket.kernels.norm import Rotary

        return Rotary.apply(x_BSHN, table, False)
    cos, sin = table
    half = table.shape[-1]
    first, second, rest = x_BSHN.split([half, half, x_BSHN.shape[-1] - 2 * half], -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BSHN.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def norm_rotate(x_BSHN: Tensor, p_N: Tensor, eps: float, table: Tensor, one: bool = False) -> Tensor:
    """`rms_norm` of every head, then `rotate`."""
    if usable(table) and _has_kernel(x_BSHN, p_N):
        return apply(_NormRotate, x_BSHN, p_N, eps, one, table)
    return rotate(rms_norm(x_BSHN, p_N, eps, one), table)


def _factor(p_D: Tensor, one: bool) -> Tensor:
    """The factor of a norm with a weight; 1 + weight in fp32, in which kernels compute."""
    return p_D.float() + 1 if one else p_D


def _has_kernel(x_TD: Tensor, p_D: Tensor) -> bool:
    """Whether the kernel applies: a program holds a whole row, and mixed dtypes would need torch's promotion."""
    value_D = value_of(p_D)
    return usable(x_TD, value_D) and x_TD.dtype == value_D.dtype and x_TD.shape[-1] <= 32768


class _RmsNorm(torch.autograd.Function):
    """One kernel per direction for norm and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, eps: float, one: bool) -> Tensor:
        from hocket.kernels import norm

        ctx.eps, ctx.one = eps, one
        return norm.forward(x, _factor(save_input(ctx, x, dest), one), eps)[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels import norm

        x, p_D = saved_input(ctx)
        dx, parts_PD = norm.backward(g, x, _factor(p_D, ctx.one), ctx.eps)
        return dx, ctx.dest.contribute(ctx, 1, partial(norm.sum_parts, parts_PD)), None, None, None


class _AddNorm(torch.autograd.Function):
    """Saves the sum, not its operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, eps: float, one: bool, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from hocket.kernels import norm

        total, y = norm.forward(x, _factor(dest.value(), one), eps, more)
        save_input(ctx, total, dest)
        ctx.eps, ctx.one, ctx.added = eps, one, more is not None
        return total, y

    @staticmethod
    def backward(ctx: Any, g_total: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels import norm

        total, p_D = saved_input(ctx)
        dx, parts_PD = norm.backward(g, total, _factor(p_D, ctx.one), ctx.eps, g_total)
        dw = ctx.dest.contribute(ctx, 1, partial(norm.sum_parts, parts_PD))
        return dx, dw, None, None, None, dx if ctx.added else None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, eps: float, one: bool, table: Tensor
    ) -> Tensor:
        from hocket.kernels import norm

        ctx.eps, ctx.one, ctx.table = eps, one, table
        return norm.rope(x, table, _factor(save_input(ctx, x, dest), one), eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels import norm

        x, p_N = saved_input(ctx)
        dx, parts_PN = norm.norm_rope_backward(g, x, ctx.table, _factor(p_N, ctx.one), ctx.eps)
        return dx, ctx.dest.contribute(ctx, 1, partial(norm.sum_parts, parts_PN)), None, None, None, None

"""Moving rows: to the places that a table names, and back as sums, with gradients that are moves again.

A table `place` [N, K] says, for each of N rows and each of its K choices, which row of another tensor stands for it;
-1 says that none does. No two choices share a place. So what goes one way is a copy, and what goes the other way a sum
over a row's choices, in their order, in fp32, rounded once. Nothing is ever accumulated over an index: that makes it
deterministic on every device, and much faster than the backward of plain indexing. On GPUs the kernels of
`hocket/kernels/rows.py` compute what the formulas here say, and read and write every row once.

Shapes: N and R rows, D columns, K choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.kernels.usable import usable


def gather(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows `x[order]`; `inverse` is the permutation that undoes `order`."""
    return _Gather.apply(x_RD, order_R, inverse_R)


def spread(x_ND: Tensor, place_NK: Tensor, rows: int) -> Tensor:
    """Every row at all its places, [rows, D]; places that nobody has hold anything."""
    return _Spread.apply(x_ND, place_NK, rows)


def spread_weights(weights_NK: Tensor, place_NK: Tensor, rows: int) -> Tensor:
    """The weight of every choice at its place, fp32 [rows]; places that nobody has hold anything."""
    return _SpreadWeights.apply(weights_NK, place_NK, rows)


def total(
    rows_RD: Tensor,
    probs_NK: Tensor | None,
    place_NK: Tensor,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """`(sum over choices of prob * row) [+ shared] [+ residual]`, [N, D] or in the shape of the residual.

    Without `probs` (fp32) all of them are 1, and nothing but the table is kept for backward.
    """
    return _Total.apply(rows_RD, probs_NK, place_NK, residual, shared)


def spread_into(x_ND: Tensor, place_NK: Tensor, out_RD: Tensor) -> None:
    """Copy every row to all its places in `out`, without a graph. Columns of both must be contiguous."""
    if usable(x_ND):
        from hocket.kernels import rows

        rows.spread(x_ND, place_NK, out_RD)
        return
    here = place_NK.reshape(-1) >= 0
    source = torch.arange(here.numel(), device=here.device)[here] // place_NK.shape[1]
    out_RD[place_NK.reshape(-1)[here].long()] = x_ND.index_select(0, source)


def total_of(
    rows_RD: Tensor,
    probs_NK: Tensor | None,
    place_NK: Tensor,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What `total` says, without a graph; without a residual also into `out` [N, D]. Columns must be contiguous."""
    if usable(rows_RD):
        from hocket.kernels import rows

        return rows.total(rows_RD, probs_NK, place_NK, residual, shared, out)
    chosen_NKD = _chosen(rows_RD, place_NK)
    total_ND = _sum_in_order(chosen_NKD if probs_NK is None else chosen_NKD * probs_NK.unsqueeze(-1))
    if shared is not None:
        total_ND = total_ND + shared.view_as(total_ND)
    if residual is not None:
        return (total_ND.view_as(residual) + residual).to(residual.dtype)
    return total_ND.to(rows_RD.dtype) if out is None else out.copy_(total_ND)


def _total_backward(g_ND: Tensor, rows_RD: Tensor, probs_NK: Tensor, place_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows, [R, D], and of weights, fp32 [N, K], whose sums run over columns."""
    if usable(rows_RD, probs_NK):
        from hocket.kernels import rows

        return rows.total_backward(g_ND, rows_RD, probs_NK, place_NK)
    here = place_NK.reshape(-1) >= 0
    at, source = place_NK.reshape(-1)[here].long(), torch.arange(here.numel(), device=here.device)[here]
    g_rows_RD = torch.zeros_like(rows_RD)
    scaled_RD = g_ND.index_select(0, source // place_NK.shape[1]) * probs_NK.reshape(-1)[source].unsqueeze(-1)
    g_rows_RD[at] = scaled_RD.to(rows_RD.dtype)
    return g_rows_RD, (_chosen(rows_RD, place_NK) * g_ND.unsqueeze(1)).sum(-1)


def _chosen(rows_RD: Tensor, place_NK: Tensor) -> Tensor:
    """The row of every choice in fp32, [N, K, D]; 0 where there is none."""
    at = place_NK.reshape(-1)
    rows = rows_RD.index_select(0, at.clamp(min=0)) if len(rows_RD) else rows_RD.new_zeros(len(at), rows_RD.shape[1])
    return rows.float().masked_fill((at < 0).unsqueeze(-1), 0.0).view(*place_NK.shape, rows_RD.shape[1])


def _sum_in_order(x_NKD: Tensor) -> Tensor:
    """The sum over K from the first to the last, which `Tensor.sum` does not promise."""
    first_ND, *others = x_NKD.unbind(1)
    total_ND = first_ND.clone()
    for each_ND in others:
        total_ND += each_ND
    return total_ND


class _Gather(torch.autograd.Function):
    """Rows in another order; backward gathers with the inverse."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return _gathered(x_RD, order_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return _gathered(g_RD, ctx.saved_tensors[0]), None, None


def _gathered(x_RD: Tensor, order_R: Tensor) -> Tensor:
    if usable(x_RD):
        from hocket.kernels import rows

        return rows.gather(x_RD, order_R)
    return x_RD.index_select(0, order_R)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_NK: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place_NK)
        out_RD = x_ND.new_empty(rows, x_ND.shape[1])
        spread_into(x_ND, place_NK, out_RD)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return total_of(g_RD, None, ctx.saved_tensors[0]), None, None


class _SpreadWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, place_NK: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place_NK)
        out_R = weights_NK.new_empty(rows)
        if usable(weights_NK):
            from hocket.kernels import rows as kernels

            kernels.weights(weights_NK.contiguous(), out_R, place_NK, back=False)
            return out_R
        here = place_NK >= 0
        out_R[place_NK[here].long()] = weights_NK[here]
        return out_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_R: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (place_NK,) = ctx.saved_tensors
        g_NK = g_R.new_empty(place_NK.shape)
        if usable(g_R):
            from hocket.kernels import rows as kernels

            kernels.weights(g_NK, g_R.contiguous(), place_NK, back=True)
            return g_NK, None, None
        here = place_NK >= 0
        g_NK[here], g_NK[~here] = g_R[place_NK[here].long()], 0.0
        return g_NK, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_NK: Tensor | None,
        place_NK: Tensor,
        residual: Tensor | None,
        shared: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*((place_NK,) if probs_NK is None else (place_NK, rows_RD, probs_NK)))
        ctx.rows, ctx.has_residual, ctx.has_shared = len(rows_RD), residual is not None, shared is not None
        return total_of(rows_RD, probs_NK, place_NK, residual, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        place_NK, *kept = ctx.saved_tensors
        g_ND = g.reshape(-1, g.shape[-1])
        if kept:
            rows_RD, probs_NK = kept
            g_rows_RD, g_probs_NK = _total_backward(g_ND, rows_RD, probs_NK, place_NK)
        else:
            g_rows_RD, g_probs_NK = g_ND.new_empty(ctx.rows, g_ND.shape[1]), None
            spread_into(g_ND.contiguous(), place_NK, g_rows_RD)
        return g_rows_RD, g_probs_NK, None, g if ctx.has_residual else None, g if ctx.has_shared else None

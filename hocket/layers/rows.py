"""Moving rows: to the places in a table, and back as sums, with gradients that are moves again.

A table `place` [N, K] has, for each of N rows and each of its K choices, the index of a row of another tensor; -1 for
none. No two choices share a place. So one direction is a copy, and the other a sum over a row's choices, in order, in
fp32, rounded once. No operation accumulates over an index, so all are deterministic on every device, and much faster
than the backward of plain indexing. On GPUs the kernels of `hocket/kernels/rows.py` compute these formulas, and read
and write every row once.

Shapes: N and R rows, D columns, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.kernels import usable
from hocket.predict.part_sizes import label_bytes


def gather(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows `x[order]`; `inverse` is the permutation that undoes `order`."""
    return _Gather.apply(x_RD, order_R, inverse_R)


def spread(x_ND: Tensor, place_NK: Tensor, rows: int) -> Tensor:
    """Every row copied to all its places, [rows, D]; other rows are undefined."""
    return _Spread.apply(x_ND, place_NK, rows)


def spread_weights(weights_NK: Tensor, place_NK: Tensor, rows: int) -> Tensor:
    """The weight of every choice at its place, fp32 [rows]; other elements are undefined."""
    return _SpreadWeights.apply(weights_NK, place_NK, rows)


def total(
    rows_RD: Tensor,
    probs_NK: Tensor | None,
    place_NK: Tensor,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """`(sum over choices of prob * row) [+ shared] [+ residual]`, [N, D] or in the shape of the residual.

    Without `probs` (fp32) all weights are 1, and only the table is kept for backward.
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
    """`total` without a graph; without a residual also into `out` [N, D]. Columns must be contiguous."""
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
    """Gradients of rows, [R, D], and of weights, fp32 [N, K], which sum over columns."""
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
    """The row of every choice in fp32, [N, K, D]; 0 for none."""
    at = place_NK.reshape(-1)
    rows = rows_RD.index_select(0, at.clamp(min=0)) if len(rows_RD) else rows_RD.new_zeros(len(at), rows_RD.shape[1])
    return rows.float().masked_fill((at < 0).unsqueeze(-1), 0.0).view(*place_NK.shape, rows_RD.shape[1])


def _sum_in_order(x_NKD: Tensor) -> Tensor:
    """The sum over K in order, which `Tensor.sum` does not guarantee."""
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


# ------------------------------------------------------------------------------------------------------------- per rank
#
# One copy per destination rank: one row per (token, rank), however many of the token's experts are there.
#
# A token's choices mostly share ranks: 8 choices among 4 ranks fall on 3.6 ranks on average. So a row has a *label*,
# columns after the hidden state that list the token's choices on that rank, and their weights:
#
#     hidden state [D]  |  seat of every choice, int32 [K]  |  their weights, fp32 [K]
#
# with a seat of -1 and a weight of 0 for choices on other ranks.
#
# The *seat* of a choice is its index among the choices for that rank, in the order of `Routing.inverse_R`: that of rows
# with one copy per choice. From seats and exchanged counts the receiver computes each choice's place in grouped order.
# It copies the row there once per choice, runs the experts, and sums a row's outputs in fp32, in the order of the
# choices; the experts or this sum apply the weights. It returns one rounded row per pair, and the token's own rank sums
# at most as many rows as there are ranks. Backward is the same in reverse: gradients of hidden states travel as rows,
# and gradients of weights in the rows' labels.
#
# Note: [Labels are bits]
# A label shares rows, and thus a message, with numbers of another dtype. Rows are only copied, and only `open_rows` and
# the gradient of `pack` read labels, as bits, so no rounding and no sum ever touches them.
#
# Note: [Bits of the two ways]
# With one copy per expert, a token's rows are all summed on its own rank in fp32. The only difference here is one
# rounding to the rows' dtype per (token, rank): in forward, and of the gradient of the hidden state in backward.
# Choices and expert products have the same bits for the same input. Both ways are reproducible.
#
# Shapes: T tokens, K choices, P expert-parallel ranks, N rows (pairs), D hidden, W columns of a labelled row, R rows in
# grouped order.


@dataclass(frozen=True, eq=False)
class Pairs:
    """The (token, rank) pairs of one microbatch, on the rank of the tokens. Rows are sorted by rank, then token."""

    row_TK: Tensor
    """Sent row that contains a choice, int32."""
    first_TK: Tensor
    """The same for the token's first choice on each rank, -1 for others: every row once, in the order of choices."""
    seat_TK: Tensor
    """Index of a choice among all choices for its rank, int32."""
    counts_PM: Tensor
    """Counts for every rank: choices by its experts, then rows; int64 [P, L + 1]."""
    room: int
    """Allocated rows, an upper bound; rows after the last pair are undefined."""


def pair(inverse_TK: Tensor, counts_E: Tensor, ranks: int) -> Pairs:
    """The pairs of a routing; `inverse` is the row of each choice with one copy per choice (`Routing.inverse_R`)."""
    tokens, top_k = inverse_TK.shape
    room = tokens * min(top_k, ranks)
    if usable(inverse_TK) and tokens:
        from hocket.kernels.rows import number

        return Pairs(*number(inverse_TK, counts_E, ranks), room)
    counts_PL = counts_E.view(ranks, -1)
    end_P = counts_PL.sum(1).cumsum(0)
    rank_TK = torch.searchsorted(end_P, inverse_TK.long(), right=True)
    seat_TK = inverse_TK - (end_P - end_P.diff(prepend=end_P.new_zeros(1)))[rank_TK]
    token_T = torch.arange(tokens, device=inverse_TK.device)
    here_PT = torch.zeros(ranks, tokens, dtype=torch.int64, device=inverse_TK.device)
    here_PT[rank_TK, token_T.unsqueeze(1)] = 1
    row_TK = (here_PT.view(-1).cumsum(0).view(ranks, tokens) - 1)[rank_TK, token_T.unsqueeze(1)]
    earlier_TK = (rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)).tril(-1).any(2)
    first_TK = row_TK.masked_fill(earlier_TK, -1)
    row_TK, first_TK, seat_TK = (x.to(torch.int32) for x in (row_TK, first_TK, seat_TK))
    return Pairs(row_TK, first_TK, seat_TK, torch.cat([counts_PL, here_PT.sum(1, keepdim=True)], 1), room)


def pack(x_TD: Tensor, probs_TK: Tensor, pairs: Pairs) -> Tensor:
    """Tokens to labelled rows, [room, W]. Backward sums a token's rows in fp32, and reads weights' gradients."""
    return _Pack.apply(x_TD, probs_TK, pairs)


def read_labels(rows_NW: Tensor, top_k: int, counts_PM: Tensor, grouped_R: Tensor) -> tuple[Tensor, Tensor]:
    """Place in grouped order, int32 [N, K], -1 for none, and weight, fp32 [N, K], of every row's choices.

    `counts` are those of every source rank (`Pairs.counts_PM`). `grouped` has the place in grouped order of every seat,
    sorted by source rank.
    """
    if usable(rows_NW) and len(rows_NW):
        from hocket.kernels import rows

        return rows.read_labels(_ints(rows_NW), label_bytes(top_k) // 4, top_k, counts_PM, grouped_R)
    label_NC = _labels(rows_NW, top_k)
    chosen_P, received_P = counts_PM[:, :-1].sum(1), counts_PM[:, -1]
    first_N = (chosen_P.cumsum(0) - chosen_P).repeat_interleave(received_P, output_size=len(rows_NW))
    seat_NK = label_NC[:, :top_k]
    place_NK = torch.full_like(seat_NK, -1)
    row_M, k_M = (seat_NK >= 0).nonzero(as_tuple=True)
    place_NK[row_M, k_M] = grouped_R[first_N[row_M] + seat_NK[row_M, k_M]]
    return place_NK, label_NC[:, top_k : 2 * top_k].contiguous().view(torch.float32)


def open_rows(rows_NW: Tensor, place_NK: Tensor, probs_NK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Labelled rows to `rows` rows in grouped order, [R, D], and the weights as values with a gradient.

    Backward sums the gradients of a row's copies in fp32, and writes those of weights to its label. The rows are not
    kept.
    """
    return _Open.apply(rows_NW, place_NK, probs_NK, rows)


def opened_rows(rows_NW: Tensor, place_NK: Tensor, rows: int) -> Tensor:
    """The rows of `open_rows`, without a graph."""
    width = rows_NW.shape[1] - label_bytes(place_NK.shape[1]) // rows_NW.itemsize
    grouped_RD = rows_NW.new_empty(rows, width)
    spread_into(rows_NW[:, :width], place_NK, grouped_RD)
    return grouped_RD


def _ints(rows_NW: Tensor) -> Tensor:
    return rows_NW.view(torch.int32)


def _labels(rows_NW: Tensor, top_k: int) -> Tensor:
    """Labels as int32, a view [N, label_bytes / 4] of the rows."""
    ints = _ints(rows_NW)
    return ints[:, ints.shape[1] - label_bytes(top_k) // 4 :]


def _labelled(x: Tensor, rows: int, width: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Rows with space for labels, and a view of their hidden-state columns."""
    rows_NW = x.new_empty(rows, width + label_bytes(top_k) // x.itemsize)
    return rows_NW, rows_NW[:, :width]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, probs_TK: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(pairs.row_TK, pairs.first_TK)
        top_k = probs_TK.shape[1]
        rows_NW, hidden_ND = _labelled(x_TD, pairs.room, x_TD.shape[1], top_k)
        spread_into(x_TD, pairs.first_TK, hidden_ND)
        if usable(x_TD) and len(x_TD):
            from hocket.kernels.rows import write_labels

            write_labels(_ints(rows_NW), label_bytes(top_k) // 4, probs_TK, pairs.row_TK, pairs.seat_TK)
            return rows_NW
        label_NC, k = _labels(rows_NW, top_k), torch.arange(top_k, device=x_TD.device)
        label_NC[:, :top_k], label_NC[:, top_k : 2 * top_k] = -1, 0
        label_NC[pairs.row_TK.long(), k] = pairs.seat_TK
        label_NC[pairs.row_TK.long(), top_k + k] = probs_TK.contiguous().view(torch.int32)
        return rows_NW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_NW: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        row_TK, first_TK = ctx.saved_tensors
        top_k, g_NW = row_TK.shape[1], g_NW.contiguous()
        width = g_NW.shape[1] - label_bytes(top_k) // g_NW.itemsize
        g_TD = total_of(g_NW[:, :width], None, first_TK)
        if usable(g_NW) and len(row_TK):
            from hocket.kernels.rows import label_grads

            return g_TD, label_grads(_ints(g_NW), label_bytes(top_k) // 4, row_TK), None
        k = torch.arange(top_k, device=g_NW.device)
        return g_TD, _labels(g_NW, top_k)[row_TK.long(), top_k + k].view(torch.float32), None


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NW: Tensor, place_NK: Tensor, probs_NK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(place_NK)
        return opened_rows(rows_NW, place_NK, rows), probs_NK.view_as(probs_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor, g_probs_NK: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        (place_NK,) = ctx.saved_tensors
        rows, top_k = place_NK.shape
        g_NW, g_hidden_ND = _labelled(g_RD, rows, g_RD.shape[1], top_k)
        total_of(g_RD, None, place_NK, out=g_hidden_ND)
        _labels(g_NW, top_k)[:, top_k : 2 * top_k] = g_probs_NK.contiguous().view(torch.int32)
        return g_NW, None, None, None

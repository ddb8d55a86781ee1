"""Dispatch: moving a token's rows to its experts and back, as values and pure functions.

A token's hidden state is sent once per chosen expert. The rows pass through three orders:

    sent      by global expert, then token: what leaves a rank, already split by destination
    received  by source rank, then local expert, then token: what arrives
    grouped   by local expert, then source rank, then token: what the grouped GEMM reads

Every change of order is a gather in forward and a gather in backward, never an accumulation over an index,
so it is deterministic on every device, and much faster than the backward of plain indexing. On GPUs the kernels of
`hocket/kernels/rows.py` compute what the formulas here say, and read and write every row once.

Note: [Who knows what of a dispatch]
A layer's parts see rows, a `Routing` and a `Splits`, and touch the two only through the functions below: `permute`
makes the rows to send from tokens, `group_rows` and `ungroup_rows` stand before and behind the experts, `unpermute`
makes tokens of the rows that came back. Whoever moves rows in between (`runtime/actions.py`) asks `exchange_counts` for
the `Splits`, and sends by its `table` forwards, by `table.back` on the way back. So another way to tell the ranks how
many rows come is another maker of `Splits`, and parts of the model do not change for it.

Shapes: T tokens, D hidden, E global experts, L local experts, P expert-parallel ranks, K top_k, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.kernels.usable import usable
from hocket.parallel.routing import Routing, inverse_of
from hocket.runtime.transports import RowTable


class CountExchange(Protocol):
    """The group of expert-parallel ranks, as much of it as the exchange of counts needs."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def all_counts(self, counts: Tensor) -> Tensor:
        """Every rank's counts [P, ...] of what it sends to each: [P, P, ...]."""
        ...


@dataclass(frozen=True, eq=False)
class Splits:
    """How many rows go where, after the ranks have exchanged their counts."""

    table: RowTable
    counts_PL: Tensor
    """Rows received by source rank and local expert, int64, on the device."""

    @property
    def offsets_L(self) -> Tensor:
        """End of every local expert's rows in grouped order, int32."""
        return self._grouping[0]

    @property
    def order_R(self) -> Tensor:
        """Received position of every grouped row, int32."""
        return self._grouping[1]

    @property
    def inverse_R(self) -> Tensor:
        """Grouped position of every received row, int32."""
        return self._grouping[2]

    @cached_property
    def _grouping(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computed at first use, on the lane that uses it."""
        if usable(self.counts_PL):
            from hocket.kernels.routing import regroup

            return regroup(self.counts_PL, sum(self.table.receive))
        order_R = _block_order(self.counts_PL, sum(self.table.receive))
        return self.counts_PL.sum(0).cumsum(0).to(torch.int32), order_R, inverse_of(order_R)


def permute(x_TD: Tensor, routing: Routing) -> Tensor:
    """Tokens to the rows that are sent: [R, D]. Backward sums a token's rows over its choices, in fp32."""
    return _Permute.apply(x_TD, routing)


def unpermute(rows_RD: Tensor, probs_TK: Tensor, residual: Tensor, shared: Tensor | None, routing: Routing) -> Tensor:
    """`(sum over choices of prob * row) [+ shared] + residual`, in the shape of the residual, [T, D] or [B, S, D].

    The rows are in sent order; all sums are in fp32, in this order, and rounded once.
    """
    return _Unpermute.apply(rows_RD, probs_TK, residual, shared, routing)


def exchange_counts(routing: Routing, group: CountExchange | None) -> Splits:
    """Tell every rank how many rows go from whom to whom. Stops the host until the counts are known.

    Without a group, or in a group of one, all rows stay here and nothing waits.
    """
    if group is None or group.size == 1:
        return Splits(RowTable([[routing.tokens * routing.top_k]], 0), routing.counts_E.view(1, -1))
    every_PPL = group.all_counts(routing.counts_E.view(group.size, -1))
    rows: list[list[int]] = every_PPL.sum(-1).tolist()
    return Splits(RowTable(rows, group.rank), every_PPL[:, group.rank].contiguous())


def group_rows(rows_RD: Tensor, splits: Splits) -> Tensor:
    """Rows in received order to grouped order."""
    if len(splits.table.rows) == 1:
        return rows_RD
    return _Gather.apply(rows_RD, splits.order_R, splits.inverse_R)


def ungroup_rows(rows_RD: Tensor, splits: Splits) -> Tensor:
    """Rows in grouped order to received order."""
    if len(splits.table.rows) == 1:
        return rows_RD
    return _Gather.apply(rows_RD, splits.inverse_R, splits.order_R)


def _block_order(counts_PL: Tensor, rows: int) -> Tensor:
    """Positions, in [P, L] block order, of rows taken in [L, P] block order, int32. `rows` spares a host sync."""
    sizes = counts_PL.reshape(-1)
    start_PL = (sizes.cumsum(0) - sizes).view_as(counts_PL)
    sizes_by_expert = counts_PL.t().reshape(-1)
    grouped_start = sizes_by_expert.cumsum(0) - sizes_by_expert
    shift = start_PL.t().reshape(-1) - grouped_start
    order_R = torch.arange(rows, device=sizes.device) + shift.repeat_interleave(sizes_by_expert, output_size=rows)
    return order_R.to(torch.int32)


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


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        if usable(x_TD):
            from hocket.kernels import rows

            return rows.permute(x_TD, routing.inverse_R, routing.top_k)
        return x_TD.index_select(0, routing.order_R // routing.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        routing: Routing = ctx.routing
        if usable(g_RD):
            from hocket.kernels import rows

            return rows.permute_backward(g_RD, routing.inverse_R, routing.top_k), None
        return _sum_in_order(_by_token(g_RD, routing).float()).to(g_RD.dtype), None


class _Unpermute(torch.autograd.Function):
    """Weighted sum of each token's rows, shared expert and residual."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, probs_TK: Tensor, residual: Tensor, shared: Tensor | None, routing: Routing
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, probs_TK)
        ctx.routing, ctx.has_shared = routing, shared is not None
        if usable(rows_RD, probs_TK):
            from hocket.kernels import rows

            return rows.unpermute(rows_RD, probs_TK, routing.inverse_R, residual, shared)
        total_TD = _sum_in_order(_by_token(rows_RD, routing).float() * probs_TK.unsqueeze(-1))
        if shared is not None:
            total_TD = total_TD + shared.view_as(total_TD)
        return (total_TD.view_as(residual) + residual).to(residual.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        rows_RD, probs_TK = ctx.saved_tensors
        routing: Routing = ctx.routing
        g_TD = g.reshape(-1, g.shape[-1])
        if usable(rows_RD, probs_TK):
            from hocket.kernels import rows

            g_rows_RD, g_probs_TK = rows.unpermute_backward(g_TD, rows_RD, probs_TK, routing.inverse_R)
        else:
            prob_R = probs_TK.reshape(-1).index_select(0, routing.order_R)
            g_rows_RD = g_TD.index_select(0, routing.order_R // routing.top_k) * prob_R.unsqueeze(-1)
            g_rows_RD = g_rows_RD.to(rows_RD.dtype)
            g_probs_TK = (_by_token(rows_RD, routing).float() * g_TD.unsqueeze(1)).sum(-1)
        return g_rows_RD, g_probs_TK, g, g if ctx.has_shared else None, None


def _by_token(rows_RD: Tensor, routing: Routing) -> Tensor:
    """Rows in sent order as [T, K, D]."""
    return rows_RD.index_select(0, routing.inverse_R).view(routing.tokens, routing.top_k, rows_RD.shape[1])


def _sum_in_order(x_TKD: Tensor) -> Tensor:
    """The sum over K from the first to the last, which `Tensor.sum` does not promise."""
    first_TD, *others = x_TKD.unbind(1)
    total_TD = first_TD.clone()
    for each_TD in others:
        total_TD += each_TD
    return total_TD

"""Dispatch: moving a token's rows to its experts and back, as values and pure functions.

A token's hidden state is sent once per chosen expert, or once per rank that has chosen experts (`rows.py`). Rows have
one of three orders:

    sent      by destination, that is by global expert, then token; with one copy per rank by rank, then token
    received  by source rank, then in the order in which that rank sent them
    grouped   by local expert, then source rank, then token: the grouped GEMM's input

Transports that write into peer memory write rows in grouped order, so no kernel sorts them (`runtime/blocks.py`). With
one copy per expert, received order is a permutation of grouped order. With one copy per rank, a received row has one
place in grouped order for each of its choices.

Note: [The interface of a dispatch]
A layer's parts use rows, a `Routing` and a `Splits`, the last two only through the functions of this module.
`send_rows` makes the rows to send from tokens; or the exchange makes them by `rows_of`, which it can call again for
backward. `to_experts` and `from_experts` reorder rows before and after the experts. `unpermute` makes tokens of the
returned rows. The weights of choices stay with the tokens, or go to the experts: see Note: [Weights inside the
experts]. The exchange (`engine/actions.py`) gets the `Splits` from `exchange_counts`, sends rows by its `table`, and
returns them by `table.back`. It sends the first `sum(table.send)` rows of the tensor, which may have more
(`Routing.room`); its gradient has as many. Another way to exchange counts is another function that returns `Splits`,
and parts of the model do not change: `place_counts`, whose rows arrive in grouped order.

Note: [Weights inside the experts]
A token's result is the sum over its experts of `w * down(silu(gate) * up)`, which equals that of `down(w * silu(gate) *
up)`. In the second form the gradient of `w` needs no output row of the experts: it is the sum of `silu(gate) * up`
times its own gradient, and the backward of SwiGLU has both (Guo et al. 2025, "SonicMoE", arXiv 2512.14080). That saves
keeping, and reading in backward, [R, D]. Three cases use the first form: experts with a bias after the second product,
models that hocket did not write, and rows sent once per expert, which carry no weight.

Shapes: T tokens, D hidden, E global experts, L local experts, P expert-parallel ranks, K top_k, N received rows,
R rows in grouped order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from hocket.kernels import usable
from hocket.layers.routing import CountExchange, Routing, inverse_of
from hocket.layers.rows import (
    gather,
    open_rows,
    opened_rows,
    pack,
    read_labels,
    spread,
    spread_weights,
    total,
    total_of,
)
from hocket.predict.part_sizes import label_bytes
from hocket.runtime.blocks import Blocks, HostBlocks, Room, host_blocks, lay_out
from hocket.runtime.segment import rebuild_in_backward
from hocket.runtime.transports import Pending, RowTable


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Counts of received rows that stand for several choices each."""

    counts_PM: Tensor
    """By source rank: choices by local expert, then rows; int64, on the device."""
    choices: int
    """All their choices, which are rows in grouped order."""
    top_k: int


@dataclass(frozen=True, eq=False)
class Splits:
    """How many rows go where, after the ranks have exchanged their counts."""

    table: RowTable | HostBlocks
    """With blocks, rows arrive in grouped order."""
    counts_PL: Tensor
    """Choices by source rank and local expert, int64, on the device. With one copy per expert, also rows received."""
    arrivals: Arrivals | None = None
    """Set with one copy per rank."""

    count = None
    """Number of valid rows, if not all are: see `PlacedSplits`."""

    @property
    def grouped(self) -> bool:
        """Whether received order is grouped order."""
        return isinstance(self.table, HostBlocks) or len(self.table.rows) == 1

    @cached_property
    def offsets_L(self) -> Tensor:
        """End of every local expert's rows in grouped order, int32."""
        return self.counts_PL.sum(0).cumsum(0, dtype=torch.int32) if self.grouped else self._grouping[0]

    @property
    def order_R(self) -> Tensor:
        """Position by source rank, then expert of every grouped row, int32."""
        return self._grouping[1]

    @property
    def inverse_R(self) -> Tensor:
        """Grouped position of every row by source rank, then expert; int32."""
        return self._grouping[2]

    @cached_property
    def _grouping(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computed at first use, on the lane that uses it."""
        rows = sum(self.table.receive) if self.arrivals is None else self.arrivals.choices
        if usable(self.counts_PL):
            from hocket.kernels.routing import regroup

            return regroup(self.counts_PL, rows)
        order_R = _block_order(self.counts_PL, rows)
        return self.counts_PL.sum(0).cumsum(0).to(torch.int32), order_R, inverse_of(order_R)


def exchange_counts(routing: Routing, group: CountExchange | None, placed: bool = False) -> Splits:
    """Exchange the row counts of all ranks. Blocks the host until they are known.

    With `placed`, on a transport that writes into peer memory, rows will arrive in grouped order. Without a group, or
    in a group of one, all rows stay here and nothing waits.
    """
    if group is None or group.size == 1:
        assert routing.pairs is None, "one copy per rank is for experts on other ranks"
        return Splits(RowTable([[routing.tokens * routing.top_k]], 0), routing.counts_E.view(1, -1))
    every_PPM = group.all_counts(counts_to_send(routing, group.size))
    if placed:
        assert routing.pairs is None, "rows are placed that are sent once per expert"
        return Splits(host_blocks(every_PPM.cpu(), group.rank), every_PPM[:, group.rank])
    return splits_of(every_PPM, group.rank, routing)


def counts_to_send(routing: Routing, ranks: int) -> Tensor:
    """Counts for each target rank: choices by local expert, [P, L], and with one copy per rank then the rows."""
    return routing.counts_E.view(ranks, -1) if routing.pairs is None else routing.pairs.counts_PM


def splits_of(every_PPM: Tensor, rank: int, routing: Routing) -> Splits:
    """A rank's splits from the counts of all ranks. Blocks the host until they are known."""
    every, counts_PM = every_PPM.cpu(), every_PPM[:, rank]  # summed on the host, which saves kernel launches
    if routing.pairs is None:
        rows: list[list[int]] = every.sum(-1).tolist()
        return Splits(RowTable(rows, rank), counts_PM)
    arrivals = Arrivals(counts_PM, int(every[:, rank, :-1].sum()), routing.top_k)
    table = RowTable(every[..., -1].tolist(), rank, label_bytes(routing.top_k))
    return Splits(table, counts_PM[:, :-1], arrivals)


def send_rows(
    x_TD: Tensor, probs_TK: Tensor, routing: Routing, weighted: bool = False, later: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns rows to send, [`routing.room`, D or more]; their weights, [`routing.room`], with `weighted`; and else
    the weights that stay here, [T, K]. Both are None if rows carry their weights. With `later` rows and weights are
    still those of tokens, [T, D] and [T, K], for `rows_of`.
    """
    if routing.pairs is not None:
        return pack(x_TD, probs_TK, routing.pairs), None, None
    sent_TK, stay = (probs_TK, None) if weighted else (None, probs_TK)
    return *((x_TD, sent_TK) if later else rows_of(x_TD, sent_TK, routing)), stay


def rows_of(x_TD: Tensor, probs_TK: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor | None]:
    """Tokens to one row per choice, [`routing.room`, D], and the weights of rows, [`routing.room`] or None."""
    weights_R = None if probs_TK is None else spread_weights(probs_TK, routing.inverse_TK, routing.room)
    return permute(x_TD, routing), weights_R


def tokens_of(g_RD: Tensor, pending: Pending, routing: Routing) -> tuple[Tensor, Pending]:
    """The gradient of tokens, [T, D], and its `Pending`; `pending` is that of their rows' gradient."""
    g_TD = g_RD.new_empty(routing.tokens, g_RD.shape[1])
    return g_TD, pending.then(lambda: total_of(g_RD, None, routing.inverse_TK, out=g_TD))


@dataclass(frozen=True, eq=False)
class Opened:
    """State of rows that stood for several choices each, fp32 and int32 [N, K]."""

    probs_NK: Tensor | None
    """Weights of choices; None: the experts have applied them."""
    place_NK: Tensor
    """Places of choices in grouped order; -1 for none."""


def to_experts(
    rows_ND: Tensor, splits: Splits | PlacedSplits, weights_R: Tensor | None = None, weighted: bool = False
) -> tuple[Tensor, Tensor | None, Opened | None]:
    """Rows in received order to grouped order, [R, D]; weights for the experts, [R]; and state for `from_experts`.

    The weights are the given ones, for rows that all stay on this rank; with `weighted`, those carried by the rows;
    else None.
    """
    assert weights_R is None or (isinstance(splits, Splits) and splits.grouped), "weights are given in grouped order"
    if isinstance(splits, PlacedSplits) or splits.arrivals is None:
        grouped_RD = group_rows(rows_ND, splits)
        rebuild_in_backward(grouped_RD, partial(group_rows, splits=splits))
        return grouped_RD, weights_R, None
    arrivals = splits.arrivals
    place_NK, probs_NK = read_labels(rows_ND.detach(), arrivals.top_k, arrivals.counts_PM, splits.inverse_R)
    grouped_RD, probs_NK = open_rows(rows_ND, place_NK, probs_NK, arrivals.choices)
    rebuild_in_backward(grouped_RD, partial(opened_rows, place_NK=place_NK, rows=arrivals.choices))
    if weighted:
        return grouped_RD, spread_weights(probs_NK, place_NK, arrivals.choices), Opened(None, place_NK)
    return grouped_RD, None, Opened(probs_NK, place_NK)


def from_experts(rows_RD: Tensor, opened: Opened | None, splits: Splits | PlacedSplits) -> Tensor:
    """Rows in grouped order to received order, [N, D]; a row with several choices becomes their [weighted] sum."""
    return ungroup_rows(rows_RD, splits) if opened is None else total(rows_RD, opened.probs_NK, opened.place_NK)


def unpermute(
    rows_ND: Tensor, probs_TK: Tensor | None, residual: Tensor | None, shared: Tensor | None, routing: Routing
) -> Tensor:
    """`(sum over a token's rows [times weights]) [+ shared] [+ residual]`, [T, D] or in the residual's shape.

    The rows are in sent order; all sums are in fp32, in the order of choices, and rounded once.
    """
    place_TK = routing.inverse_TK if routing.pairs is None else routing.pairs.first_TK
    return total(rows_ND, probs_TK, place_TK, residual, shared)


def permute(x_TD: Tensor, routing: Routing) -> Tensor:
    """Tokens to one row per choice, [R, D]. Backward sums a token's rows over its choices, in fp32."""
    return spread(x_TD, routing.inverse_TK, routing.room)


def group_rows(rows_RD: Tensor, splits: Splits | PlacedSplits) -> Tensor:
    """Rows in received order to grouped order, one per choice."""
    if isinstance(splits, PlacedSplits) or splits.grouped:
        return rows_RD
    return gather(rows_RD, splits.order_R, splits.inverse_R)


def ungroup_rows(rows_RD: Tensor, splits: Splits | PlacedSplits) -> Tensor:
    """Rows in grouped order to received order, one per choice."""
    if isinstance(splits, PlacedSplits) or splits.grouped:
        return rows_RD
    return gather(rows_RD, splits.inverse_R, splits.order_R)


def _block_order(counts_PL: Tensor, rows: int) -> Tensor:
    """Permutation of rows from [P, L] block order to [L, P] block order, int32. `rows` avoids a host sync."""
    sizes = counts_PL.reshape(-1)
    start_PL = (sizes.cumsum(0) - sizes).view_as(counts_PL)
    sizes_by_expert = counts_PL.t().reshape(-1)
    grouped_start = sizes_by_expert.cumsum(0) - sizes_by_expert
    shift = start_PL.t().reshape(-1) - grouped_start
    order_R = torch.arange(rows, device=sizes.device) + shift.repeat_interleave(sizes_by_expert, output_size=rows)
    return order_R.to(torch.int32)


# --------------------------------------------------------------------------------------------------------------- placed
#
# Splits known only to the device: rows arrive in grouped order, in a buffer of fixed capacity.
#
# Unlike `exchange_counts` the host does not wait: see `runtime/blocks.py`, and its Note: [Fixed capacity without
# dropped rows].


@dataclass(frozen=True, eq=False)
class PlacedSplits:
    """An exchange described on the device. Rows arrive in grouped order; rows after the last are undefined."""

    table: Blocks
    ends_L: Tensor
    """End of every local expert's rows, int32; in memory of the exchanging lane."""

    @cached_property
    def offsets_L(self) -> Tensor:
        """End of every local expert's rows, int32.

        Copied at first use, on the lane that uses it, since weight gradients read it after the exchanging lane may
        have reused its memory.
        """
        return self.ends_L.clone()

    @property
    def count(self) -> Tensor:
        """Received rows: int32 [1]."""
        return self.offsets_L[-1:]


def place_counts(routing: Routing, group: CountExchange, room: Room) -> PlacedSplits:
    """Exchange the row counts of all ranks on the device, without a host wait."""
    assert routing.pairs is None, "devices place rows that are sent once per expert"
    every_PPL = group.all_counts(routing.counts_E.view(group.size, -1))
    return PlacedSplits(*lay_out(every_PPL, group.rank, routing.tokens * routing.top_k, room))

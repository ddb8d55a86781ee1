"""Block layout of an all-to-all that delivers rows grouped by expert.

All rows of one rank for one expert of another rank are a *block*. The counts of every (rank, expert) pair fix the
offset of each block at its source and at its target. So the sender writes rows in grouped order, and the receiver need
not sort. `HostBlocks` holds the layout on the host, for copy engines. `Blocks` holds it on the device, for kernels: the
host never learns the counts.

Note: [Fixed capacity without dropped rows]
A host that does not know the counts allocates a fixed number of rows. Rows beyond that capacity are not exchanged, and
the step's result is wrong. Every rank computes the row count of the fullest rank and keeps the first count above
capacity, else the maximum, on the device. The engine checks it before the optimizer step. If the capacity was exceeded,
it runs the step again with splits known to the host and raises the capacity (`engine/experts.py`).

Shapes: P ranks, L local experts per rank, D hidden, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hocket.kernels import usable


@dataclass(frozen=True, eq=False)
class Blocks:
    """One rank's side of an exchange, int32 on the device.

    Each block is (first row here, first row at the peer, number of rows). Block (p, l) of `leaving` goes to rank p;
    block (p, l) of `arriving` comes from rank p.
    """

    leaving: Tensor
    """[3, P, L]."""
    arriving: Tensor
    """[3, P, L]."""
    arrived: Tensor
    """Number of rows here after the exchange: [1]."""
    returned: Tensor
    """Number of rows here after the reverse exchange: [1]."""
    room: int
    """Rows allocated for arrivals: the host's upper bound."""
    sent: int
    """Upper bound of the rows that this rank sends."""

    @property
    def back(self) -> Blocks:
        """The reverse exchange, which returns all rows."""
        return Blocks(self.arriving, self.leaving, self.returned, self.arrived, self.sent, self.room)


@dataclass(frozen=True, eq=False)
class HostBlocks:
    """One rank's side of an exchange, int64 on the host. Unlike with `Blocks`, every row has room."""

    leaving: np.ndarray
    """[3, P, L]: first row here, first row at the peer, number of rows."""
    arriving: np.ndarray
    """[3, P, L]."""
    fullest: int
    """Rows received by the rank that receives most."""
    fullest_back: int
    """Rows received by the rank that receives most in the reverse exchange."""

    @property
    def send(self) -> list[int]:
        return self.leaving[2].sum(1).tolist()

    @property
    def receive(self) -> list[int]:
        return self.arriving[2].sum(1).tolist()

    @property
    def sent(self) -> int:
        return int(self.leaving[2].sum())

    @property
    def room(self) -> int:
        return int(self.arriving[2].sum())

    @property
    def back(self) -> HostBlocks:
        """The reverse exchange, which returns all rows."""
        return HostBlocks(self.arriving, self.leaving, self.fullest_back, self.fullest)


@dataclass(frozen=True, eq=False)
class Room:
    """The row capacity of a rank, and how many rows were needed."""

    capacity: int
    needed: Tensor
    """Rows of the fullest rank over all exchanges since the last reset, up to the first that exceeded the capacity:
    int64 [1] on the device."""


def lay_out(every_PPL: Tensor, rank: int, sent: int, room: Room) -> tuple[Blocks, Tensor]:
    """Lay out the exchange that groups rows by expert. Returns it with the end of each local expert's rows, int32 [L].

    `every[s, d, l]` is the number of rows of rank s for expert l of rank d, in sent order; `sent` is this rank's total.
    See Note: [Fixed capacity without dropped rows].
    """
    capacity, needed = room.capacity, room.needed
    if usable(every_PPL):
        from hocket.kernels.exchange import lay_out as launch

        leaving, arriving, ends = launch(every_PPL, rank, capacity, needed)
    else:
        leaving, arriving, ends = _formula(every_PPL, rank, capacity, needed)
    local = every_PPL.shape[2]
    blocks = Blocks(leaving, arriving, ends[local - 1 : local], ends[local:], capacity, sent)
    return blocks, ends[:local]


def _formula(every_PPL: Tensor, rank: int, capacity: int, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ranks = len(every_PPL)
    sent, grouped, ends_by_target = _places(every_PPL)
    kept = torch.minimum(every_PPL, (capacity - grouped).clamp(min=0))
    leaving, arriving = _sides(sent, grouped, kept, rank)
    fullest = ends_by_target[:, -1].max()
    needed.copy_(torch.where(needed > capacity, needed, torch.maximum(needed, fullest)))
    ends = ends_by_target[rank, ranks - 1 :: ranks].clamp(max=capacity)
    ends = torch.cat([ends, every_PPL[rank].sum().view(1)])
    return leaving.to(torch.int32), arriving.to(torch.int32), ends.to(torch.int32)


def host_blocks(every_PPL: Tensor, rank: int) -> HostBlocks:
    """The layout of `lay_out` from counts on the host, with room for all rows."""
    sent, grouped, ends_by_target = _places(every_PPL)
    leaving, arriving = _sides(sent, grouped, every_PPL, rank)
    fullest, fullest_back = int(ends_by_target[:, -1].max()), int(every_PPL.sum((1, 2)).max())
    return HostBlocks(leaving.numpy(), arriving.numpy(), fullest, fullest_back)


def _places(every_PPL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First rows of all blocks [P, P, L] at their sources and at their targets; end rows at the targets, by (expert,
    source).
    """
    ranks, _, local = every_PPL.shape
    by_source = every_PPL.reshape(ranks, -1)
    sent = (by_source.cumsum(1) - by_source).view_as(every_PPL)
    by_target = every_PPL.permute(1, 2, 0).reshape(ranks, -1)  # (target; expert, source)
    ends_by_target = by_target.cumsum(1)
    grouped = (ends_by_target - by_target).view(ranks, local, ranks).permute(2, 0, 1)
    return sent, grouped, ends_by_target


def _sides(sent: Tensor, grouped: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Blocks that leave a rank and blocks that arrive there, [3, P, L] each, from offsets and counts [P, P, L] of all
    blocks.
    """
    leaving = torch.stack([sent[rank], grouped[rank], rows[rank]])
    return leaving, torch.stack([grouped[:, rank], sent[:, rank], rows[:, rank]])


def rows_of(blocks: Tensor | np.ndarray) -> Tensor:
    """Local row numbers of all blocks [3, P, L], concatenated: int64. Synchronizes with the device."""
    ranges = zip(blocks[0].flatten().tolist(), blocks[2].flatten().tolist(), strict=True)
    return torch.cat([torch.arange(first, first + count) for first, count in ranges])

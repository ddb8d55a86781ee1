"""Which rows go where in an exchange that puts them where their experts want them.

All rows of one rank for one expert of another are a *block*. Where each block lies, here and at its peer, follows from
how many rows every rank has for every expert, which a small exchange tells all devices. So whatever writes into the
memory of peers can put rows at their places in grouped order at once, and nobody sorts them when they have come. Hosts
that have waited for the counts know these places too (`HostBlocks`), and let copy engines move the blocks. But no host
has to know: kernels read places, and whatever depends on the number of rows, on the device (`Blocks`).

Note: [A fixed capacity, and never silently]
A host that does not know how many rows arrive can only allocate a fixed number. Rows beyond it are not sent, and not
brought back, so what the step computes from there on is wrong. But every rank sees how many rows the fullest rank of
its group would have had, and keeps on the device the largest number up to the first that is too large. The engine looks
at it before weights change, and makes such a step again with splits that the host knows, which have room for all
(`engine/experts.py`). From then on there is more room. So no row is ever lost, and a step that is made twice says so.

Shapes: P ranks, L local experts of each, D hidden, R rows.
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

    Of every block: its first row here, its first row at the peer, and its rows; block (p, l) of those that leave goes
    to rank p, and of those that arrive comes from it.
    """

    leaving: Tensor
    """[3, P, L]."""
    arriving: Tensor
    """[3, P, L]."""
    arrived: Tensor
    """Rows that are here after the exchange: [1]."""
    returned: Tensor
    """Rows that are here after the exchange that brings all back: [1]."""
    room: int
    """Rows that are allocated for those that arrive, which is all that the host knows of them."""
    sent: int
    """Rows that this rank sends at most."""

    @property
    def back(self) -> Blocks:
        """The exchange that brings all rows back."""
        return Blocks(self.arriving, self.leaving, self.returned, self.arrived, self.sent, self.room)


@dataclass(frozen=True, eq=False)
class HostBlocks:
    """One rank's side of an exchange, int64 on the host: like `Blocks`, but all rows have room."""

    leaving: np.ndarray
    """[3, P, L]: of every block its first row here, its first row at the peer, and its rows."""
    arriving: np.ndarray
    """[3, P, L]."""
    fullest: int
    """Rows of the rank that gets most of them."""
    fullest_back: int
    """Rows of the rank that gets most of those that are brought back."""

    @property
    def send(self) -> list[int]:
        """Rows that this rank sends to each."""
        return self.leaving[2].sum(1).tolist()

    @property
    def receive(self) -> list[int]:
        """Rows that this rank gets from each."""
        return self.arriving[2].sum(1).tolist()

    @property
    def sent(self) -> int:
        """Rows that this rank sends."""
        return int(self.leaving[2].sum())

    @property
    def room(self) -> int:
        """Rows that this rank gets."""
        return int(self.arriving[2].sum())

    @property
    def back(self) -> HostBlocks:
        """The exchange that brings all rows back."""
        return HostBlocks(self.arriving, self.leaving, self.fullest_back, self.fullest)


@dataclass(frozen=True, eq=False)
class Room:
    """How many rows a rank has room for, and how many would have been needed."""

    capacity: int
    """Rows that may arrive at a rank."""
    needed: Tensor
    """Rows of the fullest rank in any exchange since this was zero, until one had no room: int64 [1], on the device."""


def lay_out(every_PPL: Tensor, rank: int, sent: int, room: Room) -> tuple[Blocks, Tensor]:
    """The exchange that groups rows by expert, and where each local expert's rows then end, int32 [L].

    `every[s, d, l]` are the rows that rank s has for expert l of rank d, which lie in its sent order; `sent` are all
    rows of this rank. See Note: [A fixed capacity, and never silently].
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
    """What the kernel `lay_out` computes."""
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
    """The same exchange as that of `lay_out`, of counts that are on the host, with room for all rows."""
    sent, grouped, ends_by_target = _places(every_PPL)
    leaving, arriving = _sides(sent, grouped, every_PPL, rank)
    fullest, fullest_back = int(ends_by_target[:, -1].max()), int(every_PPL.sum((1, 2)).max())
    return HostBlocks(leaving.numpy(), arriving.numpy(), fullest, fullest_back)


def _places(every_PPL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First rows of all blocks [P, P, L] at their sources and at their targets; ends by target, of (expert, source)."""
    ranks, _, local = every_PPL.shape
    by_source = every_PPL.reshape(ranks, -1)
    sent = (by_source.cumsum(1) - by_source).view_as(every_PPL)
    by_target = every_PPL.permute(1, 2, 0).reshape(ranks, -1)  # (target; expert, source)
    ends_by_target = by_target.cumsum(1)
    grouped = (ends_by_target - by_target).view(ranks, local, ranks).permute(2, 0, 1)
    return sent, grouped, ends_by_target


def _sides(sent: Tensor, grouped: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """What leaves a rank and what arrives there, [3, P, L] each, of all blocks' places and rows, [P, P, L]."""
    leaving = torch.stack([sent[rank], grouped[rank], rows[rank]])
    return leaving, torch.stack([grouped[:, rank], sent[:, rank], rows[:, rank]])


def rows_of(blocks: Tensor | np.ndarray) -> Tensor:
    """Rows of all blocks [3, P, L] where they lie here, one block after the other: int64. Stops the host."""
    ranges = zip(blocks[0].flatten().tolist(), blocks[2].flatten().tolist(), strict=True)
    return torch.cat([torch.arange(first, first + count) for first, count in ranges])

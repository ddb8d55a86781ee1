"""Weights gathered in fp8: each rank casts its shard after an update, and a gather moves half the bytes.

Note: [Scales before the cast]
A product needs one scale per row of a weight (`layers/fp8.py`), and a shard may begin and end inside of a row. A row's
scale is the least power of two with which it fits, which is the largest of its pieces' scales. After an update each
rank casts its whole rows in one pass and finds its pieces' scales; one small all-reduce (max) for all units gives the
scales of all rows; then pieces are cast. So every rank knows all scales, and a gather moves fp8 values alone. A rank
first rounds to the activations' format, as a gather in that format does, so the result is bitwise the cast of gathered
weights.

Weights that no fp8 product reads, of norms and routers, are small. Every rank keeps them whole in the activations'
format, from the same all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.layers.fp8 import E4M3, cast_rows, cast_to, scale_of
from hocket.runtime.comm import Group, Pending
from hocket.runtime.weights import Weight


@dataclass(frozen=True)
class _Rows:
    """Whole rows of a member in this rank's shard."""

    here: slice
    rows: slice
    width: int


@dataclass(frozen=True)
class _Piece:
    here: slice
    row: int


class Fp8Unit:
    """One unit's cast shard, and views of what a gather brings."""

    def __init__(self, group: ParamGroup, in_fp8: Callable[[str], bool], rows: int, kept: int) -> None:
        """Its scales begin at `rows` in those of all units, and its unquantized weights at `kept`."""
        self.group, self.rank = group, group.groups.gather.rank
        self.flat = torch.zeros(group.layout.shard, dtype=E4M3, device=group.device)
        self.chosen = [in_fp8(entry.name) for entry in group.layout.entries]
        self._rows: list[_Rows] = []
        self._pieces: list[_Piece] = []
        self._wide: list[tuple[slice, slice]] = []  # range of the shard -> range of `kept`
        self.of_member: list[slice] = []
        """Each member's range in the scales, or in `kept`."""
        for entry, chosen in zip(group.layout.entries, self.chosen, strict=True):
            local = group.layout.local(entry.name, self.rank)
            if not chosen:
                self.of_member.append(slice(kept, kept + entry.numel))
                where = slice(kept + local.lo, kept + local.hi)
                self._wide.append((slice(local.offset, local.offset + len(local)), where))
                kept += entry.numel
                continue
            count = prod(entry.shape[:-1])
            self.of_member.append(slice(rows, rows + count))
            self._split(local.lo, local.hi, local.offset - local.lo, entry.shape[-1], rows)
            rows += count
        self.rows, self.kept = rows, kept

    def _split(self, lo: int, hi: int, shift: int, width: int, rows: int) -> None:
        """Rows and pieces of elements `lo:hi` of a member, at `lo + shift` in the shard."""
        first, last = -(-lo // width), hi // width
        if first > last:  # inside of one row
            self._pieces.append(_Piece(slice(lo + shift, hi + shift), rows + last))
            return
        if lo < first * width:
            self._pieces.append(_Piece(slice(lo + shift, first * width + shift), rows + first - 1))
        if first < last:
            here = slice(first * width + shift, last * width + shift)
            self._rows.append(_Rows(here, slice(rows + first, rows + last), width))
        if last * width < hi:
            self._pieces.append(_Piece(slice(last * width + shift, hi + shift), rows + last))

    def cast(self, scales: Tensor, kept: Tensor) -> None:
        """Cast whole rows; write their scales, those of pieces, and this rank's part of `kept`."""
        main = self.group.main
        wide = main.to(self.group.compute_dtype)
        for rows in self._rows:
            values = wide[rows.here].view(-1, rows.width)
            cast_rows([values], into=(self.flat[rows.here].view(-1, rows.width), scales[rows.rows]))
        for piece in self._pieces:
            scales[piece.row] = scale_of(wide[piece.here].float().abs().amax())
        for here, where in self._wide:
            kept[where] = main[here]

    def cast_pieces(self, scales: Tensor) -> None:
        for piece in self._pieces:
            value = self.group.main[piece.here].to(self.group.compute_dtype)
            self.flat[piece.here] = cast_to(value.float(), scales[piece.row])

    def views(self, slot: Tensor, kept: Tensor) -> list[Tensor]:
        entries = self.group.layout.entries
        flat = self._bytes(slot).view(E4M3)
        return [
            (flat[entry.offset : entry.end] if chosen else kept[here]).view(entry.shape)
            for entry, chosen, here in zip(entries, self.chosen, self.of_member, strict=True)
        ]

    def gather(self, slot: Tensor) -> Pending:
        whole, length = self._bytes(slot), self.group.layout.shard
        mine = whole[length * self.rank :][:length]
        mine.copy_(self.flat.view(torch.uint8))
        return self.group.groups.gather.all_gather(whole, mine)

    def _bytes(self, slot: Tensor) -> Tensor:
        return slot.view(torch.uint8)[: self.group.layout.total]


class Fp8Weights:
    """All units of one class that are gathered in fp8. See Note: [Scales before the cast]."""

    def __init__(self, groups: Sequence[ParamGroup], gather: Group, in_fp8: Callable[[str], bool]) -> None:
        self._gather = gather
        self.units: list[Fp8Unit] = []
        rows = kept = 0
        for group in groups:
            self.units.append(Fp8Unit(group, in_fp8, rows, kept))
            rows, kept = self.units[-1].rows, self.units[-1].kept
        like = groups[0]
        self.scales = torch.zeros(rows, device=like.device)
        self.kept = torch.zeros(kept, dtype=like.compute_dtype, device=like.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast anew after an update or load. All ranks of the group call this at the same point."""
        scales, kept = self.scales.zero_(), torch.zeros_like(self.kept, dtype=torch.float32)
        for unit in self.units:
            unit.cast(scales, kept)
        scales.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # rows that are not finite win the maximum
        self._gather.all_reduce(scales, "max").wait()
        self._gather.all_reduce(kept).wait()  # the other ranks have zeros
        scales.masked_fill_(scales.isinf(), torch.nan)
        self.kept.copy_(kept)
        for unit in self.units:
            unit.cast_pieces(scales)

    def scale(self, weights: Sequence[Weight], unit: Fp8Unit) -> None:
        for weight, chosen, here in zip(weights, unit.chosen, unit.of_member, strict=True):
            if chosen:
                weight.scale = self.scales[here].view(weight.shape[:-1])

    @property
    def nbytes(self) -> int:
        return sum(unit.flat.nbytes for unit in self.units) + self.scales.nbytes + self.kept.nbytes

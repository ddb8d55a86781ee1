"""Weights gathered in fp8: each rank casts its shard after an update, and a gather moves half the bytes.

Note: [Scales before the cast]
A product needs one scale per row of a weight (`layers/fp8.py`), and a shard has whole rows. After an update each rank
casts its rows in one pass, and one small all-reduce for all units gives the scales of all rows. So every rank knows all
scales, and a gather moves fp8 values alone. A rank first rounds to the activations' format, as a gather in that format
does, so the result is bitwise the cast of gathered weights.

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
from hocket.layers.fp8 import E4M3, cast_rows
from hocket.runtime.comm import Group, Pending
from hocket.runtime.weights import Weight


@dataclass(frozen=True)
class _Rows:
    """Rows of a member in this rank's shard: their elements, and their scales."""

    here: slice
    rows: slice
    width: int


class Fp8Unit:
    """One unit's cast shard, and views of what a gather brings."""

    def __init__(self, group: ParamGroup, in_fp8: Callable[[str], bool], rows: int, kept: int) -> None:
        """Its scales begin at `rows` in those of all units, and its unquantized weights at `kept`."""
        self.group, self.rank = group, group.groups.gather.rank
        self.flat = torch.zeros(group.layout.shard, dtype=E4M3, device=group.device)
        self.chosen = [in_fp8(entry.name) for entry in group.layout.entries]
        self._rows: list[_Rows] = []
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
            if local:
                width, here = entry.shape[-1], slice(local.offset, local.offset + len(local))
                self._rows.append(_Rows(here, slice(rows + local.lo // width, rows + local.hi // width), width))
            rows += count
        self.rows, self.kept = rows, kept

    def cast(self, scales: Tensor, kept: Tensor) -> None:
        """Cast this rank's rows; write their scales, and this rank's part of `kept`."""
        main = self.group.main
        wide = main.to(self.group.compute_dtype)
        for rows in self._rows:
            values = wide[rows.here].view(-1, rows.width)
            cast_rows([values], into=(self.flat[rows.here].view(-1, rows.width), scales[rows.rows]))
        for here, where in self._wide:
            kept[where] = main[here]

    def views(self, slot: Tensor, kept: Tensor) -> list[Tensor]:
        entries = self.group.layout.entries
        flat = self._bytes(slot).view(E4M3)
        return [
            (flat[entry.offset : entry.end] if chosen else kept[here]).view(entry.shape)
            for entry, chosen, here in zip(entries, self.chosen, self.of_member, strict=True)
        ]

    def gather(self, slot: Tensor) -> Pending:
        return self.group.groups.gather.all_gather(
            self._bytes(slot), self.flat.view(torch.uint8), self.group.layout.pieces
        )

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

    def scale(self, weights: Sequence[Weight], unit: Fp8Unit) -> None:
        for weight, chosen, here in zip(weights, unit.chosen, unit.of_member, strict=True):
            if chosen:
                weight.scale = self.scales[here].view(weight.shape[:-1])

    @property
    def nbytes(self) -> int:
        return sum(unit.flat.nbytes for unit in self.units) + self.scales.nbytes + self.kept.nbytes

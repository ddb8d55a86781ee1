"""Clones of a unit's experts: their weights come from the ranks that own them, and their gradients go back.

Clones lie in the room behind this rank's own experts, in whatever buffer holds weights or gradients of the unit
(`FlatLayout`, `room`). So one grouped product computes with both. Slots and shards are longer by that room. What is
gathered or reduced there means nothing: weights are overwritten by the next `bring`, and gradients are zero behind a
`home`. The optimizer's averages leave it out, since runs of neighbours end where it begins (`adamw.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.fsdp.layout import FlatLayout
from hocket.program.cloning import Clones, owner_of
from hocket.runtime.comm import Group, Pending
from hocket.runtime.transports import RowTable


class UnitClones:
    """The clones of one layer's experts, on one rank."""

    def __init__(self, layout: FlatLayout, there: Group, back: Group) -> None:
        """Weights travel on `there`, gradients on `back`: groups of the expert-parallel ranks."""
        self._layout, self._there, self._back = layout, there, back
        self._local = layout.entries[0].shape[0]
        self.choose(())

    def choose(self, clones: Clones) -> None:
        """Clone these experts from now on. All ranks choose the same ones."""
        ranks, rank = self._there.size, self._there.rank
        owners = [owner_of(clone.expert, ranks * self._local, ranks) for clone in clones]
        moved = sorted(zip(owners, clones, strict=True), key=lambda move: (move[0], move[1].rank, move[1].seat))
        rows = [[0] * ranks for _ in range(ranks)]
        for owner, clone in moved:
            rows[owner][clone.rank] += 1
        self._table = RowTable(rows, rank)
        self._mine = [clone.expert % self._local for owner, clone in moved if owner == rank]
        self._theirs = [self._local + clone.seat for _, clone in moved if clone.rank == rank]

    def bring(self, flat: Tensor) -> Pending:
        """Fill the room in a buffer of weights with the weights of clones. They may be read after the wait."""
        views = self._layout.views(flat)
        arrived, pending = self._moved(views, self._mine, self._theirs, self._there, self._table)

        def settle() -> None:
            for at, values in self._each(arrived, views, self._theirs):
                at.copy_(values)

        return pending.then(settle)

    def home(self, flat: Tensor) -> Pending:
        """Add the gradients of clones in a buffer to those of their experts, on the owners, and zero the room.

        An owner adds them in the order of ranks.
        """
        views = self._layout.views(flat)
        arrived, pending = self._moved(views, self._theirs, self._mine, self._back, self._table.back)
        for view in views:
            view[self._local :].zero_()

        def settle() -> None:
            for at, values in self._each(arrived, views, self._mine):
                at.add_(values)

        return pending.then(settle)

    @staticmethod
    def _moved(
        views: list[Tensor], leaving: list[int], arriving: list[int], group: Group, table: RowTable
    ) -> tuple[Tensor, Pending]:
        """What comes for the experts `arriving`, a row for each, while those `leaving` are sent."""
        width = sum(view[0].numel() for view in views)
        rows = views[0].new_empty(len(leaving), width)
        for row, expert in zip(rows, leaving, strict=True):
            torch.cat([view[expert].reshape(-1) for view in views], out=row)
        arrived = rows.new_empty(len(arriving), width)
        if not any(map(any, table.rows)):
            return arrived, Pending()
        return arrived, group.all_to_all(arrived, rows, table)

    @staticmethod
    def _each(rows: Tensor, views: list[Tensor], experts: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Where each parameter of each expert lies, and what came for it."""
        sizes = [view[0].numel() for view in views]
        return [
            (view[expert], values.view(view[expert].shape))
            for row, expert in zip(rows, experts, strict=True)
            for view, values in zip(views, row.split(sizes), strict=True)
        ]

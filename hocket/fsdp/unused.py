"""Parameters that no rank uses have no gradient.

Note: [Gradients that no rank has]
A unit is reduced whole, with zeros for parameters unused on this rank. If no rank has used a parameter, an optimizer
would take the zeros for a gradient and apply weight decay and momentum, unlike without sharding. So `.grad` is None
then. After each backward a rank writes its unused parameters to the store. Reading the gradient of a parameter unused
here waits for the other ranks' entries: hosts wait, devices do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hocket.fsdp.same_order import SameOrder
from hocket.runtime.world import waiting

Group = Any
"""A `ParamGroup`, which has a `Usage`."""

LEAD = 128
"""Backwards whose unused parameters stay in the store: as far as a rank may be ahead of a reader."""


class Usage:
    """Which members of a group got gradients from some rank since they were forgotten.

    All count as used before the first `send`. See Note: [Gradients that no rank has].
    """

    def __init__(self, learns: Sequence[bool]) -> None:
        self._learns = learns
        self._mine = set[int]()
        self.left_out = set[int]()
        """Members without a gradient from this rank in the last reduction."""
        self.by_none: set[int] | None = None
        """Those of them without one from any rank; None: unknown."""
        self.ask: Callable[[], None] = lambda: None
        """Sets `by_none`, if that can be known now."""

    def send(self, written: Sequence[bool]) -> None:
        """A reduction is issued with gradients of `written` members."""
        self._mine.update(i for i, has in enumerate(written) if has)
        self.left_out = {i for i, learns in enumerate(self._learns) if learns} - self._mine
        self.by_none = None

    def unused_by_all(self, index: int) -> bool:
        """Whether no rank is known to have used a member."""
        if index in self.left_out and self.by_none is None:
            self.ask()
        return index in self.left_out and index in (self.by_none or ())

    def add(self, index: int) -> None:
        self._mine.add(index)
        self.left_out.discard(index)

    def forget(self, index: int) -> None:
        self._mine.discard(index)
        self.left_out.discard(index)


class UnusedGradients:
    """Parameters unused on the ranks of one model. See Note: [Gradients that no rank has]."""

    def __init__(self, order: SameOrder | None, model: str, groups: Sequence[Group]) -> None:
        self._order, self._key, self._groups = order, f"unused{model}", groups
        self._sent = False  # whether reductions were issued since the last write
        self._rounds = 0  # writes so far

    def about_to_send(self, group: Group, written: Sequence[bool]) -> None:
        """A reduction is issued with gradients of the members in `written`."""
        group.usage.send(written)
        self._sent = True

    def all_sent(self) -> None:
        """After a backward or deferred reductions: write the unused members."""
        if self._order is not None and self._sent:
            self._sent, self._rounds = False, self._rounds + 1
            said = {g.members[0].name: sorted(g.usage.left_out) for g in self._groups if g.usage.left_out}
            self._order.store.set(self._entry(self._order.rank), json.dumps(said))
            self._order.store.delete_key(self._entry(self._order.rank, before=LEAD))

    def _entry(self, rank: int, before: int = 0) -> str:
        return f"{self._key} {rank} {self._rounds - before}"

    def find(self, groups: Sequence[Group]) -> None:
        """Find the members that no rank has used. Raises ValueError if a rank does not arrive."""
        asking = [group for group in groups if group.usage.left_out and group.usage.by_none is None]
        heard = dict[int, dict[str, list[int]]]()
        if asking and self._order is not None:
            self.all_sent()
            heard = self._hear(self._order)
        for group in asking:
            holders = group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else heard
            theirs = [heard[rank].get(group.members[0].name, ()) for rank in holders if rank in heard]
            group.usage.by_none = group.usage.left_out.intersection(*theirs)

    def _hear(self, order: SameOrder) -> dict[int, dict[str, list[int]]]:
        """Unused members of other ranks by group, in this rank's last backward."""
        entries = {rank: self._entry(rank) for rank in order.ranks if rank != order.rank}

        def late() -> str:
            missing = [rank for rank, entry in entries.items() if not order.store.check([entry])]
            return f"rank {order.rank} reads gradients, and ranks {missing} have not ended that backward"

        keys = list(entries.values())
        for _ in waiting(lambda: order.store.check(keys), late):
            pass
        return dict(zip(entries, map(json.loads, order.store.multi_get(keys)), strict=True))

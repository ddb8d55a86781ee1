"""Prefetch: predicts the next units, and starts their gathers.

A pass is predicted to repeat the last one of its kind; the first backward, to reverse the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from hocket.fsdp.module_unit import Unit

T = TypeVar("T")


class Order(Generic[T]):
    """The expected order of a pass over units, and its progress. Deviations only cost prediction."""

    def __init__(self, expected: Sequence[T]) -> None:
        self.expected = list(expected)
        self.seen: list[T] = []
        self.surprises = 0
        """How often an item was not the expected one."""
        self._next = 0

    def reach(self, item: T) -> None:
        """`item` is needed now; repetitions are ignored."""
        if self.seen and self.seen[-1] is item:
            return
        self.seen.append(item)
        if self._next < len(self.expected) and self.expected[self._next] is item:
            self._next += 1
            return
        self.surprises += 1
        later = [i for i in range(self._next, len(self.expected)) if self.expected[i] is item]
        earlier = [i for i in range(self._next) if self.expected[i] is item]
        if later or earlier:
            self._next = [*later, *earlier][0] + 1

    def upcoming(self) -> Iterator[T]:
        return iter(self.expected[self._next :])

    def finish(self) -> None:
        """End a pass; the next one is expected to repeat it."""
        if self.seen:
            self.expected = self.seen
        self.restart()

    def restart(self) -> None:
        self.seen = []
        self._next = 0


class Lookahead:
    """Follows the passes over a model's units, and prefetches."""

    def __init__(self, units: Sequence[Unit], prefetch: int, free: bool) -> None:
        """With `free`, gathered weights are freed for others."""
        self._units, self._prefetch, self._free = units, prefetch, free
        self._forward: Order[Unit] = Order(units)
        self._backward: Order[Unit] = Order([])
        self._left: list[Unit] = []  # units whose forward ended in this pass
        self._reverse_of: list[Unit] = []  # the forward from which backward was predicted
        self.explicit: dict[tuple[Unit, bool], Sequence[Unit]] = {}
        """(unit, backward) -> units to gather when it begins, if the user has set them."""

    def reach_forward(self, unit: Unit) -> None:
        """Forward has gathered a unit: prefetch the next ones."""
        self._forward.reach(unit)
        self._start(self._forward)

    def leave_forward(self, unit: Unit) -> None:
        if not self._left or self._left[-1] is not unit:
            self._left.append(unit)

    def end_forward(self) -> None:
        self._forward.finish()
        if self._left != self._reverse_of:
            self._backward = Order(self._left[::-1])
        self._reverse_of, self._left = self._left, []

    def reach_backward(self, unit: Unit) -> None:
        self._backward.reach(unit)
        self._start(self._backward)

    def go_on_backward(self) -> None:
        self._start(self._backward)

    def end_backward(self) -> None:
        self._backward.finish()

    def order_of_use(self) -> list[Unit]:
        """All units, in the expected order of the forward."""
        return list(dict.fromkeys([*self._forward.expected, *self._units]))

    def to_gather_first(self, order: Sequence[Unit]) -> list[Unit]:
        """Those of `order` that may be gathered before a forward begins."""
        if not self._free:
            return list(order)
        found, left = list[Unit](), self._prefetch
        for unit in order:
            if unit.full and not unit.contains_units and any(one.full for one in found):
                if not left:
                    break
                left -= 1
            found.append(unit)
        return found

    @property
    def surprises(self) -> int:
        return self._forward.surprises + self._backward.surprises

    def restart(self) -> None:
        self._forward.restart()
        self._backward.restart()
        self._left.clear()

    def _start(self, order: Order[Unit]) -> None:
        """Start the gathers of the next units, as far as there is room."""
        told = self.explicit.get((order.seen[-1], order is self._backward)) if order.seen else None
        if told is not None:
            for unit in told:
                unit.prefetch()
            return
        left = self._prefetch
        for unit in order.upcoming():
            if not unit.full or unit.contains_units:
                continue
            if not left or not unit.prefetch():
                return
            left -= 1

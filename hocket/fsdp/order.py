"""The order in which units are needed, as far as it is known: first a guess, then what the last pass did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """What a pass over the units is expected to need next, and what it has needed so far.

    A pass that turns out otherwise is served all the same; it is only predicted worse. The next pass is expected to be
    like the last one.
    """

    def __init__(self, expected: Sequence[T]) -> None:
        self.expected = list(expected)
        self.seen: list[T] = []
        self.surprises = 0
        """How often something was needed that was not expected next."""
        self._next = 0

    def reach(self, item: T) -> None:
        """Note that `item` is needed now. Still to be needed is nothing new."""
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
        """What is expected after the last item reached, nearest first."""
        return iter(self.expected[self._next :])

    def finish(self) -> None:
        """End a pass: the next one is expected to be like it."""
        if self.seen:
            self.expected = self.seen
        self.restart()

    def restart(self) -> None:
        """Forget the pass under way, without learning from it."""
        self.seen = []
        self._next = 0

"""Which op of the host was open when a kernel was launched: ops of one thread lie inside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket_trace.data import Floats, Ints


@dataclass(frozen=True)
class Nesting:
    """The host's ops by thread and start, each with the op around it."""

    order: Ints
    """Positions in the columns this was made from."""
    start: Floats
    end: Floats
    parent: Ints
    """Index into these columns, -1 for an outermost op."""
    threads: dict[int, tuple[int, int]]
    """Thread -> its first row and the row after its last."""

    def innermost(self, at: Floats, thread: Ints) -> Ints:
        """The innermost op open at each time on each thread, -1 if there is none."""
        found = np.full(len(at), -1, np.int64)
        for number in np.unique(thread):
            first, last = self.threads.get(int(number), (0, 0))
            here = np.flatnonzero(thread == number)
            index = first + np.searchsorted(self.start[first:last], at[here], side="right") - 1
            index[index < first] = -1
            found[here] = self._up_while(index, lambda i, here=here: self.end[i] < at[here])
        return found

    def climb(self, index: Ints, wanted: NDArray[np.bool_]) -> Ints:
        """The op itself or the nearest around it that is wanted (a mask over these columns), -1 if there is none."""
        return self._up_while(index.copy(), lambda i: ~wanted[i])

    def _up_while(self, index: Ints, going: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
        """Replace each index by its parent while `going(index)` holds for it."""
        if not len(self.parent):
            return index
        while len(moving := np.flatnonzero((index >= 0) & going(index))):
            index[moving] = self.parent[index[moving]]
        return index


def nest(start: Floats, end: Floats, thread: Ints) -> Nesting:
    """Order the ops and find the op around each."""
    order = np.lexsort((-end, start, thread))
    start, end, thread = start[order], end[order], thread[order]
    numbers, firsts = np.unique(thread, return_index=True)
    lasts = [*firsts[1:].tolist(), len(thread)][: len(firsts)]  # no threads, no ops
    spans = {int(n): (int(a), b) for n, a, b in zip(numbers, firsts, lasts, strict=True)}
    parent: list[int] = []
    starts, ends = start.tolist(), end.tolist()
    for first, last in spans.values():
        around: list[int] = []
        for i in range(first, last):
            while around and ends[around[-1]] <= starts[i]:
                around.pop()
            parent.append(around[-1] if around else -1)
            around.append(i)
    return Nesting(order, start, end, np.array(parent, np.int64), spans)

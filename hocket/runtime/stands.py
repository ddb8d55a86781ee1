"""Where a rank's lanes stand, told from which of its ops are known to be complete.

Ops that no other lane waits for leave no event, so nothing says when they are complete. But a lane is in order: what
stands before an op that is complete is complete too. What stands behind the last such op of a lane is *open*. A lane
can be at its open ops up to the first of which an event says that it is not complete. If one of these waits for an open
op of another lane, then that is where the lane waits, unless it is still at those before it, which is a *doubt*.
Otherwise it *stands at* them, at one of which nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.program.ops import Lane, Op


class Stands:
    """What is open of a rank's step. Positions are those of the rank's list."""

    def __init__(
        self,
        ops: Sequence[Op],
        issued: Sequence[int],
        completed: Callable[[Op, int], bool | None],
        streams: bool = True,
    ) -> None:
        """`issued` are positions in their order; of the last it is not known whether it was issued to its end.

        `completed` says of any other whether it is complete; None if nothing tells. `streams`: the ops of a lane begin
        one after the other, and not when the host issues them.
        """
        self._ops, self._streams = ops, streams
        self._lanes: dict[Lane, list[int]] = {}
        self._index: dict[int, int] = {}
        for position in issued:
            lane = self._lanes.setdefault(ops[position].lane, [])
            self._index[position] = len(lane)
            lane.append(position)
        last = issued[-1] if issued else -1
        self.doubts: list[tuple[int, ...]] = []
        """Ops at one of which a lane may be that seems to wait, as found by `at`."""
        self._complete: dict[Lane, int] = {}
        self._begun: dict[Lane, int] = {}
        for lane in self._lanes:
            self._complete[lane], self._begun[lane] = self._counts(lane, completed, last)

    def _counts(self, lane: Lane, completed: Callable[[Op, int], bool | None], last: int) -> tuple[int, int]:
        """How many ops of a lane are known to be complete, and how many may have been begun, for all that is known."""
        positions = self._lanes[lane]
        begun = len(positions)
        for count in range(len(positions), 0, -1):
            position = positions[count - 1]
            known = completed(self._ops[position], position) if position != last else None
            if known:
                return count, begun
            if known is False:
                begun = count
        return 0, begun

    def open(self, position: int) -> bool:
        """Whether an op that was issued is not known to be complete."""
        return self._index[position] >= self._complete[self._ops[position].lane]

    def reached(self, position: int) -> bool:
        """Whether an op may have begun."""
        if not self._streams:
            return True
        lane = self._ops[position].lane
        blocked = next((p for p in self._open_ops(lane) if self._waits_for(p)), None)
        return self._index[position] < (self._begun[lane] if blocked is None else self._index[blocked])

    def _waits_for(self, position: int) -> list[int]:
        """Open ops of other lanes that an op waits for."""
        return [p for p in self._ops[position].deps if p in self._index and self.open(p)]

    def _open_ops(self, lane: Lane, up_to: int = -1) -> list[int]:
        """Ops at which a lane may be, as far as it alone is concerned; up to one of them, if that is said."""
        positions = self._lanes[lane]
        end = self._begun[lane] if up_to < 0 else min(self._begun[lane], self._index[up_to] + 1)
        return positions[self._complete[lane] : end]

    def at(self) -> list[tuple[int, ...]]:
        """What all that is open waits for in the end: each time the ops at one of which a lane stands.

        Seen from the op that was issued last and from the compute lane: what only others wait for, such as a send for a
        late receiver, keeps this rank from nothing.
        """
        last = list(self._index)[-1:]
        seen, found = set[int](), dict[Lane, tuple[int, ...]]()
        left = [*last, *self._lanes.get("compute", [])[-1:]]
        while left:
            position = left.pop()
            if position in seen or not self.open(position):
                continue
            seen.add(position)
            lane = self._ops[position].lane
            at_once = position in last and not self._streams
            before = [position] if at_once else self._open_ops(lane, position)
            waits = next((p for p in before if self._waits_for(p)), None)
            if waits is not None:
                left += self._waits_for(waits)
                if self._streams and waits != before[0]:
                    self.doubts.append(tuple(before[: before.index(waits)]))
            elif lane not in found or len(before) < len(found[lane]):  # up to the first that is asked for
                found[lane] = tuple(before)
        return list(found.values())

"""Which units stay gathered while nobody uses them, and who has to go when another one needs the room.

A unit that nobody uses any more is not thrown out at once: its weights stay until the room is needed. So the last units
of forward are still there when backward begins, those of backward when the next microbatch does, and a prefetch is
nothing but a gather that nobody has asked for yet. Nothing else keeps units: there are no phases.

Units that contain others are in use for as long as these run, and are never asked to go; neither is any unit of a
strategy that does not shard weights.
"""

from __future__ import annotations

from typing import Protocol


class Resident(Protocol):
    """A unit, as far as it matters here."""

    claims: int

    @property
    def full_bytes(self) -> int: ...
    def evict(self) -> None: ...


class Residency(Protocol):
    """Who may be gathered at the same time."""

    def admit(self, unit: Resident, wanted: bool) -> bool:
        """Make room for `unit`, throwing out idle units. False if there is no room and `unit` is not `wanted` yet."""
        ...

    def touch(self, unit: Resident) -> None:
        """`unit`, which is gathered, is needed now or soon."""
        ...

    def gone(self, unit: Resident) -> None:
        """`unit` is not gathered any more."""
        ...


class Unbounded:
    """Everybody stays."""

    def admit(self, unit: Resident, wanted: bool) -> bool:
        return True

    def touch(self, unit: Resident) -> None:
        pass

    def gone(self, unit: Resident) -> None:
        pass


class Budget:
    """Units have memory of their own, and as many are gathered as fit into a number of units or bytes.

    A unit that is needed while all others are in use is gathered all the same: branches that run side by side, or
    several microbatches in flight, need what they need. `exceeded` counts how often.
    """

    def __init__(self, units: int | None, nbytes: int | None) -> None:
        assert (units is None) != (nbytes is None)
        self.units, self.nbytes = units, nbytes
        self.exceeded = 0
        self._gathered: list[Resident] = []  # what nobody has needed or looked ahead to for longest comes first

    def _fits(self, unit: Resident) -> bool:
        if self.units is not None:
            return len(self._gathered) < self.units
        assert self.nbytes is not None
        return sum(other.full_bytes for other in self._gathered) + unit.full_bytes <= self.nbytes

    def admit(self, unit: Resident, wanted: bool) -> bool:
        if unit in self._gathered:  # gathered again, with newer weights
            self.touch(unit)
            return True
        idle = [other for other in self._gathered if not other.claims]
        while not self._fits(unit) and idle:
            idle.pop(0).evict()
        if not self._fits(unit):
            if not wanted:
                return False
            self.exceeded += 1
        self._gathered.append(unit)
        return True

    def touch(self, unit: Resident) -> None:
        self._gathered.remove(unit)
        self._gathered.append(unit)

    def gone(self, unit: Resident) -> None:
        self._gathered.remove(unit)

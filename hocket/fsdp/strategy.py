"""The sharding strategies as policy bits, and how far ahead weights are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hocket.config import Strategy
from hocket.fsdp.residency import Budget, Resident
from hocket.sizes import parse_bytes


@dataclass(frozen=True)
class Policy:
    """What a strategy and its options come down to."""

    free: bool
    """Whether gathered weights make room for others."""
    reduce_every_microbatch: bool
    staging: int


def policy_of(strategy: str, staging: int) -> Policy:
    """The bits of a strategy. Raises: ValueError for an unknown one."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(get_args(Strategy))}")
    rank = get_args(Strategy).index(strategy)
    return Policy(
        reduce_every_microbatch=rank >= 2,
        free=rank >= 3,
        staging=staging,
    )


class Allowance:
    """What may still be gathered ahead from where a pass stands."""

    def __init__(self, units: int | None, nbytes: int | None) -> None:
        self._units, self._nbytes = units, nbytes
        self._taken = 0

    def take(self, nbytes: int) -> bool:
        """Whether one more unit fits; the first always does if anything is to be gathered ahead."""
        self._taken += 1
        if self._units is not None:
            return self._taken <= self._units
        assert self._nbytes is not None
        fits = nbytes <= self._nbytes or (self._taken == 1 and self._nbytes > 0)
        self._nbytes -= nbytes
        return fits


@dataclass(frozen=True)
class Prefetch:
    """How far ahead weights are gathered: in units, or in bytes."""

    units: int | None
    nbytes: int | None

    @classmethod
    def parse(cls, value: int | str) -> Prefetch:
        """`2` is two units, `"512MiB"` as many units as fit, at least one."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"prefetch={value!r} must be a number of units, or a size such as '512MiB'")
        if isinstance(value, str):
            return cls(None, parse_bytes(value, "prefetch"))
        if value < 0:
            raise ValueError(f"prefetch={value} is negative: give a number of units, 0 for none")
        return cls(value, None)

    def allowance(self) -> Allowance:
        """A new one."""
        return Allowance(self.units, self.nbytes)

    def budget(self, units: Sequence[Resident]) -> Budget:
        """Room for the unit in use and those ahead of it."""
        if self.units is not None:
            return Budget(self.units + 1, None)
        assert self.nbytes is not None
        largest = max((unit.full_bytes for unit in units), default=0)
        return Budget(None, largest + max(self.nbytes, largest))

"""Where each parameter lies in a unit's flat buffer, and which range of it each rank keeps.

Parameters lie in the order given. Shards are ranges of elements, so a shard may begin and end anywhere inside a
parameter; padding is nearly nothing, where shards of whole rows would add up to 88 % (a buffer must then be a multiple
of ranks times the least common multiple of all row sizes).

Parameters and shards start at multiples of 64 elements, so that kernels and collectives get operands aligned to 128
bytes even in bf16; an odd-sized parameter in between would otherwise slow down all that follow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

ALIGN = 64
"""Elements; 128 bytes of bf16."""


@dataclass(frozen=True)
class Entry:
    """One parameter in a flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Local:
    """The part of one parameter that one rank keeps: its elements `lo:hi`, at `offset` in the shard. May be empty."""

    lo: int
    hi: int
    offset: int

    def __len__(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit: `world` shards of `shard` elements. What no parameter covers is zero."""

    entries: tuple[Entry, ...]
    world: int
    shard: int

    @classmethod
    def build(cls, params: Iterable[tuple[str, tuple[int, ...]]], world: int, align: int = ALIGN) -> FlatLayout:
        """Lay parameters (name, shape) out for `world` ranks; starts and shards are multiples of `align` elements."""
        assert world >= 1
        assert align >= 1
        entries, end = [], 0
        for name, shape in params:
            entry = Entry(name, tuple(shape), -(-end // align) * align)
            entries.append(entry)
            end = entry.end
        assert len({entry.name for entry in entries}) == len(entries), "two parameters of one unit have the same name"
        return cls(tuple(entries), world, -(-end // (world * align)) * align)

    @property
    def total(self) -> int:
        """Elements of the whole buffer."""
        return self.world * self.shard

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the buffer that belong to no parameter."""
        starts = [0, *(entry.end for entry in self.entries)]
        ends = [*(entry.offset for entry in self.entries), self.total]
        return tuple((lo, hi) for lo, hi in zip(starts, ends, strict=True) if lo < hi)

    def local(self, name: str, rank: int) -> Local:
        """What `rank` keeps of a parameter."""
        entry, start = self.by_name[name], rank * self.shard
        lo = min(max(start, entry.offset), entry.end)
        hi = max(min(start + self.shard, entry.end), lo)
        if lo == hi:
            return Local(0, 0, 0)
        return Local(lo - entry.offset, hi - entry.offset, lo - start)

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

from torch import Tensor

from hocket.program.shard import ALIGN


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
    def build(
        cls,
        params: Iterable[tuple[str, tuple[int, ...]]],
        world: int,
        align: int = ALIGN,
    ) -> FlatLayout:
        """Lay parameters (name, shape) out for `world` ranks; starts and shards are multiples of `align` elements."""
        assert world >= 1
        assert align >= 1
        params = [(name, tuple(shape)) for name, shape in params]
        assert len({name for name, _ in params}) == len(params), "two parameters of one unit have the same name"
        entries, end = list[Entry](), 0
        for name, shape in params:
            entries.append(Entry(name, shape, _up(end, align)))
            end = entries[-1].end
        return cls(tuple(entries), world, _up(end, world * align) // world)

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
        inside = sorted((entry.offset, entry.end) for entry in self.entries if entry.numel)
        starts = [0, *(end for _, end in inside)]
        ends = [*(offset for offset, _ in inside), self.total]
        return tuple((lo, hi) for lo, hi in zip(starts, ends, strict=True) if lo < hi)

    def local(self, name: str, rank: int) -> Local:
        """What `rank` keeps of a parameter."""
        entry, start = self.by_name[name], rank * self.shard
        lo = min(max(start, entry.offset), entry.end)
        hi = max(min(start + self.shard, entry.end), lo)
        if lo == hi:
            return Local(0, 0, 0)
        return Local(lo - entry.offset, hi - entry.offset, lo - start)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in a whole buffer, as views of their shapes."""
        return [flat[entry.offset : entry.end].view(entry.shape) for entry in self.entries]

    def slices(self, rank: int) -> list[slice]:
        """What `rank` keeps of each parameter, as ranges of its shard."""
        locals_ = [self.local(entry.name, rank) for entry in self.entries]
        return [slice(local.offset, local.offset + len(local)) for local in locals_]

    def joined(self, parts: int) -> FlatLayout:
        """The same buffer with every `parts` neighbouring shards taken as one."""
        assert self.world % parts == 0, f"{self.world} shards can't be taken {parts} at a time"
        return FlatLayout(self.entries, self.world // parts, self.shard * parts)


def _up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step

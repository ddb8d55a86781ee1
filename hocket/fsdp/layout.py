"""Flat layout: where each parameter lies in a unit's buffer, and which range of it each rank keeps.

Shards are ranges of elements that begin and end anywhere in a parameter. Shards of whole rows would need up to 88 %
padding (a multiple of ranks times the least common multiple of row sizes). Parameters and shards are aligned to 64
elements, 128 bytes in bf16, so that kernels and collectives are fast.
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
    """The elements `lo:hi` of a parameter that one rank keeps, at `offset` in its shard. May be empty."""

    lo: int
    hi: int
    offset: int

    def __len__(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit: `world` shards of `shard` elements. Padding is zero."""

    entries: tuple[Entry, ...]
    world: int
    shard: int

    @classmethod
    def build(
        cls,
        params: Iterable[tuple[str, tuple[int, ...]]],
        world: int,
        align: int = ALIGN,
        alike: int = 1,
    ) -> FlatLayout:
        """Lay out parameters (name, shape) for `world` ranks, aligned to `align` elements.

        `alike` ranks with the same shard can divide it among them.
        """
        assert world >= 1
        assert align >= 1
        params = [(name, tuple(shape)) for name, shape in params]
        assert len({name for name, _ in params}) == len(params), "two parameters of one unit have the same name"
        entries, end = list[Entry](), 0
        for name, shape in params:
            entries.append(Entry(name, shape, _up(end, align)))
            end = entries[-1].end
        return cls(tuple(entries), world, _up(end, world * alike * align) // world)

    @property
    def total(self) -> int:
        return self.world * self.shard

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
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
        """Views of the parameters in a whole buffer."""
        return [flat[entry.offset : entry.end].view(entry.shape) for entry in self.entries]

    def slices(self, rank: int) -> list[slice]:
        """What `rank` keeps of each parameter, as ranges of its shard."""
        locals_ = [self.local(entry.name, rank) for entry in self.entries]
        return [slice(local.offset, local.offset + len(local)) for local in locals_]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step

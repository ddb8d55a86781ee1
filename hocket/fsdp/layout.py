"""Layout of a unit: where each parameter is in its buffer, and which rows of it each rank keeps.

A parameter is divided over ranks by rows, like torch's `Shard(0)`: each rank has `ceil(rows / ranks)` of them, the last
ranks fewer or none. In the buffer a parameter is whole, with padding after its last row, so that it is a view of the
buffer and a rank's rows are one slice (`kernels/pieces.py`). Chunks of a shard are aligned to 64 elements, 128 bytes in
bf16, so that kernels and collectives are fast. A single number has no rows: every rank keeps it, like `Replicate()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from hocket.kernels.pieces import Pieces
from hocket.program.shard import ALIGN


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    start: int
    """Of a rank's chunk in its shard."""
    chunk: int
    """Elements of a chunk."""
    offset: int
    """Of the whole in the buffer."""

    @property
    def is_kept_by_all(self) -> bool:
        return not self.shape

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
    """The buffer of one unit: `world` shards of `shard` elements. Padding is zero."""

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
        fine: bool = False,
    ) -> FlatLayout:
        """Lay out parameters (name, shape) for `world` ranks, chunks aligned to `align` elements.

        A row is an index of the first dimension, or with `fine` of all dimensions but the last: stacked weights then
        need less padding. `alike` ranks with the same shard can divide it among them.
        """
        assert world >= 1
        assert align >= 1
        params = [(name, tuple(shape)) for name, shape in params]
        assert len({name for name, _ in params}) == len(params), "two parameters of one unit have the same name"
        entries, end = list[Entry](), 0
        for name, shape in params:
            first = max(1, len(shape) - 1) if fine else 1
            rows, width = math.prod(shape[:first]), math.prod(shape[first:])
            start, chunk = _up(end, align), -(-rows // world) * width
            entries.append(Entry(name, shape, start, chunk, world * start))
            end = start + chunk
        return cls(tuple(entries), world, _up(end, alike * align))

    @property
    def total(self) -> int:
        return self.world * self.shard

    @cached_property
    def pieces(self) -> Pieces:
        """The chunks, for collectives."""
        bounds = ((entry.start, entry.chunk) for entry in self.entries if entry.chunk)
        return Pieces(tuple(bounds), self.shard, self.world)

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the buffer's elements that belong to no parameter."""
        ends = [0, *(entry.end for entry in self.entries)]
        starts = [*(entry.offset for entry in self.entries), self.total]
        return tuple((lo, hi) for lo, hi in zip(ends, starts, strict=True) if lo < hi)

    def local(self, name: str, rank: int) -> Local:
        """What `rank` keeps of a parameter."""
        entry = self.by_name[name]
        if entry.is_kept_by_all:
            return Local(0, 1, entry.start)
        lo, hi = (min(each * entry.chunk, entry.numel) for each in (rank, rank + 1))
        return Local(lo, hi, entry.start)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of the parameters in a whole buffer."""
        return [flat[entry.offset : entry.end].view(entry.shape) for entry in self.entries]

    def slices(self, rank: int) -> list[slice]:
        """What `rank` keeps of each parameter, as ranges of its shard."""
        locals_ = [self.local(entry.name, rank) for entry in self.entries]
        return [slice(local.offset, local.offset + len(local)) for local in locals_]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step

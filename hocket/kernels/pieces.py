"""The layout of a buffer of whole tensors that collectives gather into or reduce from, and of its shards.

Each tensor is contiguous in the buffer and divided into equal chunks, one per rank. A rank's shard concatenates its
chunks, so its places in the buffer are one slice for each tensor:

    shard of rank r [S]      | chunk of a | chunk of b | ...
    buffer [W * S]           | a: chunks of rank 0, 1, ..., W - 1 | b: chunks of rank 0, 1, ..., W - 1 | ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """The chunks of a shard of `size` elements; each of `world` ranks has such a shard."""

    bounds: tuple[tuple[int, int], ...]
    """(start in the shard, length) of each chunk, none empty, in order, without overlap. Gaps belong to no tensor."""
    size: int
    world: int

    @classmethod
    def one(cls, size: int, world: int) -> Pieces:
        """Shards of one tensor of `world * size` elements."""
        return cls(((0, size),), size, world)

    @property
    def in_order(self) -> bool:
        """Whether the buffer is the concatenation of all shards, without gaps."""
        return self.bounds == ((0, self.size),)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of the shard's ranges without gaps; adjacent chunks are joined."""
        found: list[tuple[int, int]] = []
        for start, length in self.bounds:
            if found and sum(found[-1]) == start:
                start, length = found[-1][0], found.pop()[1] + length
            found.append((start, length))
        return tuple(found)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the shard's gaps."""
        ends = [0, *(start + length for start, length in self.runs)]
        starts = [*(start for start, _ in self.runs), self.size]
        return tuple((lo, hi) for lo, hi in zip(ends, starts, strict=True) if lo < hi)

    def tensors(self, whole: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """(view of all ranks' chunks of a tensor in the buffer, the range of one in the shard)."""
        for start, length in self.bounds:
            first = self.world * start
            yield whole[first : first + self.world * length], slice(start, start + length)

    def pack(self, whole: Tensor, shards: Tensor) -> Tensor:
        """Copy a buffer [W * S] to the concatenated `shards` [W * S]; gaps are not written."""
        packed = shards.view(self.world, self.size)
        for view, here in self.tensors(whole):
            packed[:, here] = view.view(self.world, -1)
        return shards

    def unpack(self, shards: Tensor, whole: Tensor) -> Tensor:
        """The inverse of `pack`."""
        packed = shards.view(self.world, self.size)
        for view, here in self.tensors(whole):
            view.view(self.world, -1).copy_(packed[:, here])
        return whole

    def between(self, low: int, high: int) -> np.ndarray:
        """The elements `low:high` of a shard by chunk, [4, N]: start of rank 0's chunk in the buffer, offset from
        `low`, length, and distance between neighbouring ranks' chunks in the buffer.
        """
        if (low, high) not in self._between:
            start, length = np.array(self.bounds, dtype=np.int64).reshape(-1, 2).T
            first, last = np.maximum(start, low), np.minimum(start + length, high)
            found = np.stack([self.world * start + first - start, first - low, last - first, length])
            self._between[low, high] = found[:, first < last]
        return self._between[low, high]

    @cached_property
    def _between(self) -> dict[tuple[int, int], np.ndarray]:
        return {}


class Own(NamedTuple):
    """A rank's elements of a buffer, from `low` of its shard."""

    rank: int
    whole: Tensor
    """1-D."""
    pieces: Pieces
    low: int = 0

    def chunks(self, high: int) -> Iterator[tuple[Tensor, slice]]:
        """(view in the buffer, its range relative to `low`) of each chunk, up to `high`."""
        for first, at, count, step in self.pieces.between(self.low, high).T.tolist():
            start = first + self.rank * step
            yield self.whole[start : start + count], slice(at, at + count)

"""Ranges and parts of a parameter, as boxes of the whole: an offset and a size per dimension.

A range of elements of a row-major tensor of n dimensions is at most 2n - 1 boxes: for a matrix the end of a row, whole
rows, the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes), one number per dimension."""


def boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Cut the elements `[lo, hi)` of a row-major tensor into boxes, in the order of the elements."""
    if lo >= hi:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((lo,), (hi - lo,))]
    inner = tuple(shape[1:])
    row = prod(inner)
    first, lead = divmod(lo, row)
    last, tail = divmod(hi, row)

    def within(r: int, a: int, b: int) -> list[Box]:
        return [((r, *offsets), (1, *sizes)) for offsets, sizes in boxes(inner, a, b)]

    if first == last:
        return within(first, lead, tail)
    found: list[Box] = []
    if lead:
        found += within(first, lead, row)
        first += 1
    if last > first:
        found.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + within(last, 0, tail)


@dataclass(frozen=True)
class Part:
    """Where the elements of a part of a parameter lie in the whole: along one dimension, in blocks of equal length."""

    shape: tuple[int, ...]
    """Of the part."""
    dim: int
    starts: tuple[int, ...]
    """Index in the whole parameter at which each block of the part begins; several blocks only along dimension 0."""

    @property
    def block(self) -> int:
        """Length of a block."""
        return self.shape[self.dim] // len(self.starts)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole value."""
        return torch.cat([whole.narrow(self.dim, start, self.block) for start in self.starts], self.dim)

    def boxes(self, lo: int, hi: int) -> Iterator[Box]:
        """The elements `[lo, hi)` of the part, as boxes of the whole, in the order of the elements."""
        for offsets, sizes in boxes(self.shape, lo, hi):
            first, stop = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
            while first < stop:
                number = first // self.block
                end = min(stop, (number + 1) * self.block)
                start = self.starts[number] + first - number * self.block
                yield _along(offsets, self.dim, start), _along(sizes, self.dim, end - first)
                first = end


@dataclass(frozen=True)
class Span:
    """The elements `[lo, hi)` of a parameter, or of a part of it."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    lo: int
    hi: int
    part: Part | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    def of(self, whole: Tensor) -> Tensor:
        """These elements of a whole value, 1-D."""
        return (whole if self.part is None else self.part.of(whole)).reshape(-1)[self.lo : self.hi]

    def boxes(self) -> Iterator[Box]:
        """The same as boxes of the whole, in the order of the elements."""
        yield from boxes(self.shape, self.lo, self.hi) if self.part is None else self.part.boxes(self.lo, self.hi)

    def put(self, elements: Tensor, flat: Tensor) -> None:
        """Write these elements, 1-D, where they belong in a whole value, which is given 1-D."""
        whole, at = flat.view(self.shape), 0
        for offsets, sizes in self.boxes():
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            whole[box] = elements[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)


def _along(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])

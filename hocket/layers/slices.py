"""Which slice of each weight a tensor-parallel rank has.

Heads, columns of MLPs and the vocabulary are split evenly, and delta nets by key heads. With fewer key and value heads
than ranks, neighbouring ranks share a head, and each has a copy. Other norms, routers and the weights that make latents
of attention are whole on every rank. So are routed experts, which are split over ranks in other ways
(`program/mesh.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorRank:
    """A rank in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    sharing: int = 1
    """Number of neighbours, itself included, with the same key and value heads."""


ALONE = TensorRank()


@dataclass(frozen=True)
class Split:
    """A weight is split along a dimension; with several stacked `blocks`, each block is."""

    dim: int
    blocks: int = 1
    keys: bool = False
    """Whether it makes keys or values, which may have fewer heads than ranks."""


_HEADS, _INTO, _PAIR, _KEYS = Split(0), Split(1), Split(0, 2), Split(0, keys=True)
SPLITS = {
    "attn.q_wide_norm": _HEADS, "attn.k_wide_norm": _KEYS, "attn.bq": _HEADS, "attn.bk": _KEYS, "attn.bv": _KEYS,
    "attn.sinks": _HEADS,
    "attn.wq": _HEADS, "attn.wk": _KEYS, "attn.wv": _KEYS, "attn.wo": _INTO,
    "attn.wq_b": _HEADS, "attn.wkv_b": _HEADS,
    "attn.w_qkvz": _HEADS, "attn.w_ba": _HEADS, "attn.conv": _HEADS, "attn.dt": _HEADS, "attn.a_log": _HEADS,
    "attn.w_out": _INTO,
    "mlp.w_gate_up": _PAIR, "mlp.w_down": _INTO, "shared.w_gate_up": _PAIR, "shared.w_down": _INTO,
    "embed.weight": Split(0), "head.weight": Split(0),
}  # fmt: skip
"""Keyed by the last two words of a parameter's name."""


def split_of(name: str) -> Split | None:
    """How a parameter is split over tensor-parallel ranks; None if all have the whole."""
    return SPLITS.get(".".join(name.split(".")[-2:]))


def sharers_of(name: str, at: TensorRank) -> int:
    """How many neighbouring ranks, itself included, have the same slice of a parameter; all if that is the whole."""
    split = split_of(name)
    return at.size if split is None else at.sharing if split.keys else 1


def whole_shape(name: str, shape: Sequence[int], at: TensorRank) -> tuple[int, ...]:
    """The shape in the whole model of a parameter that has `shape` on each rank."""
    split, parts = split_of(name), at.size // sharers_of(name, at)
    return tuple(n * parts if split and i == split.dim else n for i, n in enumerate(shape))


def part_of(name: str, whole: Sequence[int], at: TensorRank) -> Part | None:
    """The position of a rank's slice in a parameter of the shape `whole`; None if it has all of it."""
    split, sharers = split_of(name), sharers_of(name, at)
    if split is None or at.size == sharers:
        return None
    parts, number = at.size // sharers, at.rank // sharers
    shape = tuple(n // parts if i == split.dim else n for i, n in enumerate(whole))
    block, mine = whole[split.dim] // split.blocks, shape[split.dim] // split.blocks
    return Part(shape, split.dim, tuple(i * block + number * mine for i in range(split.blocks)))


def take(name: str, value: Tensor, at: TensorRank) -> Tensor:
    """A rank's slice of the whole value of a parameter."""
    part = part_of(name, value.shape, at)
    return value if part is None else part.of(value)


# ---------------------------------------------------------------------------------------------------------------- parts
#
# Ranges and slices of a parameter, as boxes of the whole: an offset and a size per dimension.
#
# A range of elements of a row-major tensor of n dimensions is at most 2n - 1 boxes: for a matrix the end of a row,
# whole rows, the beginning of a row.


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
    """The position of a slice in the whole parameter: along one dimension, in blocks of equal length."""

    shape: tuple[int, ...]
    """Of the slice."""
    dim: int
    starts: tuple[int, ...]
    """Index in the whole parameter of each block's start; several blocks only along dimension 0."""

    @property
    def block(self) -> int:
        """Length of a block."""
        return self.shape[self.dim] // len(self.starts)

    def of(self, whole: Tensor) -> Tensor:
        """The slice of a whole value."""
        return torch.cat([whole.narrow(self.dim, start, self.block) for start in self.starts], self.dim)

    def boxes(self, lo: int, hi: int) -> Iterator[Box]:
        """The elements `[lo, hi)` of the slice, as boxes of the whole, in the order of the elements."""
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
    """The elements `[lo, hi)` of a parameter, or of a slice of it."""

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
        """Write these elements, 1-D, to their place in a whole value, which is given 1-D."""
        whole, at = flat.view(self.shape), 0
        for offsets, sizes in self.boxes():
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            whole[box] = elements[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)


def _along(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])

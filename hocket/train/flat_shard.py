"""A contiguous range of a tensor's elements, as something `torch.distributed.checkpoint` (DCP) can save and reshard.

DCP describes what a rank holds by boxes (offset and size per dimension). A range of elements of a row-major tensor is
at most two boxes per dimension, so flat shards need no DTensor, no padding and no communication of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes), one number per dimension."""


class Piece(Protocol):
    """Elements `[lo, hi)` of a named tensor of the whole model, flattened row by row.

    `tensor` holds them: one dimension, `hi - lo` elements. A scalar's shape is `()` and its one element is `[0, 1)`.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def lo(self) -> int: ...
    @property
    def hi(self) -> int: ...
    @property
    def tensor(self) -> Tensor: ...


@dataclass(frozen=True)
class Range:
    """The plain `Piece`."""

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    tensor: Tensor


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


class FlatShard(Tensor):
    """A tensor of the global shape of which this rank holds the elements of one range.

    Must be a Tensor, for DCP refuses other objects; but it supports no operation except what DCP asks for.
    """

    piece: Piece
    parts: dict[torch.Size, tuple[torch.Size, Tensor]]
    """Offsets of each box -> its sizes and a view of its elements in the piece's tensor."""

    @staticmethod
    def __new__(cls: type[FlatShard], piece: Piece) -> FlatShard:
        """An empty shell with the global shape; `__init__` gives it the elements."""
        tensor = piece.tensor
        return Tensor._make_wrapper_subclass(cls, tuple(piece.shape), dtype=tensor.dtype, device=tensor.device)

    def __init__(self, piece: Piece) -> None:
        assert piece.tensor.shape == (piece.hi - piece.lo,), piece.name
        assert 0 <= piece.lo <= piece.hi <= prod(piece.shape), piece.name
        self.piece, self.parts = piece, {}
        start = 0
        for offsets, sizes in boxes(piece.shape, piece.lo, piece.hi):
            count = prod(sizes)
            self.parts[torch.Size(offsets)] = (torch.Size(sizes), piece.tensor[start : start + count].view(sizes))
            start += count

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a FlatShard is only for checkpoints; it has no {func}")

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, (sizes, _) in self.parts.items():
            yield ChunkStorageMetadata(offsets, sizes)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank would write."""
        properties = TensorProperties(dtype=self.piece.tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP: what this rank wants to read."""
        return list(self._chunks())

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP: the elements of one box, to write from or to read into."""
        assert index.offset is not None
        return self.parts[index.offset][1]

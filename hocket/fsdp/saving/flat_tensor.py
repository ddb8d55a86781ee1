"""A range of a parameter's elements, as something `torch.distributed.checkpoint` (DCP) can save, load and reshard.

A flat shard begins and ends anywhere inside a parameter. DCP describes what a rank holds by boxes, and a range of
elements is a few of them (`layers/slices.py`). So flat shards need no DTensor, no padding and no communication of
their own: DCP cuts the boxes of who saved against the boxes of who loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hocket.layers.slices import Box, Part, Span


class FlatTensor(Tensor):
    """A tensor of a parameter's whole shape of which this rank holds the elements `[lo, hi)`, in the 1-D `flat`.

    DCP refuses what is no Tensor, so this is one; but it supports no operation except what DCP asks for. Loading writes
    into `flat`. With `writes` false another rank holds the same elements and saves them; this one only loads. With
    `part`, `[lo, hi)` counts the elements of that part of the parameter.
    """

    flat: Tensor
    span: Span
    writes: bool

    @staticmethod
    def __new__(
        cls: type[FlatTensor],
        flat: Tensor,
        shape: Sequence[int],
        lo: int,
        hi: int,
        *,
        writes: bool = True,
        part: Part | None = None,
    ) -> FlatTensor:
        """A shell with the whole shape; `__init__` gives it the elements."""
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=flat.dtype, device=flat.device)

    def __init__(
        self,
        flat: Tensor,
        shape: Sequence[int],
        lo: int,
        hi: int,
        *,
        writes: bool = True,
        part: Part | None = None,
    ) -> None:
        assert flat.shape == (hi - lo,), f"elements {lo} to {hi} in a tensor of shape {tuple(flat.shape)}"
        within = shape if part is None else part.shape
        assert 0 <= lo <= hi <= prod(within), f"elements {lo} to {hi} of a tensor of shape {tuple(within)}"
        self.flat, self.span, self.writes = flat.detach(), Span(tuple(shape), lo, hi, part), writes

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        return f"FlatTensor(elements {self.span.lo} to {self.span.hi} of shape {tuple(self.shape)}, {self.dtype})"

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default:
            # DCP's own staging makes an empty twin on the CPU and then copies attributes, `flat` among them.
            empty = args[0].flat.new_empty(0, device=(kwargs or {}).get("device"))
            return cls(empty, args[1], 0, 0)
        raise TypeError(f"a FlatTensor is a rank's part of a parameter, for checkpoints only; it has no {func}")

    def with_elements(self, flat: Tensor) -> FlatTensor:
        """The same range, with other elements."""
        return FlatTensor.of(flat, self.span, self.writes)

    @staticmethod
    def of(flat: Tensor, span: Span, writes: bool = True) -> FlatTensor:
        """These elements of a parameter."""
        return FlatTensor(flat, span.shape, span.lo, span.hi, writes=writes, part=span.part)

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the whole shape that this rank holds, 1-D."""
        return self.span.of(whole)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each box, and a view of its elements in `flat`."""
        # A parameter without elements has one box without elements, or no rank would mention it in the checkpoint.
        cut: Iterable[Box] = [((0,) * self.dim(), tuple(self.shape))]
        if self.numel():
            cut = self.span.boxes()
        start = 0
        for offsets, sizes in cut:
            count = prod(sizes)
            view = self.flat[start : start + count].view(sizes)
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), view
            start += count

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank would write."""
        if not self.writes:
            return []
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _view in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP: what this rank wants to read."""
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP: the elements of one box, to write from or to read into."""
        return next(view for chunk, view in self._chunks() if chunk.offsets == index.offset)

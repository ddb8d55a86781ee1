"""What one rank has of a parameter of the whole model, and how `torch.distributed.checkpoint` (DCP) sees it.

Most shards are rows and go to DCP as DTensors. A plan cuts finer, experts on a part of the ranks have no mesh for their
dimension 0, and tensor-parallel parts of stacked weights are several. DCP describes a rank's data by boxes, and a range
of elements is a few of them (`layers/slices.py`): it intersects the boxes of saving and loading ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hocket.fsdp.sharded_parameter import around
from hocket.layers.slices import Span

if TYPE_CHECKING:
    from hocket.fsdp.param_group import ParamGroup


class Boxes(Tensor):
    """A tensor of a parameter's whole shape, of which this rank holds the elements `span` in the 1-D `flat`.

    It is a Tensor because DCP requires one, but supports only what DCP needs. Loading writes into `flat`.
    """

    flat: Tensor
    span: Span

    @staticmethod
    def __new__(cls: type[Boxes], flat: Tensor, span: Span) -> Boxes:
        """A wrapper with the whole shape; `__init__` sets the elements."""
        return Tensor._make_wrapper_subclass(cls, span.shape, dtype=flat.dtype, device=flat.device)

    def __init__(self, flat: Tensor, span: Span) -> None:
        within = span.shape if span.part is None else span.part.shape
        assert flat.shape == (span.hi - span.lo,), f"elements {span.lo} to {span.hi} in {tuple(flat.shape)}"
        assert 0 <= span.lo <= span.hi <= prod(within), f"elements {span.lo} to {span.hi} of a tensor of shape {within}"
        self.flat, self.span = flat.detach(), span

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        return f"Boxes(elements {self.span.lo} to {self.span.hi} of shape {tuple(self.shape)}, {self.dtype})"

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default:
            # DCP's staging makes an empty copy on the CPU and then copies attributes, `flat` among them.
            empty = args[0].flat.new_empty(0, device=(kwargs or {}).get("device"))
            return cls(empty, Span(tuple(args[1]), 0, 0))
        raise TypeError(f"Boxes are a rank's part of a parameter, for checkpoints only; they have no {func}")

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """(box, view of its elements in `flat`)."""
        # An empty parameter has one empty box, so that the checkpoint mentions it.
        cut = self.span.boxes() if self.numel() else [((0,) * self.dim(), tuple(self.shape))]
        start = 0
        for offsets, sizes in cut:
            count = prod(sizes)
            view = self.flat[start : start + count].view(sizes)
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), view
            start += count

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank would write."""
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


def local_of(value: Tensor) -> Tensor:
    """The memory here of a tensor of a checkpoint."""
    if isinstance(value, Boxes):
        return value.flat
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def with_local(value: Tensor, local: Tensor) -> Tensor:
    """The same part of a tensor in other memory."""
    if isinstance(value, Boxes):
        return Boxes(local, value.span)
    # `DTensor.from_local` would move a copy on the host to the device of the mesh.
    return around(local, value._spec) if isinstance(value, DTensor) else local


@dataclass(frozen=True)
class Piece:
    """The elements that this rank has of a member of a group."""

    name: str
    group: ParamGroup
    position: int
    """Of the member in its group."""
    span: Span
    """Its elements in the whole model's parameter; for experts, with the experts of all ranks."""
    shared: int = 1
    """Neighbouring tensor-parallel ranks with these elements, each with a gradient of its own tokens or heads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.span.shape

    @property
    def lo(self) -> int:
        return self.span.lo

    @property
    def hi(self) -> int:
        return self.span.hi

    @property
    def main(self) -> Tensor:
        """The main weights, 1-D: live memory."""
        return self.group.locals[self.position]

    @property
    def grad(self) -> Tensor:
        """The reduced gradient, 1-D; between a reduce and the step."""
        grad = self.group.grad_of(self.position)
        assert grad is not None, f"{self.name} has no gradient"
        return grad

    def boxes(self, flat: Tensor) -> Boxes:
        """Elements here, 1-D, as checkpoints describe them."""
        return Boxes(flat, self.span)

    # Of a module's parameter

    @property
    def param(self) -> Any:
        """What the module and its optimizer see: a DTensor, unless this rank keeps the whole."""
        return self.group.shards[self.position]

    def is_like(self, value: Tensor) -> bool:
        """Whether a tensor has an element here for each of the parameter's."""
        return value.shape == self.param.shape and local_of(value).numel() == len(self.span)

    def saved(self, value: Tensor) -> Tensor:
        """A tensor like the parameter, for a checkpoint of the whole model.

        In boxes if ranks beside those of the DTensor's mesh have other parts, and if tensor-parallel ranks have: of
        uneven rows a `_StridedShard` says other elements than are here.
        """
        value = value.detach()
        in_rows = self.group.groups.part[1] == 1 and self.span.part is None
        return value if in_rows else self.boxes(local_of(value).reshape(-1))

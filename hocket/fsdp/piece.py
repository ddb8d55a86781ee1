"""What one rank has of a parameter of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.fsdp.saving.boxes import Boxes, is_whole, local_of
from hocket.layers.slices import Span

if TYPE_CHECKING:
    from hocket.fsdp.param_group import ParamGroup


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
        """A tensor like the parameter, for a checkpoint of the whole model: in boxes if other ranks have more rows."""
        value = value.detach()
        return value if self.group.groups.part[1] == 1 else self.boxes(local_of(value).reshape(-1))

    def here(self, value: Tensor) -> Tensor:
        """The elements here, 1-D, of what `saved` returns, or of a tensor of the whole model.

        Raises: ValueError for a rank's part of another rank, or of another way to shard.
        """
        if isinstance(value, Boxes) and value.span == self.span:
            return value.flat
        if not isinstance(value, Boxes) and self.is_like(value):
            return local_of(value).reshape(-1)
        if not is_whole(value) or value.shape != self.shape:
            raise ValueError(
                f"{self.name} is given a part of it, {value!r}, which is not what this rank keeps: what was sharded in "
                f"another way goes through a checkpoint"
            )
        return self.span.of(value.detach())

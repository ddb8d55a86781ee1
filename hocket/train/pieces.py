"""What a checkpoint of a run is made of: ranges of the elements of named tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hocket.layers.slices import Part


@dataclass(frozen=True)
class Range:
    """Elements `[lo, hi)` of a named tensor of the whole model, flattened row by row.

    `tensor` holds them: one dimension, `hi - lo` elements. A scalar's shape is `()` and its one element is `[0, 1)`.
    With a `part`, these are elements of that part of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    tensor: Tensor
    part: Part | None = None

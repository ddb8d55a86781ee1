"""Which part of each weight a tensor-parallel rank has.

Heads, columns of MLPs and the vocabulary are spread evenly. Norms and routers are whole on every rank, and so are
routed experts, which are spread over ranks in other ways (`parallel/mesh.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hocket.fsdp.flat_tensor import Part


@dataclass(frozen=True)
class Split:
    """A weight is cut along a dimension; of several `blocks` stacked there, each is."""

    dim: int
    blocks: int = 1


_HEADS, _INTO, _PAIR = Split(0), Split(1), Split(0, 2)
SPLITS = {
    "attn.wq": _HEADS, "attn.wk": _HEADS, "attn.wv": _HEADS, "attn.wo": _INTO,
    "mlp.w_gate_up": _PAIR, "mlp.w_down": _INTO, "shared.w_gate_up": _PAIR, "shared.w_down": _INTO,
    "embed.weight": Split(0), "head.weight": Split(0),
}  # fmt: skip
"""By the last two words of a parameter's name."""


def split_of(name: str) -> Split | None:
    """How a parameter is spread over tensor-parallel ranks; None if all have the whole."""
    return SPLITS.get(".".join(name.split(".")[-2:]))


def whole_shape(name: str, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The shape in the whole model of a parameter that has `shape` on each of `size` ranks."""
    split = split_of(name)
    return tuple(n * size if split and i == split.dim else n for i, n in enumerate(shape))


def part_of(name: str, whole: Sequence[int], rank: int, size: int) -> Part | None:
    """Where a rank's part of a parameter of the shape `whole` lies in it; None if it has all of it."""
    split = split_of(name)
    if split is None or size == 1:
        return None
    shape = tuple(n // size if i == split.dim else n for i, n in enumerate(whole))
    block, mine = whole[split.dim] // split.blocks, shape[split.dim] // split.blocks
    return Part(shape, split.dim, tuple(i * block + rank * mine for i in range(split.blocks)))


def take(name: str, value: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part of the whole value of a parameter."""
    part = part_of(name, value.shape, rank, size)
    return value if part is None else part.of(value)

"""Which part of each weight a tensor-parallel rank has.

Heads, columns of MLPs and the vocabulary are spread evenly, and delta nets by key heads. Where there are fewer key and
value heads than ranks, as many neighbours as have the same one each keep it. Other norms, routers and what makes
latents of attention are whole on every rank, and so are routed experts, which are spread over ranks in other ways
(`program/mesh.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hocket.parallel.parts import Part


@dataclass(frozen=True)
class TensorRank:
    """A rank in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    sharing: int = 1
    """Neighbours, itself included, that have the same key and value heads."""


ALONE = TensorRank()


@dataclass(frozen=True)
class Split:
    """A weight is cut along a dimension; of several `blocks` stacked there, each is."""

    dim: int
    blocks: int = 1
    keys: bool = False
    """Whether it makes keys or values, of which there may be fewer heads than ranks."""


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
"""By the last two words of a parameter's name."""


def split_of(name: str) -> Split | None:
    """How a parameter is spread over tensor-parallel ranks; None if all have the whole."""
    return SPLITS.get(".".join(name.split(".")[-2:]))


def sharers_of(name: str, at: TensorRank) -> int:
    """How many neighbouring ranks, itself included, have the same part of a parameter; all, where that is the whole."""
    split = split_of(name)
    return at.size if split is None else at.sharing if split.keys else 1


def whole_shape(name: str, shape: Sequence[int], at: TensorRank) -> tuple[int, ...]:
    """The shape in the whole model of a parameter that has `shape` on each rank."""
    split, parts = split_of(name), at.size // sharers_of(name, at)
    return tuple(n * parts if split and i == split.dim else n for i, n in enumerate(shape))


def part_of(name: str, whole: Sequence[int], at: TensorRank) -> Part | None:
    """Where a rank's part of a parameter of the shape `whole` lies in it; None if it has all of it."""
    split, sharers = split_of(name), sharers_of(name, at)
    if split is None or at.size == sharers:
        return None
    parts, number = at.size // sharers, at.rank // sharers
    shape = tuple(n // parts if i == split.dim else n for i, n in enumerate(whole))
    block, mine = whole[split.dim] // split.blocks, shape[split.dim] // split.blocks
    return Part(shape, split.dim, tuple(i * block + number * mine for i in range(split.blocks)))


def take(name: str, value: Tensor, at: TensorRank) -> Tensor:
    """A rank's part of the whole value of a parameter."""
    part = part_of(name, value.shape, at)
    return value if part is None else part.of(value)

"""Section `optimizer`: which weights the optimizer updates, and how, by name and by shape in the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from hocket.config.rule import Between, OnlyWith, Rule, problem


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which weights the optimizer updates, and how."""

    name: Literal["adamw", "muon"] = "adamw"
    """The optimizer. muon updates the matrices of layers, including those of routers and of each expert, and AdamW the
    rest: embedding, head, vectors, and the weights that `adamw` names."""
    adamw: Annotated[tuple[str, ...], OnlyWith("optimizer.name = muon")] = ()
    """For muon: patterns of names, as in `no_decay`, of further weights that AdamW updates."""
    scale: Annotated[Literal["match_rms_adamw", "original"], OnlyWith("optimizer.name = muon")] = "match_rms_adamw"
    """For muon: learning-rate factor by a matrix's shape. match_rms_adamw makes updates as large as those of AdamW:
    0.2 times the root of the longer side. original: the root of rows / columns, at least 1."""
    no_decay: tuple[str, ...] = ()
    """Names of further weights without weight decay, besides all vectors, such as embed.weight or *.router.weight. In a
    pattern * stands for any text. hocket explain shows which weights decay."""
    skip_spikes: Annotated[float, Between(0, 1e12)] = 0.0
    """A step is skipped if its gradient norm is above this factor times the median of the last 128 steps that were not
    skipped; 0 skips none. A step whose gradient is not finite is always skipped: weights, the optimizer's state and
    balance biases stay unchanged."""

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Settings that are patterns of weight names."""
        return {"optimizer.no_decay": self.no_decay, "optimizer.adamw": self.adamw}

    def left_out(self, names: Iterable[str]) -> str:
        """The pattern of `no_decay` that matches a weight with these names; empty if none does."""
        return next((x for x in self.no_decay for name in names if fnmatchcase(name, x)), "")

    def decays(self, names: Sequence[str], shape: Sequence[int]) -> bool:
        """Whether a weight decays: it is a matrix, and `no_decay` matches none of its `names`."""
        return not is_vector(names[0], shape) and not self.left_out(names)

    def by_muon(self, name: str, shape: Sequence[int]) -> bool:
        """Whether Muon updates a weight: a matrix, or one per expert, in a layer of hocket's own transformer."""
        if self.name != "muon" or not name.startswith("layers.") or name.endswith(_NO_MATRICES):
            return False
        matrix = len(shape) == (3 if ".experts." in name else 2)
        return matrix and not any(fnmatchcase(name, pattern) for pattern in self.adamw)


_NO_MATRICES = (".attn.conv", ".shared.w_gate")
"""Suffixes of two-dimensional weights that are short convolutions or one vector."""


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is not a matrix; for stacked experts, each expert's. `name` is hocket's own."""
    return len(shape) < (3 if ".experts." in name else 2)


OPTIMIZER_RULES = (
    Rule(
        ("optimizer.skip_spikes",),
        lambda c, h: 0 < c.optimizer.skip_spikes <= 1,
        "about half of all norms are above their median",
        "optimizer.skip_spikes above 1, or optimizer.skip_spikes = 0",
    ),
)


Shapes = Mapping[str, Sequence[int]]
"""Names of weights -> their shapes in the whole model."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights with the same treatment."""

    names: tuple[str, ...]
    elements: int
    decay: float
    why: str
    """The reason, in words."""


def weight_groups(optimizer: OptimizerConfig, weight_decay: float, shapes: Shapes) -> tuple[WeightGroup, ...]:
    """All weights, grouped by treatment."""
    found: dict[str, list[str]] = {"matrices, by Muon": [], "matrices": [], "vectors": []}
    for name, shape in shapes.items():
        pattern = optimizer.left_out([name])
        why = "vectors" if is_vector(name, shape) else f"optimizer.no_decay: {pattern}" if pattern else "matrices"
        why += ", by Muon" if optimizer.by_muon(name, shape) else ""
        found.setdefault(why, []).append(name)
    return tuple(
        WeightGroup(
            tuple(names),
            sum(math.prod(shapes[n]) for n in names),
            weight_decay * why.startswith("matrices"),
            why,
        )
        for why, names in found.items()
        if names
    )


def unmatched(optimizer: OptimizerConfig, names: Iterable[Iterable[str]], origins: Mapping[str, str]) -> list[str]:
    """A problem for each pattern that matches no weight; `names` are all names of each weight."""
    known = [name for of_one in names for name in of_one]
    return [
        problem(
            setting,
            patterns,
            origins,
            f"no weight is named like {pattern!r}",
            f"a pattern of names such as {', '.join(samples(known))}",
        )
        for setting, patterns in optimizer.patterns.items()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def samples(names: Sequence[str], most: int = 4) -> list[str]:
    """A few names of different kinds."""
    kinds = {".".join(word for word in name.split(".") if not word.isdigit()): name for name in reversed(names)}
    return [*reversed(kinds.values())][:most]

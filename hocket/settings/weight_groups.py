"""Which weights the optimizer treats in which way: by name, and by the shape that they have in the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hocket.config import Config
from hocket.settings.schema import problem

Shapes = Mapping[str, Sequence[int]]
"""Names of weights -> their shapes in the whole model."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are treated alike."""

    names: tuple[str, ...]
    elements: int
    decay: float
    why: str
    """What puts them here, in words."""


def decays(config: Config, names: Iterable[str], shape: Sequence[int]) -> bool:
    """Whether a weight decays: a matrix, and under none of its `names` one that `optimizer.no_decay` leaves out."""
    found = list(names)
    return not is_vector(found[0], shape) and not _left_out(config, found)


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is no matrix: of stacked experts, that of each. `name` is hocket's own."""
    return len(shape) < (3 if ".experts." in name else 2)


_NO_MATRICES = (".attn.conv", ".shared.w_gate")
"""Ends of names of weights that have two dimensions and are many short convolutions, or one vector."""


def by_muon(config: Config, name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a weight: a matrix, or one for each expert, of a layer of hocket's own transformer."""
    if config.optimizer.name != "muon" or not name.startswith("layers.") or name.endswith(_NO_MATRICES):
        return False
    matrix = len(shape) == (3 if ".experts." in name else 2)
    return matrix and not any(fnmatchcase(name, pattern) for pattern in config.optimizer.adamw)


def _left_out(config: Config, names: Iterable[str]) -> str:
    """The pattern that leaves a weight out; empty if there is none."""
    return next((x for x in config.optimizer.no_decay for name in names if fnmatchcase(name, x)), "")


def weight_groups(config: Config, shapes: Shapes) -> tuple[WeightGroup, ...]:
    """All weights, by what is done with them."""
    found: dict[str, list[str]] = {"matrices, by Muon": [], "matrices": [], "vectors": []}
    for name, shape in shapes.items():
        pattern = _left_out(config, [name])
        why = "vectors" if is_vector(name, shape) else f"optimizer.no_decay: {pattern}" if pattern else "matrices"
        why += ", by Muon" if by_muon(config, name, shape) else ""
        found.setdefault(why, []).append(name)
    return tuple(
        WeightGroup(
            tuple(names),
            sum(math.prod(shapes[n]) for n in names),
            config.train.weight_decay * why.startswith("matrices"),
            why,
        )
        for why, names in found.items()
        if names
    )


def patterns_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Settings that are patterns of names of weights."""
    return {"optimizer.no_decay": config.optimizer.no_decay, "optimizer.adamw": config.optimizer.adamw}


def unmatched(config: Config, names: Iterable[Iterable[str]], origins: Mapping[str, str]) -> list[str]:
    """A problem for each pattern that no weight has; `names` are all names of each weight."""
    known = [name for of_one in names for name in of_one]
    return [
        problem(
            setting,
            patterns,
            origins,
            f"no weight is named like {pattern!r}",
            f"a pattern of names such as {', '.join(samples(known))}",
        )
        for setting, patterns in patterns_of(config).items()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def samples(names: Sequence[str], most: int = 4) -> list[str]:
    """A few names of different kinds."""
    kinds = {".".join(word for word in name.split(".") if not word.isdigit()): name for name in reversed(names)}
    return [*reversed(kinds.values())][:most]

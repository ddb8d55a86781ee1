"""Where a number that is not finite came from: looked for once a run ends by it, when time does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.engine.engine import Engine
from hocket.model.documents import Microbatch
from hocket.program.ops import Op
from hocket.runtime.world import everyone

Found = tuple[float, int, int, str]
"""Layer, part and microbatch of an op, and its name: the first of all is the least."""


def blame(engine: Engine, microbatches: Sequence[Microbatch]) -> str:
    """The first op whose output is not finite, with its rank; or the last unit whose gradient in the last step is not.

    Runs forward once more on the microbatches. Every rank calls this, and is told the same. Empty if all is finite.
    """
    seen: list[Found] = []

    def see(op: Op, result: Any) -> None:
        losses = engine.validating.actions.losses[-1:] if op.part == "head" else []
        if not all(map(_finite, [*_tensors(result), *losses])):
            seen.append((*_place(op, engine), str(op)))

    engine.watch(microbatches, see)
    found = [(*mine, rank) for rank, mine in enumerate(everyone(min(seen, default=None))) if mine]
    if found:
        *_, op, rank = min(found)
        return f"the first output that is not finite is that of {op} on rank {rank}"
    units = sorted({unit for mine in everyone(engine.optimizer.not_finite()) for unit in mine})
    if units:
        _, unit = units[-1]
        return f"all outputs of its forward are finite, and backward loses that in the gradient of {unit}"
    return ""


def _place(op: Op, engine: Engine) -> tuple[float, int, int]:
    if op.layer < 0:
        return (-1.0 if op.part == "embed" else float("inf")), 0, op.microbatch
    parts = [part.name for part in engine.layout.type_of(op.layer).parts]
    return float(op.layer), parts.index(op.part), op.microbatch


def _tensors(result: Any) -> list[Tensor]:
    several = result if isinstance(result, list | tuple) else [result]
    return [each for each in several if isinstance(each, Tensor) and each.is_floating_point()]


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())

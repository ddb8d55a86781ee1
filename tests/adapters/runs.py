"""A step of `plan_model` and the same step of the plain model. Ranks import this module: it has no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.adapters.step import PlannedStep
from hocket.model.documents import Microbatch
from tests.adapters.families import LENGTH, SEQUENCES, batches, model
from tests.helpers.parity import Piece

Batches = list[list[tuple[Tensor, Tensor]]]
Step = dict[str, Any]

SETTINGS: dict[str, Any] = {
    "train.sequences": SEQUENCES,
    "train.device": "cpu",
    "train.clip": 0.0,
    "data.sequence_length": LENGTH,
}
CHOSEN: dict[str, Any] = {
    "plan.layers_per_stage": (1, 1, 1, 1),
    "overlap.pp.defer_layers": 1,
    "overlap.pp.defer_head": 1,
    "overlap.ep.merge_ends": "off",
    "overlap.dp.update": "end",
}
"""What costs would choose in a pipeline of two ranks with two stages each, which takes longer than a step."""


def planned(made: nn.Module, settings: dict[str, Any], given: Batches, documents: Any = None, **how: Any) -> Step:
    """Losses of this rank's microbatches, pieces of gradients by the model's names, and the step.

    `documents` are those of each microbatch and data-parallel rank, where some share sequences.
    """
    torch.use_deterministic_algorithms(True)
    step = hocket.plan_model(made, {**SETTINGS, "train.microbatches": len(given), **settings}, **how)
    grads: list[Piece] = []
    finish = step.engine.optimizer.apply

    def keep(**how: Any) -> None:
        grads.extend(pieces_of(step))
        finish(**how)

    step.engine.optimizer.apply = keep  # type: ignore[method-assign]
    at = step.engine.where.dp
    several = [None] * len(given) if documents is None else [ranks[at] for ranks in documents]
    microbatches = [Microbatch(*ranks[at], documents=docs) for ranks, docs in zip(given, several, strict=True)]
    outcome = step(microbatches, 1e-2)
    step.engine.assert_clean()
    losses = [loss.item() for loss in step.engine.executor.actions.losses]
    return {"losses": losses, "grads": grads, "outcome": outcome, "step": step}


def pieces_of(step: PlannedStep) -> list[Piece]:
    """What this rank has of all gradients."""
    units, theirs = step.engine.sharded.units.values(), step.parameters
    return [(theirs[p.name][0], p.shape, p.lo, p.hi, p.grad.clone()) for unit in units for p in unit.pieces()]


def plain(made: Any, given: Batches, logits: Callable[[Tensor], Tensor] | None = None) -> tuple[list[list[float]], Any]:
    """Losses by microbatch and rank, and whole gradients: of each microbatch summed over ranks first, as reduces do."""
    logits = logits or (lambda ids: made(input_ids=ids, use_cache=False).logits)
    params = {name: param for name, param in made.named_parameters() if param.requires_grad}
    total = {name: torch.zeros_like(param) for name, param in params.items()}
    losses = []
    for ranks in given:
        losses.append([])
        of_ranks: list[Sequence[Tensor | None]] = []
        for ids, targets in ranks:
            loss = F.cross_entropy(logits(ids).flatten(0, 1).float(), targets.flatten())
            losses[-1].append(loss.item())
            of_ranks.append(torch.autograd.grad(loss / len(given), [*params.values()], allow_unused=True))
        for name, grads in zip(params, zip(*of_ranks, strict=True), strict=True):
            found = [grad for grad in grads if grad is not None]
            for grad in found[1:]:
                found[0] = found[0] + grad
            if found:
                total[name] += found[0] * (1 / len(ranks))
    return losses, total


def far(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """The relative difference of two tensors, by norms; of what is smaller than `least`, relative to that."""
    return float((found - expected).norm() / expected.norm().clamp(min=least))


def of_family(family: str, settings: dict[str, Any], microbatches: int, ranks: int, **changes: Any) -> Step:
    """A family's planned step on this rank, without what cannot be sent to other processes."""
    out = planned(model(family, **changes), settings, batches(microbatches, ranks))
    step = out.pop("step")
    out["verbs"] = sorted({f"{op.verb} {op.part}" for ops in step.program.ranks for op in ops})
    step.close()
    return out

"""The numerics gate: before anything is timed, all contenders but the bounds must learn the same.

They take a few steps on one batch that is repeated, so that the loss falls; its curves must agree. AdamW would hide
gradients that are off by a factor, for it divides them by their own size. So the gate's `eps` is about as large as an
element of a gradient, and a wrong factor shows as a slower or faster fall.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hocket.bench.contender import Contender
from hocket.bench.workload import Workload, batches
from hocket.config import ModelConfig
from hocket.model.transformer import parameter_counts

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest difference of two losses at the same step, relative to the loss before the first step, by compute dtype. Not
to the loss itself: on one batch it soon falls to almost nothing, and then rounding is all that is left of it."""
LAYERS = 4
"""Layers of the gate's model where the workload has no optimizer."""


class NumericsError(RuntimeError):
    """Contenders do not compute the same."""


@dataclass(frozen=True)
class Verdict:
    """What the gate saw."""

    curves: Mapping[str, Sequence[float]]
    """Mean loss over all ranks by contender and step."""
    tolerance: float
    worst: float
    """Largest difference from the first contender, relative to the first loss."""
    fall: float
    """By how much the first contender's loss changed, relative to the first one. Far above the tolerance."""
    layers: int
    """Layers of the model that was compared."""


def sensitive(workload: Workload) -> Workload:
    """A workload whose optimizer lets a wrong factor of a gradient show."""
    size, _ = parameter_counts(workload.config.model)
    train = dataclasses.replace(workload.config.train, eps=size**-0.5)
    return dataclasses.replace(workload, config=dataclasses.replace(workload.config, train=train))


def small(workload: Workload) -> Workload:
    """What the gate runs for a workload without an optimizer: fewer layers, with one. Even stages stay even."""
    config = workload.config
    stages = config.mesh.pp * config.plan.chunks
    layers = config.model.layers
    if not config.plan.layers_per_stage:
        layers = min(layers, -(-LAYERS // stages) * stages)
    model: ModelConfig = dataclasses.replace(
        config.model, layers=layers, dense_layers=tuple(n for n in config.model.dense_layers if n < layers)
    )
    return sensitive(dataclasses.replace(workload, config=dataclasses.replace(config, model=model), optimizer=True))


def curve(contender: Contender, workload: Workload, rank: int, device: torch.device, steps: int) -> list[float]:
    """Losses of `steps` steps on one batch, the mean over data-parallel ranks. Every rank calls this."""
    microbatches = batches(workload, rank, 0, device)
    losses = torch.stack([contender.step(microbatches).double() for _ in range(steps)]).cpu()
    dist.all_reduce(losses)  # ranks without the head add 0
    return (losses / workload.mesh.dp).tolist()


def judge(curves: Mapping[str, Sequence[float]], workload: Workload) -> Verdict:
    """Compare curves. Raises NumericsError if they differ by more than the tolerance of the dtype."""
    tolerance = TOLERANCE[workload.config.train.dtype]
    verdict = Verdict(curves, tolerance, 0.0, 0.0, workload.config.model.layers)
    if not curves:
        return verdict
    first, *others = curves
    reference, worst = curves[first], 0.0
    for name in others:
        for step, (mine, theirs) in enumerate(zip(reference, curves[name], strict=True)):
            apart = abs(mine - theirs) / abs(reference[0])
            if not apart <= tolerance:  # so that nan fails too
                raise NumericsError(
                    f"{name} does not compute what {first} computes: at step {step} their losses are {theirs:.6g} and "
                    f"{mine:.6g}, {apart:.1e} apart, and at most {tolerance:g} is allowed; nothing was timed"
                )
            worst = max(worst, apart)
    fall = abs(reference[0] - reference[-1]) / abs(reference[0])
    return dataclasses.replace(verdict, worst=worst, fall=fall)

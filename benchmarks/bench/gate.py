"""The numerics gate: before anything is timed, all contenders but the bounds must learn the same.

They take a few steps on one batch that is repeated, so that the loss falls; what they have learnt must agree. Three
things make that a sensitive test, which it would not be with an ordinary learning rate:

- AdamW would hide gradients that are off by a factor, for it divides them by their own size. So the gate's `eps` is
  about as large as an element of a gradient: below a large one, which belongs to head or embedding and would otherwise
  decide alone, and above those of layers and experts, where a wrong factor shows in full.
- The learning rate is so small that the loss falls by a few per cent up to a fifth and is still falling at the end. A
  batch that is learnt at once leaves nothing but rounding to compare.
- Differences are measured against what was learnt, not against the loss.

The model has few layers, which is quicker and gives each of them more weight. In fp32 the tolerance is a few times what
another order of sums does, and an error of 5 % in the gradients of one layer, or of all experts, or of embedding or
head, is caught. In bf16, where rounding makes close routing choices flip, it catches what is off by a factor (means
that are sums, a lost rank or microbatch) in all gradients, or in those of embedding, head or all layers. It cannot
tell a few per cent, nor anything in experts alone: `--precision.compute fp32` can.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.bench.contender import Contender
from benchmarks.bench.workload import Workload, batches
from hocket.config.schema import changed
from hocket.model.transformer import parameter_counts

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 5e-2}
"""Largest difference of two losses at the same step, relative to what was learnt, by compute dtype."""
ENOUGH = {"fp32": 1e-3, "bf16": 1e-2, "fp8": 1e-2}
"""How much must be learnt, relative to the first loss, for a comparison to mean something: far more than rounding."""
LAYERS = 4
"""Layers of the gate's model."""
EPS = 0.3
"""AdamW's `eps`, in elements of a gradient whose norm is 1."""
RATE, FASTEST = 0.8, 2.0
"""Learning rate over `eps`, for as many tokens as make a gradient of norm 1, and for any number of tokens."""


class NumericsError(RuntimeError):
    """Contenders do not compute the same."""


@dataclass(frozen=True)
class Verdict:
    """What the gate saw."""

    curves: Mapping[str, Sequence[float]]
    """Mean loss over all ranks by contender and step."""
    tolerance: float
    worst: float
    """Largest difference from the first contender, relative to `of`."""
    fall: float
    """What the first contender learnt: by how much its loss changed at most, relative to the first one."""
    layers: int
    """Layers of the model that was compared."""
    of: str = "the first loss"
    """What `worst` and `tolerance` are relative to."""
    sequence_length: int = 0
    """Tokens of a sequence of the batch that was compared; 0 where that was done at every length."""


def gentle(workload: Workload) -> Workload:
    """A workload whose optimizer descends slowly, and whose steps show the size of a gradient.

    The gradient's norm is at first about sqrt(2 hidden / tokens): half of its square is the head's, whose rows are the
    normed states of single tokens, and about as much comes through the first norm to the embedding. The smaller it is,
    the larger must be the step.
    """
    model = workload.config.model
    weights, _ = parameter_counts(model)
    eps = EPS * weights**-0.5
    rate = min(FASTEST, RATE * workload.tokens / (2 * model.hidden))
    return workload.having(
        lambda config: changed(config, {"train.eps": eps, "train.lr": rate * eps, "train.min_lr": 0.0})
    )


def small(workload: Workload) -> Workload:
    """What the gate runs: fewer layers and tokens, with an optimizer. Stages are even."""
    every = [workload.config, *workload.variants.values()]
    stages = math.lcm(*(config.mesh.pp * config.plan.chunks for config in every))
    layers = stages * max(1, min(workload.config.model.layers // stages, -(-LAYERS // stages)))
    dense = tuple(n for n in workload.config.model.dense_layers if n < layers)
    changes = {"model.layers": layers, "model.dense_layers": dense, "train.sequences": 1, "plan.layers_per_stage": ()}
    fewer = workload.having(lambda config: changed(config, changes))
    return gentle(dataclasses.replace(fewer, optimizer=True))


def curve(contender: Contender, workload: Workload, rank: int, device: torch.device, steps: int) -> list[float]:
    """Losses of `steps` steps on one batch, the mean over ranks with tokens of their own. Every rank calls this."""
    microbatches = batches(workload, rank, 0, device)
    losses = torch.stack([contender.step(microbatches).double() for _ in range(steps)]).cpu()
    dist.all_reduce(losses)  # ranks without the head add 0
    return (losses / workload.mesh.data).tolist()


def judge(curves: Mapping[str, Sequence[float]], workload: Workload) -> Verdict:
    """Compare curves. Raises NumericsError if they differ by more than the tolerance of the dtype, or show nothing."""
    config = workload.config
    dtype = config.precision.compute
    tolerance, length = TOLERANCE[dtype], config.data.sequence_length
    verdict = Verdict(curves, tolerance, 0.0, 0.0, config.model.layers, "what was learnt", length)
    if not curves:
        return verdict
    first, *others = curves
    reference, worst = curves[first], 0.0
    learnt = max(abs(reference[0] - loss) for loss in reference)
    fall = learnt / abs(reference[0])
    if others and not fall >= ENOUGH[dtype]:  # so that nan fails too
        raise NumericsError(
            f"the gate shows nothing: over {len(reference)} steps the loss of {first} went from {reference[0]:.6g} to "
            f"{reference[-1]:.6g}, and by {ENOUGH[dtype]:.1%} it should change; nothing was timed"
        )
    for name in others:
        for step, (mine, theirs) in enumerate(zip(reference, curves[name], strict=True)):
            apart = abs(mine - theirs) / learnt
            if not apart <= tolerance:
                raise NumericsError(
                    f"{name} does not compute what {first} computes: at step {step} their losses are {theirs:.6g} and "
                    f"{mine:.6g}, {apart:.1e} of what was learnt apart, and at most {tolerance:g} is allowed; "
                    "nothing was timed"
                )
            worst = max(worst, apart)
    return dataclasses.replace(verdict, worst=worst, fall=fall)

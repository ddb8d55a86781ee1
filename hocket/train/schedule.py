"""The learning rate of every step: a function of the step and of settings alone, so a continued run has the same."""

from __future__ import annotations

import math
from collections.abc import Callable

from hocket.config import TrainConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}
"""Share of the decay that has passed -> what is left of the way from the highest rate to the lowest.

1-sqrt is that of Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations".
"""


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of step `step` (from 0): a linear rise over `warmup` steps, then what `train.schedule` says.

    The first step already has 1 / warmup of `lr`. The last step of the run has the lowest rate, and so have steps
    behind it. A decay of n steps begins behind the last step with the whole rate: its steps are n.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    span, shape = train.decay
    if not span:
        return train.lr
    if train.schedule.startswith("wsd"):
        share = (step - (train.steps - 1 - span)) / span
    else:
        share = (step - train.warmup) / span
    return train.lowest_lr + (train.lr - train.lowest_lr) * SHAPES[shape](min(1.0, max(0.0, share)))

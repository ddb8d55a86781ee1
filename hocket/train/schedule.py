"""Learning rate over a run."""

from __future__ import annotations

import math

from hocket.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of step `step` (from 0): a linear rise over `warmup` steps, then half a cosine to `min_lr`.

    The first step already has 1 / warmup of `lr`, and the last step of the run has `min_lr`.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    span = max(1, train.steps - 1 - train.warmup)
    share = min(1.0, (step - train.warmup) / span)
    return train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(math.pi * share)) / 2

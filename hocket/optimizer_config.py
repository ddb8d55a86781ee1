"""The settings of section `optimizer`, as a frozen dataclass. `config.py` exports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does with which weights."""

    no_decay: tuple[str, ...] = ()
    """Names of weights without weight decay, beside all vectors, such as embed.weight or *.router.weight. In a pattern
    * stands for any text. hocket explain shows which weights decay."""
    skip_spikes: float = 0.0
    """A step is skipped if the norm of its gradient is above this factor times the median of those of the last 128
    steps that were taken; 0 skips none. A step whose gradient is not finite is always skipped: weights, the optimizer's
    state and balance biases stay as they were."""
    skip_limit: int = 5
    """Most steps in a row that may be skipped. At the next one the run ends; 0 ends it at the first."""

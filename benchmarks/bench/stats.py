"""Figures from blocks of steps: ratios of contenders that took turns, with intervals, and what is noise.

Every round has one block of each contender. A block's time is the median of its steps; a ratio compares blocks of the
same round, so that what drifts (temperature, clocks, neighbours) drifts in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 4000
"""Resamples behind an interval."""


@dataclass(frozen=True)
class Ratio:
    """A median with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Median over rounds of `above / below`, seconds by round, with its interval."""
    assert len(above) == len(below) > 0
    logs = np.log(np.asarray(above) / np.asarray(below))
    chooser = np.random.default_rng(0)
    medians = np.median(chooser.choice(logs, (SAMPLES, len(logs))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(math.exp(float(np.median(logs))), math.exp(float(low)), math.exp(float(high)))


def noise(blocks: Sequence[float]) -> float:
    """A against A: how far two neighbouring blocks of one contender are apart, median share; 0 for one block."""
    logs = np.log(np.asarray(blocks))
    apart = np.abs(np.diff(logs))
    return math.expm1(float(np.median(apart))) if len(apart) else 0.0


def off_clock(clocks: Sequence[float | None], tolerance: float = 0.02) -> list[bool]:
    """Which blocks ran at a clock that differs from their median by more than `tolerance`. Unknown clocks do not."""
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return [False] * len(clocks)
    middle = float(np.median(known))
    return [clock is not None and abs(clock / middle - 1.0) > tolerance for clock in clocks]


def spread(values: Sequence[float]) -> float:
    """Largest over smallest, minus 1."""
    return max(values) / min(values) - 1.0

"""Curves over steps as pictures: what many runs have measured, a point a step.

A column of pixels reaches from the smallest to the largest value of the steps that share it, with the mean in front. So
no spike is lost, however long a run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from hocket_trace.data import Floats
from hocket_trace.scene import Line, Rule, Scene, Word, tick

PALETTE = ("fwd", "bwd", "wgrad", "a2a", "exposed", "pp", "gather", "reduce")
"""Names of colours that can be told apart."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 22, 30, 22
_FAINT = 0.3
"""Opacity of extremes beside their means."""


@dataclass(frozen=True)
class Curve:
    """Values by step. Values that are no numbers are left out."""

    steps: Sequence[float]
    values: Sequence[float]
    color: str = "fwd"
    dashed: bool = False

    def points(self) -> tuple[Floats, Floats]:
        """Steps and values that are finite."""
        kept = [(x, y) for x, y in zip(self.steps, self.values, strict=True) if isfinite(y)]
        both = np.array(kept, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def shown(value: float) -> str:
    """A value of an axis."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def by_column(columns: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(column, smallest, mean, largest value) of each whole number of a column that has values; columns ascend."""
    at, first, count = np.unique(columns.astype(np.int64), return_index=True, return_counts=True)
    low, high = np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)
    return at.astype(np.float64), low, np.add.reduceat(values, first) / count, high


def chart(title: str, curves: Sequence[Curve], width: int = 560, height: int = 240) -> Scene:
    """A picture with axes, `width` x `height` pixels. All curves share them; one without points is not drawn."""
    scene = Scene(width, height)
    scene.words.append(Word(8, 18, title, bold=True))
    drawn = [(curve, *curve.points()) for curve in curves]
    drawn = [(curve, x, y) for curve, x, y in drawn if len(x)]
    if not drawn:
        scene.words.append(Word(_LEFT, height / 2, "no values", dim=True))
        return scene
    (left, right), (low, high) = _range([x for _, x, _ in drawn]), _range([y for _, _, y in drawn])
    across, up = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    for value in _ticks(low, high, up / 40):
        y = _TOP + up - (value - low) / (high - low) * up
        scene.lines.append(Line(((_LEFT, y), (width - _RIGHT, y)), "line"))
        scene.words.append(Word(_LEFT - 6, y + 4, shown(value), dim=True, anchor="end"))
    for value in _ticks(left, right, across / 90):
        x = _LEFT + (value - left) / (right - left) * across
        scene.rules.append(Rule(x, _TOP, height - _BOTTOM))
        scene.words.append(Word(x, height - 6, shown(value), dim=True, anchor="middle"))
    for curve, x, y in drawn:
        column, least, mean, most = by_column((x - left) / (right - left) * across, y)
        both = np.stack([_TOP + up - (values - low) / (high - low) * up for values in (least, mean, most)], axis=1)
        if len(x) > len(column):
            ends = zip(np.repeat(column + _LEFT, 2).tolist(), both[:, ::2].ravel().tolist(), strict=True)
            scene.lines.append(Line(tuple(ends), curve.color, opacity=_FAINT))
        points = zip((column + _LEFT).tolist(), both[:, 1].tolist(), strict=True)
        scene.lines.append(Line(tuple(points), curve.color, curve.dashed))
    return scene


def _range(values: Sequence[Floats]) -> tuple[float, float]:
    """Smallest and largest value, further apart if they are one."""
    low, high = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
    room = (abs(low) or 1.0) * 0.05
    return (low, high) if high > low else (low - room, high + room)


def _ticks(low: float, high: float, count: float) -> list[float]:
    """About `count` round numbers between two."""
    step = tick(high - low, max(count, 1.0) * 100)
    return [n * step for n in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]

"""Sets of time as unions of intervals, in numpy.

`Spans` is a float64 array (n, 2) of starts and ends, ascending, disjoint and not empty, as made by `union`. All other
functions take and return this form, in time linear in the number of intervals once they are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket_trace.data import Floats

Spans = NDArray[np.float64]


def union(start: Floats, end: Floats) -> Spans:
    """The points in any of the intervals; touching intervals are merged, empty ones dropped."""
    kept = end > start
    start, end = start[kept], end[kept]
    if not len(start):
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate([[True], start[1:] > reach[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([start[opens], reach[closes]], axis=1)


def intersect(a: Spans, b: Spans) -> Spans:
    """The points in both."""
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    count = np.maximum(np.searchsorted(b[:, 0], a[:, 1], side="left") - first, 0)
    i = np.repeat(np.arange(len(a)), count)
    j = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return np.stack([np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])], axis=1)


def subtract(a: Spans, b: Spans) -> Spans:
    """The points of `a` that are not in `b`."""
    edges = np.concatenate([[-np.inf], b.ravel(), [np.inf]])
    return intersect(a, edges.reshape(-1, 2))


def clip(spans: Spans, start: float, end: float) -> Spans:
    """The points between two times."""
    return intersect(spans, np.array([[start, end]]))


def length(spans: Spans) -> float:
    """Summed length."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def covered(start: Floats, end: Floats, by: Spans) -> Floats:
    """The length of each interval's intersection with `by`; the intervals may overlap each other."""
    return _measure(end, by) - _measure(start, by)


def _measure(at: Floats, spans: Spans) -> Floats:
    """The length of `spans` before each time."""
    if not len(spans):
        return np.zeros(len(at))
    lengths = spans[:, 1] - spans[:, 0]
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    i = np.searchsorted(spans[:, 0], at, side="right") - 1
    inside = np.clip(at - spans[i, 0], 0.0, lengths[i])
    return np.where(i >= 0, before[i] + inside, 0.0)

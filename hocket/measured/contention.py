"""By how much compute is slower while communication runs, from ops that met more and less of it.

The model is that of the simulator (`program/schedule.py`): while the kinds S of communication run, compute gets on at
1 / (1 + sum of their factors). So an op of work w that took d, of it a share x_S beside the kinds S, satisfies

    w / d = sum over S of x_S / (1 + sum over k in S of factor_k)

Ops with the same cost key have the same work but for noise. Shares instead of seconds of overlap are taken as given,
since a longer op meets more communication for that reason alone. The factors make

    sum over ops of w * (log d - log w + log of the right side)^2

smallest, by Gauss-Newton steps; ops far off count less (Huber). The works are those of a trace without communication
if there is one. Otherwise they are what the ops of each key agree on best, which needs ops that met different shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hocket.program.schedule import KINDS, CostKey, Kind
from hocket_trace.data import Floats, Ints, RankTrace
from hocket_trace.intervals import union

Matrix = NDArray[np.float64]

SUBSETS = 1 << len(KINDS)
"""Sets of kinds, as bits: bit k says that KINDS[k] runs."""
_MEMBERS = np.array([[bool(subset >> k & 1) for k in range(len(KINDS))] for subset in range(SUBSETS)], dtype=float)

ENOUGH = 0.01
"""Share of compute beside a kind below which its factor is not asked for."""
MOST = 1.0
"""Greatest factor: compute is at most half as fast. What would ask for more is no contention."""
LEAST = 1e-3
"""Factors below this are no contention."""
_STEADY = 0.3
"""Residuals (of a logarithm) above which an op counts less."""


@dataclass(frozen=True)
class Overlaps:
    """Compute ops and what ran beside them, one row per op."""

    key: Ints
    """Number of the op's cost key."""
    seconds: Floats
    shares: Matrix
    """(ops, SUBSETS): share of the op's time beside each set of kinds; a row adds up to 1."""

    def take(self, rows: NDArray[np.bool_]) -> Overlaps:
        """These rows."""
        return Overlaps(self.key[rows], self.seconds[rows], self.shares[rows])


def joined(parts: Sequence[Overlaps]) -> Overlaps:
    """All rows of all parts."""
    return Overlaps(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Overlaps)))


def shares_beside(trace: RankTrace, start: Floats, end: Floats) -> Matrix:
    """Share of each interval in which exactly each set of kinds of communication ran on the trace's rank."""
    spans = [union(trace.start[rows], trace.end[rows]) for rows in (trace.of_kind(kind) for kind in KINDS)]
    edges = np.concatenate([spans[k].ravel() for k in range(len(KINDS))])
    turns = np.concatenate([np.tile([1, -1], len(spans[k])) << k for k in range(len(KINDS))]).astype(np.int64)
    order = np.argsort(edges, kind="stable")
    edges, running = edges[order], np.cumsum(turns[order])
    shares = np.zeros((len(start), SUBSETS))
    if len(edges):
        length = np.diff(edges, append=edges[-1])
        for subset in np.unique(running).tolist():
            before = np.concatenate([[0.0], np.cumsum(np.where(running == subset, length, 0.0))])[:-1]
            if subset:
                shares[:, subset] = np.interp(end, edges, before) - np.interp(start, edges, before)
    shares /= np.maximum(end - start, 1e-12)[:, None]
    shares[:, 0] = np.maximum(1.0 - shares[:, 1:].sum(1), 0.0)
    return shares


def progress(shares: Matrix, factors: Floats) -> Floats:
    """The right side of the formula: work per second of every op."""
    return shares @ (1.0 / (1.0 + _MEMBERS @ factors))


def factors_of(ops: Overlaps, works: Mapping[int, float]) -> Floats:
    """The factor of every kind, none below 0. `works` are known works of an op by number of its key, may be empty."""
    weight = _mean_of_key(ops.key, ops.seconds)
    beside = (weight @ ops.shares) @ _MEMBERS / max(weight.sum(), 1e-12)
    asked = np.flatnonzero(beside > ENOUGH)
    known = np.array([np.log(works.get(key, np.nan)) for key in ops.key.tolist()])
    factors = np.zeros(len(KINDS))
    if not len(asked):
        return factors
    for _ in range(50):
        residual, slope = _linearised(ops, known, weight, factors)
        steady = weight * np.minimum(1.0, _STEADY / np.maximum(np.abs(residual), 1e-12))
        a = slope[:, asked] * np.sqrt(steady)[:, None]
        step = np.linalg.lstsq(a.T @ a + 1e-9 * weight.sum() * np.eye(len(asked)), -a.T @ (np.sqrt(steady) * residual))
        new = factors.copy()
        new[asked] = np.clip(factors[asked] + step[0], 0.0, MOST)
        done = np.abs(new - factors).max() < 1e-6
        factors = new
        if done:
            break
    return factors


def _linearised(ops: Overlaps, known: Floats, weight: Floats, factors: Floats) -> tuple[Floats, Matrix]:
    """Residuals, and their derivatives by the factors: (ops, kinds). Unknown works are eliminated from both."""
    pace = 1.0 / (1.0 + _MEMBERS @ factors)
    speed = ops.shares @ pace
    slope = -(ops.shares * pace**2) @ _MEMBERS / speed[:, None]
    value = np.log(ops.seconds) + np.log(speed)
    free = np.isnan(known)
    both = np.column_stack([value, slope])
    centred = both - _means(ops.key, both, weight)
    residual = np.where(free, centred[:, 0], value - known)
    return residual, np.where(free[:, None], centred[:, 1:], slope)


def _means(key: Ints, values: Matrix, weight: Floats) -> Matrix:
    """For every row the weighted mean over the rows with its key."""
    total = np.bincount(key, weight)
    sums = np.column_stack([np.bincount(key, weight * column) for column in values.T])
    return (sums / np.maximum(total, 1e-300)[:, None])[key]


def _mean_of_key(key: Ints, values: Floats) -> Floats:
    return _means(key, values[:, None], np.ones(len(values)))[:, 0]


def named(factors: Floats) -> dict[Kind, float]:
    """Factors by kind, without those that are as good as 0."""
    return {kind: float(value) for kind, value in zip(KINDS, factors, strict=True) if value > LEAST}


def numbers_of(keys: Sequence[CostKey]) -> dict[CostKey, int]:
    """A number for every different key, in the order of first appearance."""
    return {key: n for n, key in enumerate(dict.fromkeys(keys))}

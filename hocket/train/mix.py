"""Which source of text stands at which position of the stream.

Note: [The source of a position is a function of the position]
A run has one number as its state, the sequences it has consumed, and any number of ranks continues from it. So which
source a position reads, and which of the source's sequences, may depend on settings and the position alone. Weights
apply to sequences of equal length, not to documents: otherwise long documents would shift the mix.

Between two changes of weights the sources get sequences as Webster's method gives parties seats: the k-th sequence
(from 0) of a source with share w is due at time (k + 1/2) / w, and sequences come in the order of these times. At time
t a source has t * w sequences, rounded, so after n sequences of S sources it has n * w, and at most 1/2 + w * S / 2
more or fewer. Within blocks of `BLOCK` sequences the sources are then put into a random order. Otherwise a mix of two
halves would give one source to all even data-parallel ranks, and the other to the odd ones.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

BLOCK = 64
"""Sequences whose sources are in a random order."""


class Quotas:
    """How sources share a stream. `changes` has ascending first positions, from 0 on, with the weights from there on.

    A weight is at least 0, and one of each change is above. Two streams with the same weights up to a position agree up
    to there, whatever comes behind it.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[Fraction]]], seed: int = 0) -> None:
        assert changes[0][0] == 0
        self._firsts, self._seed = [first for first, _ in changes], seed
        self._weights = [_whole(weights) for _, weights in changes]
        self._block = (-1, -1)
        self._taken, self._sources = list[int](), np.empty(0, dtype=np.int64)
        self._before = [[0] * len(self._weights[0])]
        for first in self._firsts[1:]:
            self._before.append(self.counts(first))

    def place(self, position: int) -> tuple[int, int]:
        """(source, which of its sequences, counted through all its epochs) of a position."""
        segment, offset = self._find(position)
        source = int(self._sources[offset])
        return source, self._count(segment, offset, source)

    def counts(self, position: int) -> list[int]:
        """Sequences of each source before a position."""
        if not position:
            return [0] * len(self._weights[0])
        segment, offset = self._find(position - 1)
        return [self._count(segment, offset + 1, source) for source in range(len(self._taken))]

    def shares(self, position: int) -> list[Fraction]:
        """Share of each source from a position on."""
        weights = self._weights[bisect_right(self._firsts, position) - 1]
        return [Fraction(weight, sum(weights)) for weight in weights]

    def _count(self, segment: int, offset: int, source: int) -> int:
        within = int(np.count_nonzero(self._sources[:offset] == source))
        return self._before[segment][source] + self._taken[source] + within

    def _find(self, position: int) -> tuple[int, int]:
        """Make the block of a position the current one. Returns its segment and the place of the position in it."""
        segment = min(bisect_right(self._firsts, position), len(self._before)) - 1
        block, offset = divmod(position - self._firsts[segment], BLOCK)
        if (segment, block) != self._block:
            self._block, weights = (segment, block), self._weights[segment]
            self._taken, due = _taken(weights, block * BLOCK)
            order = np.random.default_rng([self._seed, segment, block]).permutation(BLOCK)
            self._sources = np.array([_next(due, weights) for _ in range(BLOCK)])[order]
        return segment, offset


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """The same weights as whole numbers."""
    factor = math.lcm(*(weight.denominator for weight in weights))
    return [int(weight * factor) for weight in weights]


Due = list[tuple[Fraction, int, int]]
"""A heap of (when, in units of 1 / weight, source, which of its sequences)."""


def _taken(weights: Sequence[int], count: int) -> tuple[list[int], Due]:
    """How many of the first `count` sequences each source has, and what is due next."""
    total, early = sum(weights), max(0, count - len(weights))  # at that time at most `count` are due
    taken = [(2 * early * weight + total) // (2 * total) if weight else 0 for weight in weights]
    due: Due = [(Fraction(2 * k + 1, weights[s]), s, k) for s, k in enumerate(taken) if weights[s]]
    heapq.heapify(due)
    for _ in range(count - sum(taken)):
        taken[_next(due, weights)] += 1
    return taken, due


def _next(due: Due, weights: Sequence[int]) -> int:
    """Take the source that is due."""
    _, source, k = due[0]
    heapq.heapreplace(due, (Fraction(2 * k + 3, weights[source]), source, k + 1))
    return source

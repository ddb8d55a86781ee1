"""What causal attention inside of documents costs: how many keys queries meet, and what layers do for each.

Costs of ops, the order of microbatches and chunks of context-parallel ranks all go by this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

SLOWER = 0.6
"""What flash attention over windows, and with sinks, takes longer for every key than the kernel that a GPU's rates are
of, as a share. Timed on an H200 with torch 2.11, forward and backward of 16,384 tokens with windows of 128 and
4,096."""

Lengths = tuple[tuple[int, int], ...]
"""How long documents are: (tokens of a document, tokens that are in documents of that length)."""


def lengths_of(documents: Iterable[int]) -> Lengths:
    """Of documents with so many tokens each; one without tokens is none."""
    return tuple((length, length * count) for length, count in sorted(Counter(documents).items()) if length)


def merged(several: Iterable[Lengths]) -> Lengths:
    """All of them together."""
    found = Counter[int]()
    for lengths in several:
        found.update(dict(lengths))
    return tuple(sorted(found.items()))


def met(queries: int, window: int = 0) -> int:
    """Pairs of a query and a key of a document's first so many tokens. With a window each meets its last tokens."""
    within = min(queries, window) if window else queries
    return within * (within + 1) // 2 + (queries - within) * window


def keys(lengths: Lengths, window: int = 0) -> float:
    """Keys that a query meets on average. Of its own, on the diagonal, half is counted, as in half of the square."""
    found = 0.0
    for length, tokens in lengths:
        diagonal = min(length, window) if window else length
        found += tokens * (met(length, window) - diagonal / 2) / length
    return found / sum(tokens for _, tokens in lengths)


@dataclass(frozen=True)
class Attending:
    """What a model's layers do for pairs of a query and a key."""

    layers: tuple[tuple[int, int], ...] = ((1, 0),)
    """(work for each pair, window or 0) of layers that differ in these. None of them: no layer has attention."""

    def until(self, tokens: int) -> int:
        """The work for the first tokens of a document."""
        return sum(each * met(tokens, window) for each, window in self.layers)

    def work(self, lengths: Lengths) -> int:
        """The work for documents."""
        return sum(self.until(length) * tokens // length for length, tokens in lengths)


FULL = Attending()
"""Full attention in every layer."""


def of_windows(windows: Iterable[int], seq: int, sinks: bool = False) -> Attending:
    """What layers with these windows do in sequences of `seq` tokens; 0 and `seq` mean full attention."""
    work = Counter[int]()
    for each in windows:
        window = each if each < seq else 0
        work[window] += round(100 * (1 + slower(window, sinks)))
    unit = math.gcd(*work.values())
    return Attending(tuple((each // unit, window) for window, each in sorted(work.items())))


def slower(window: int, sinks: bool) -> float:
    """What attention takes longer for every key than the kernel that a GPU's rates are of, as a share."""
    return SLOWER if window or sinks else 0.0

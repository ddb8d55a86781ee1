"""Packed documents: the cost of causal attention inside them, and how a step's sequences are assigned to ranks.

Costs of ops, the order of microbatches and chunks of context-parallel ranks all depend on the number of (query, key)
pairs, and on the layers' work per pair.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.config import Config

SLOWER = 0.6
"""Extra time per key of flash attention with windows or sinks, relative to the kernel of a GPU's rates. Timed on an
H200 with torch 2.11, forward and backward of 16,384 tokens with windows of 128 and 4,096."""

Lengths = tuple[tuple[int, int], ...]
"""Lengths of documents: (tokens per document, total tokens in documents of that length)."""


def lengths_of(documents: Iterable[int]) -> Lengths:
    """The `Lengths` of documents with these numbers of tokens; empty documents are ignored."""
    return tuple((length, length * count) for length, count in sorted(Counter(documents).items()) if length)


def merged(several: Iterable[Lengths]) -> Lengths:
    """The union of several `Lengths`."""
    found = Counter[int]()
    for lengths in several:
        found.update(dict(lengths))
    return tuple(sorted(found.items()))


def pairs(queries: int, window: int = 0) -> int:
    """(query, key) pairs of causal attention over so many tokens; with a window, over each query's last keys."""
    within = min(queries, window) if window else queries
    return within * (within + 1) // 2 + (queries - within) * window


def keys(lengths: Lengths, window: int = 0) -> float:
    """Mean keys per query. A query's own key, on the diagonal, counts as half, as in half of the square."""
    found = 0.0
    for length, tokens in lengths:
        diagonal = min(length, window) if window else length
        found += tokens * (pairs(length, window) - diagonal / 2) / length
    return found / sum(tokens for _, tokens in lengths)


@dataclass(frozen=True)
class AttentionWork:
    """A model's attention work per (query, key) pair."""

    layers: tuple[tuple[int, int], ...] = ((1, 0),)
    """(work per pair, window or 0), summed over layers of equal window. Empty: no layer has attention."""

    def until(self, tokens: int) -> int:
        """The work for a document's first tokens."""
        return sum(each * pairs(tokens, window) for each, window in self.layers)

    def work(self, lengths: Lengths) -> int:
        """The work for all documents."""
        return sum(self.until(length) * tokens // length for length, tokens in lengths)


FULL = AttentionWork()
"""Full attention in every layer."""


def of_windows(windows: Iterable[int], seq: int, sinks: bool = False) -> AttentionWork:
    """The work of layers with these windows in sequences of `seq` tokens; 0 and `seq` mean full attention."""
    work = Counter[int]()
    for each in windows:
        window = each if each < seq else 0
        work[window] += round(100 * (1 + slower(window, sinks)))
    unit = math.gcd(*work.values())
    return AttentionWork(tuple((each // unit, window) for window, each in sorted(work.items())))


def slower(window: int, sinks: bool) -> float:
    """Extra time of attention per key, relative to the kernel of a GPU's rates."""
    return SLOWER if window or sinks else 0.0


# -------------------------------------------------------------------------------------------------------------- dealing
#
# Which sequences of a step share a microbatch, and in which order microbatches run: by the cost of their attention.
#
# All microbatches have equally many tokens, but their attention work depends on the lengths of their documents.
# Pipeline ranks wait for the microbatch that takes longest. Data-parallel ranks wait for the most expensive of theirs
# in each microbatch where they communicate. So all sequences of a step are reassigned: into parcels of nearly equal
# cost; parcels of similar cost to the ranks that run them at the same time; and equal total cost to each rank. This is
# integer arithmetic on what every rank knows, so all ranks agree without communication. A step's set of sequences does
# not change.
#
# The order matters to pipelines alone. One cheap microbatch fills the pipeline, then the most expensive come first.
# With these in the middle most simulated steps are up to 2 % shorter, but steps of interleaved orders of few groups, in
# which a microbatch soon returns to the first rank, are up to 6 % longer.


Dealt = list[list[list[int]]]
"""[microbatch][data-parallel rank] -> indices of the step's sequences."""


def deals(c: Config) -> bool:
    """Whether a step's sequences are reassigned: with packing, if ranks wait for each other."""
    return c.data.packing != "off" and c.mesh.pp * c.mesh.dp > 1


def by_documents(c: Config) -> bool:
    """Whether attention time depends on documents' lengths: not where documents are separated by masks."""
    return c.data.packing != "off" and c.train.device != "cpu" and c.precision.compute != "fp32"


def as_read(microbatches: int, ranks: int, sequences: int) -> Dealt:
    """Sequences in reading order: those of a microbatch's first rank, of its second, of the next microbatch."""
    each = [list(range(n, n + sequences)) for n in range(0, microbatches * ranks * sequences, sequences)]
    return [each[n : n + ranks] for n in range(0, len(each), ranks)]


def dealt(works: Sequence[int], ranks: int, sequences: int) -> Dealt:
    """Assigns sequences of costs `works` to `ranks` data-parallel ranks, with `sequences` per microbatch.

    Raises ValueError if sequences do not divide evenly.
    """
    parcels, rest = divmod(len(works), sequences)
    if not parcels or rest or parcels % ranks:
        raise ValueError(f"{len(works)} sequences do not fill microbatches of {sequences} on {ranks} ranks")
    made = _parcels(works, parcels)
    costs = [sum(works[n] for n in parcel) for parcel in made]
    falling = sorted(range(parcels), key=lambda p: (-costs[p], p))
    groups = [falling[n : n + ranks] for n in range(0, parcels, ranks)]
    evened = _evened(groups, costs)
    return [[made[p] for p in group] for group in [*evened[-1:], *evened[:-1]]]


def works_of(dealt: Dealt, works: Sequence[int]) -> list[list[int]]:
    """The cost of each [microbatch][data-parallel rank]."""
    return [[sum(works[n] for n in mine) for mine in microbatch] for microbatch in dealt]


def _parcels(works: Sequence[int], count: int) -> list[list[int]]:
    """Equally many sequences in each, expensive ones with cheap ones; each parcel in reading order."""
    falling = sorted(range(len(works)), key=lambda n: (-works[n], n))
    made: list[list[int]] = [[] for _ in range(count)]
    for turn, first in enumerate(range(0, len(works), count)):
        some = falling[first : first + count]
        for parcel, sequence in zip(made, reversed(some) if turn % 2 else some, strict=True):
            parcel.append(sequence)
    return [sorted(parcel) for parcel in made]


def _evened(groups: Sequence[Sequence[int]], costs: Sequence[int]) -> list[list[int]]:
    """Each group's parcels by rank: the most expensive to the rank with the least cost so far."""
    had = [0] * len(groups[0])
    found = []
    for group in groups:
        of_rank = [0] * len(group)
        for rank, parcel in zip(sorted(range(len(had)), key=lambda r: (had[r], r)), group, strict=True):
            of_rank[rank] = parcel
            had[rank] += costs[parcel]
        found.append(of_rank)
    return found

"""Documents that share sequences: what causal attention inside of them costs, and how a step deals sequences out.

Costs of ops, the order of microbatches and chunks of context-parallel ranks all go by how many keys queries meet, and
by what layers do for each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.config import Config

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


# -------------------------------------------------------------------------------------------------------------- dealing
#
# Which sequences of a step share a microbatch, and in which order microbatches run: by the cost of their attention.
#
# Microbatches have as many tokens each, and as much attention as their documents are long. Ranks of a pipeline wait for
# one that takes longer. Data-parallel ranks wait for the dearest of theirs wherever they meet in each microbatch. So
# all sequences of a step are dealt out anew: parcels of as even cost as sequences allow, neighbours in cost to the
# ranks that run them at the same time, and as much to each rank over the whole step. This is integer arithmetic on what
# every rank knows, so all ranks find the same without a word. A step has the sequences that it would have otherwise.
#
# The order matters to pipelines alone. One cheap microbatch fills the pipeline, and then the dearest come first. With
# the dearest in the middle most simulated steps are up to 2 % shorter, but those of interleaved orders of few groups,
# in which a microbatch soon comes back to the first rank, up to 6 % longer.


Dealt = list[list[list[int]]]
"""Numbers of a step's sequences that [microbatch][data-parallel rank] has."""


def deals(c: Config) -> bool:
    """Whether a step's sequences are dealt out: where documents share them, and ranks wait for each other."""
    return c.data.packing != "off" and c.mesh.pp * c.mesh.dp > 1


def by_documents(c: Config) -> bool:
    """Whether attention takes as long as documents are that share sequences: with masks it does not."""
    return c.data.packing != "off" and c.train.device != "cpu" and c.precision.compute != "fp32"


def as_read(microbatches: int, ranks: int, sequences: int) -> Dealt:
    """Sequences one after the other: those of a microbatch's first rank, of its second, of the next microbatch."""
    each = [list(range(n, n + sequences)) for n in range(0, microbatches * ranks * sequences, sequences)]
    return [each[n : n + ranks] for n in range(0, len(each), ranks)]


def dealt(works: Sequence[int], ranks: int, sequences: int) -> Dealt:
    """Sequences by their costs, `works`, for `ranks` data-parallel ranks with `sequences` in a microbatch.

    Raises: ValueError if sequences cannot be dealt out evenly.

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
    """The cost that each [microbatch][data-parallel rank] has."""
    return [[sum(works[n] for n in mine) for mine in microbatch] for microbatch in dealt]


def _parcels(works: Sequence[int], count: int) -> list[list[int]]:
    """As many sequences in each, the dearest with the cheapest, in the order in which they are read."""
    falling = sorted(range(len(works)), key=lambda n: (-works[n], n))
    made: list[list[int]] = [[] for _ in range(count)]
    for turn, first in enumerate(range(0, len(works), count)):
        some = falling[first : first + count]
        for parcel, sequence in zip(made, reversed(some) if turn % 2 else some, strict=True):
            parcel.append(sequence)
    return [sorted(parcel) for parcel in made]


def _evened(groups: Sequence[Sequence[int]], costs: Sequence[int]) -> list[list[int]]:
    """Parcels of each group by rank: the dearest goes to the rank that has had the least so far."""
    had = [0] * len(groups[0])
    found = []
    for group in groups:
        of_rank = [0] * len(group)
        for rank, parcel in zip(sorted(range(len(had)), key=lambda r: (had[r], r)), group, strict=True):
            of_rank[rank] = parcel
            had[rank] += costs[parcel]
        found.append(of_rank)
    return found

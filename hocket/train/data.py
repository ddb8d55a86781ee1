"""Sequences in a random order that only the seed fixes, at a position that is independent of the number of ranks.

The tokens of a split are cut into sequences of equal length, wherever documents end (a separator token marks the end).
With `data.packing`, documents that share a sequence do not attend to each other, and `best_fit` cuts none of them. Each
epoch visits all sequences in a new random order. `sources.py` defines how several sources share one stream. The
*position* of a run is the number of sequences it has consumed. A step takes the next `dp * microbatches * sequences` of
them, whatever their order in the step (`hocket/program/documents.py`), so the same position continues the same stream
on any number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hocket.config.rule import problem
from hocket.kernels import IGNORED
from hocket.model.documents import PADDING
from hocket.problems import stop_if
from hocket.program.documents import Lengths, lengths_of
from hocket.resolve import Settings
from hocket.train.corpus import Corpus, Split, inside, known_corpus
from hocket.train.sources import Quotas, Source, Text, quotas_of, read_sources

# -- bins --------------------------------------------------------------------------------------------------------------
# Best fit decreasing: documents, the longest first, go into the fullest sequence that still has room (Johnson 1973,
# Near-optimal bin packing algorithms). A document of n tokens takes n - 1 places: its last token, the separator, is
# only a target.


def best_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Indices of the items in each bin. `sizes` are from 1 to `room`."""
    bins, left, open_by_room = list[list[int]](), list[int](), dict[int, list[int]]()
    rooms: list[int] = []  # keys of open_by_room, ascending
    for thing in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[thing])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins.append([])
            left.append(room)
            number = len(bins) - 1
        else:
            found = rooms[place]
            number = open_by_room[found].pop()
            if not open_by_room[found]:
                del open_by_room[found], rooms[place]
        bins[number].append(thing)
        left[number] -= size
        if rest := left[number]:
            if rest not in open_by_room:
                open_by_room[rest] = []
                insort(rooms, rest)
            open_by_room[rest].append(number)
    return bins


# -- streams -----------------------------------------------------------------------------------------------------------

Row = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Tokens, targets and document numbers (None if documents are not separated) of a sequence, int64 [length] each."""
Batch = tuple[Tensor, Tensor, Tensor | None]
"""The same for several sequences, int64 [sequences, length] each."""


def _batch(rows: Sequence[Row]) -> Batch:
    ids, targets, numbers = zip(*rows, strict=True)
    documents = None if numbers[0] is None else torch.from_numpy(np.stack(numbers))
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(targets)), documents


class Stream:
    """The endless sequences of one split of one source. Callers keep the position."""

    def __init__(self, split: Split, length: int, seed: int, packing: str = "off", once: bool = False) -> None:
        """`packing` is that of `data.packing`. With `once`, as in a validation, each sequence counts once: those that
        fill up the last batch have no target in the loss.
        """
        self.split, self.length, self.seed, self.packing, self.once = split, length, seed, packing, once
        self.left_out = 0
        """Number of documents that are longer than a sequence, with packing that cuts none."""
        self.sequences = max(0, (len(split.tokens) - 1) // length)
        """Sequences per epoch. Sequence n is tokens[n * length : (n + 1) * length], with targets shifted by one token;
        with best_fit it is the documents of `_bins[n]`."""
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)
        if packing == "best_fit":
            sizes = np.diff(split.bounds) - 1
            fitting = (sizes > 0) & (sizes <= length)
            self.left_out = int((sizes > length).sum())
            self._firsts, self._sizes = split.bounds[:-1][fitting], sizes[fitting]
            self._bins = best_fit(self._sizes, length)
            self.sequences = len(self._bins)

    def window(self, position: int) -> int:
        """Index in the split of the sequence at a position of the stream."""
        epoch, index = divmod(position, self.sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.sequences)
        return int(self._order[index])

    def _documents(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each document of a sequence begins in the split, and how many of its tokens are in the sequence."""
        number = self.window(position)
        if self.packing == "best_fit":
            return self._firsts[self._bins[number]], self._sizes[self._bins[number]]
        first, end = number * self.length, (number + 1) * self.length
        lo, hi = np.searchsorted(self.split.bounds, [first + 1, end]) if self.packing == "on" else (0, 0)
        firsts = np.concatenate([[first], self.split.bounds[lo:hi].astype(np.int64)])
        return firsts, np.diff(firsts, append=end)

    def row(self, position: int) -> Row:
        """The sequence at a position. Targets that are not learnt, or that begin the next document, are `IGNORED`."""
        (firsts, sizes), (tokens, bounds, masked) = self._documents(position), self.split
        count = int(sizes.sum())
        places = np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes) + np.arange(count)
        ids, targets = np.zeros(self.length, dtype=np.int64), np.full(self.length, IGNORED)
        ids[:count], targets[:count] = tokens[places], tokens[places + 1]
        if self.packing == "off":
            return ids, targets, None
        begins = bounds[np.searchsorted(bounds, places + 1).clip(max=len(bounds) - 1)] == places + 1
        targets[:count][begins | inside(places + 1, masked)] = IGNORED
        numbers = np.full(self.length, PADDING)
        numbers[:count] = np.repeat(np.arange(len(sizes)), sizes)
        return ids, targets, numbers

    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position, padding as one. Without packing: the whole length."""
        _, sizes = self._documents(position)
        padding = self.length - sizes.sum()
        return np.append(sizes, padding) if padding else sizes

    def batch(self, positions: Sequence[int]) -> Batch:
        """The sequences at some positions."""
        ids, targets, documents = _batch([self.row(each) for each in positions])
        if self.once:
            targets[torch.tensor(positions) >= self.sequences] = IGNORED
        return ids, targets, documents

    def batches(self, size: int) -> int:
        """Batches per epoch; the last one may be partial."""
        return -(-self.sequences // size)

    def __str__(self) -> str:
        """How full the sequences are with best_fit; otherwise empty."""
        if self.packing != "best_fit":
            return ""
        filled = float(self._sizes.sum()) / max(1, self.sequences * self.length)
        left_out = f"; {self.left_out:,} documents longer than a sequence are left out" if self.left_out else ""
        return f"{self.sequences:,} sequences, {100 * filled:.1f} % full{left_out}"


@dataclass(frozen=True)
class Mix:
    """The training data of a run: the streams of its sources as one."""

    streams: Sequence[Stream]
    quotas: Quotas

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        source, index = self.quotas.place(position)
        return self.streams[source].row(index)

    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position. Padding counts as one document."""
        source, index = self.quotas.place(position)
        return self.streams[source].lengths(index)

    def batch(self, positions: Sequence[int]) -> Batch:
        """The sequences at some positions."""
        return _batch([self.row(each) for each in positions])

    def epochs(self, position: int) -> list[float]:
        """How many epochs of each source precede a position."""
        counts = self.quotas.counts(position)
        return [count / stream.sequences for count, stream in zip(counts, self.streams, strict=True)]


def make_streams(text: Text, settings: Settings) -> tuple[Mix, dict[str, Stream]]:
    """The training stream of a run, and the validation stream of each source by name (empty if there is one source).

    Raises ValueError if a single source has less training text than a batch, one of several less than a sequence, or a
    validation split less than a batch. Validation streams are checked only if they are used.
    """
    stop_if([line for each in zip(text.sources, text.corpora, strict=True) for line in _unmasked(*each, settings)])
    made, problems = [_streams(corpus, settings) for corpus in text.corpora], list[str]()
    several = bool(text.sources[0].name)
    held = {
        s.name: stream for s, (_, stream) in zip(text.sources, made, strict=True) if s.has_validation or not several
    }
    for source, (train, validation) in zip(text.sources, made, strict=True):
        fix = "more text, or leave the source out"
        fix = fix if several else "shorter data.sequence_length, fewer train.microbatches, or more text"
        problems += _too_small(source, train, "training", 1 if several else settings.batch, fix, settings)
        if settings.train.eval_batches and source.name in held:
            fix = "a larger validation, validation = 0 for this source, or more text"
            fix = fix if several else "a larger data.validation, more text, or train.eval_batches = 0"
            problems += _too_small(source, validation, "validation", settings.batch, fix, settings)
    if settings.train.eval_batches and not held:
        reason = f"no source keeps anything for validation, but train.eval_batches = {settings.train.eval_batches}"
        fix = "validation above 0 for one of them, or train.eval_batches = 0"
        problems.append(problem("data.paths", settings.data.paths, settings.origins, reason, fix))
    stop_if(problems if several else problems[:1], "sources")  # with one source the second follows from the first
    return Mix([train for train, _ in made], text.quotas), held


def known_documents(settings: Settings) -> tuple[Lengths, ...]:
    """Documents of each sequence of a run's first step, in stream order.

    Nothing is tokenised for this: the result is empty without packing, or if the cache has no text that fills a step.
    """
    if settings.data.packing == "off":
        return ()
    try:
        sources = read_sources(settings.data, settings.origins)
        corpora = [known_corpus(each.data, each.origins, Path(settings.run.folder)) for each in sources]
    except ValueError:  # plans are also made on hosts without the text
        return ()
    streams = [_streams(corpus, settings)[0] for corpus in corpora if corpus is not None]
    if len(streams) < len(sources) or not all(stream.sequences for stream in streams):
        return ()
    mix = Mix(streams, quotas_of(sources, settings.batch, settings.train.seed))
    return tuple(lengths_of(mix.lengths(n).tolist()) for n in range(settings.batch))


def _unmasked(source: Source, corpus: Corpus, settings: Settings) -> list[str]:
    """A message about text of which nothing is learnt, or whose mask data.packing = off would ignore."""
    tokens, _, masked = corpus.train
    if len(tokens) and corpus.train.unlearnt >= len(tokens):
        reason = "no token of it is learnt: it has prompts alone, or chats without an answer"
        return [problem("data.paths", source.data.paths, source.origins, reason, "text with answers")]
    if settings.data.packing != "off" or not (len(masked) or len(corpus.validation.masked)):
        return []
    reason = "has prompts or chats, of which only a part is learnt, and data.packing = off learns everything"
    return [problem("data.paths", source.data.paths, source.origins, reason, "data.packing = best_fit, or on")]


def _streams(corpus: Corpus, settings: Settings) -> tuple[Stream, Stream]:
    """The training and the validation sequences."""
    data, seed = settings.data, settings.train.seed
    train = Stream(corpus.train, data.sequence_length, seed, data.packing)
    return train, Stream(corpus.validation, data.sequence_length, seed + 1, data.packing, once=True)


def _too_small(source: Source, stream: Stream, split: str, needed: int, fix: str, settings: Settings) -> list[str]:
    """A message about a split with too few sequences: a mix needs one of each source, a single source a whole batch."""
    if stream.sequences >= needed:
        return []
    train, length = settings.train, settings.data.sequence_length
    reason = (
        f"the {split} split has {len(stream.split.tokens):,} tokens, {stream.sequences:,} sequences of {length}, but "
    )
    if needed == settings.batch:
        sizes = f"train.microbatches {train.microbatches} x train.sequences {train.sequences}"
        reason += f"a batch takes {needed:,} (mesh.dp {settings.mesh.dp} x {sizes})"
    else:
        reason += "a mix takes one at least"
    if stream.left_out:  # shorter sequences would leave out more documents
        reason += f"; {stream.left_out:,} documents are longer than a sequence"
        others = fix.removeprefix("shorter data.sequence_length, ")
        fix = f"data.packing = on, which cuts documents, a longer data.sequence_length, {others}"
    return [problem("data.paths", source.data.paths, source.origins, reason, fix)]

"""Sequences in a random order that only the seed fixes, at a position that survives any change of ranks.

The tokens of a split are cut into sequences of equal length, without regard to where documents end (a separator token
stands there); with `data.packing` the documents that share a sequence are then kept apart. Each epoch visits all of
them in a new random order. Several sources share one stream as `sources.py` says. The *position* of a run is
the number of sequences it has consumed. A step takes the next `dp * microbatches * sequences` of them, whatever their
order in the step is (`hocket/program/documents.py`), so the same position continues the same stream on any number of
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.model.documents import PADDING
from hocket.problems import stop_if
from hocket.program.documents import Lengths, lengths_of
from hocket.resolve import Settings
from hocket.settings.schema import problem
from hocket.train.corpus import Corpus, inside, known_corpus
from hocket.train.sources import Quotas, Source, Text, quotas_of, read_sources

# -- bins --------------------------------------------------------------------------------------------------------------
# Whole documents in sequences: which of them share one, so that little is left over.
#
# Best fit, the longest first: a document goes where the least room is left that still holds it (Johnson 1973,
# Near-optimal bin packing algorithms). A document of n tokens takes n - 1 places: its last token, the separator, is
# only a target.


def best_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Numbers of the things in each bin. `sizes` are from 1 to `room`."""
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


# -- data --------------------------------------------------------------------------------------------------------------

NOTHING = np.zeros((0, 2), dtype=np.int64)
"""No ranges."""

Row = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Tokens, targets and numbers of documents (None where they are not kept apart) of a sequence, int64 [length] each."""


class Rows(ABC):
    """An endless stream of sequences. It holds no position: callers do."""

    @property
    @abstractmethod
    def streams(self) -> Sequence[Shuffled]:
        """The streams of all sources."""

    @abstractmethod
    def row(self, position: int) -> Row:
        """The sequence at a position.

        Where documents are kept apart, a target that is the first token of the next document is `IGNORED`.
        """

    @abstractmethod
    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position, padding as one; of a whole sequence its length."""

    def batch(self, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and documents of sequences, int64 [len(positions), length] each."""
        rows = [self.row(each) for each in positions]
        ids, targets, numbers = zip(*rows, strict=True)
        documents = None if numbers[0] is None else torch.from_numpy(np.stack(numbers))
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(targets)), documents


class Shuffled(Rows):
    """Sequences that each epoch visits once, in an order of its own."""

    tokens: np.ndarray
    seed: int
    sequences: int
    """Sequences of one epoch."""
    left_out = 0
    """Documents that are longer than a sequence, where none is cut."""
    once = False
    """Whether each sequence counts once, as in a validation: what fills the last batch up has no target that counts."""
    _epoch = -1
    _order: np.ndarray

    def __len__(self) -> int:
        return self.sequences

    @property
    def streams(self) -> Sequence[Shuffled]:
        """Itself."""
        return [self]

    def batch(self, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, targets and documents of sequences, int64 [len(positions), length] each."""
        ids, targets, documents = super().batch(positions)
        if self.once:
            targets[torch.tensor(positions) >= self.sequences] = IGNORED
        return ids, targets, documents

    def batches(self, size: int) -> int:
        """Batches that hold one epoch; the last one may not be full."""
        return -(-self.sequences // size)

    def window(self, position: int) -> int:
        """Which sequence of the split stands at a position of the stream."""
        epoch, index = divmod(position, self.sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.sequences)
        return int(self._order[index])


class Stream(Shuffled):
    """The sequences of one split of one source."""

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        seed: int,
        starts: np.ndarray | None = None,
        masked: np.ndarray = NOTHING,
    ) -> None:
        """With `starts`, where documents begin in `tokens`, documents are kept apart. `masked` is as in a `Corpus`."""
        self.tokens, self.length, self.seed, self.starts, self.masked = tokens, length, seed, starts, masked
        # Sequence i is tokens[i * length : (i + 1) * length] with the targets one token further on.
        self.sequences = max(0, (len(tokens) - 1) // length)

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        first = self.window(position) * self.length
        both = self.tokens[first : first + self.length + 1].astype(np.int64)
        ids, targets = both[:-1], both[1:].copy()
        if self.starts is None:
            return ids, targets, None
        places = np.arange(first, first + self.length + 1)
        numbers = np.searchsorted(self.starts, places, side="right")
        targets[(numbers[1:] != numbers[:-1]) | inside(places[1:], self.masked)] = IGNORED
        return ids, targets, numbers[:-1]

    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position."""
        first = self.window(position) * self.length
        starts = NOTHING[:, 0] if self.starts is None else self.starts
        lo, hi = np.searchsorted(starts, [first + 1, first + self.length])
        return np.diff(np.concatenate([[first], starts[lo:hi].astype(np.int64), [first + self.length]]))


class Bins(Shuffled):
    """Sequences of whole documents and padding. See `hocket/train/data.py`."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int, bounds: np.ndarray, masked: np.ndarray) -> None:
        """`bounds` has where whole documents begin, and where the last one ends. `masked` is as in a `Corpus`."""
        self.tokens, self.length, self.seed, self.masked = tokens, length, seed, masked
        sizes = np.diff(bounds) - 1
        fitting = (sizes > 0) & (sizes <= length)
        self.left_out = int((sizes > length).sum())
        firsts, sizes = bounds[:-1][fitting], sizes[fitting]
        self._bins = [[(firsts[i], sizes[i]) for i in each] for each in best_fit(sizes, length)]
        self.sequences = len(self._bins)
        self.filled = float(sizes.sum()) / max(1, self.sequences * length)
        """Share of the places that hold a token."""

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        ids, targets = np.zeros(self.length, dtype=np.int64), np.full(self.length, IGNORED)
        numbers, at = np.full(self.length, PADDING), 0
        for number, (first, size) in enumerate(self._bins[self.window(position)]):
            here = slice(at, at + size)
            ids[here], targets[here] = self.tokens[first : first + size], self.tokens[first + 1 : first + size + 1]
            targets[here][inside(np.arange(first + 1, first + size + 1), self.masked)] = IGNORED
            numbers[here] = number
            at += size
        return ids, targets, numbers

    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position, padding as one."""
        sizes = np.array([size for _, size in self._bins[self.window(position)]], dtype=np.int64)
        return np.append(sizes, self.length - sizes.sum())

    def __str__(self) -> str:
        behind = f"; {self.left_out:,} documents longer than a sequence are left out" if self.left_out else ""
        return f"{self.sequences:,} sequences, {100 * self.filled:.1f} % full{behind}"


class Mixed(Rows):
    """The streams of several sources as one."""

    def __init__(self, streams: Sequence[Shuffled], quotas: Quotas) -> None:
        self._streams, self.quotas = streams, quotas

    @property
    def streams(self) -> Sequence[Shuffled]:
        """Those it is made of."""
        return self._streams

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        source, index = self.quotas.place(position)
        return self.streams[source].row(index)

    def lengths(self, position: int) -> np.ndarray:
        """Tokens of each document of the sequence at a position, padding as one."""
        source, index = self.quotas.place(position)
        return self.streams[source].lengths(index)

    def epochs(self, position: int) -> list[float]:
        """How often each source was read up to a position."""
        counts = self.quotas.counts(position)
        return [count / stream.sequences for count, stream in zip(counts, self.streams, strict=True)]


def make_streams(text: Text, settings: Settings) -> tuple[Rows, dict[str, Shuffled]]:
    """The training stream of a run, and the validation streams by source, where a source has a name.

    Raises ValueError if text for training is shorter than one batch, or a source of several than one sequence, or if a
    validation split is shorter than one batch. Validation streams are only checked if they are used.
    """
    stop_if([line for each in zip(text.sources, text.corpora, strict=True) for line in _unmasked(*each, settings)])
    made = [_split(corpus, settings) for corpus in text.corpora]
    evaluated = settings.train.eval_batches > 0
    if not text.sources[0].name:
        ((train, validation),) = made
        _check_length(
            train, "training", settings, "shorter data.sequence_length, fewer train.microbatches, or more text"
        )
        if evaluated:
            more = "a larger data.validation, more text, or train.eval_batches = 0"
            _check_length(validation, "validation", settings, more)
        return train, {"": validation}
    problems = []
    for source, (train, validation) in zip(text.sources, made, strict=True):
        problems += _too_small(source, train, validation if evaluated else None, settings)
    streams = {s.name: held for s, (_, held) in zip(text.sources, made, strict=True) if s.has_validation}
    if evaluated and not streams:
        reason = f"no source keeps anything for validation, but train.eval_batches = {settings.train.eval_batches}"
        fix = "validation above 0 for one of them, or train.eval_batches = 0"
        problems.append(problem("data.paths", settings.data.paths, settings.origins, reason, fix))
    stop_if(problems, "sources")
    return Mixed([train for train, _ in made], text.quotas), streams


def known_documents(settings: Settings) -> tuple[Lengths, ...]:
    """Documents of each sequence of a run's first step, in the order in which they are read.

    Nothing is tokenised for it: without text in the cache that fills a step, and without packing, there are none.
    """
    if settings.data.packing == "off":
        return ()
    try:
        sources = read_sources(settings.data, settings.origins)
        corpora = [known_corpus(each.data, each.origins, Path(settings.run.folder)) for each in sources]
    except ValueError:  # plans are made anywhere, and the text may be where the run will be
        return ()
    streams = [_split(corpus, settings)[0] for corpus in corpora if corpus is not None]
    if len(streams) < len(sources) or not all(stream.sequences for stream in streams):
        return ()
    quotas = quotas_of(sources, settings.batch, settings.train.seed)
    rows: Rows = Mixed(streams, quotas) if sources[0].name else streams[0]
    return tuple(lengths_of(rows.lengths(n).tolist()) for n in range(settings.batch))


def _unmasked(source: Source, corpus: Corpus, settings: Settings) -> list[str]:
    """A line about text of which nothing is learnt, or all of it though parts are not to be."""
    ranges = corpus.masked.clip(max=len(corpus.train))
    if len(corpus.train) and int((ranges[:, 1] - ranges[:, 0]).sum()) >= len(corpus.train):
        reason = "no token of it is learnt: it has prompts alone, or chats without an answer"
        return [problem("data.paths", source.data.paths, source.origins, reason, "text with answers")]
    if settings.data.packing != "off" or not (len(corpus.masked) or len(corpus.validation_masked)):
        return []
    reason = "has prompts or chats, of which only a part is learnt, and data.packing = off learns everything"
    return [problem("data.paths", source.data.paths, source.origins, reason, "data.packing = best_fit, or on")]


def _split(corpus: Corpus, settings: Settings) -> tuple[Shuffled, Shuffled]:
    data, length = settings.data, settings.data.sequence_length
    splits = (
        (corpus.train, corpus.starts, corpus.masked, settings.train.seed),
        (corpus.validation, corpus.validation_starts, corpus.validation_masked, settings.train.seed + 1),
    )
    if data.packing == "best_fit":
        train, validation = (
            Bins(tokens, length, seed, bounds, masked)
            for (tokens, _, masked, seed), bounds in zip(splits, corpus.whole_documents, strict=True)
        )
    elif data.packing == "off":
        train, validation = (Stream(tokens, length, seed) for tokens, _, _, seed in splits)
    else:
        train, validation = (Stream(tokens, length, seed, starts, masked) for tokens, starts, masked, seed in splits)
    validation.once = True
    return train, validation


def _too_small(source: Source, train: Shuffled, validation: Shuffled | None, settings: Settings) -> list[str]:
    """What one source of several has too little of. A batch takes from all, but a validation is of one."""
    paths, length = source.data.paths, settings.data.sequence_length
    if not train.sequences:
        reason = f"its training split has {len(train.tokens):,} tokens, no sequence of {length}{_too_long(train)}"
        fix = _cut_them(train, "more text, or leave the source out")
        return [problem("data.paths", paths, source.origins, reason, fix)]
    if validation is None or not source.has_validation or validation.sequences >= settings.batch:
        return []
    reason = (
        f"its validation split has {len(validation.tokens):,} tokens, {validation.sequences:,} sequences of {length}, "
        f"but a batch takes {settings.batch:,}{_too_long(validation)}"
    )
    fix = _cut_them(validation, "a larger validation, validation = 0 for this source, or more text")
    return [problem("data.paths", paths, source.origins, reason, fix)]


def _check_length(stream: Shuffled, split: str, settings: Settings, fix: str) -> None:
    if stream.sequences < settings.batch:
        train, length = settings.train, settings.data.sequence_length
        reason = (
            f"the {split} split has {len(stream.tokens):,} tokens, {stream.sequences:,} sequences of {length}, but a "
            f"batch takes {settings.batch:,} (mesh.dp {settings.mesh.dp} x train.microbatches {train.microbatches} x "
            f"train.sequences {train.sequences}){_too_long(stream)}"
        )
        raise ValueError(problem("data.paths", settings.data.paths, settings.origins, reason, _cut_them(stream, fix)))


def _cut_them(stream: Shuffled, fix: str) -> str:
    """What lets a split have more sequences: where documents are left out, shorter sequences would leave out more."""
    if not stream.left_out:
        return fix
    others = fix.removeprefix("shorter data.sequence_length, ")
    return f"data.packing = on, which cuts documents, a longer data.sequence_length, {others}"


def _too_long(stream: Shuffled) -> str:
    return f"; {stream.left_out:,} documents are longer than a sequence" if stream.left_out else ""

"""Sequences in a random order that only the seed fixes, at a position that survives any change of ranks.

The tokens of a split are cut into sequences of equal length, without regard to where documents end (a separator token
stands there); with `data.packing` the documents that share a sequence are then kept apart. Each epoch visits all of
them in a new random order. Several sources share one stream as `hocket/train/mix.py` says. The *position* of a run is
the number of sequences it has consumed. A step takes the next `dp * microbatches * sequences` of them; which rank gets
which follows from the rank's number alone, so the same position continues the same stream on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.problems import stop_if
from hocket.resolve import Settings
from hocket.settings.schema import problem
from hocket.train.corpus import Corpus
from hocket.train.mix import Quotas
from hocket.train.sources import Source, Text

Row = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Tokens, targets and numbers of documents (None where they are not kept apart) of a sequence, int64 [length] each."""


class Rows(ABC):
    """An endless stream of sequences. It holds no position: callers do."""

    @abstractmethod
    def row(self, position: int) -> Row:
        """The sequence at a position.

        Where documents are kept apart, a target that is the first token of the next document is `IGNORED`.
        """

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the `count` sequences from `position` on, int64 [count, length] each."""
        ids, targets, _ = self._rows(position, count)
        return ids, targets

    def documents(self, position: int, count: int) -> Tensor | None:
        """Numbers of the documents of their tokens, int64 [count, length]; None where documents are not kept apart."""
        return self._rows(position, count)[2]

    def _rows(self, position: int, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = [self.row(each) for each in range(position, position + count)]
        ids, targets, numbers = zip(*rows, strict=True)
        documents = None if numbers[0] is None else torch.from_numpy(np.stack(numbers))
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(targets)), documents

    def batch(
        self, position: int, microbatch: int, dp_rank: int, *, dp: int, sequences: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a data-parallel rank reads for one microbatch of the step that starts at `position`.

        Tokens, targets and documents, int64 [sequences, length] each. A step consumes `dp * microbatches * sequences`.
        """
        return self._rows(position + (microbatch * dp + dp_rank) * sequences, sequences)


class Stream(Rows):
    """The sequences of one split of one source."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int, starts: np.ndarray | None = None) -> None:
        """With `starts`, where documents begin in `tokens`, documents are kept apart."""
        self.tokens, self.length, self.seed, self.starts = tokens, length, seed, starts
        # Sequence i is tokens[i * length : (i + 1) * length] with the targets one token further on.
        self.sequences = max(0, (len(tokens) - 1) // length)
        """Sequences of one epoch."""
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.sequences

    def window(self, position: int) -> int:
        """Which sequence of the split stands at a position of the stream."""
        epoch, index = divmod(position, self.sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.sequences)
        return int(self._order[index])

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        first = self.window(position) * self.length
        both = self.tokens[first : first + self.length + 1].astype(np.int64)
        ids, targets = both[:-1], both[1:].copy()
        if self.starts is None:
            return ids, targets, None
        numbers = np.searchsorted(self.starts, np.arange(first, first + self.length + 1), side="right")
        targets[numbers[1:] != numbers[:-1]] = IGNORED
        return ids, targets, numbers[:-1]


class Mixed(Rows):
    """The streams of several sources as one."""

    def __init__(self, streams: Sequence[Stream], quotas: Quotas) -> None:
        self.streams, self.quotas = streams, quotas

    def row(self, position: int) -> Row:
        """The sequence at a position."""
        source, index = self.quotas.place(position)
        return self.streams[source].row(index)

    def epochs(self, position: int) -> list[float]:
        """How often each source was read up to a position."""
        counts = self.quotas.counts(position)
        return [count / stream.sequences for count, stream in zip(counts, self.streams, strict=True)]


def make_streams(text: Text, settings: Settings) -> tuple[Rows, dict[str, Stream]]:
    """The training stream of a run, and the validation streams by source, where a source has a name.

    Raises ValueError if text for training is shorter than one batch, or a source of several than one sequence, or if a
    validation split is shorter than one batch. Validation streams are only checked if they are used.
    """
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
        problems.append(problem("data.sources", settings.data.sources, settings.origins, reason, fix))
    stop_if(problems, "sources")
    return Mixed([train for train, _ in made], text.quotas), streams


def _split(corpus: Corpus, settings: Settings) -> tuple[Stream, Stream]:
    data = settings.data
    starts, behind = (corpus.starts, corpus.validation_starts) if data.packing == "on" else (None, None)
    train = Stream(corpus.train, data.sequence_length, data.seed, starts)
    return train, Stream(corpus.validation, data.sequence_length, data.seed + 1, behind)


def _too_small(source: Source, train: Stream, validation: Stream | None, settings: Settings) -> list[str]:
    """What one source of several has too little of. A batch takes from all, but a validation is of one."""
    paths, length = source.data.paths, settings.data.sequence_length
    if not train.sequences:
        reason = f"its training split has {len(train.tokens):,} tokens, which is no sequence of {length}"
        return [problem("data.paths", paths, source.origins, reason, "more text, or leave the source out")]
    if validation is None or not source.has_validation or validation.sequences >= settings.batch:
        return []
    reason = (
        f"its validation split has {len(validation.tokens):,} tokens, {validation.sequences:,} sequences of {length}, "
        f"but a batch takes {settings.batch:,}"
    )
    fix = "a larger validation, validation = 0 for this source, or more text"
    return [problem("data.paths", paths, source.origins, reason, fix)]


def _check_length(stream: Stream, split: str, settings: Settings, fix: str) -> None:
    if stream.sequences < settings.batch:
        train, length = settings.train, settings.data.sequence_length
        reason = (
            f"the {split} split has {len(stream.tokens):,} tokens, {stream.sequences:,} sequences of {length}, but a "
            f"batch takes {settings.batch:,} (mesh.dp {settings.mesh.dp} x train.microbatches {train.microbatches} x "
            f"train.sequences {train.sequences})"
        )
        raise ValueError(problem("data.paths", settings.data.paths, settings.origins, reason, fix))

"""Sequences in a random order that only the seed fixes, at a position that survives any change of ranks.

The tokens of a split are cut into sequences of equal length, without regard to where documents end (a separator token
stands there); with `data.packing` the documents that share a sequence are then kept apart. Each epoch visits all of
them in a new random order. The *position* of a run is the number of sequences it has consumed. A step takes the next
`dp * microbatches * sequences` of them; which rank gets which follows from the rank's number alone, so the same
position continues the same stream on any number of ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.resolve import Settings
from hocket.settings.schema import problem
from hocket.train.corpus import Corpus


class Stream:
    """An endless stream of sequences of one split. It holds no position: callers do."""

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

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """The `count` sequences from `position` on: tokens and targets, int64 [count, length] each.

        Where documents are kept apart, a target that is the first token of the next document is `IGNORED`.
        """
        windows = self._windows(position, count)
        both = torch.from_numpy(np.stack([self.tokens[row].astype(np.int64) for row in windows]))
        ids, targets = both[:, :-1].contiguous(), both[:, 1:].clone()
        if self.starts is not None:
            numbers = self._numbers(windows)
            targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        return ids, targets

    def documents(self, position: int, count: int) -> Tensor | None:
        """Numbers of the documents of their tokens, int64 [count, length]; None where documents are not kept apart."""
        return None if self.starts is None else self._numbers(self._windows(position, count))[:, :-1].contiguous()

    def _windows(self, position: int, count: int) -> list[slice]:
        firsts = [self.window(p) * self.length for p in range(position, position + count)]
        return [slice(first, first + self.length + 1) for first in firsts]

    def _numbers(self, windows: list[slice]) -> Tensor:
        """The document of every token of the windows, from 0 on, [count, length + 1]."""
        assert self.starts is not None
        places = np.stack([np.arange(row.start, row.stop) for row in windows])
        return torch.from_numpy(np.searchsorted(self.starts, places, side="right"))

    def batch(
        self, position: int, microbatch: int, dp_rank: int, *, dp: int, sequences: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a data-parallel rank reads for one microbatch of the step that starts at `position`.

        Tokens, targets and documents, int64 [sequences, length] each. A step consumes `dp * microbatches * sequences`.
        """
        first = position + (microbatch * dp + dp_rank) * sequences
        return *self.take(first, sequences), self.documents(first, sequences)


def make_streams(corpus: Corpus, settings: Settings) -> tuple[Stream, Stream]:
    """The training and the validation stream of a run.

    Raises ValueError if either split is shorter than one batch. The validation stream is only checked if it is used.
    """
    data = settings.data
    starts = corpus.starts if data.packing == "on" else None
    behind = None if starts is None else starts[starts > corpus.train_tokens] - corpus.train_tokens
    train = Stream(corpus.train, data.sequence_length, data.seed, starts)
    validation = Stream(corpus.validation, data.sequence_length, data.seed + 1, behind)
    _check_length(train, "training", settings, "shorter data.sequence_length, fewer train.microbatches, or more text")
    if settings.train.eval_batches:
        _check_length(
            validation, "validation", settings, "a larger data.validation, more text, or train.eval_batches = 0"
        )
    return train, validation


def _check_length(stream: Stream, split: str, settings: Settings, fix: str) -> None:
    if stream.sequences < settings.batch:
        train, length = settings.train, settings.data.sequence_length
        reason = (
            f"the {split} split has {len(stream.tokens):,} tokens, {stream.sequences:,} sequences of {length}, but a "
            f"batch takes {settings.batch:,} (mesh.dp {settings.mesh.dp} x train.microbatches {train.microbatches} x "
            f"train.sequences {train.sequences})"
        )
        raise ValueError(problem("data.paths", settings.data.paths, settings.origins, reason, fix))

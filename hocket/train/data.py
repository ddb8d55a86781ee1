"""Packed sequences in a random order that only the seed fixes, at a position that survives any change of ranks.

The tokens of a split are cut into sequences of equal length, without regard to where documents end (a separator token
stands there). Each epoch visits all of them in a new random order. The *position* of a run is the number of sequences
it has consumed. A step takes the next `dp * microbatches * sequences` of them; which rank gets which follows from
the rank's number alone, so the same position continues the same stream on any number of ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hocket.leaves import problem
from hocket.resolve import Settings
from hocket.train.corpus import Corpus


class Stream:
    """An endless stream of sequences of one split. It holds no position: callers do."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
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
        """The `count` sequences from `position` on: tokens and targets, int64 [count, length] each."""
        rows = []
        for p in range(position, position + count):
            start = self.window(p) * self.length
            rows.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        both = torch.from_numpy(np.stack(rows))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def batch(self, position: int, microbatch: int, dp_rank: int, *, dp: int, sequences: int) -> tuple[Tensor, Tensor]:
        """What a data-parallel rank reads for one microbatch of the step that starts at `position`.

        Tokens and targets, int64 [sequences, length] each. A step consumes `dp * microbatches * sequences`.
        """
        return self.take(position + (microbatch * dp + dp_rank) * sequences, sequences)


def make_streams(corpus: Corpus, settings: Settings) -> tuple[Stream, Stream]:
    """The training and the validation stream of a run.

    Raises ValueError if either split is shorter than one batch. The validation stream is only checked if it is used.
    """
    data = settings.data
    train = Stream(corpus.train, data.sequence_length, data.seed)
    validation = Stream(corpus.validation, data.sequence_length, data.seed + 1)
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

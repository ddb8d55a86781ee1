"""Moving tokens between tensor-parallel ranks piece by piece, so that products can run on what is there already.

Each rank has S tokens of a microbatch's P * S. `spread` shows every rank's tokens to all: a product takes them in as
they come. `collect` adds up P partial sums of all tokens, of which each rank keeps its own S: a product hands them out
as it makes them. Both work pairwise, without a ring: a rank and each of its peers have a link of their own.

On gloo pieces are sends and receives; `token_copies.py` has another way for GPUs.

Shapes: P ranks, S tokens of one rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hocket.runtime.transports import Pending, local_sum

Wire = Callable[[Tensor, int], Pending]
"""Sends a tensor to a rank of the group, or receives one from it."""


class Spread(Protocol):
    """All ranks' tokens, on their way here."""

    def take(self, low: int, high: int) -> Tensor:
        """Tokens of the ranks `low` to `high`, of which none is this one: [(high - low) * S, D]. Waits for them."""
        ...

    def whole(self, out_TD: Tensor) -> Callable[[], None]:
        """Have `out` become the tokens of all ranks; it has when the returned call is over."""
        ...

    def end(self) -> None:
        """Order the current queue behind all of it. Call it when nothing more will be taken."""
        ...


class Collect(Protocol):
    """Partial sums of all tokens, on their way to the ranks that keep them."""

    def place(self, low: int, high: int) -> Tensor:
        """Where to write partial sums for the ranks `low` to `high`: [(high - low) * S, D]."""
        ...

    def send(self, low: int, high: int) -> None:
        """They have been written."""
        ...

    def sum(self, out_SD: Tensor) -> None:
        """Have `out` become the sum over ranks of what they had for this one, in rank order, in fp32, rounded once."""
        ...


class Tokens(Protocol):
    """How the ranks of a group move pieces."""

    def spread(self, x_SD: Tensor) -> Spread: ...
    def collect(self, out_SD: Tensor) -> Collect:
        """For results like `out`."""
        ...


class SentTokens:
    """Pieces as sends and receives, for CPUs."""

    def __init__(self, rank: int, size: int, send: Wire, recv: Wire) -> None:
        self.rank, self.size, self.send, self.recv = rank, size, send, recv

    def spread(self, x_SD: Tensor) -> Spread:
        return _SentSpread(self, x_SD.contiguous())

    def collect(self, out_SD: Tensor) -> Collect:
        return _SentCollect(self, out_SD)

    def others(self) -> list[int]:
        """The peers, from the next one on."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class _SentSpread:
    def __init__(self, tokens: SentTokens, x_SD: Tensor) -> None:
        size, rank = tokens.size, tokens.rank
        self._all_PSD = x_SD.new_empty(size, *x_SD.shape)
        self._all_PSD[rank].copy_(x_SD)
        self._sent = [tokens.send(x_SD, to) for to in tokens.others()[::-1]]
        self._coming = {source: tokens.recv(self._all_PSD[source], source) for source in tokens.others()}

    def take(self, low: int, high: int) -> Tensor:
        for source in range(low, high):
            self._coming[source].wait()
        return self._all_PSD[low:high].flatten(0, 1)

    def whole(self, out_TD: Tensor) -> Callable[[], None]:
        def wait() -> None:
            self.end()
            out_TD.copy_(self._all_PSD.flatten(0, 1))

        return wait

    def end(self) -> None:
        for pending in (*self._coming.values(), *self._sent):
            pending.wait()


class _SentCollect:
    def __init__(self, tokens: SentTokens, out_SD: Tensor) -> None:
        self._tokens = tokens
        self._leaving_PSD = out_SD.new_empty(tokens.size, *out_SD.shape)
        self._arrived_PSD = torch.empty_like(self._leaving_PSD)
        self._coming = [tokens.recv(self._arrived_PSD[source], source) for source in tokens.others()]
        self._sent: list[Pending] = []

    def place(self, low: int, high: int) -> Tensor:
        return self._leaving_PSD[low:high].flatten(0, 1)

    def send(self, low: int, high: int) -> None:
        others = [to for to in range(low, high) if to != self._tokens.rank]
        self._sent += [self._tokens.send(self._leaving_PSD[to], to) for to in others]

    def sum(self, out_SD: Tensor) -> None:
        rank = self._tokens.rank
        self._arrived_PSD[rank].copy_(self._leaving_PSD[rank])
        for pending in (*self._coming, *self._sent):
            pending.wait()
        add_up(self._arrived_PSD.flatten(1), out_SD.view(-1))


def add_up(parts_PN: Tensor, out_N: Tensor) -> None:
    """`out` = the sum of the rows of `parts`, in their order, in fp32, rounded once."""
    if out_N.is_cuda:
        from hocket.kernels.sums import launch

        launch(parts_PN, out_N, 1.0, add=False)
        return
    total_N = torch.empty_like(out_N, dtype=torch.float32)
    local_sum(parts_PN, total_N, 1.0, add=False)
    out_N.copy_(total_N)

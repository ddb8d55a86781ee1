"""All-gather and reduce-scatter of tokens in pieces between tensor-parallel ranks, overlapped with matrix products.

Each rank owns S of a microbatch's P * S tokens. `spread` all-gathers them: a product consumes pieces as they arrive.
`collect` reduce-scatters partial sums: a product sends pieces as it makes them. Both are pairwise, not rings, since
each pair of ranks has its own link. gloo uses sends and receives, GPUs `CopiedTokens`.

Shapes: P ranks, S tokens of one rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.hangs import FlagProgress
from hocket.runtime.lanes import SideStream
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import Nccl, Pending, local_sum

Wire = Callable[[Tensor, int], Pending]
"""Sends a tensor to a rank of the group, or receives one from it."""


class Spread(Protocol):
    """All ranks' tokens, on their way here."""

    def take(self, low: int, high: int) -> Tensor:
        """Wait for the tokens of ranks `low` to `high`, which exclude this rank: [(high - low) * S, D]."""
        ...

    def whole(self, out_TD: Tensor) -> Callable[[], None]:
        """Fill `out` with the tokens of all ranks; done when the returned call returns."""
        ...

    def end(self) -> None:
        """Order the current stream after all transfers. Call it after the last `take`."""
        ...


class Collect(Protocol):
    """Partial sums, on their way to the ranks that own the tokens."""

    def place(self, low: int, high: int) -> Tensor:
        """Where to write partial sums for ranks `low` to `high`: [(high - low) * S, D]."""
        ...

    def send(self, low: int, high: int) -> None:
        """Send what was written to `place(low, high)`."""
        ...

    def sum(self, out_SD: Tensor) -> None:
        """Fill `out` with the sum of all ranks' partial sums for this rank, in rank order, in fp32, rounded once."""
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
    """`out` = the sum of the rows of `parts`, in order, in fp32, rounded once."""
    if out_N.is_cuda:
        from hocket.kernels.sums import launch

        launch(parts_PN, out_N, 1.0, add=False)
        return
    total_N = torch.empty_like(out_N, dtype=torch.float32)
    local_sum(parts_PN, total_N, 1.0, add=False)
    out_N.copy_(total_N)


# --------------------------------------------------------------------------------------------------------- token copies
#
# Pieces written into peer memory by copy engines.
#
# A rank copies pieces into its peers' *arrival buffers* (`shared_memory.py`), then writes the turn's number to a flag
# there, in the same stream; readers' streams wait for the flag. Both are stream operations: a kernel that signals
# arrival would have to wait for products, which hold all SMs while they run.
#
# Note: [Two arrival buffers without barriers]
# A rank may overwrite a peer's buffer once the peer has read it. Each spread and each collect is a turn; all ranks take
# the same turns, which alternate between two buffers. In turn n - 1 this rank waited for a piece of every peer, and a
# peer sends that piece after all its earlier work, including its reads of turn n - 2. So turn n may reuse the buffer of
# turn n - 2.
#
# Note: [Recorded turns begin at one]
# A replay writes the recorded numbers again, and a flag left at that value would let readers go on too early. So before
# each replay every rank zeroes its own flags, then all ranks synchronize. All earlier writes have been waited for, so
# none arrives late. After a replay turns continue from its last one.


FLAG_BYTES = 256
"""Bytes after a rank's two buffers: one flag per peer."""


class CopiedTokens:
    """Pieces written by copy engines. See Note: [Two arrival buffers without barriers]."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver, side: SideStream) -> None:
        """`memories[p]` are bytes of rank p: two buffers, then `FLAG_BYTES` of zeros."""
        self.rank, self.size, self.memories = rank, len(memories), tuple(memories)
        assert self.size <= FLAG_BYTES // 4, f"{self.size} ranks, and flags for {FLAG_BYTES // 4}"
        self.driver, self.side = driver, side
        self.nbytes = (memories[0].numel() - FLAG_BYTES) // 2
        """Bytes of one buffer: all tokens of the widest tensor moved."""
        self._starts = [memory.data_ptr() for memory in memories]
        self.turns = 0
        self._marks = [0, 0]
        self._views: dict[Any, Tensor] = {}
        self.others = [(rank + step) % self.size for step in range(1, self.size)]
        """The peers, starting with the next rank, so that ranks start with different peers."""

    def turn(self, like_SD: Tensor) -> tuple[int, Tensor]:
        """Begin a turn: its number, and its arrival buffer [P, S, D]."""
        needed = self.size * like_SD.nbytes
        assert needed <= self.nbytes, f"{needed} bytes of tokens for arrival buffers of {self.nbytes}"
        self.turns += 1
        self._marks[1] = self.turns
        key = self.turns % 2, like_SD.shape, like_SD.dtype
        if key not in self._views:
            start = key[0] * self.nbytes
            flat = self.memories[self.rank][start : start + needed]
            self._views[key] = flat.view(like_SD.dtype).view(self.size, *like_SD.shape)
        return self.turns, self._views[key]

    def push(self, stream: int, turn: int, peer: int, source: int, nbytes: int) -> None:
        """Copy this rank's piece to a peer and set its flag."""
        into = self._starts[peer] + turn % 2 * self.nbytes + self.rank * nbytes
        self.driver.copy(stream, into, source, nbytes)
        self.driver.write(stream, self._flag(peer, self.rank), turn)

    def wait(self, stream: int, turn: int, peer: int) -> None:
        self.driver.wait(stream, self._flag(self.rank, peer), turn)

    def _flag(self, at: int, peer: int) -> int:
        return self._starts[at] + 2 * self.nbytes + 4 * peer

    def begin(self) -> list[int]:
        """Begin a step. Returns marks: the last turn before it, and its own last turn so far."""
        self._marks = [self.turns, self.turns]
        return self._marks

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """Progress of a step's turns, which are the flags' values."""
        before, last = marks
        flags = [self._flag(self.rank, peer) for peer in self.others]
        flags += [self._flag(peer, self.rank) for peer in self.others]
        read = self.driver.read(flags)
        if read is None:
            return None
        come = [min(turn, last) - before for turn in read]
        here, there = come[: len(self.others)], come[len(self.others) :]
        done = max(0, min(*here, max(there)))  # a turn not begun here is not done
        absent = [peer for peer, turns in zip(self.others, here, strict=True) if turns == done]
        waits = done < last - before and max(there) > done
        return FlagProgress(done, tuple(absent) if waits else (), (max(there), last - before))

    def rewind(self) -> None:
        """Restart at turn one, together with all ranks of the group: Note: [Recorded turns begin at one]."""
        self.memories[self.rank][2 * self.nbytes :].zero_()
        self.turns = 0

    def spread(self, x_SD: Tensor) -> Spread:
        return _CopiedSpread(self, x_SD.contiguous())

    def collect(self, out_SD: Tensor) -> Collect:
        return _CopiedCollect(self, out_SD)


class _CopiedSpread:
    def __init__(self, tokens: CopiedTokens, x_SD: Tensor) -> None:
        self._tokens, self._x_SD = tokens, x_SD
        self._turn, self._arrived_PSD = tokens.turn(x_SD)
        self._missing = set(tokens.others)
        _, side = tokens.side.fork()
        # The previous rank first: it reads the next rank's tokens, these, first.
        for peer in reversed(tokens.others):
            tokens.push(side, self._turn, peer, x_SD.data_ptr(), x_SD.nbytes)
        self._sent = tokens.side.mark()

    def _wait(self, stream: int, source: int) -> None:
        self._tokens.wait(stream, self._turn, source)
        self._missing.discard(source)

    def take(self, low: int, high: int) -> Tensor:
        stream = self._tokens.side.current()
        for source in range(low, high):
            self._wait(stream, source)
        return self._arrived_PSD[low:high].view(-1, self._x_SD.shape[-1])

    def whole(self, out_TD: Tensor) -> Callable[[], None]:
        """Copy out of the buffer, on the side stream."""
        tokens, nbytes = self._tokens, self._x_SD.nbytes
        _, side = tokens.side.fork()
        arrived, out = self._arrived_PSD.data_ptr(), out_TD.data_ptr()
        tokens.driver.copy(side, out + tokens.rank * nbytes, self._x_SD.data_ptr(), nbytes)
        for source in tokens.others:
            self._wait(side, source)  # also if another stream has waited already
            tokens.driver.copy(side, out + source * nbytes, arrived + source * nbytes, nbytes)
        return tokens.side.mark()

    def end(self) -> None:
        assert not self._missing, f"the tokens of ranks {self._missing} were never taken"
        self._sent()


class _CopiedCollect:
    def __init__(self, tokens: CopiedTokens, out_SD: Tensor) -> None:
        self._tokens = tokens
        self._turn, self._arrived_PSD = tokens.turn(out_SD)
        self._leaving_PSD = out_SD.new_empty(tokens.size, *out_SD.shape)
        self._nbytes = out_SD.nbytes

    def place(self, low: int, high: int) -> Tensor:
        own = low == self._tokens.rank and high == low + 1
        return (self._arrived_PSD if own else self._leaving_PSD)[low:high].view(-1, self._leaving_PSD.shape[-1])

    def send(self, low: int, high: int) -> None:
        tokens, start = self._tokens, self._leaving_PSD.data_ptr()
        if low == tokens.rank and high == low + 1:
            return
        _, side = tokens.side.fork()
        for peer in range(low, high):
            source = start + peer * self._nbytes
            if peer == tokens.rank:
                tokens.driver.copy(side, self._arrived_PSD[peer].data_ptr(), source, self._nbytes)
            else:
                tokens.push(side, self._turn, peer, source, self._nbytes)

    def sum(self, out_SD: Tensor) -> None:
        self._tokens.side.mark()()  # sent pieces are memory of the current stream
        stream = self._tokens.side.current()
        for source in self._tokens.others:
            self._tokens.wait(stream, self._turn, source)
        add_up(self._arrived_PSD.view(self._tokens.size, -1), out_SD.view(-1))


@dataclass
class CopyingNccl(Nccl):
    """Tensor-parallel ranks that move pieces by copies; other collectives use NCCL."""

    tokens: CopiedTokens


def copied_tokens(
    group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float, side: SideStream
) -> CopiedTokens:
    """Arrival buffers of `nbytes` on GPUs with peer access. All ranks of the group call this together."""
    nbytes = -(-nbytes // FLAG_BYTES) * FLAG_BYTES
    rank, memories, _ = shared_memory(group, 2 * nbytes + FLAG_BYTES, device, timeout, Tensor.zero_)
    return CopiedTokens(rank, memories, Cuda(), side)

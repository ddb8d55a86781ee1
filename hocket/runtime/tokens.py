"""Moving tokens between tensor-parallel ranks piece by piece, so that products can run on what is there already.

Each rank has S tokens of a microbatch's P * S. `spread` shows every rank's tokens to all: a product takes them in as
they come. `collect` adds up P partial sums of all tokens, of which each rank keeps its own S: a product hands them out
as it makes them. Both work pairwise, without a ring: a rank and each of its peers have a link of their own.

On gloo pieces are sends and receives; `CopiedTokens` are another way for GPUs.

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


# --------------------------------------------------------------------------------------------------------- token copies
#
# Moving tokens piece by piece without an SM: a rank's copy engine writes them where its peers read them.
#
# All memory of one NVLink domain can be mapped into each process (torch's symmetric memory). So a rank copies its
# pieces straight into the *arrival buffers* of its peers, and then, in the same stream, the number of the turn into a
# flag there. Readers' streams wait for that flag. Writing and waiting are operations of the stream, not kernels:
# products hold all SMs for as long as they run, and a kernel that only says that something has arrived would have to
# wait for them.
#
# Note: [Arrivals take turns in two buffers]
# A rank may overwrite a peer's buffer once the peer has read it. Each spread and each collect is a turn. All ranks of a
# group take the same turns, and each uses the other buffer than the one before. In turn n - 1 this rank waited for a
# piece of every peer. A peer sends that piece behind all that its own current queue had been given by then, which
# includes reading what arrived in turn n - 2. So turn n may use the buffer of turn n - 2, and no barrier is needed.
#
# Note: [Recorded turns begin at one]
# A recording always writes the same numbers, and a flag that is already as large would let readers go on too early. So
# before each replay every rank makes its own flags zero, and then all meet: nobody writes before everybody has. What
# was written before has been waited for, so nothing comes late. After a replay turns count on from its last one.


FLAG_BYTES = 256
"""Bytes behind the two buffers of a rank: room for one flag of every peer."""


class CopiedTokens:
    """Pieces written by copy engines. See Note: [Arrivals take turns in two buffers]."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver, side: SideStream) -> None:
        """`memories[p]` are bytes of rank p: two buffers, and `FLAG_BYTES`, which are zero."""
        self.rank, self.size, self.memories = rank, len(memories), tuple(memories)
        assert self.size <= FLAG_BYTES // 4, f"{self.size} ranks, and flags for {FLAG_BYTES // 4}"
        self.driver, self.side = driver, side
        self.nbytes = (memories[0].numel() - FLAG_BYTES) // 2
        """Bytes of one buffer: all tokens of the widest tensor that is moved."""
        self._starts = [memory.data_ptr() for memory in memories]
        self.turns = 0
        """Those that were taken so far, or since all flags were zero."""
        self._marks = [0, 0]
        self._views: dict[Any, Tensor] = {}
        self.others = [(rank + step) % self.size for step in range(1, self.size)]
        """The peers, from the next one on: each rank begins with another."""

    def turn(self, like_SD: Tensor) -> tuple[int, Tensor]:
        """The number of a new turn, and what arrives in it: [P, S, D]."""
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
        """Copy this rank's piece for a peer, and tell it."""
        into = self._starts[peer] + turn % 2 * self.nbytes + self.rank * nbytes
        self.driver.copy(stream, into, source, nbytes)
        self.driver.write(stream, self._flag(peer, self.rank), turn)

    def wait(self, stream: int, turn: int, peer: int) -> None:
        """Until a peer's piece is here."""
        self.driver.wait(stream, self._flag(self.rank, peer), turn)

    def _flag(self, at: int, peer: int) -> int:
        """The flag of a rank in which a peer says what it has sent."""
        return self._starts[at] + 2 * self.nbytes + 4 * peer

    def begin(self) -> list[int]:
        """Marks of a step: the last turn before it, and its own last one so far."""
        self._marks = [self.turns, self.turns]
        return self._marks

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """What the flags say of a step's turns, whose numbers they are."""
        before, last = marks
        flags = [self._flag(self.rank, peer) for peer in self.others]
        flags += [self._flag(peer, self.rank) for peer in self.others]
        read = self.driver.read(flags)
        if read is None:
            return None
        come = [min(turn, last) - before for turn in read]
        here, there = come[: len(self.others)], come[len(self.others) :]
        done = max(0, min(*here, max(there)))  # a turn that this rank has not come to is not over
        absent = [peer for peer, turns in zip(self.others, here, strict=True) if turns == done]
        waits = done < last - before and max(there) > done
        return FlagProgress(done, tuple(absent) if waits else (), (max(there), last - before))

    def rewind(self) -> None:
        """Begin with turn one again, when all ranks of the group do: Note: [Recorded turns begin at one]."""
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
        # To the rank before this one first: it takes the tokens of the next rank, this one, first.
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
        """Copies out of the buffer, on the side."""
        tokens, nbytes = self._tokens, self._x_SD.nbytes
        _, side = tokens.side.fork()
        arrived, out = self._arrived_PSD.data_ptr(), out_TD.data_ptr()
        tokens.driver.copy(side, out + tokens.rank * nbytes, self._x_SD.data_ptr(), nbytes)
        for source in tokens.others:
            self._wait(side, source)  # whatever another queue has waited for
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
        self._tokens.side.mark()()  # what left is memory of the current queue
        stream = self._tokens.side.current()
        for source in self._tokens.others:
            self._tokens.wait(stream, self._turn, source)
        add_up(self._arrived_PSD.view(self._tokens.size, -1), out_SD.view(-1))


@dataclass
class CopyingNccl(Nccl):
    """Tensor-parallel ranks that move pieces by copies; whatever else is asked of the group runs on NCCL's kernels."""

    tokens: CopiedTokens


def copied_tokens(
    group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float, side: SideStream
) -> CopiedTokens:
    """Arrival buffers of `nbytes` on GPUs that reach each other's memory: all ranks of the group call this together."""
    nbytes = -(-nbytes // FLAG_BYTES) * FLAG_BYTES
    rank, memories, _ = shared_memory(group, 2 * nbytes + FLAG_BYTES, device, timeout, Tensor.zero_)
    return CopiedTokens(rank, memories, Cuda(), side)

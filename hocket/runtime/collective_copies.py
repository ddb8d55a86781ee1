"""All-gather and reduce-scatter by copy engines of one NVLink domain. They occupy no SM, unlike NCCL's kernels.

A rank can address only exported peer memory (`shared_memory.py`). So data passes through two exported staging buffers,
called *halves*:

    all-gather      a rank copies its shard to its own half; peers copy it from there
    reduce-scatter  a rank copies each peer's part to that peer's half; one kernel there adds up the parts

The kernel adds in fp32 in rank order, so results are bitwise reproducible.

Note: [Halves and their flags]
Data moves in pieces that alternate between the two halves. A rank has two flags per half and peer: *arrived* (the
peer's piece is here) and *read* (the peer has read this rank's piece). The sender waits until all *read* flags are
positive and makes them negative, copies, and makes the peers' *arrived* flags positive. The receiver waits for its
*arrived* flags and makes them negative, copies or adds up, and makes the senders' *read* flags positive. Afterwards
every flag has its initial sign, so a recorded step can be replayed. A rank sends piece n + 1 before it receives piece
n, so flags travel while bytes move. Waits and writes are stream operations, not kernels.

Note: [All-gather and reduce-scatter have halves of their own]
A half of an all-gather is written by its owner, a half of a reduce-scatter by all peers. A peer that sent a piece in an
all-gather knows that its piece was read, but not that all other ranks have read the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hocket.kernels.pieces import Own, Pieces
from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.lanes import stream_handle, wait_for_stream
from hocket.runtime.queue import named
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending, local_sum, place_own

HALVES = 2
ALIGNED = 256
_ARRIVED, _READ = 0, 1
"""Index of a half's flags of a peer."""


class Halves:
    """The halves of all ranks for all-gathers, or for reduce-scatters, as one rank sees them."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver) -> None:
        """`memories[p]` are bytes of rank p, initialized by `reset_flags`: two halves, then flags."""
        self.rank, self.size, self._memories, self.driver = rank, len(memories), tuple(memories), driver
        self.nbytes = (memories[0].numel() - flag_bytes(self.size)) // HALVES
        self.peers = [(rank + step) % self.size for step in range(1, self.size)]
        """The other ranks, starting with the next one, so that ranks start with different peers."""
        arrived = [[self._flag(rank, half, _ARRIVED, p) for p in self.peers] for half in range(HALVES)]
        read = [[self._flag(rank, half, _READ, p) for p in self.peers] for half in range(HALVES)]
        self.await_arrived = [driver.prepared([s for w in flags for s in _await(w)]) for flags in arrived]
        self.await_read = [driver.prepared([s for w in flags for s in _await(w)]) for flags in read]
        self.signal_arrived, self.signal_read = (
            [
                driver.prepared([("write", self._flag(p, half, kind, rank), 1) for p in self.peers])
                for half in range(HALVES)
            ]
            for kind in (_ARRIVED, _READ)
        )
        """What is done with the flags of all peers around copies, by half; each is given a stream."""

    def bytes_of(self, rank: int, half: int) -> Tensor:
        return self._memories[rank][half * self.nbytes : (half + 1) * self.nbytes]

    def _flag(self, at: int, half: int, kind: int, peer: int) -> int:
        return self._memories[at].data_ptr() + HALVES * self.nbytes + 4 * ((half * 2 + kind) * self.size + peer)


def _await(flag: int) -> tuple[tuple[Literal["wait"], int, int], tuple[Literal["write"], int, int]]:
    return ("wait", flag, 1), ("write", flag, -1)


def flag_bytes(size: int) -> int:
    return -(-4 * 2 * HALVES * size // ALIGNED) * ALIGNED


def reset_flags(memory: Tensor, size: int) -> None:
    """Initialize a rank's flags: no piece has arrived, all were read."""
    flags = memory[-flag_bytes(size) :].zero_().view(torch.int32)[: 2 * HALVES * size].view(HALVES, 2, size)
    flags[:, _ARRIVED], flags[:, _READ] = -1, 1


class CollectiveCopies:
    """All-gather and reduce-scatter of one group. See Note: [Halves and their flags]."""

    def __init__(
        self,
        rank: int,
        size: int,
        stream: Callable[[], int],
        make: Callable[[], Halves],
        follow: Callable[[int], object] = lambda last: None,
    ) -> None:
        """`stream` returns the handle of the current stream; `follow` makes it wait for another one, given by its
        handle. All ranks call `make` together, on first use. All ranks issue calls in the same order.
        """
        self.rank, self.size = rank, size
        self._stream, self._make, self._follow = stream, make, follow
        self._last = stream()
        self._known: dict[Any, Any] = {}

    @cached_property
    def _gathered(self) -> Halves:
        return self._make()

    @cached_property
    def _reduced(self) -> Halves:
        return self._make()

    def gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> None:
        """`out` (size * n) becomes the ranks' `shard`s (n), where `pieces` are, on the current stream."""
        assert out.is_contiguous()
        assert shard.is_contiguous()
        halves, width, base = self._gathered, out.itemsize, np.uint64(out.data_ptr())

        def send(stream: int, half: int, low: int, high: int) -> None:
            # By a kernel, so that copy engines have peers' copies alone.
            packed = halves.bytes_of(self.rank, half)[: (high - low) * width].view(out.dtype)
            place_own(shard, Own(self.rank, out, pieces, low), high, packed)

        def receive(stream: int, half: int, low: int, high: int) -> None:
            whole, theirs, nbytes = self._places(halves, pieces, width, 0, half, low, high)
            halves.driver.copies(stream, whole + base, theirs, nbytes)

        self._in_pieces(halves, pieces.size, halves.nbytes // width, send, receive)

    def reduce(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> None:
        """`into` (n) += (or =) scale * the sum of the ranks' `full` (size * n), whose parts are where `pieces` are, on
        the current stream.
        """
        assert full.is_contiguous()
        assert into.is_contiguous()
        halves, width, others, base = self._reduced, full.itemsize, self.size - 1, np.uint64(full.data_ptr())
        into, whole_F = into.view(-1), full.view(-1)
        room = halves.nbytes // others // ALIGNED * ALIGNED // width  # per sending rank

        def send(stream: int, half: int, low: int, high: int) -> None:
            whole, theirs, nbytes = self._places(halves, pieces, width, room, half, low, high)
            halves.driver.copies(stream, theirs, whole + base, nbytes)

        def receive(stream: int, half: int, low: int, high: int) -> None:
            come = halves.bytes_of(self.rank, half)[: others * room * width].view(full.dtype).view(others, room)
            own = Own(self.rank, whole_F, pieces, low)
            local_sum(come[:, : high - low], into[low:high], scale, add, own)

        self._in_pieces(halves, pieces.size, room, send, receive)

    def _places(
        self, halves: Halves, pieces: Pieces, width: int, room: int, half: int, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By peer and chunk, uint64: bytes after a buffer's start, the address in the peer's half, and bytes. In a half
        each sender has `room` elements.
        """
        key = halves, pieces, width, room, half, low, high
        if key not in self._known:
            first, packed, count, step = pieces.between(low, high)[:, None] * width  # [1, chunks] each
            peers = np.array(halves.peers, dtype=np.int64)[:, None]
            starts = [halves.bytes_of(peer, half).data_ptr() for peer in halves.peers]
            slots = np.array(starts, dtype=np.int64)[:, None] + (self.rank - (peers < self.rank)) * room * width
            found = first + peers * step, slots + packed, np.broadcast_to(count, (len(peers), count.shape[1]))
            self._known[key] = tuple(each.ravel().astype(np.uint64) for each in found)
        return self._known[key]

    def _in_pieces(
        self,
        halves: Halves,
        count: int,
        room: int,
        send: Callable[[int, int, int, int], None],
        receive: Callable[[int, int, int, int], None],
    ) -> None:
        """Move `count` elements per pair of ranks, `room` at a time. `send` and `receive` get (stream, half, first
        element, end).
        """
        assert room, f"a half of {halves.nbytes} bytes has no room for a piece of each of {self.size} ranks"
        stream, waiting = self._stream(), None
        if stream != self._last:
            self._follow(self._last)  # the halves may still be in use there
            self._last = stream
        for piece in (*self._turns(count, room), None):
            if piece is not None:
                halves.await_read[piece[0]](stream)
                send(stream, *piece)
                halves.signal_arrived[piece[0]](stream)
            if waiting is not None:
                halves.await_arrived[waiting[0]](stream)
                receive(stream, *waiting)
                halves.signal_read[waiting[0]](stream)
            waiting = piece

    @staticmethod
    def _turns(count: int, room: int) -> Iterator[tuple[int, int, int]]:
        """(half, first element, end) of each turn. Every call starts with the first half, on all ranks."""
        for number, low in enumerate(range(0, count, room)):
            yield number % HALVES, low, min(low + room, count)


@dataclass
class CopiedCollectives(Nccl):
    """All-gather and reduce-scatter by copies; other collectives use NCCL."""

    copies: CollectiveCopies

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        with named("hocket:all_gather"):
            self.copies.gather(out.view(-1), shard.view(-1), pieces)
        return DONE

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        with named("hocket:reduce_scatter"):
            self.copies.reduce(full, into, scale, add, pieces)
        return DONE

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        mine = full.view(len(self.ranks), -1)[self.copies.rank]
        part = self.scratch.take(mine.numel(), into.dtype)
        pieces = Pieces.one(mine.numel(), len(self.ranks))
        self.reduce_sum(full, part, 1.0, False, pieces)
        mine.copy_(part)
        self.scratch.give(part)
        self.all_gather(full, mine, pieces)
        local_sum(full.view(1, -1), into, scale, add)
        return DONE


def collective_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> CollectiveCopies:
    """Copies through halves of `nbytes`, between GPUs with peer access."""
    half = -(-nbytes // ALIGNED) * ALIGNED
    size, driver = dist.get_world_size(group), Cuda()

    def make() -> Halves:
        whole = HALVES * half + flag_bytes(size)
        rank, memories, _ = shared_memory(group, whole, device, timeout, lambda memory: reset_flags(memory, size))
        return Halves(rank, memories, driver)

    follow = partial(wait_for_stream, device)
    return CollectiveCopies(dist.get_rank(group), size, lambda: stream_handle(device), make, follow)

"""Pipeline sends by copy engines: the sender writes into a buffer at the receiver. They occupy no SM.

NCCL's receive is a kernel that spins on SMs until the sender arrives, and receives are issued early. Here the
receiver's stream waits for a flag in memory instead, with peer access (`shared_memory.py`). Such a wait has no timeout:
the watchdog (`hangs.py`) reads the flags and ends a step that hangs.

Note: [Two halves, each with two flags]
Data moves in pieces that alternate between two halves of a staging buffer at the receiver, which copies them from there
to the destination. Every half has a *full* flag at the receiver and a *free* flag at the sender. Each side waits for
its own flag to be positive, makes it negative, copies, and makes the other's flag positive. Afterwards every flag has
its initial sign, so a recorded step can be replayed. Every tensor starts with the first half, so both ranks agree
without communication.

Note: [Flag values]
Only signs order the copies. Magnitudes serve hang reports: the number of the piece, the same on both ranks. From the
four flags either rank can tell which piece was begun, has arrived, and was read. A replay writes the recorded numbers
again, so flags at rest then mean that all of a step's pieces have passed, or none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.hangs import FlagProgress
from hocket.runtime.lanes import stream_handle
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending

HALVES = 2
FLAG_BYTES = 256
"""Bytes after the halves of a rank that hold its flags."""
_FULL, _FREE = 0, 4 * HALVES
"""Offsets of the flags, from the end of the halves."""
_LAP = 1 << 30
"""Piece numbers wrap here: a flag has 31 bits for them."""


class HopCopies:
    """A pipeline edge as seen by one of its two ranks. See Note: [Two halves, each with two flags]."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver, stream: Callable[[], int]) -> None:
        """`rank` is this rank's position on the edge, 0 or 1; `memories` are both ranks' bytes, initialized by
        `reset_flags`. `stream` returns the handle of the current stream.
        """
        assert len(memories) == 2, f"an edge has two ranks, not {len(memories)}"
        self._driver, self._stream = driver, stream
        self._rank, self._memories = rank, memories
        self.nbytes = (memories[0].numel() - FLAG_BYTES) // HALVES
        self._sends = False
        self._piece = 0
        self._marks = [0]

    def send(self, tensor: Tensor) -> None:
        """Issue the copies of a contiguous tensor to the other rank, on the current stream."""
        self._sends = True
        for half, piece in self._pieces(tensor):
            self._await(_FREE, half)
            self._half(1 - self._rank, half, piece).copy_(piece)
            self._signal(_FULL, half)
        self._marks.append(self._piece)

    def receive(self, tensor: Tensor) -> None:
        """Issue the copies of received data into a contiguous tensor, on the current stream."""
        self._sends = False
        for half, piece in self._pieces(tensor):
            self._await(_FULL, half)
            piece.copy_(self._half(self._rank, half, piece))
            self._signal(_FREE, half)
        self._marks.append(self._piece)

    def begin(self) -> list[int]:
        """Begin a step. Returns marks: the last piece before it, then the last piece of each of its tensors."""
        self._marks = [self._piece]
        return self._marks

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """Progress of the tensors that this rank sent or received. See Note: [Flag values]."""
        sender = self._rank if self._sends else 1 - self._rank
        halves, issued = range(HALVES), len(marks) - 1
        addresses = [self._flag(sender, _FREE, half) for half in halves]
        addresses += [self._flag(1 - sender, _FULL, half) for half in halves]
        flags = self._driver.read(addresses)
        if flags is None:
            return None
        latest = self._piece + 2 * HALVES  # of the flags' numbers: a sender is ahead by that at most
        pieces = [latest - (latest + 1 - abs(flag)) % _LAP for flag in flags]
        free, full = (list(zip(flags[i : i + HALVES], pieces[i : i + HALVES], strict=True)) for i in (0, HALVES))
        last = (lambda numbers: _last_of_replay(marks, numbers)) if replayed else max
        begun, arrived = last(pieces[:HALVES]), last(pieces[HALVES:])
        read = min((piece - 1 for flag, piece in free if flag < 0), default=begun)
        if replayed and (begun == arrived == read == marks[-1] or min(begun, arrived) < 0):
            return FlagProgress()  # all have passed, or none

        def tensors(piece: int) -> int:
            return min(issued, max(0, bisect_right(marks, piece) - 1))

        done = tensors(arrived if self._sends else read)
        waits = False
        if done < issued and self._sends and begun < marks[-1]:
            start = marks[tensors(begun)]  # the last piece before the tensor of the next piece
            waits = free[(begun - start) % HALVES][0] < 0
        elif done < issued and not self._sends:
            waits = arrived < marks[done + 1] and all(flag < 0 for flag, _ in full)
        return FlagProgress(done, (1 - self._rank,) if waits else ())

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        for number, piece in enumerate(tensor.view(-1).view(torch.uint8).split(self.nbytes) if tensor.numel() else ()):
            self._piece += 1
            yield number % HALVES, piece

    def _half(self, rank: int, half: int, piece: Tensor) -> Tensor:
        return self._memories[rank][half * self.nbytes : half * self.nbytes + piece.numel()]

    def _await(self, flags: int, half: int) -> None:
        """Wait until a flag of this rank is positive, and make it negative."""
        stream, flag = self._stream(), self._flag(self._rank, flags, half)
        self._driver.wait(stream, flag, 1)
        self._driver.write(stream, flag, -_number(self._piece))

    def _signal(self, flags: int, half: int) -> None:
        """Make a flag of the other rank positive."""
        self._driver.write(self._stream(), self._flag(1 - self._rank, flags, half), _number(self._piece))

    def _flag(self, rank: int, flags: int, half: int) -> int:
        return self._memories[rank].data_ptr() + HALVES * self.nbytes + flags + 4 * half


def _last_of_replay(marks: list[int], numbers: Sequence[int]) -> int:
    """The last piece that a replay wrote, from the numbers in its halves; -1 if unknown."""
    halves = [
        (piece, (piece - low - 1) % HALVES) for low, high in pairwise(marks) for piece in range(low + 1, high + 1)
    ]
    mine = [number if marks[0] < number <= marks[-1] else 0 for number in numbers]  # ignore those of another program
    for before in ({half: piece for piece, half in halves}, {}):
        state = [before.get(half, 0) for half in range(HALVES)]
        for piece, half in halves:
            state[half] = piece
            if state == mine:
                return piece
    return -1


def _number(piece: int) -> int:
    """The magnitude of a piece's flag: never zero, which has no sign."""
    return piece % _LAP + 1


def reset_flags(memory: Tensor) -> None:
    """Initialize a rank's flags: all halves are free, none is full."""
    flags = memory[-FLAG_BYTES:].zero_().view(torch.int32)
    flags[_FULL // 4 : _FULL // 4 + HALVES] = -_number(0)
    flags[_FREE // 4 : _FREE // 4 + HALVES] = _number(0)


@dataclass
class CopiedHops(Nccl):
    """Send and receive by copies; other collectives use NCCL."""

    copies: HopCopies

    def send(self, tensor: Tensor, to: int) -> Pending:
        self.copies.send(tensor)
        return DONE

    def recv(self, tensor: Tensor, source: int) -> Pending:
        self.copies.receive(tensor)
        return DONE


def p2p_copies(
    group: dist.ProcessGroup, ranks: tuple[int, ...], nbytes: int, device: torch.device, timeout: float
) -> HopCopies:
    """Buffers of `nbytes` between two GPUs with peer access. Both ranks call this together.

    `ranks` are in the edge's order. Torch orders them by number, which differs for the edge that closes a ring.
    """
    half = -(-nbytes // (HALVES * FLAG_BYTES)) * FLAG_BYTES
    rank, memories, _ = shared_memory(group, HALVES * half + FLAG_BYTES, device, timeout, reset_flags)
    members = dist.get_process_group_ranks(group)
    places = [members.index(member) for member in ranks]
    memories = [memories[place] for place in places]
    return HopCopies(places.index(rank), memories, Cuda(), lambda: stream_handle(device))

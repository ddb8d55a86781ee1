"""Pipeline sends that hold no SM: the sender's copy engine writes what its neighbour receives into memory there.

A receive is issued early, so that what it brings is there when it is wanted. NCCL's receive is a kernel, which spins on
its SMs until the sender comes, and so does the send of a rank whose neighbour is late. Ranks of one NVLink domain can
write into each other's memory (`shared_memory.py`). So here the sender's stream copies, and the receiver's stream waits
for a flag in memory, which takes no SM from the products beside it. Such a wait has no limit of its own: a step that
hangs in one is ended by the watchdog (`hangs.py`), which reads the flags.

Note: [Two halves, each with two flags]
What is sent goes in pieces through two halves of a buffer at the receiver, and copies bring it from there to where it
is wanted. Every half has a flag at the receiver, which says that it is *full*, and one at the sender, which says that
it is *free*. Each of them waits for its own flag to be positive, makes it negative, does its copy, and makes the
other's flag positive. So a half is never written before it was read, nor read before it was written, and what both did
in the end leaves all signs as they were: a recorded step can be replayed as it is. Every tensor begins with the first
half, so that both ranks agree without a flag.

Note: [What the flags tell]
Only signs order the copies. The amounts are for a report of a hang: the number of the piece, the same on both ranks,
which each flag is made negative or positive for. From the four flags either rank can tell which piece was begun, has
arrived, and was read. They are those of the recorded step in every replay of it, so flags that are at rest then say
that all of a step's pieces have passed, or none.
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
"""Bytes behind the halves of a rank, with its flags."""
_FULL, _FREE = 0, 4 * HALVES
"""Where these flags begin, behind the halves."""
_LAP = 1 << 30
"""Pieces after which their numbers begin anew: a flag has 31 bits for them."""


class HopCopies:
    """An edge of a pipeline, as one of its two ranks sees it. See Note: [Two halves, each with two flags]."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver, stream: Callable[[], int]) -> None:
        """`rank` is the place on the edge, 0 or 1, of this rank, and `memories` are both ranks' bytes in that order.

        They are as `reset_flags` has made them. `stream` says what stream is current.
        """
        assert len(memories) == 2, f"an edge has two ranks, not {len(memories)}"
        self._driver, self._stream = driver, stream
        self._rank, self._memories = rank, memories
        self.nbytes = (memories[0].numel() - FLAG_BYTES) // HALVES
        """Bytes of a half."""
        self._sends = False
        self._piece = 0
        """Pieces that were sent or received so far."""
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
        """Issue the copies of what arrives into a contiguous tensor, on the current stream."""
        self._sends = False
        for half, piece in self._pieces(tensor):
            self._await(_FULL, half)
            piece.copy_(self._half(self._rank, half, piece))
            self._signal(_FREE, half)
        self._marks.append(self._piece)

    def begin(self) -> list[int]:
        """Marks of a step: the last piece before it, and then of each of its tensors."""
        self._marks = [self._piece]
        return self._marks

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """What the flags say of tensors that this rank has sent, or received. See Note: [What the flags tell]."""
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
        """Which half each piece of a tensor goes through, and its bytes."""
        for number, piece in enumerate(tensor.view(-1).view(torch.uint8).split(self.nbytes) if tensor.numel() else ()):
            self._piece += 1
            yield number % HALVES, piece

    def _half(self, rank: int, half: int, piece: Tensor) -> Tensor:
        """As many bytes of a rank's half as a piece has."""
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
    """The piece that a replay was at last, by those that its halves were given last; -1 if that cannot be told."""
    halves = [
        (piece, (piece - low - 1) % HALVES) for low, high in pairwise(marks) for piece in range(low + 1, high + 1)
    ]
    mine = [number if marks[0] < number <= marks[-1] else 0 for number in numbers]  # not those of another program
    for before in ({half: piece for piece, half in halves}, {}):
        state = [before.get(half, 0) for half in range(HALVES)]
        for piece, half in halves:
            state[half] = piece
            if state == mine:
                return piece
    return -1


def _number(piece: int) -> int:
    """What a flag says of a piece, and of none: never zero, which has no sign."""
    return piece % _LAP + 1


def reset_flags(memory: Tensor) -> None:
    """Make a rank's bytes what they are before anything was sent: all halves are free, and none is full."""
    flags = memory[-FLAG_BYTES:].zero_().view(torch.int32)
    flags[_FULL // 4 : _FULL // 4 + HALVES] = -_number(0)
    flags[_FREE // 4 : _FREE // 4 + HALVES] = _number(0)


@dataclass
class CopiedHops(Nccl):
    """Sends and receives by copies; whatever else is asked of the group runs on NCCL's kernels."""

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
    """Room for `nbytes` at each of two GPUs that reach each other's memory: both ranks call this together.

    `ranks` are those of the edge, in its order. Torch has its own, by their numbers: the edge that closes a ring goes
    against it.
    """
    half = -(-nbytes // (HALVES * FLAG_BYTES)) * FLAG_BYTES
    rank, memories, _ = shared_memory(group, HALVES * half + FLAG_BYTES, device, timeout, reset_flags)
    members = dist.get_process_group_ranks(group)
    places = [members.index(member) for member in ranks]
    memories = [memories[place] for place in places]
    return HopCopies(places.index(rank), memories, Cuda(), lambda: stream_handle(device))

"""Pipeline sends that hold no SM: the sender's copy engine writes what its neighbour receives into memory there.

A receive is issued early, so that what it brings is there when it is wanted. NCCL's receive is a kernel, which spins on
its SMs until the sender comes, and so does the send of a rank whose neighbour is late. Ranks of one NVLink domain can
write into each other's memory (`shared_memory.py`). So here the sender's stream copies, and the receiver's stream waits
for a word in memory, which takes no SM from the products beside it. Such a wait has no limit of its own: a step that
hangs in one is ended by the watchdog (`recorder.py`), which names its ops, or by the limit of a later NCCL call.

Note: [Two halves, each with two words]
What is sent goes in pieces through two halves of a buffer at the receiver, and copies bring it from there to where it
is wanted. Every half has a word at the receiver, which says that it is *full*, and one at the sender, which says that
it is *free*. Each of them waits for its own word to be one, makes it zero, does its copy, and makes the other's word
one. So a half is never written before it was read, nor read before it was written, and what both did in the end leaves
all words as they were: nothing counts on, and a recorded step can be replayed as it is. Every tensor begins with the
first half, so that both ranks agree without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.lanes import current_queue
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending

HALVES = 2
WORDS = 256
"""Bytes behind the halves of a rank, with its words."""
_FULL, _FREE = 0, 4 * HALVES
"""Where these words begin, behind the halves."""


class HopCopies:
    """An edge of a pipeline, as one of its two ranks sees it. See Note: [Two halves, each with two words]."""

    def __init__(self, rank: int, memories: Sequence[Tensor], driver: Driver, queue: Callable[[], int]) -> None:
        """`memories` are the bytes of both ranks, as `blank` has made them; `queue` says what stream is current."""
        assert len(memories) == 2, f"an edge has two ranks, not {len(memories)}"
        self._driver, self._queue = driver, queue
        self._mine, self._other = memories[rank], memories[1 - rank]
        self.nbytes = (self._mine.numel() - WORDS) // HALVES
        """Bytes of a half."""

    def send(self, tensor: Tensor) -> None:
        """Issue the copies of a contiguous tensor to the other rank, on the current stream."""
        for half, piece in self._pieces(tensor):
            self._take(_FREE, half)
            self._half(self._other, half, piece).copy_(piece)
            self._give(_FULL, half)

    def receive(self, tensor: Tensor) -> None:
        """Issue the copies of what arrives into a contiguous tensor, on the current stream."""
        for half, piece in self._pieces(tensor):
            self._take(_FULL, half)
            piece.copy_(self._half(self._mine, half, piece))
            self._give(_FREE, half)

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Which half each piece of a tensor goes through, and its bytes."""
        for number, piece in enumerate(tensor.view(-1).view(torch.uint8).split(self.nbytes) if tensor.numel() else ()):
            yield number % HALVES, piece

    def _half(self, memory: Tensor, half: int, piece: Tensor) -> Tensor:
        """As many bytes of a half as a piece has."""
        return memory[half * self.nbytes : half * self.nbytes + piece.numel()]

    def _take(self, words: int, half: int) -> None:
        """Wait until a word of this rank is one, and make it zero."""
        stream, word = self._queue(), self._word(self._mine, words, half)
        self._driver.wait(stream, word, 1)
        self._driver.write(stream, word, 0)

    def _give(self, words: int, half: int) -> None:
        """Make a word of the other rank one."""
        self._driver.write(self._queue(), self._word(self._other, words, half), 1)

    def _word(self, memory: Tensor, words: int, half: int) -> int:
        return memory.data_ptr() + HALVES * self.nbytes + words + 4 * half


def blank(memory: Tensor) -> None:
    """Make a rank's bytes what they are before anything was sent: all halves are free, and none is full."""
    words = memory[-WORDS:].zero_().view(torch.int32)
    words[_FREE // 4 : _FREE // 4 + HALVES] = 1


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


def hop_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> HopCopies:
    """Room for `nbytes` at each of two GPUs that reach each other's memory: both ranks call this together."""
    half = -(-nbytes // (HALVES * WORDS)) * WORDS
    rank, memories, _ = shared_memory(group, HALVES * half + WORDS, device, timeout, blank)
    return HopCopies(rank, memories, Cuda(), lambda: current_queue(device))

"""Pipeline sends that hold no SM: the sender's copy engine writes what its neighbour receives into memory there.

A receive is issued early, so that what it brings is there when it is wanted. NCCL's receive is a kernel, which spins on
its SMs until the sender comes, and so does the send of a rank whose neighbour is late. All memory of one NVLink domain
can be mapped into each process (torch's symmetric memory). So here the sender's stream copies, and the receiver's
stream waits for a word in memory, which takes no SM from the products beside it.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.lanes import current_queue
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
        self._driver, self._queue, self._memories = driver, queue, tuple(memories)
        self.nbytes = (memories[0].numel() - WORDS) // HALVES
        """Bytes of a half."""
        self._mine, self._other = memories[rank].data_ptr(), memories[1 - rank].data_ptr()

    def send(self, tensor: Tensor) -> None:
        """Issue the copies of a contiguous tensor to the other rank, on the current stream."""
        for half, source, nbytes in self._pieces(tensor):
            stream = self._own(_FREE, half)
            self._driver.copy(stream, self._other + half * self.nbytes, source, nbytes)
            self._driver.write(stream, self._word(self._other, _FULL, half), 1)

    def receive(self, tensor: Tensor) -> None:
        """Issue the copies of what arrives into a contiguous tensor, on the current stream."""
        for half, into, nbytes in self._pieces(tensor):
            stream = self._own(_FULL, half)
            self._driver.copy(stream, into, self._mine + half * self.nbytes, nbytes)
            self._driver.write(stream, self._word(self._other, _FREE, half), 1)

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
        """Which half each piece of a tensor goes through, its address and its bytes."""
        assert tensor.is_contiguous()
        for number, low in enumerate(range(0, tensor.nbytes, self.nbytes)):
            yield number % HALVES, tensor.data_ptr() + low, min(self.nbytes, tensor.nbytes - low)

    def _own(self, words: int, half: int) -> int:
        """Wait until a word of this rank is one, and make it zero; returns the stream that does."""
        stream, word = self._queue(), self._word(self._mine, words, half)
        self._driver.wait(stream, word, 1)
        self._driver.write(stream, word, 0)
        return stream

    def _word(self, memory: int, words: int, half: int) -> int:
        return memory + HALVES * self.nbytes + words + 4 * half


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


def hop_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> HopCopies:
    """Room for `nbytes` at each of two GPUs that reach each other's memory: both ranks call this together.

    NVLink multicast must be switched off before (`hocket/environment.py`): torch would make a multicast object.
    """
    half = -(-nbytes // (HALVES * WORDS)) * WORDS
    mine = symm_mem.empty(HALVES * half + WORDS, dtype=torch.uint8, device=device)
    blank(mine)
    handle: Any = symm_mem.rendezvous(mine, group)
    handle.barrier()  # nobody writes before everybody's words are as they should be
    memories = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(handle.world_size)]
    memories[handle.rank] = mine  # the other is a view of memory that the handle keeps
    return HopCopies(handle.rank, memories, Cuda(), lambda: current_queue(device))

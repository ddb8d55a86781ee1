"""Moving tokens piece by piece without an SM: a rank's copy engine writes them where its peers read them.

All memory of one NVLink domain can be mapped into each process (torch's symmetric memory). So a rank copies its pieces
straight into the *arrival buffers* of its peers, and then, in the same stream, the number of the turn into a word
there. Readers' streams wait for that word. Writing and waiting are operations of the stream, not kernels: products hold
all SMs for as long as they run, and a kernel that only says that something has arrived would have to wait for them.

Note: [Arrivals take turns in two buffers]
A rank may overwrite a peer's buffer once the peer has read it. Each spread and each collect is a turn. All ranks of a
group take the same turns, and each uses the other buffer than the one before. In turn n - 1 this rank waited for a
piece of every peer. A peer sends that piece behind all that its own current queue had been given by then, which
includes reading what arrived in turn n - 2. So turn n may use the buffer of turn n - 2, and no barrier is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hocket.runtime.lanes import Side, current_handle
from hocket.runtime.tokens import Collect, Spread, add_up
from hocket.runtime.transports import Nccl

WORDS = 256
"""Room for the words of all peers, in bytes, behind the buffers."""


class CopiedTokens:
    """Pieces written by copy engines. See Note: [Arrivals take turns in two buffers]."""

    def __init__(
        self,
        rank: int,
        arrivals: Sequence[Tensor],
        signal: Callable[[int, int], object],
        wait: Callable[[int, int], object],
        side: Side,
        stores: bool = False,
    ) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. With `stores`, products store their results there by themselves.

        `signal(p, n)` on the current queue tells rank p that what this rank has for it in turn n is there; `wait(p, n)`
        has the current queue wait for that word of rank p.
        """
        self.rank, self.size, self.arrivals = rank, len(arrivals), tuple(arrivals)
        self.signal, self.wait, self.side, self.stores = signal, wait, side, stores
        self._turns = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one arrival buffer: all tokens of the widest tensor that is moved."""
        return self.arrivals[0].shape[1]

    def others(self) -> list[int]:
        """The peers, from the next one on: each rank begins with another."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def turn(self, like_SD: Tensor) -> tuple[int, list[Tensor]]:
        """The number of a new turn, and its buffer on every rank as room for [P, S, D]."""
        needed = self.size * like_SD.nbytes
        assert needed <= self.nbytes, f"{needed} bytes of tokens for arrival buffers of {self.nbytes}"
        self._turns += 1
        slot, shape = self._turns % 2, (self.size, *like_SD.shape)
        return self._turns, [buffer[slot][:needed].view(like_SD.dtype).view(shape) for buffer in self.arrivals]

    def spread(self, x_SD: Tensor) -> Spread:
        return _CopiedSpread(self, x_SD.contiguous())

    def collect(self, out_SD: Tensor) -> Collect:
        return _CopiedCollect(self, out_SD)


class _CopiedSpread:
    def __init__(self, tokens: CopiedTokens, x_SD: Tensor) -> None:
        self._tokens, self._x_SD = tokens, x_SD
        self._turn, self._rooms = tokens.turn(x_SD)
        self._taken: set[int] = {tokens.rank}
        with tokens.side.behind():
            # To the rank before this one first: it takes the tokens of the next rank, this one, first.
            for peer in reversed(tokens.others()):
                self._rooms[peer][tokens.rank].copy_(x_SD)
                tokens.signal(peer, self._turn)
        self._sent = tokens.side.mark()

    def take(self, low: int, high: int) -> Tensor:
        for source in range(low, high):
            if source not in self._taken:
                self._tokens.wait(source, self._turn)
                self._taken.add(source)
        return self._rooms[self._tokens.rank][low:high].flatten(0, 1)

    def whole(self, out_TD: Tensor) -> Callable[[], None]:
        """Copies out of the buffer, on the side."""
        rank, out_PSD = self._tokens.rank, out_TD.view(self._tokens.size, *self._x_SD.shape)
        with self._tokens.side.behind():
            out_PSD[rank].copy_(self._x_SD)
            for source in self._tokens.others():
                out_PSD[source].copy_(self.take(source, source + 1))
        return self._tokens.side.mark()

    def end(self) -> None:
        missing = set(range(self._tokens.size)) - self._taken
        assert not missing, f"the tokens of ranks {missing} were never taken"
        self._sent()


class _CopiedCollect:
    def __init__(self, tokens: CopiedTokens, out_SD: Tensor) -> None:
        self._tokens = tokens
        self._turn, self._rooms = tokens.turn(out_SD)
        self._leaving_PSD = out_SD.new_empty(tokens.size, *out_SD.shape)

    def place(self, low: int, high: int) -> Tensor:
        if high == low + 1 and (low == self._tokens.rank or self._tokens.stores):
            return self._rooms[low][self._tokens.rank]
        return self._leaving_PSD[low:high].flatten(0, 1)

    def send(self, low: int, high: int) -> None:
        rank = self._tokens.rank
        in_place = high == low + 1 and (low == rank or self._tokens.stores)
        if in_place and low != rank:
            self._tokens.signal(low, self._turn)
        if in_place:
            return
        with self._tokens.side.behind():
            for peer in range(low, high):
                self._rooms[peer][rank].copy_(self._leaving_PSD[peer])
                if peer != rank:
                    self._tokens.signal(peer, self._turn)

    def sum(self, out_SD: Tensor) -> None:
        self._tokens.side.mark()()  # what left is memory of the current queue
        for source in self._tokens.others():
            self._tokens.wait(source, self._turn)
        add_up(self._rooms[self._tokens.rank].flatten(1), out_SD.view(-1))


@dataclass
class CopyingNccl(Nccl):
    """Tensor-parallel ranks that move pieces by copies; whatever else is asked of the group runs on NCCL's kernels."""

    tokens: CopiedTokens


def copied_tokens(group: dist.ProcessGroup, nbytes: int, device: torch.device, side: Side) -> CopiedTokens:
    """Arrival buffers of `nbytes` on GPUs that reach each other's memory: all ranks of the group call this together.

    NVLink multicast must be switched off before (`hocket/environment.py`): torch would make a multicast object.
    """
    nbytes = -(-nbytes // WORDS) * WORDS
    mine = symm_mem.empty(2 * nbytes + WORDS, dtype=torch.uint8, device=device)
    mine.zero_()
    handle: Any = symm_mem.rendezvous(mine, group)
    handle.barrier()  # nobody writes before everybody's words are zero
    everyones = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(handle.world_size)]
    everyones[handle.rank] = mine  # the others are views of memory that the handle keeps
    words = [memory.data_ptr() + 2 * nbytes for memory in everyones]
    me, write, wait = handle.rank, _operation("cuStreamWriteValue32_v2"), _operation("cuStreamWaitValue32_v2")
    return CopiedTokens(
        me,
        [memory[: 2 * nbytes].view(2, nbytes) for memory in everyones],
        lambda peer, turn: write(current_handle(device), words[peer] + 4 * me, turn),
        lambda peer, turn: wait(current_handle(device), words[me] + 4 * peer, turn),
        side,
    )


@cache
def _operation(name: str) -> Callable[[int, int, int], None]:
    """An operation of the driver: (stream, address, value). Waiting is for at least the value."""
    call = getattr(ctypes.CDLL("libcuda.so.1"), name)
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def run(stream: int, address: int, value: int) -> None:
        error = call(stream, address, value, 0)
        assert error == 0, f"{name} failed with error {error} of the driver"

    return run

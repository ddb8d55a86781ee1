"""An all-to-all of unequal parts that holds no SM: each rank's copy engine writes its rows where the peers want them.

NCCL leaves an all-to-all to copy engines only if all parts are equal, which the rows of experts are not. But the host
of every rank knows how many rows go from whom to which expert, and all memory of one NVLink domain can be mapped into
each process (torch's symmetric memory). So a rank copies its rows straight to where they belong in each peer's arrival
buffer, each block (`blocks.py`) to its place in grouped order: when they have come, no kernel has to sort them by
expert. Copies of a stream run in order, and a barrier behind them says that everybody's have arrived.

Note: [Rounds]
An arrival buffer has room for a fixed number of rows. If some rank gets more than that, the exchange takes as many
rounds as that rank needs, so that nothing is ever lost or refused: all ranks see the same table and count the same
rounds.

Note: [Two arrival buffers, one barrier]
Rounds take turns in two buffers. A rank writes to a peer's buffer again two rounds later, behind the barrier of the
round between, which the peer has entered behind its own copying-out of the first. So one barrier a round is enough.

Note: [Rows are copied out]
Experts could read an arrival buffer where it is. But then a rank could enter the round between only behind its experts,
on another lane, and the all-to-all of one half of a merged step would wait for the experts of the other: what the plan
keeps apart. A buffer for each exchange in flight would avoid that, with room for the worst load in each. The copy takes
memory bandwidth, but no SM, and stands behind the barrier on a lane that is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.blocks import Blocks, HostBlocks, host_blocks
from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.lanes import current_queue
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending, RowTable


class PeerCopies:
    """The arrival buffers of all ranks of a group, as this rank sees them."""

    def __init__(
        self,
        rank: int,
        arrivals: Sequence[Tensor],
        barrier: Callable[[], object],
        driver: Driver,
        queue: Callable[[], int],
    ) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. `barrier` orders all ranks' current streams, `queue` names one."""
        self.rank, self.arrivals, self._barrier = rank, tuple(arrivals), barrier
        self._driver, self._queue = driver, queue
        size = len(self.arrivals)
        self._peers = (rank + np.arange(1, size)) % size  # each rank begins with another one
        starts = [[buffer.data_ptr() for buffer in buffers] for buffers in self.arrivals]
        self._starts = np.array(starts, dtype=np.int64).T
        self._rounds = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one arrival buffer."""
        return self.arrivals[0].shape[1]

    def exchange(self, out: Tensor, rows: Tensor, blocks: HostBlocks) -> None:
        """Every block of `rows` [R, D] goes where it belongs; `out` [R', D] becomes what is here then.

        Runs on the current stream, on which all exchanges of the group are issued.
        """
        assert out.is_contiguous()
        assert rows.is_contiguous()
        width = rows.shape[1] * rows.itemsize
        capacity = self.nbytes // max(1, width)
        assert capacity, f"a row of {width} bytes does not fit into an arrival buffer of {self.nbytes}"
        first, there, count = blocks.leaving
        own = there[self.rank], first[self.rank], count[self.rank]
        self._copy(width, out.data_ptr(), rows.data_ptr(), *own)
        elsewhere = _between(own[0], own[2], len(out))
        first, there, count = (of_PL[self._peers] for of_PL in (first, there, count))
        for low in range(0, blocks.fullest, capacity):
            starts = self._starts[self._rounds % 2]
            self._rounds += 1
            begin, cut = _cut(there, count, low, low + capacity)
            into = starts[self._peers][:, None] - low * width
            self._copy(width, into, rows.data_ptr(), begin, first + begin - there, cut)
            self._barrier()
            begin, cut = _cut(*elsewhere, low, low + capacity)
            self._copy(width, out.data_ptr(), starts[self.rank] - low * width, begin, begin, cut)

    def _copy(
        self, width: int, into: int | np.ndarray, source: int, to: np.ndarray, at: np.ndarray, count: np.ndarray
    ) -> None:
        """Copy `count` rows of `width` bytes each, from row `at` behind `source` to row `to` behind `into`."""
        some = count > 0
        if some.any():
            places = into + to * width, source + at * width, count * width
            self._driver.copies(self._queue(), *(numbers[some] for numbers in places))


def _cut(first: np.ndarray, count: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each range between `low` and `high`: where it begins, and how much there is; below 1 if nothing."""
    begin = np.maximum(first, low)
    return begin, np.minimum(first + count, high) - begin


def _between(first: np.ndarray, count: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows between ascending ranges begin, from row 0 on, and how many there are, up to row `end`."""
    begin = np.concatenate([[0], first + count])
    return begin, np.concatenate([first, [end]]) - begin


@dataclass
class CopiedRows(Nccl):
    """Exchanges rows by copies; whatever else is asked of the group runs on NCCL's kernels."""

    places_rows = True
    copies: PeerCopies

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        self.copies.exchange(out, rows, host_blocks(torch.tensor(table.rows).unsqueeze(-1), table.rank))
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        assert isinstance(blocks, HostBlocks), "copies are issued by a host, which must know how many rows there are"
        self.copies.exchange(out, rows, blocks)
        return DONE


def peer_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> PeerCopies:
    """Arrival buffers of `nbytes` on GPUs that reach each other's memory: all ranks of the group call this together."""
    return PeerCopies(*shared_buffers(group, nbytes, device, timeout), Cuda(), lambda: current_queue(device))


def shared_buffers(
    group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float
) -> tuple[int, list[Tensor], Callable[[], object]]:
    """Return (this rank, every rank's two buffers of `nbytes` as bytes [2, n], a barrier of current streams).

    All ranks of the group call it together; see `shared_memory`.
    """
    rank, memories, barrier = shared_memory(group, 2 * nbytes, device, timeout)
    return rank, [memory.view(2, nbytes) for memory in memories], barrier

"""All-to-all of rows by copy engines: each rank writes rows to their final place at the receivers. It occupies no SM.

NCCL uses copy engines for an all-to-all only if all parts have equal size. Here the host knows all row counts and has
peer access (`shared_memory.py`), so a rank copies each block (`blocks.py`) to its grouped position in the receiver's
arrival buffer. No kernel sorts rows by expert. A barrier after the copies tells all ranks that rows have arrived.

Note: [Rounds]
An arrival buffer has a fixed number of rows. If a rank receives more, the exchange takes several rounds; all ranks
compute the same number from the same table.

Note: [Two arrival buffers, one barrier]
Rounds alternate between two buffers. A rank writes to the same buffer again two rounds later, after the barrier of the
round between. The peer enters that barrier after it has copied out the first round. So one barrier per round is enough.

Note: [Rows are copied out]
Experts do not read the arrival buffer in place: the next round could then start only after them, and the all-to-all of
one half of a merged step would wait for the experts of the other. One buffer per exchange in flight would need memory
for the worst load in each. A kernel copies rows out, on a lane that is hidden, and merges in this rank's own rows: many
small blocks, each of which would otherwise cost the host a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hocket.kernels import usable
from hocket.runtime.blocks import Blocks, HostBlocks, host_blocks
from hocket.runtime.driver import Cuda, Driver
from hocket.runtime.lanes import stream_handle
from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending, RowTable


class PeerCopies:
    """The arrival buffers of all ranks of a group, as seen by this rank."""

    def __init__(
        self,
        rank: int,
        arrivals: Sequence[Tensor],
        barrier: Callable[[], object],
        driver: Driver,
        stream: Callable[[], int],
    ) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. `barrier` orders all ranks' current streams; `stream` returns the
        handle of this rank's.
        """
        self.rank, self.arrivals, self.barrier = rank, tuple(arrivals), barrier
        self._driver, self._stream = driver, stream
        size = len(self.arrivals)
        self._peers = (rank + np.arange(1, size)) % size  # ranks start with different peers
        starts = [[buffer.data_ptr() for buffer in buffers] for buffers in self.arrivals]
        self._starts = np.array(starts, dtype=np.int64).T
        self._rounds = 0

    @property
    def nbytes(self) -> int:
        return self.arrivals[0].shape[1]

    def exchange(self, out: Tensor, rows: Tensor, blocks: HostBlocks) -> None:
        """Deliver every block of `rows` [R, D]; `out` [R', D] receives this rank's rows.

        Runs on the current stream, on which all exchanges of the group are issued.
        """
        assert out.is_contiguous()
        assert rows.is_contiguous()
        width = rows.shape[1] * rows.itemsize
        capacity = self.nbytes // max(1, width)
        assert capacity, f"a row of {width} bytes does not fit into an arrival buffer of {self.nbytes}"
        leaving = blocks.leaving[:, self._peers]
        for low in range(0, blocks.fullest, capacity):
            high = low + capacity
            starts = self._starts[self._rounds % 2]
            here = self.arrivals[self.rank][self._rounds % 2]
            self._rounds += 1
            self._send(rows, width, leaving, starts, low, high)
            self.barrier()
            if low < len(out):
                self._take(here, rows, out, blocks.leaving[:, self.rank], low, min(high, len(out)))

    def _send(self, rows: Tensor, width: int, leaving: np.ndarray, starts: np.ndarray, low: int, high: int) -> None:
        """Copy the peers' rows `low` to `high`; their blocks are `leaving` [3, P - 1, L]."""
        first, there, count = leaving
        begin, end = np.maximum(there, low), np.minimum(there + count, high)
        some = begin < end
        if some.any():
            into = starts[self._peers][:, None] + (begin - low) * width
            sources = rows.data_ptr() + (first + begin - there) * width
            copies = (numbers[some] for numbers in (into, sources, (end - begin) * width))
            self._driver.copies(self._stream(), *copies)

    def _take(self, here: Tensor, rows: Tensor, out: Tensor, own: np.ndarray, low: int, high: int) -> None:
        """Fill rows `low` to `high` of `out`: this rank's own blocks [3, L] from `rows`, the others from `here`."""
        if usable(out) and out[0].nbytes % 4 == 0:
            from hocket.kernels.exchange import take_blocks

            take_blocks(here, rows, out, torch.from_numpy(own).to(out.device, non_blocking=True), low, high)
            return
        whole = out[low:high]
        whole.copy_(here[: whole.nbytes].view(out.dtype).view_as(whole))
        for first, there, count in own.T.tolist():
            begin, end = max(there, low), min(there + count, high)
            if begin < end:
                out[begin:end] = rows[first + begin - there : first + end - there]


@dataclass
class CopiedRows(Nccl):
    """Exchange rows by copies; other collectives use NCCL."""

    copies: PeerCopies

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        self.copies.exchange(out, rows, host_blocks(torch.tensor(table.rows).unsqueeze(-1), table.rank))
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        assert isinstance(blocks, HostBlocks), "copies are issued by a host, which must know how many rows there are"
        self.copies.exchange(out, rows, blocks)
        return DONE


def peer_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> PeerCopies:
    """Arrival buffers of `nbytes` on GPUs with peer access. All ranks of the group call this together."""
    whole = -(-nbytes // 256) * 256  # aligns both buffers
    return PeerCopies(*shared_buffers(group, whole, device, timeout), Cuda(), lambda: stream_handle(device))


def shared_buffers(
    group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float
) -> tuple[int, list[Tensor], Callable[[], object]]:
    """Return (this rank, every rank's two buffers of `nbytes` as bytes [2, n], a barrier of current streams).

    All ranks of the group call this together; see `shared_memory`.
    """
    rank, memories, barrier = shared_memory(group, 2 * nbytes, device, timeout)
    return rank, [memory.view(2, nbytes) for memory in memories], barrier


# ---------------------------------------------------------------------------------------------------------- pushed rows
#
# All-to-all of rows whose counts the host does not know: kernels store rows at their grouped position in peer memory.
#
# Kernels read the counts on the device; a barrier after them tells all ranks that rows have arrived. `Note: [Two
# arrival buffers, one barrier]` applies. There is one round: a buffer holds the capacity (`blocks.py`).


COUNTS = 1 << 20
"""Bytes at the end of an arrival buffer that receive counts."""


class PushBuffers:
    """The arrival buffers of all ranks of a group, for this rank's kernels."""

    def __init__(self, rank: int, arrivals: Sequence[Tensor], barrier: Callable[[], object]) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. `barrier` orders all ranks' current streams."""
        self.rank, self.arrivals, self.barrier = rank, tuple(arrivals), barrier
        self.nbytes = self.arrivals[rank].shape[1] - COUNTS
        addresses = [[buffers[turn].data_ptr() for buffers in self.arrivals] for turn in (0, 1)]
        self.addresses = torch.tensor(addresses, device=self.arrivals[rank].device)
        self.count_addresses = self.addresses + self.nbytes
        self._exchanges = self._counted = 0

    def all_counts(self, counts: Tensor) -> Tensor:
        """All-gather `counts` (P, ...), int64: (P, P, ...). Valid until the exchange of counts after the next.

        At most two microbatches exchange rows at a time, alternating, and each reaches its next exchange of counts
        after its experts on all ranks. By then nothing reads the old counts.
        """
        from hocket.kernels.exchange import push_counts

        turn = self._counted % 2
        self._counted += 1
        nbytes = len(self.arrivals) * counts.nbytes
        assert nbytes <= COUNTS, f"{nbytes} bytes of counts, and room for {COUNTS}"
        push_counts(counts, self.count_addresses[turn], self.rank)
        self.barrier()
        here = self.arrivals[self.rank][turn][self.nbytes : self.nbytes + nbytes]
        return here.view(counts.dtype).view(-1, *counts.shape)

    def exchange(self, out: Tensor, rows: Tensor, blocks: Blocks) -> None:
        """Deliver every block of `rows` [R, D]; `out` [R', D] receives this rank's rows.

        Runs on the current stream, on which all exchanges of the group are issued.
        """
        from hocket.kernels.exchange import push, take

        turn = self._exchanges % 2
        self._exchanges += 1
        here = self.arrivals[self.rank][turn]
        assert out.nbytes <= self.nbytes, f"{out.shape[0]} rows do not fit into a buffer of {self.nbytes} bytes"
        push(rows.contiguous(), self.addresses[turn], blocks.leaving, self.rank)
        self.barrier()
        take(here[: out.nbytes].view(out.dtype).view(out.shape), out, blocks.arrived)


@dataclass
class PushedRows(Nccl):
    """Exchange rows by kernels of hocket; other collectives use NCCL."""

    timeout: float
    pushes: PushBuffers
    outgrown: list[PushBuffers] = field(default_factory=list)
    """Smaller buffers that recorded steps may still use."""

    def make_room(self, nbytes: int) -> None:
        """Grow arrival buffers to rows of `nbytes`. All ranks of the group call this."""
        if nbytes > self.pushes.nbytes:
            self.outgrown.append(self.pushes)
            self.pushes = push_buffers(self.group, nbytes, self.device, self.timeout)

    def all_counts(self, counts: Tensor) -> Tensor:
        return self.pushes.all_counts(counts)

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        assert isinstance(blocks, Blocks), "kernels read on the device how many rows there are"
        self.pushes.exchange(out, rows, blocks)
        return DONE


def push_buffers(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> PushBuffers:
    """Arrival buffers for rows of `nbytes` on GPUs with peer access. All ranks of the group call this together."""
    whole = -(-nbytes // 16) * 16 + COUNTS
    return PushBuffers(*shared_buffers(group, whole, device, timeout))

"""An exchange of rows of which no host knows the counts: kernels store them where they belong in the peers' memory.

All memory of one NVLink domain can be mapped into each process (torch's symmetric memory). So a kernel that reads the
counts on the device can store rows straight into the arrival buffers of the peers, in the order in which their experts
want them. Kernels of a stream run in order, and a barrier behind them says that everybody's rows have arrived.
`Note: [Two arrival buffers, one barrier]` of `peer_copies.py` holds here too, and there is one round only: a buffer has
room for the capacity (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.peer_copies import shared_buffers
from hocket.runtime.transports import DONE, Nccl, Pending

COUNTS = 1 << 20
"""Bytes at the end of an arrival buffer, where counts arrive."""


class Pushes:
    """The arrival buffers of all ranks of a group, as this rank's kernels see them."""

    def __init__(self, rank: int, arrivals: Sequence[Tensor], barrier: Callable[[], object]) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. `barrier` orders all ranks' current streams."""
        self.rank, self.arrivals, self.barrier = rank, tuple(arrivals), barrier
        self.nbytes = self.arrivals[rank].shape[1] - COUNTS
        addresses = [[buffers[turn].data_ptr() for buffers in self.arrivals] for turn in (0, 1)]
        self.addresses = torch.tensor(addresses, device=self.arrivals[rank].device)
        self.count_addresses = self.addresses + self.nbytes
        self._exchanges = self._counted = 0

    def all_counts(self, counts: Tensor) -> Tensor:
        """Every rank's `counts` (P, ...), int64: (P, P, ...). Overwritten by the exchange of counts after the next.

        At most two microbatches exchange rows at a time, in turns, and a microbatch comes to its next exchange of
        counts behind its experts, on all ranks. So by then nobody reads them any more.
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
        """Every block of `rows` [R, D] goes where it belongs; `out` [R', D] becomes what is here then.

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
    """Exchanges rows by kernels of its own; whatever else is asked of the group runs on NCCL's kernels."""

    timeout: float
    """Seconds that a barrier may take."""
    pushes: Pushes
    outgrown: list[Pushes] = field(default_factory=list)
    """Buffers that recorded steps may still use."""

    def make_room(self, nbytes: int) -> None:
        """Have arrival buffers for rows of `nbytes` from now on. All ranks of the group call this."""
        if nbytes > self.pushes.nbytes:
            self.outgrown.append(self.pushes)
            self.pushes = pushes(self.group, nbytes, self.device, self.timeout)

    def all_counts(self, counts: Tensor) -> Tensor:
        return self.pushes.all_counts(counts)

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        assert isinstance(blocks, Blocks), "kernels read on the device how many rows there are"
        self.pushes.exchange(out, rows, blocks)
        return DONE


def pushes(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> Pushes:
    """Arrival buffers for rows of `nbytes` on GPUs that reach each other's memory: all ranks of the group call this."""
    whole = -(-nbytes // 16) * 16 + COUNTS
    return Pushes(*shared_buffers(group, whole, device, timeout))

"""An all-to-all of unequal parts that holds no SM: each rank's copy engine writes its rows where the peers want them.

NCCL leaves an all-to-all to copy engines only if all parts are equal, which the rows of experts are not. But the host
of every rank knows how many rows go from whom to whom, and all memory of one NVLink domain can be mapped into each
process (torch's symmetric memory). So a rank copies its rows straight to where they belong in each peer's arrival
buffer. Copies of a stream run in order, and a barrier behind them says that everybody's have arrived.

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

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.shared_memory import shared_memory
from hocket.runtime.transports import DONE, Nccl, Pending, RowTable


class PeerCopies:
    """The arrival buffers of all ranks of a group, as this rank sees them."""

    def __init__(self, rank: int, arrivals: Sequence[Tensor], barrier: Callable[[], object]) -> None:
        """`arrivals[p]` are bytes [2, n] of rank p. `barrier` orders all ranks' current streams."""
        self.rank, self.arrivals, self._barrier = rank, tuple(arrivals), barrier
        self._rounds = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one arrival buffer."""
        return self.arrivals[0].shape[1]

    def exchange(self, out: Tensor, rows: Tensor, table: RowTable) -> None:
        """Send `rows` [R, D], those for rank 0 first; `out` [R', D] becomes what arrives, that of rank 0 first.

        Runs on the current stream, on which all exchanges of the group are issued.
        """
        assert out.is_contiguous()
        assert rows.is_contiguous()
        me, world = self.rank, range(len(self.arrivals))
        sent, received = _edges(table.send), _edges(table.receive)
        mine = out[received[me] : received[me + 1]]
        mine.copy_(rows[sent[me] : sent[me + 1]])
        width = rows.shape[1] * rows.itemsize
        capacity = self.nbytes // max(1, width)
        assert capacity, f"a row of {width} bytes does not fit into an arrival buffer of {self.nbytes}"
        most = max(sum(line[d] for line in table.rows) for d in world)
        for low in range(0, most, capacity):
            high = low + capacity
            here = [buffer[self._rounds % 2] for buffer in self.arrivals]
            self._rounds += 1
            for step in world[1:]:  # each rank begins with another peer
                peer = (me + step) % len(here)
                first = sum(line[peer] for line in table.rows[:me])  # among the rows that the peer gets
                a, b = max(low, first), min(high, first + table.send[peer])
                if a < b:
                    into = here[peer][(a - low) * width : (b - low) * width]
                    into.copy_(_flat_bytes(rows[sent[peer] + a - first : sent[peer] + b - first]))
            self._barrier()
            for a, b in ((low, min(high, received[me])), (max(low, received[me + 1]), min(high, received[-1]))):
                if a < b:
                    _flat_bytes(out[a:b]).copy_(here[me][(a - low) * width : (b - low) * width])


@dataclass
class CopiedRows(Nccl):
    """Exchanges rows by copies; whatever else is asked of the group runs on NCCL's kernels."""

    copies: PeerCopies

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        self.copies.exchange(out, rows, table)
        return DONE


def peer_copies(group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float) -> PeerCopies:
    """Arrival buffers of `nbytes` on GPUs that reach each other's memory: all ranks of the group call this together."""
    return PeerCopies(*shared_buffers(group, nbytes, device, timeout))


def shared_buffers(
    group: dist.ProcessGroup, nbytes: int, device: torch.device, timeout: float
) -> tuple[int, list[Tensor], Callable[[], object]]:
    """Return (this rank, every rank's two buffers of `nbytes` as bytes [2, n], a barrier of current streams).

    All ranks of the group call it together; see `shared_memory`.
    """
    rank, memories, barrier = shared_memory(group, 2 * nbytes, device, timeout)
    return rank, [memory.view(2, nbytes) for memory in memories], barrier


def _edges(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and the end."""
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    return edges


def _flat_bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)

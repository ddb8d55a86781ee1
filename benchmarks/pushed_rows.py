"""What does an expert all-to-all cost whose counts no host knows? Step by step, and beside products.

    torchrun --nproc-per-node 4 -m benchmarks.pushed_rows

Each rank sends the rows of 8,192 (or 4,096) tokens of Qwen3-30B-A3B's MoE layers (8 rows of 2,048 numbers each, to
128 experts), in shares as uneven as a router makes them. With NCCL, counts known to the host beforehand, what arrives
is then grouped by expert; with kernels that store into the peers, it arrives grouped. Alone: times of all that there is
to do, and by the number of programs. Beside products: by how much longer these take. Half a minute.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.copy_engine import ROUNDS, Call, Clock, Products
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.kernels.exchange import PUSHING, TAKING, push, take
from hocket.parallel.dispatch import Splits, group_rows
from hocket.parallel.mesh import Mesh
from hocket.parallel.placed import place_counts
from hocket.parallel.routing import Routing
from hocket.runtime.blocks import Room
from hocket.runtime.comm import CommOptions, make_groups
from hocket.runtime.pushed_rows import PushedRows
from hocket.runtime.transports import Nccl, RowTable

HIDDEN, TOP_K, EXPERTS = 2048, 8, 128
CAPACITY = 1.5
PUSHES, TAKES = (8, 16, 32, 64, 128), (33, 66, 132, 264, 528)
"""Numbers of programs that are tried."""


def counts_of(rows: int, rank: int) -> Tensor:
    """Rows for every expert: shares like those of a router without load balancing, all ranks alike."""
    shares = 1 + 0.5 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9)
    counts = (rows * shares / shares.sum()).long()
    counts[rank] += rows - counts.sum()
    return counts


class Exchange:
    """Rows to send, room for those that arrive, and both ways to get them there."""

    def __init__(self, tokens: int, rank: int, device: torch.device) -> None:
        self.rows_sent, world = tokens * TOP_K, dist.get_world_size()
        self.capacity = int(CAPACITY * self.rows_sent)
        options = CommOptions(arrival=self.capacity * HIDDEN * 2, device_splits=True)
        self.group = make_groups(Mesh(dp=world, ep=world), rank, device, "nccl", options).a2a
        transport = self.group.transport
        assert isinstance(transport, PushedRows)
        self.transport, self.pushes = transport, transport.pushes
        counts = counts_of(self.rows_sent, rank).to(device)
        self.routing = Routing(torch.empty(0, device=device), counts, tokens, TOP_K)
        every = self.group.all_counts(counts.view(world, -1))
        self.known = Splits(RowTable(every.sum(-1).tolist(), rank), every[:, rank].contiguous())
        self.room = Room(self.capacity, torch.zeros(1, dtype=torch.int64, device=device))
        self.placed = place_counts(self.routing, self.group, self.room)
        numbers: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.rows = torch.randn(self.rows_sent, HIDDEN, **numbers)
        self.received = torch.empty(self.known.table.room, HIDDEN, **numbers)
        self.out = torch.empty(self.capacity, HIDDEN, **numbers)
        self.leaving = (self.rows_sent - self.known.table.send[rank]) * HIDDEN * 2

    def nccl(self) -> None:
        self.transport.all_to_all(self.received, self.rows, self.known.table)

    def group_rows(self) -> None:
        group_rows(self.received, self.known)

    def counts(self) -> None:
        place_counts(self.routing, self.group, self.room)

    def all_counts(self) -> None:
        self.pushes.all_counts(self.routing.counts_E.view(self.group.size, -1))

    def nccl_counts(self) -> None:
        Nccl.all_counts(self.transport, self.routing.counts_E.view(self.group.size, -1))

    def pushed(self) -> None:
        self.group.all_to_all(self.out, self.rows, self.placed.table)

    def push(self, programs: int) -> Call:
        """The stores alone: no barrier behind, so peers may overtake each other."""
        addresses = self.pushes.addresses[0]
        return lambda: push(self.rows, addresses, self.placed.table.leaving, self.group.rank, programs)

    def take(self, programs: int) -> Call:
        here = self.pushes.arrivals[self.group.rank][0][: self.out.nbytes].view(torch.bfloat16).view(self.out.shape)
        return lambda: take(here, self.out, self.placed.table.arrived, programs=programs)

    def check(self) -> None:
        """Both ways bring the same rows."""
        self.nccl()
        self.pushed()
        torch.cuda.synchronize()
        wanted = group_rows(self.received, self.known)
        assert torch.equal(self.out[: len(wanted)], wanted), "rows that were pushed are not those that NCCL brings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()
    exchange, clock = Exchange(options.tokens, rank, device), Clock(device)
    with torch.cuda.stream(clock.lanes[0]):
        exchange.check()
    steps: dict[str, Call] = {
        "nccl": exchange.nccl,
        "grouping": exchange.group_rows,
        "pushed": exchange.pushed,
        "counts and places": exchange.counts,
        "counts": exchange.all_counts,
        "counts by nccl": exchange.nccl_counts,
        "barrier": exchange.pushes.barrier,
        **{f"stores, {n} programs": exchange.push(n) for n in PUSHES},
        **{f"taking, {n} programs": exchange.take(n) for n in TAKES},
    }
    alone = {name: clock.alone(call) for name, call in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in ("nothing", "nccl", "pushed", "nothing again")}
    products = Products(options.tokens, device)
    for turn in range(ROUNDS + 1):
        for name in list(times)[:: -1 if turn % 2 else 1]:
            seconds = clock.beside(products, steps.get(name), None)
            if turn:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    beside = {name: {"seconds": s, "tax": s / medians["nothing"] - 1} for name, s in medians.items()}
    if rank == 0:
        for name, seconds in alone.items():
            print(f"alone  {name:22} {1e3 * seconds:7.3f} ms  {exchange.leaving / seconds / 1e9:6.0f} GB/s")
        for name, found in beside.items():
            print(f"beside {name:22} {1e3 * found['seconds']:7.2f} ms  tax {found['tax']:6.1%}")
        result = {
            "tokens": options.tokens, "leaving_bytes": exchange.leaving, "pushing": PUSHING, "taking": TAKING,
            "alone": alone, "beside": beside,
        }  # fmt: skip
        print(write("pushed_rows", result, options.out, options.commit))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What does an expert all-to-all cost: on NCCL's kernels, and on copy engines? Alone, and beside products.

    torchrun --nproc-per-node 4 -m benchmarks.row_exchange

Each rank sends the rows of 8,192 (or 4,096) tokens of Qwen3-30B-A3B's MoE layers (8 rows of 2,048 numbers each) to the
other ranks, in equal parts, or in parts as uneven as a router makes them. Alone: times, and bytes that leave a rank a
second. Beside products: matrix products run on one stream while rows are exchanged on another; the tax is by how much
longer the products take. Half a minute.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.copy_engine import ROUNDS, Call, Clock, Products
from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.plan.mesh import Mesh
from hocket.runtime.comm import make_groups
from hocket.runtime.peer_copies import PeerCopies, peer_copies
from hocket.runtime.transports import Nccl, RowTable

HIDDEN, TOP_K = 2048, 8


def tables(rows: int, world: int) -> dict[str, list[list[int]]]:
    """Rows from each rank to each: in equal parts, and spread like shares of a router without load balancing."""
    even = [[rows // world] * world for _ in range(world)]
    generator = torch.Generator().manual_seed(0)
    uneven = []
    for _ in range(world):
        shares = 1 + 0.3 * torch.randn(world, generator=generator).clamp(-2, 2)
        line = [int(rows * share) for share in (shares / shares.sum()).tolist()]
        line[0] += rows - sum(line)
        uneven.append(line)
    return {"even": even, "uneven": uneven}


class Exchange:
    """Rows to send, room for those that arrive, and both ways to get them there."""

    def __init__(self, table: RowTable, nccl: Nccl, copies: PeerCopies, device: torch.device) -> None:
        self.table, self.nccl, self.copies = table, nccl, copies
        numbers: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.rows = torch.randn(sum(table.send), HIDDEN, **numbers)
        self.out = torch.empty(sum(table.receive), HIDDEN, **numbers)
        self.leaving = (sum(table.send) - table.send[table.rank]) * HIDDEN * 2

    def by_nccl(self) -> None:
        self.nccl.all_to_all(self.out, self.rows, self.table)

    def by_copies(self) -> None:
        self.copies.exchange(self.out, self.rows, self.table)

    def check(self) -> None:
        """Both ways bring the same rows."""
        self.by_nccl()
        wanted = self.out.clone()
        self.out.zero_()
        self.by_copies()
        torch.cuda.synchronize()
        assert torch.equal(self.out, wanted), "rows that were copied are not those that NCCL brings"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    rank, device = join()
    world = dist.get_world_size()
    groups = make_groups(Mesh(dp=world, ep=world), rank, device, "nccl")
    nccl = groups.a2a.transport
    assert isinstance(nccl, Nccl)
    rows = options.tokens * TOP_K
    copies = peer_copies(nccl.group, 2 * rows * HIDDEN, device, timeout=60.0)  # room for as many rows as leave
    clock = Clock(device)
    cases: dict[str, Call] = {}
    alone: dict[str, Any] = {}
    for name, table in tables(rows, world).items():
        exchange = Exchange(RowTable(table, rank), nccl, copies, device)
        with torch.cuda.stream(clock.lanes[0]):
            exchange.check()
        for way, call in (("nccl", exchange.by_nccl), ("copies", exchange.by_copies)):
            cases[f"{way}, {name}"] = call
            seconds = clock.alone(call)
            alone[f"{way}, {name}"] = {"seconds": seconds, "gb_per_s": exchange.leaving / seconds / 1e9}
    times: dict[str, list[float]] = {name: [] for name in ("nothing", *cases)}
    products = Products(options.tokens, device)
    for turn in range(ROUNDS + 1):
        for name in list(times)[:: -1 if turn % 2 else 1]:
            seconds = clock.beside(products, cases.get(name), None)
            if turn:
                times[name].append(seconds)
    bound = statistics.median(times["nothing"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    beside = {name: {"seconds": seconds, "tax": seconds / bound - 1} for name, seconds in medians.items()}
    if rank == 0:
        for name, found in alone.items():
            print(f"alone  {name:16} {1e3 * found['seconds']:7.3f} ms  {found['gb_per_s']:6.0f} GB/s")
        for name, found in beside.items():
            print(f"beside {name:16} {1e3 * found['seconds']:7.2f} ms  tax {found['tax']:6.1%}")
        result = {"tokens": options.tokens, "exchanges_beside": 16, "alone": alone, "beside": beside}
        print(write("row_exchange", result, options.out, options.commit))
    dist.barrier()
    groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

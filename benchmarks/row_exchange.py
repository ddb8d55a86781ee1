"""What does an expert all-to-all cost: on NCCL's kernels, and on copy engines? Alone, and beside products.

    torchrun --nproc-per-node 4 -m benchmarks.row_exchange

Each rank sends the rows of 8,192 (or 4,096) tokens of Qwen3-30B-A3B's MoE layers (8 rows of 2,048 numbers each, 128
experts) to the other ranks, in equal parts, or in parts as uneven as a router makes them. *Sorted* adds the kernel that
then puts rows in the order of experts; copies by block leave nothing to sort. Alone: times, bytes that leave a rank a
second, and what issuing it takes the host. Beside products: matrix products run on one stream while rows are exchanged
on another; the tax is by how much longer the products take. Half a minute.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.copy_engine import ROUNDS, Call, Clock, Products
from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.layers.dispatch import Splits, group_rows
from hocket.program.mesh import Mesh
from hocket.runtime.blocks import HostBlocks, host_blocks
from hocket.runtime.comm import make_groups
from hocket.runtime.peer_rows import PeerCopies, peer_copies
from hocket.runtime.transports import Nccl, RowTable

HIDDEN, TOP_K, EXPERTS = 2048, 8, 128
ISSUED = 50


def tables(rows: int, world: int) -> dict[str, Tensor]:
    """Rows from each rank to each expert, [P, P, L]: equally many, and spread like those of an untrained router."""
    local = EXPERTS // world
    even = torch.full((world, world, local), rows // EXPERTS)
    generator = torch.Generator().manual_seed(0)
    shares = 1 + 0.3 * torch.randn(world, EXPERTS, generator=generator).clamp(-2, 2)
    uneven = (rows * shares / shares.sum(1, keepdim=True)).long()
    uneven[:, 0] += rows - uneven.sum(1)
    return {"even": even, "uneven": uneven.view(world, world, local)}


class Exchange:
    """Rows to send, room for those that arrive, and all ways to get them there."""

    def __init__(self, every_PPL: Tensor, rank: int, nccl: Nccl, copies: PeerCopies, device: torch.device) -> None:
        self.table = RowTable(every_PPL.sum(-1).tolist(), rank)
        self.blocks, self.by_rank = host_blocks(every_PPL, rank), host_blocks(every_PPL.sum(-1, keepdim=True), rank)
        self.splits = Splits(self.table, every_PPL[:, rank].to(device))
        self.nccl, self.copies = nccl, copies
        numbers: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.rows = torch.randn(self.table.sent, HIDDEN, **numbers)
        self.out = torch.empty(self.table.room, HIDDEN, **numbers)
        self.leaving = (self.table.sent - self.table.send[rank]) * HIDDEN * 2

    def ways(self) -> dict[str, Call]:
        return {
            "nccl": self.by_nccl,
            "nccl, sorted": lambda: self.sort(self.by_nccl()),
            "copies by rank, sorted": lambda: self.sort(self.by_copies(self.by_rank)),
            "copies by block": lambda: self.by_copies(self.blocks),
        }

    def by_nccl(self) -> Tensor:
        self.nccl.all_to_all(self.out, self.rows, self.table)
        return self.out

    def by_copies(self, blocks: HostBlocks) -> Tensor:
        self.copies.exchange(self.out, self.rows, blocks)
        return self.out

    def sort(self, rows: Tensor) -> Tensor:
        return group_rows(rows, self.splits)

    def check(self) -> None:
        """All ways bring the same rows."""
        wanted = self.sort(self.by_nccl()).clone()
        for name, call in self.ways().items():
            self.out.zero_()
            result = call()
            torch.cuda.synchronize()
            assert isinstance(result, Tensor)
            assert name == "nccl" or torch.equal(result, wanted), f"{name}: rows are not those that NCCL brings"


def issue_seconds(call: Call) -> float:
    """What the host needs to issue a call, the least of several."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(ISSUED // 10):
            call()
        times.append((time.perf_counter() - start) / (ISSUED // 10))
    return min(times)


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
    copies = peer_copies(nccl.group, 2 * rows * HIDDEN, device, timeout=60.0)  # room for half of the rows that leave
    clock = Clock(device)
    cases: dict[str, Call] = {}
    alone: dict[str, Any] = {}
    for name, every_PPL in tables(rows, world).items():
        exchange = Exchange(every_PPL, rank, nccl, copies, device)
        with torch.cuda.stream(clock.lanes[0]):
            exchange.check()
        for way, call in exchange.ways().items():
            cases[f"{way}, {name}"] = call
            seconds = clock.alone(call)
            with torch.cuda.stream(clock.lanes[0]):
                host = issue_seconds(call)
            alone[f"{way}, {name}"] = {
                "seconds": seconds, "gb_per_s": exchange.leaving / seconds / 1e9, "host_seconds": host,
            }  # fmt: skip
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
            speed = f"{1e3 * found['seconds']:7.3f} ms  {found['gb_per_s']:6.0f} GB/s"
            print(f"alone  {name:30} {speed}  host {1e6 * found['host_seconds']:5.0f} us")
        for name, found in beside.items():
            print(f"beside {name:30} {1e3 * found['seconds']:7.2f} ms  tax {found['tax']:6.1%}")
        result = {"tokens": options.tokens, "exchanges_beside": 16, "alone": alone, "beside": beside}
        print(write("row_exchange", result, options.out, options.commit))
    dist.barrier()
    groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

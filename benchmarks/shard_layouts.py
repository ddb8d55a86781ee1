"""What would it cost to gather and reduce a unit parameter by parameter, in place?

    torchrun --nproc-per-node 2 -m benchmarks.shard_layouts

Today a unit is one flat buffer, and a rank's shard is one slice of it, cut at any element. If each parameter was padded
to whole rows for each rank, a rank's shard would be torch's `Shard(0)` of it, and its place in the gathered buffer one
slice for each parameter. Then a gather is one grouped NCCL call, or one batch of copies: the same bytes in more pieces.
Measured alone, on NCCL and on copy engines, by the host's and the device's time, for units of Llama-3 8B,
Qwen3-30B-A3B and T5-large. Both layouts must give the same numbers. Writes benchmarks/results/shard_layouts.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.program.mesh import Mesh
from hocket.runtime.collective_copies import ALIGNED, CollectiveCopies, CopiedCollectives
from hocket.runtime.comm import Group, make_groups
from hocket.runtime.driver import Cuda
from hocket.runtime.lanes import stream_handle
from hocket.runtime.transports import Nccl, local_sum

UNITS: dict[str, tuple[tuple[int, int], ...]] = {
    "a layer of Llama-3 8B": (
        (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336), (2, 4096),
    ),
    "attention and router of Qwen3-30B-A3B": (
        (4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048), (4, 2048),
    ),
    "experts of Qwen3-30B-A3B": ((128, 1536 * 2048), (128, 2048 * 768)),
    "a layer of T5-large": (*[(1024, 1024)] * 4, (4096, 1024), (1024, 4096), (2, 1024)),
}  # fmt: skip
"""(rows, elements of a row) of the parameters; small ones are packed into the last."""
CALLS, ROUNDS, WARM_UP = 10, 7, 3
BF16 = 2


@dataclass(frozen=True)
class Pieces:
    """Where the parameters of a unit are, in bytes: of each rank's shard, and of the gathered buffer."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    world: int

    @classmethod
    def of(cls, shapes: tuple[tuple[int, int], ...], world: int) -> Pieces:
        sizes = [-(-rows // world) * row * BF16 for rows, row in shapes]
        sizes[-1] = -(-sizes[-1] // ALIGNED) * ALIGNED
        return cls(tuple(np.cumsum([0, *sizes[:-1]]).tolist()), tuple(sizes), world)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def between(self, low: int, high: int) -> np.ndarray:
        """[4, N] of the shard's bytes `low` to `high`: where they are in the gathered buffer for rank 0, their offset
        after `low`, their number, and how far apart ranks are in the gathered buffer.
        """
        found = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            first, last = max(start, low), min(start + size, high)
            if first < last:
                found.append((self.world * start + first - start, first - low, last - first, size))
        return np.array(found, dtype=np.int64).T


class Pieced:
    """All-gather and reduce-scatter by copies where shards are pieces of the gathered buffer."""

    def __init__(self, copies: CollectiveCopies, pieces: Pieces, device: torch.device) -> None:
        self.copies, self.pieces, self.device = copies, pieces, device
        self.driver, self.rank = Cuda(), copies.rank
        self.between = cache(pieces.between)

    def _move(self, into: list[np.ndarray], sources: list[np.ndarray], sizes: list[np.ndarray]) -> None:
        self.driver.copies(stream_handle(self.device), *(np.concatenate(each) for each in (into, sources, sizes)))

    def gather(self, out: Tensor) -> None:
        halves, base = self.copies._gathered, out.data_ptr()

        def send(half: int, low: int, high: int) -> None:
            whole, packed, size, step = self.between(low, high)
            here = halves.bytes_of(self.rank, half).data_ptr()
            self._move([here + packed], [base + whole + self.rank * step], [size])

        def receive(half: int, low: int, high: int) -> None:
            whole, packed, size, step = self.between(low, high)
            peers, starts = halves.peers, {p: halves.bytes_of(p, half).data_ptr() for p in halves.peers}
            self._move(
                [base + whole + p * step for p in peers], [starts[p] + packed for p in peers], [size for _ in peers]
            )

        self.copies._in_pieces(halves, self.pieces.nbytes, halves.nbytes, send, receive)

    def reduce(self, full: Tensor, into: Tensor) -> None:
        halves, base, world = self.copies._reduced, full.data_ptr(), self.pieces.world
        room = halves.nbytes // world // ALIGNED * ALIGNED

        def send(half: int, low: int, high: int) -> None:
            whole, packed, size, step = self.between(low, high)
            ranks = [self.rank, *halves.peers]
            starts = [halves.bytes_of(p, half).data_ptr() + self.rank * room for p in ranks]
            self._move(
                [start + packed for start in starts], [base + whole + p * step for p in ranks], [size for _ in ranks]
            )

        def receive(half: int, low: int, high: int) -> None:
            come = halves.bytes_of(self.rank, half)[: world * room].view(world, room)[:, : high - low]
            local_sum(come.view(full.dtype), into[low // BF16 : high // BF16], 1.0, False)

        self.copies._in_pieces(halves, self.pieces.nbytes, room, send, receive)


def calls_of(
    group: Group, pieces: Pieces, device: torch.device
) -> dict[tuple[str, str], tuple[Callable[[], Any], Tensor]]:
    """(what, layout) -> a call, and what it makes."""
    world, rank, transport = pieces.world, group.rank, group.transport
    whole = torch.randn(world * pieces.nbytes // BF16, device=device).bfloat16()
    grads, into = torch.randn_like(whole), torch.empty(2, pieces.nbytes // BF16, device=device)
    outs = [torch.empty_like(whole) for _ in range(2)]
    bounds = [(s // BF16, n // BF16) for s, n in zip(pieces.starts, pieces.sizes, strict=True)]
    outs[0].view(world, -1)[rank].copy_(whole.view(world, -1)[rank])
    for start, size in bounds:
        outs[1][world * start + rank * size :][:size] = whole.view(world, -1)[rank][start : start + size]
    mine = outs[0].view(world, -1)[rank]
    parts = [(outs[1][world * s :][: world * n], outs[1][world * s + rank * n :][:n]) for s, n in bounds]
    if isinstance(transport, CopiedCollectives):
        by_piece = Pieced(transport.copies, pieces, device)
        gather, reduce = lambda: by_piece.gather(outs[1]), lambda: by_piece.reduce(grads, into[1])
    else:
        assert isinstance(transport, Nccl)
        scattered = torch.empty(pieces.nbytes // BF16, device=device, dtype=torch.bfloat16)

        def gather() -> None:
            with dist._coalescing_manager(group=transport.group, device=device):
                for out, own in parts:
                    dist.all_gather_into_tensor(out, own, group=transport.group)

        def reduce() -> None:
            with dist._coalescing_manager(group=transport.group, device=device):
                for s, n in bounds:
                    dist.reduce_scatter_tensor(
                        scattered[s : s + n], grads[world * s :][: world * n], group=transport.group
                    )
            local_sum(scattered.view(1, -1), into[1], 1.0, False)

    sums = grads.float()
    dist.all_reduce(sums, group=None)
    wanted = torch.cat([sums[world * s + rank * n :][:n] for s, n in bounds])
    assert_sums(group, grads, into, reduce, sums.view(world, -1)[rank], wanted)
    return {
        ("gather", "flat"): (lambda: group.all_gather(outs[0], mine), outs[0]),
        ("gather", "pieces"): (gather, outs[1]),
        ("reduce", "flat"): (lambda: group.reduce_sum(grads, into[0], add=False), into[0]),
        ("reduce", "pieces"): (reduce, into[1]),
    }  # fmt: skip


def assert_sums(
    group: Group, grads: Tensor, into: Tensor, pieced: Callable[[], Any], flat: Tensor, parts: Tensor
) -> None:
    """Assert that both layouts sum gradients, up to rounding to bf16."""
    group.reduce_sum(grads, into[0], add=False).wait()
    pieced()
    for found, wanted in zip(into, (flat, parts), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.05)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Host's and device's seconds of one call, issued on a stream of its own as fast as the host can."""
    stream, begin, end = torch.cuda.Stream(device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    dist.barrier()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # so that the device never waits for the host
        begin.record()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        host = (time.perf_counter() - start) / CALLS
        end.record()
    torch.cuda.synchronize(device)
    return host, begin.elapsed_time(end) / CALLS / 1e3


def alike(made: dict[tuple[str, str], tuple[Any, Tensor]], pieces: Pieces) -> None:
    """Assert that both layouts gathered the same shards, and that sums of pieces are those of their gradients."""
    flat, pieced = (made["gather", layout][1] for layout in ("flat", "pieces"))
    for rank in range(pieces.world):
        shard = flat.view(pieces.world, -1)[rank]
        for start, size in ((s // BF16, n // BF16) for s, n in zip(pieces.starts, pieces.sizes, strict=True)):
            there = pieced[pieces.world * start + rank * size :][:size]
            assert torch.equal(there, shard[start : start + size]), "gathers differ"


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    rank, device = join()
    world, found = dist.get_world_size(), {}
    for name in ("nccl", "copy_engine"):
        groups = make_groups(Mesh(dp=world), rank, device, name)  # type: ignore[arg-type]
        for unit, shapes in UNITS.items():
            pieces = Pieces.of(shapes, world)
            rows: dict[str, dict[str, list[float]]] = {}
            gathers, reduces = (calls_of(g, pieces, device) for g in (groups.gather_dense, groups.reduce_dense))
            made = {key: (gathers if key[0] == "gather" else reduces)[key] for key in gathers}
            for call, _ in made.values():
                for _ in range(WARM_UP):
                    timed(call, device)
            alike(made, pieces)
            for _ in range(ROUNDS):
                for (what, layout), (call, _) in made.items():
                    host, on_device = timed(call, device)
                    row = rows.setdefault(f"{what}, {layout}", {"host": [], "device": []})
                    row["host"].append(host)
                    row["device"].append(on_device)
            found[f"{unit}, {name}"] = {
                "bytes": world * pieces.nbytes, "parameters": len(shapes),
                **{key: {of: statistics.median(times) for of, times in row.items()} for key, row in rows.items()},
            }  # fmt: skip
            if rank == 0:
                row = found[f"{unit}, {name}"]
                said = (
                    f"{k}: host {v['host'] * 1e6:6.1f} us, device {v['device'] * 1e6:8.1f} us"
                    for k, v in row.items()
                    if isinstance(v, dict)
                )
                print(f"{unit}, {name}: {'; '.join(said)}", flush=True)
            del gathers, reduces, made
        dist.barrier()
    if rank == 0:
        print(write("shard_layouts", {"units": found}, options.out, options.commit))


if __name__ == "__main__":
    main()

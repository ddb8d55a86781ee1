"""What does it cost to gather and reduce a unit in pieces, one for each parameter, rather than as one tensor?

    torchrun --nproc-per-node 2 -m benchmarks.shard_layouts

A rank keeps whole rows of each parameter, so its shard has one place in the gathered buffer for each parameter
(`kernels/pieces.py`). The same bytes as one slice would be one NCCL call, or one copy for each peer. Measured alone, on
NCCL and on copy engines, by the host's and the device's time, for units of Llama-3 8B, Qwen3-30B-A3B and T5-large. Both
layouts must give the same numbers. Writes benchmarks/results/shard_layouts.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.fsdp.layout import FlatLayout
from hocket.kernels.pieces import Pieces
from hocket.program.mesh import Mesh
from hocket.runtime.comm import Group, make_groups

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


def pieces_of(shapes: tuple[tuple[int, int], ...], world: int) -> Pieces:
    """Where a unit's parameters are, divided by rows."""
    return FlatLayout.build(((str(i), shape) for i, shape in enumerate(shapes)), world).pieces


def calls_of(
    group: Group, pieces: Pieces, device: torch.device
) -> dict[tuple[str, str], tuple[Callable[[], Any], Tensor]]:
    """(what, layout) -> a call, and what it makes."""
    whole = torch.randn(pieces.world * pieces.size, device=device).bfloat16()
    grads, into = torch.randn_like(whole), torch.empty(2, pieces.size, device=device)
    outs = [torch.empty_like(whole) for _ in range(2)]
    shard = whole.view(pieces.world, -1)[group.rank]
    packed = pieces.pack(grads, torch.zeros_like(grads))
    return {
        ("gather", "flat"): (lambda: group.all_gather(outs[0], shard), outs[0]),
        ("gather", "pieces"): (lambda: group.all_gather(outs[1], shard, pieces), outs[1]),
        ("reduce", "flat"): (lambda: group.reduce_sum(packed, into[0], add=False), into[0]),
        ("reduce", "pieces"): (lambda: group.reduce_sum(grads, into[1], add=False, pieces=pieces), into[1]),
    }  # fmt: skip


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
    """Assert that both layouts gather and sum the same numbers."""
    flat, pieced = (made["gather", layout][1] for layout in ("flat", "pieces"))
    assert torch.equal(
        pieces.unpack(flat, torch.zeros_like(flat)),
        pieces.unpack(pieces.pack(pieced, flat.clone()), torch.zeros_like(flat)),
    )
    for start, length in pieces.runs:
        one, other = (made["reduce", layout][1][start : start + length] for layout in ("flat", "pieces"))
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.05)


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    rank, device = join()
    world, found = dist.get_world_size(), {}
    for name in ("nccl", "copy_engine"):
        groups = make_groups(Mesh(dp=world), rank, device, name)  # type: ignore[arg-type]
        for unit, shapes in UNITS.items():
            pieces = pieces_of(shapes, world)
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
                "bytes": world * pieces.size * BF16, "parameters": len(shapes),
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

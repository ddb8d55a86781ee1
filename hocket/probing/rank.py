"""One rank of a measurement: `python -m hocket.probing.rank REQUEST FILE`; rank 0 writes the answer to FILE.

The place of the rank is in the variables that `torch.distributed` reads, as for any worker.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hocket.probing.rates import rates
from hocket.probing.request import Measured, Product, Request
from hocket.program.mesh import Mesh
from hocket.program.simulate import Kind
from hocket.runtime.comm import CommOptions, Groups, RowTable, make_groups
from hocket.runtime.lanes import drain
from hocket.runtime.weights import DTYPES
from hocket.runtime.world import everyone, join_world, leave_world

TIMEOUT = 60.0
"""Seconds that a rank waits for the others."""
WARM_UP, TIMES, ROUNDS = 2, {"cpu": 3, "cuda": 20}, 3
"""Calls that do not count, calls of one round, and rounds, of which the fastest counts."""
ROW = 1024
"""Elements of one row of an all-to-all."""


def measure(request: Request, rank: int) -> Measured:
    """Everything that was asked for. The default group exists already, of `request.world` ranks."""
    device = torch.device("cuda", rank) if request.device == "cuda" else torch.device("cpu")
    products = {sizes: _worst(_product(sizes, request, device), device) for sizes in request.products}
    transfers: dict[tuple[Kind, int], float] = {}
    names: tuple[str, ...] = ()
    if request.world > 1:
        options = CommOptions(timeout=TIMEOUT)
        shapes = ((Mesh(dp=request.world, ep=request.world), False), (Mesh(pp=request.world), True))
        for mesh, pipeline in shapes:
            asked = [(kind, size) for kind, size in request.transfers if (kind == "pp") == pipeline]
            if not asked and (pipeline or not request.names):
                continue
            groups = make_groups(mesh, rank, device, request.transport, options)
            calls = list(_transfers(asked, groups, request, device))
            transfers.update((key, _worst(call, device)) for key, call in calls)
            if request.names and not pipeline:
                names = _names_of_a_gather(groups, request, device)
    slowest: dict[str, float] = {}
    if request.rates:
        found = rates(device, DTYPES[request.dtype])
        slowest = {name: min(everyone(rate)) for name, rate in found.items()}
    return Measured(products=products, transfers=transfers, names=names, rates=slowest)


def _worst(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, of the fastest round, on the slowest rank."""
    for _ in range(WARM_UP):
        call()
    _finish(device)
    best = float("inf")
    for _ in range(ROUNDS):
        everyone(None)  # all ranks begin together
        start = time.perf_counter()
        for _ in range(TIMES[device.type]):
            call()
        _finish(device)
        best = min(best, (time.perf_counter() - start) / TIMES[device.type])
    return max(everyone(best))


def _finish(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        drain(device)


def _product(sizes: Product, request: Request, device: torch.device) -> Callable[[], None]:
    m, k, n = sizes
    dtype = DTYPES[request.dtype]
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)

    def call() -> None:
        torch.mm(a, b, out=out)

    return call


def _transfers(
    asked: list[tuple[Kind, int]], groups: Groups, request: Request, device: torch.device
) -> Iterator[tuple[tuple[Kind, int], Callable[[], None]]]:
    """Each transfer with a call that does it once. Buffers are made where the transport wants them."""
    dtype, world = DTYPES[request.dtype], request.world
    for kind, wire in asked:
        shard = max(1, wire // (world - 1) // dtype.itemsize)
        if kind == "gather":
            yield (kind, wire), gather(groups, shard, dtype, device)
        elif kind == "reduce":
            yield (kind, wire), _reduce(groups, shard, dtype, device)
        elif kind == "a2a":
            yield (kind, wire), _a2a(groups, max(1, shard // ROW), dtype, device)
        else:
            yield (kind, wire), _p2p(groups, max(1, wire // dtype.itemsize), dtype, device)


def gather(groups: Groups, shard: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A call that gathers `shard` elements of every rank."""
    group = groups.gather_dense
    mine = torch.ones(shard, device=device, dtype=dtype)
    out = torch.zeros(group.size * shard, device=device, dtype=dtype)
    return lambda: group.all_gather(out, mine).wait()


def _reduce(groups: Groups, shard: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    group = groups.reduce_dense
    full = torch.ones(group.size * shard, device=device, dtype=dtype)
    into = torch.zeros(shard, device=device)
    return lambda: group.reduce_sum(full, into).wait()


def _a2a(groups: Groups, rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """`rows` rows from every rank to every rank."""
    group = groups.a2a
    table = RowTable([[rows] * group.size] * group.size, group.rank)
    mine = torch.ones(rows * group.size, ROW, device=device, dtype=dtype)
    out = torch.empty_like(mine)
    return lambda: group.all_to_all(out, mine, table).wait()


def _p2p(groups: Groups, numel: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Every other rank sends to the next one, which receives. The last of an odd number of ranks looks on."""
    rank, world = groups.control.rank, groups.control.size
    tensor = torch.ones(numel, device=device, dtype=dtype)

    def call() -> None:
        if rank % 2:
            assert groups.recv_act is not None
            groups.recv_act.recv(tensor, groups.recv_act.other).wait()
        elif rank + 1 < world:
            assert groups.send_act is not None
            groups.send_act.send(tensor, groups.send_act.other).wait()

    return call


def _names_of_a_gather(groups: Groups, request: Request, device: torch.device) -> tuple[str, ...]:
    """Of everything that a gather of 16 MiB from every rank ran on this rank's device."""
    dtype = DTYPES[request.dtype]
    call = gather(groups, (16 << 20) // dtype.itemsize, dtype, device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    events = []
    for _ in range(2):  # the first profile of a process misses activities
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            call()
            drain(device)
        events = list(profile.events() or [])
    return tuple(event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA)


def main(arguments: list[str]) -> None:
    """Be one rank."""
    request, target = Request.from_json(arguments[0]), Path(arguments[1])
    torch.set_num_threads(1)
    join_world(request.device == "cuda", TIMEOUT)
    rank = torch.distributed.get_rank()
    if request.device == "cuda":
        torch.cuda.set_device(rank)
    measured = measure(request, rank)
    if rank == 0:
        target.write_text(measured.to_json())
    leave_world()


if __name__ == "__main__":
    main(sys.argv[1:])

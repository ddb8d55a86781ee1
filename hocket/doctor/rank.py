"""One rank of a measurement: rates of its GPU under sustained load, and transfers through hocket's own groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from hocket.model.layers import swiglu
from hocket.predict.simulate import Kind
from hocket.program.mesh import Mesh
from hocket.runtime.comm import CommOptions, Groups, RowTable, make_groups
from hocket.runtime.lanes import drain
from hocket.runtime.world import everyone, join_world, leave_world

LOAD = {"cpu": 0.02, "cuda": 2.0}
"""Seconds of load, of which the second half is timed: a clock takes most of a second to settle."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the timed work. Products are of [n, n] matrices, attention of one sequence, kernels move `nbytes`."""

    n: int
    heads: int
    sequence: int
    head_dim: int
    nbytes: int


SIZES = {"cpu": Sizes(128, 2, 128, 32, 1 << 20), "cuda": Sizes(8192, 32, 8192, 128, 1 << 29)}


def rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Work per second, by field of `Hardware`; FLOPs and bytes are counted as in `predict/cost.py`."""
    size = SIZES[device.type]
    calls = {**_products(size, device, dtype), **_kernels(size, device, dtype)}
    seconds = {name: _seconds(call, device) for name, (_, call) in calls.items()}
    found = {name: work / seconds[name] for name, (work, _) in calls.items()}
    forward, both = (seconds[name] for name in ("attention_fwd_flops", "attention_bwd_flops"))
    backward = max(both - forward, both / 2)  # on a busy host the difference may be anything
    return found | {"attention_bwd_flops": calls["attention_bwd_flops"][0] / backward}


def _attention_flops(size: Sizes) -> float:
    """Forward FLOPs: causal, so half of the square."""
    return 2.0 * size.heads * size.sequence**2 * size.head_dim


Timed = tuple[float, Callable[[], object]]
"""Work, and a call that does it once; the call for attention's backward includes a forward."""


def _products(size: Sizes, device: torch.device, dtype: torch.dtype) -> Mapping[str, Timed]:
    a, b = (torch.randn(size.n, size.n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    shape = 1, size.heads, size.sequence, size.head_dim
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient, flops = torch.randn(shape, device=device).to(dtype), _attention_flops(size)

    def forward() -> None:
        with torch.no_grad():
            scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    return {
        "gemm_flops": (2.0 * size.n**3, lambda: torch.mm(a, b, out=out)),
        "attention_fwd_flops": (flops, forward),
        "attention_bwd_flops": (2.5 * flops, both),
    }


def _kernels(size: Sizes, device: torch.device, dtype: torch.dtype) -> Mapping[str, Timed]:
    """A copy, and SwiGLU as an example of kernels between matmuls: it reads twice what it writes."""
    rows = size.nbytes // (size.n * dtype.itemsize)
    source = torch.randn(rows, size.n, device=device).to(dtype)
    into = torch.empty_like(source)

    def kernel() -> None:
        with torch.no_grad():
            swiglu(source)

    return {
        "memory_bandwidth": (2.0 * source.nbytes, lambda: into.copy_(source)),
        "kernel_bandwidth": (1.5 * source.nbytes, kernel),
    }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds per call under sustained load, measured in its second half."""
    call()
    once = _timed(call, 3, device)
    count = max(1, int(LOAD[device.type] / 2 / max(once, 1e-6)))
    _timed(call, count, device)
    return _timed(call, count, device)


def _timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type == "cuda":
        drain(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        drain(device)
    return (time.perf_counter() - start) / count


# -- transfers ---------------------------------------------------------------------------------------------------------

TIMEOUT = 60.0
"""Seconds that a rank waits for the others."""
WARM_UP, TIMES, ROUNDS = 2, {"cpu": 3, "cuda": 20}, 3
"""Untimed calls, calls per round, and rounds, of which the fastest counts."""
ROW = 1024
"""Elements of one row of an all-to-all."""
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


Transfers = Mapping[tuple[Kind, int], float]
"""As in `measure.py`, which imports no torch."""


def meet_and_measure(
    transfers: Sequence[tuple[Kind, int]], device: str, rank: int, world: int, rendezvous: str
) -> tuple[Transfers, dict[str, float]]:
    """Join the other ranks through a file, and measure."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(rendezvous, world)
    join_world(device == "cuda", TIMEOUT, store=store, rank=rank, world_size=world)
    if device == "cuda":
        torch.cuda.set_device(rank)
    measured = measure(transfers, device, rank, world)
    leave_world()
    return measured


def measure(
    transfers: Sequence[tuple[Kind, int]], kind: str, rank: int, world: int
) -> tuple[Transfers, dict[str, float]]:
    """Seconds of transfers, and rates of the slowest rank, with all ranks at once. The default group must exist."""
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    dtype, options, found = DTYPES[kind], CommOptions(timeout=TIMEOUT), dict[tuple[Kind, int], float]()
    for mesh, pipeline in ((Mesh(dp=world, ep=world), False), (Mesh(pp=world), True)):
        asked = [(each, size) for each, size in transfers if (each == "pp") == pipeline]
        if asked:
            groups = make_groups(mesh, rank, device, "nccl" if kind == "cuda" else "gloo", options)
            calls = [(each, _transfer(*each, groups, dtype, device)) for each in asked]
            found.update((each, _worst(call, device)) for each, call in calls)
    return found, {name: min(everyone(rate)) for name, rate in rates(device, dtype).items()}


def _worst(call: Callable[[], None], device: torch.device) -> float:
    """Seconds per call in the fastest round, on the slowest rank."""
    _timed(call, WARM_UP, device)
    best = float("inf")
    for _ in range(ROUNDS):
        everyone(None)  # start all ranks together
        best = min(best, _timed(call, TIMES[device.type], device))
    return max(everyone(best))


def _transfer(kind: Kind, wire: int, groups: Groups, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A call that does a transfer once. Buffers are allocated as the transport requires."""
    world, rank = groups.control.size, groups.control.rank
    shard = max(1, wire // (world - 1) // dtype.itemsize)
    if kind == "gather":
        own, whole = (torch.ones(n * shard, device=device, dtype=dtype) for n in (1, world))
        return lambda: groups.gather_dense.all_gather(whole, own).wait()
    if kind == "reduce":
        full, into = torch.ones(world * shard, device=device, dtype=dtype), torch.zeros(shard, device=device)
        return lambda: groups.reduce_dense.reduce_sum(full, into).wait()
    if kind == "a2a":  # equally many rows between all pairs of ranks
        rows = max(1, shard // ROW)
        table = RowTable([[rows] * world] * world, groups.a2a.rank)
        mine = torch.ones(rows * world, ROW, device=device, dtype=dtype)
        out = torch.empty_like(mine)
        return lambda: groups.a2a.all_to_all(out, mine, table).wait()
    tensor = torch.ones(max(1, wire // dtype.itemsize), device=device, dtype=dtype)

    def send_or_receive() -> None:
        """Every other rank sends to the next one. The last of an odd number of ranks is idle."""
        if rank % 2:
            assert groups.recv_act is not None
            groups.recv_act.recv(tensor, groups.recv_act.other).wait()
        elif rank + 1 < world:
            assert groups.send_act is not None
            groups.send_act.send(tensor, groups.send_act.other).wait()

    return send_or_receive

"""Linear layers of tensor-parallel ranks: what does communication cost when products run beside it?

    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel

The layers of Llama-3 8B and 70B on 8,192 tokens, all ranks together as one tensor-parallel group. *Plain* is a
collective of NCCL and then a product, or a product and then a collective, in bf16 with NCCL's own settings. Every way
of `hocket/parallel/tensor.py` does the same work, forward and backward with the weight gradient. Ways take turns with
plain in blocks, and a speed-up is the median of the ratios of neighbouring blocks. Then whole layers, with attention
and norms: plain, and the ways that were fastest. A minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks import join
from benchmarks.record import write
from hocket.config import ModelConfig
from hocket.model.families import llama3_8b
from hocket.model.layers import swiglu
from hocket.parallel.mesh import Mesh
from hocket.parallel.tensor import Tensors, Way, column_linear, row_linear
from hocket.runtime.comm import CommOptions, Group, make_groups
from hocket.runtime.norms import rms_norm
from hocket.runtime.transports import Nccl
from hocket.runtime.weights import WgradQueue, collecting, manage

MODELS = {
    "llama3_8b": llama3_8b(),
    "llama3_70b": replace(llama3_8b(), hidden=8192, layers=80, heads=64, ffn=28672),
    "smoke": replace(llama3_8b(), hidden=1024, heads=16, ffn=2048, head_dim=64),
}
ROLES = ("qkv", "proj", "fc1", "fc2")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One way of a layer: on NCCL's own group, or on hocket's."""

    name: str
    way: Way
    plain: bool = False


def cases(role: str, direction: str, size: int) -> list[Case]:
    """What is tried; the first is plain."""
    splits = [n for n in (size, 4, 2, 1) if size % n == 0 and n <= size]
    splits = sorted(set(splits), reverse=True)
    found = [Case("plain", Way(), plain=True)]
    if role in ("qkv", "fc1"):
        if direction == "forward":
            return [*found, *(Case(f"ring/{n}", Way("ring", "off", (n, n))) for n in splits)]
        found.append(Case("bulk", Way("off", "bulk")))
        return [*found, *(Case(f"pipeline/{n}", Way("off", "pipeline", (n, n))) for n in splits if n > 1)]
    if direction == "backward":
        return [*found, *(Case(f"ring/{n}", Way("off", "ring", (n, n))) for n in splits)]
    return [*found, *(Case(f"pipeline/{n}", Way("pipeline", "off", (n, n))) for n in splits if n > 1)]


class Bench:
    """The groups of a rank, and its clock."""

    def __init__(self, rank: int, device: torch.device, tokens: int, widest: int, rounds: int) -> None:
        world = dist.get_world_size()
        self.rank, self.size, self.device, self.tokens, self.rounds = rank, world, device, tokens, rounds
        options = CommOptions(timeout=60.0, tokens=tokens * widest * 2)
        self.groups = make_groups(Mesh(tp=world), rank, device, "nccl", options)
        self.ours = Tensors.of(self.groups.tp, device)
        own = dist.group.WORLD
        assert own is not None
        ranks = tuple(range(world))
        self.plain = Tensors(Group("plain", ranks, rank, Nccl(own, ranks, device)), self.ours.side)

    def use(self, case: Case) -> Tensors:
        """The group of a case."""
        return self.plain if case.plain else self.ours

    def new(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16) * 0.02

    def block(self, call: Call, repeats: int) -> float:
        """Seconds of one of several calls in a row, on the slowest rank."""
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        worst = torch.tensor(start.elapsed_time(end) / 1e3 / repeats, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def compare(self, calls: dict[str, Call]) -> dict[str, dict[str, Any]]:
        """Seconds of every call, and how much faster each is than the first: blocks in turns, there and back."""
        first = next(iter(calls))
        repeats = max(3, min(20, int(0.02 / self.block(calls[first], 3))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.rounds):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                times[name].append(self.block(calls[name], repeats))
        return {
            name: {
                "seconds": statistics.median(values),
                "speedup": statistics.median(a / b for a, b in zip(times[first], values, strict=True)),
                "all": values,
            }
            for name, values in times.items()
        }


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of a layer's weights, whole."""
    width = model.heads * model.head_dim
    return {
        "qkv": (width + 2 * model.kv_heads * model.head_dim, model.hidden),
        "proj": (model.hidden, width),
        "fc1": (2 * model.ffn, model.hidden),
        "fc2": (model.hidden, model.ffn),
    }


def is_column(role: str) -> bool:
    return role in ("qkv", "fc1")


def linear(role: str, x: Tensor, weight: Tensor, tensors: Tensors, way: Way) -> Tensor:
    """The layer of a role."""
    return column_linear(x, (weight,), tensors, way)[0] if is_column(role) else row_linear(x, weight, tensors, way)


def managed(name: str, value: Tensor) -> tuple[nn.Parameter, Tensor]:
    """A parameter as a plan has it, and room for its gradient."""
    param = nn.Parameter(value)
    manage(param, name).value = value
    return param, torch.empty_like(value)


class Role:
    """One weight of a layer on this rank, its input, and the gradient of its output."""

    def __init__(self, bench: Bench, role: str, shape: tuple[int, int]) -> None:
        (out, into), size, tokens = shape, bench.size, bench.tokens
        self.bench, self.role = bench, role
        rows, columns = (out // size, into) if is_column(role) else (out, into // size)
        self.weight, self.grad = managed(role, bench.new(rows, columns))
        self.x = bench.new(tokens // size if is_column(role) else tokens, columns).requires_grad_()
        self.g = bench.new(tokens if is_column(role) else tokens // size, rows)
        self.flops = 2.0 * tokens * out * into / size

    def forward(self, case: Case) -> Tensor:
        return linear(self.role, self.x, self.weight, self.bench.use(case), case.way)

    def call(self, case: Case, direction: str) -> Call:
        """Forward alone, or backward alone of a forward that has been."""
        if direction == "forward":

            def forward() -> Tensor:
                with torch.no_grad():
                    return self.forward(case)

            return forward
        queue = WgradQueue()
        with collecting(queue):
            y = self.forward(case)

        def backward() -> Sequence[Tensor]:
            dx = torch.autograd.grad(y, self.x, self.g, retain_graph=True)
            queue.drain(lambda weight: self.grad)
            return dx[0], self.grad

        return backward

    def check(self, calls: dict[str, Call]) -> None:
        """All ways give what plain gives, but for rounding, twice in a row."""
        results: dict[str, Any] = {}
        for turn in range(2):
            for name, call in calls.items():
                found = call()
                results[f"{name} {turn}"] = tuple(t.clone() for t in found) if isinstance(found, tuple) else found
        wanted: Any = results["plain 0"]
        for name, found in results.items():
            pairs: Any = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
            for a, b in pairs:
                error = (a.float() - b.float()).abs().max() / a.float().abs().max()
                assert error < 0.02, f"{self.role} {name}: off by {error:.3f} of the largest value"

    def measure(self, direction: str) -> dict[str, Any]:
        """Every way against plain."""
        calls = {case.name: self.call(case, direction) for case in cases(self.role, direction, self.bench.size)}
        self.check(calls)
        found = self.bench.compare(calls)
        work = self.flops * (1 if direction == "forward" else 2)
        for figures in found.values():
            figures["tflop_per_s"] = work / figures["seconds"] / 1e12
        return found


class Layer:
    """A whole dense layer: norms, attention, a gated MLP."""

    def __init__(self, bench: Bench, model: ModelConfig) -> None:
        self.bench, self.model = bench, model
        size, d = bench.size, model.hidden
        params = {
            role: managed(role, bench.new(*((a // size, b) if is_column(role) else (a, b // size))))
            for role, (a, b) in shapes(model).items()
        }
        self.weights = {role: param for role, (param, _) in params.items()}
        norms = [managed(f"norm{i}", torch.ones(d, device=bench.device, dtype=torch.bfloat16)) for i in range(2)]
        self.norms = [param for param, _ in norms]
        self.grads = {f"norm{i}": grad for i, (_, grad) in enumerate(norms)}
        self.grads |= {role: grad for role, (_, grad) in params.items()}
        self.x = bench.new(bench.tokens // size, d).requires_grad_()
        self.g = bench.new(bench.tokens // size, d)

    def forward(self, tensors: Tensors, ways: dict[str, Way]) -> Tensor:
        c, size = self.model, self.bench.size

        def apply(role: str, x: Tensor) -> Tensor:
            return linear(role, x, self.weights[role], tensors, ways[role])

        qkv = apply("qkv", rms_norm(self.x, self.norms[0], c.norm_eps))
        heads, keys = c.heads // size, c.kv_heads // size
        q, k, v = qkv.view(1, -1, heads + 2 * keys, c.head_dim).transpose(1, 2).split((heads, keys, keys), 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.x + apply("proj", o.transpose(1, 2).reshape(-1, heads * c.head_dim))
        return x + apply("fc2", swiglu(apply("fc1", rms_norm(x, self.norms[1], c.norm_eps))))

    def call(self, case: Case, ways: dict[str, Way]) -> Call:
        def step() -> object:
            queue = WgradQueue()
            with collecting(queue):
                y = self.forward(self.bench.use(case), ways)
            (dx,) = torch.autograd.grad(y, self.x, self.g)
            queue.drain(lambda weight: self.grads[weight.name])
            return dx

        return step

    def measure(self, ways: dict[str, Way]) -> dict[str, Any]:
        """Forward and backward: plain, hocket's ways, and plain again for the noise."""
        plain = dict.fromkeys(ROLES, Way())
        calls = {
            "plain": self.call(Case("plain", Way(), plain=True), plain),
            "overlapped": self.call(Case("overlapped", Way()), ways),
            "plain again": self.call(Case("plain", Way(), plain=True), plain),
        }
        return self.bench.compare(calls)


def transports(bench: Bench, hidden: int) -> dict[str, Any]:
    """Seconds of a gather and of a sum alone, by NCCL and by copies."""
    size = bench.size
    x, y = bench.new(bench.tokens // size, hidden), bench.new(bench.tokens, hidden)
    tokens = bench.ours.tokens
    assert tokens is not None

    def copied_sum() -> None:
        out = torch.empty_like(x)
        collect = tokens.collect(out)
        for step in range(1, size + 1):
            to = (bench.rank + step) % size
            collect.place(to, to + 1)
            collect.send(to, to + 1)
        collect.sum(out)

    calls: dict[str, Call] = {
        "gather, nccl": lambda: bench.plain.gather(x),
        "gather, nccl of 16 SMs": lambda: bench.ours.gather(x),
        "gather, copies": lambda: bench.ours.begin_gather(x).get(),
        "sum, nccl": lambda: bench.plain.sum(y),
        "sum, nccl of 16 SMs": lambda: bench.ours.sum(y),
        "sum, copies": copied_sum,
    }
    found = {name: min(bench.block(call, 10) for _ in range(3)) for name, call in calls.items()}
    moved = y.nbytes * (size - 1) / size
    return {name: {"seconds": seconds, "gb_per_s": moved / seconds / 1e9} for name, seconds in found.items()}


def fastest(found: dict[str, Any], role: str, size: int) -> Way:
    """The way that was fastest in each direction."""
    best = {}
    for direction in ("forward", "backward"):
        by_name = {case.name: case for case in cases(role, direction, size)}
        name = min(by_name, key=lambda name: found[direction][name]["seconds"])
        best[direction] = by_name[name].way
    forward, backward = best["forward"], best["backward"]
    return Way(forward.forward, backward.backward, (forward.splits[0], backward.splits[1]))


def measure_role(bench: Bench, role: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Every way of a role, forward and backward."""
    one = Role(bench, role, shape)
    return {direction: one.measure(direction) for direction in ("forward", "backward")}


def measure_model(bench: Bench, name: str) -> dict[str, Any]:
    """All roles and both directions of a model's layer, then the layer."""
    model = MODELS[name]
    found: dict[str, Any] = {"transport": transports(bench, model.hidden), "roles": {}}
    ways = {}
    for role in ROLES:
        found["roles"][role] = measure_role(bench, role, shapes(model)[role])
        ways[role] = fastest(found["roles"][role], role, bench.size)
    found["ways"] = {role: [way.forward, way.backward, way.splits] for role, way in ways.items()}
    found["layer"] = Layer(bench, model).measure(ways)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """The figures, for people."""
    print(f"== {name}")
    for what, figures in found["transport"].items():
        print(f"{what:24} {1e3 * figures['seconds']:7.3f} ms  {figures['gb_per_s']:6.0f} GB/s")
    for role, directions in found["roles"].items():
        for direction, ways in directions.items():
            for way, figures in ways.items():
                times = f"{1e3 * figures['seconds']:7.3f} ms  {figures['tflop_per_s']:5.0f} TFLOP/s"
                print(f"{role:5} {direction:9} {way:12} {times}  {figures['speedup']:5.2f}x")
    print("ways", found["ways"])
    for way, figures in found["layer"].items():
        print(f"layer {way:12} {1e3 * figures['seconds']:7.3f} ms  {figures['speedup']:5.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["llama3_8b", "llama3_70b"], choices=MODELS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rank, device = join()
    world = dist.get_world_size()
    widest = max(MODELS[name].hidden for name in options.models)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bench = Bench(rank, device, options.tokens, widest, options.rounds)
        result: dict[str, Any] = {"tp": world, "tokens": options.tokens, "models": {}}
        for name in options.models:
            result["models"][name] = measure_model(bench, name)
            if rank == 0:
                show(name, result["models"][name])
    if rank == 0:
        name = "tensor_parallel" if world == 4 else f"tensor_parallel_{world}"
        print(write(name, result, options.out, options.commit))
    dist.barrier()
    bench.groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What `tensor_parallel.py` measures: linear layers of tensor-parallel ranks and whole layers, done in every way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.config.overlap import COLUMNS, ROLES, Method, possible
from hocket.layers.norms import rms_norm
from hocket.layers.tensor import Arriving, TensorParallel, Way, column_linear, row_linear
from hocket.model.layers import swiglu
from hocket.program.mesh import Mesh
from hocket.runtime.comm import CommOptions, Group, make_groups
from hocket.runtime.transports import Nccl
from hocket.runtime.weights import WgradQueue, collecting, manage

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One way of a layer, and whose group communicates."""

    name: str
    way: Way
    group: Literal["nccl", "ours", "nobody"] = "ours"
    """NCCL with its own settings, hocket's, or none: then only products are left."""


PLAIN, ALONE = Case("plain", Way(), "nccl"), Case("products alone", Way(), "nobody")
AGAIN = replace(PLAIN, name="plain again")


def tried(role: str, direction: str, size: int) -> list[Case]:
    """Every way in which a layer can be done in a direction; of the other direction's they say nothing."""
    method: Method = "ring" if (role in COLUMNS) == (direction == "forward") else "pipeline"

    def way(name: Method, splits: int = 0) -> Way:
        both = (splits, splits)
        return Way(name, "off", both) if direction == "forward" else Way("off", name, both)

    fewest = 1 if method == "ring" else 2
    found = [Case("off", Way())]
    if "bulk" in possible(role, direction):
        found.append(Case("bulk", way("bulk")))
    counts = [n for n in range(size, fewest - 1, -1) if size % n == 0]
    return found + [Case(f"{method}/{splits}", way(method, splits)) for splits in counts]


@dataclass(frozen=True)
class Alone(TensorParallel):
    """Tensor-parallel ranks among whom nothing moves: tokens of others are random, sums are this rank's alone."""

    everyones: dict[torch.Size, Tensor] = field(default_factory=dict)

    def gather(self, x_SD: Tensor) -> Tensor:
        if x_SD.shape not in self.everyones:
            self.everyones[x_SD.shape] = torch.randn(
                self.size * x_SD.shape[0], x_SD.shape[1], device=x_SD.device, dtype=x_SD.dtype
            ).mul_(0.02)
        return self.everyones[x_SD.shape]

    def begin_gather(self, x_SD: Tensor) -> Arriving:
        return Arriving(self.gather(x_SD))

    def sum(self, partial_TD: Tensor) -> Tensor:
        return partial_TD[: partial_TD.shape[0] // self.size]


class Bench:
    """The groups of a rank, and its clock."""

    def __init__(self, rank: int, device: torch.device, tokens: int, widest: int, rounds: int) -> None:
        world = dist.get_world_size()
        self.rank, self.size, self.device, self.tokens, self.rounds = rank, world, device, tokens, rounds
        options = CommOptions(timeout=60.0, tokens=tokens * widest * 2)
        self.groups = make_groups(Mesh(tp=world), rank, device, "nccl", options)
        self.ours = TensorParallel.of(self.groups.tp, device)
        own = dist.group.WORLD
        assert own is not None
        ranks = tuple(range(world))
        plain = Group("plain", ranks, rank, Nccl(own, ranks, device))
        self.plain = TensorParallel(plain, self.ours.side, self.ours.second_queue)
        self.alone = Alone(plain, self.ours.side, self.ours.second_queue)

    def use(self, case: Case) -> TensorParallel:
        """The group of a case."""
        if case.group == "ours":
            return self.ours
        return self.plain if case.group == "nccl" else self.alone

    def new(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16) * 0.02

    def block(self, call: Call, repeats: int) -> tuple[float, float]:
        """Of one of several calls in a row, on the slowest rank: seconds, and those in which the host issues it."""
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        issued = time.perf_counter() - begin
        end.record()
        end.synchronize()
        worst = torch.tensor([start.elapsed_time(end) / 1e3, issued], dtype=torch.float64) / repeats
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        seconds, issuing = worst.tolist()
        return seconds, issuing

    def compare(self, calls: dict[str, Call]) -> dict[str, dict[str, Any]]:
        """Seconds of every call, and how much faster each is than the first: blocks in turns, there and back."""
        first = next(iter(calls))
        repeats = max(3, min(20, int(0.02 / self.block(calls[first], 3)[0])))
        times: dict[str, list[float]] = {name: [] for name in calls}
        hosts: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.rounds):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                seconds, issuing = self.block(calls[name], repeats)
                times[name].append(seconds)
                hosts[name].append(issuing)
        return {
            name: {
                "seconds": statistics.median(values),
                "speedup": statistics.median(a / b for a, b in zip(times[first], values, strict=True)),
                "host_seconds": statistics.median(hosts[name]),
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


def linear(role: str, x: Tensor, weight: Tensor, tp: TensorParallel, way: Way) -> Tensor:
    """The layer of a role."""
    return column_linear(x, (weight,), tp, way)[0] if role in COLUMNS else row_linear(x, weight, tp, way)


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
        rows, columns = (out // size, into) if role in COLUMNS else (out, into // size)
        self.weight, self.grad = managed(role, bench.new(rows, columns))
        self.x = bench.new(tokens // size if role in COLUMNS else tokens, columns).requires_grad_()
        self.g = bench.new(tokens if role in COLUMNS else tokens // size, rows)
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
            with torch.autograd.set_multithreading_enabled(False):  # as in segments
                dx = torch.autograd.grad(y, self.x, self.g, retain_graph=True)
            queue.drain(lambda weight: self.grad)
            return dx[0], self.grad

        return backward

    def check(self, calls: dict[str, Call]) -> None:
        """All ways that communicate give what plain gives, but for rounding, twice in a row."""
        results: dict[str, Any] = {}
        for turn in range(2):
            for name, call in calls.items():
                if name == ALONE.name:
                    continue
                found = call()
                results[f"{name} {turn}"] = tuple(t.clone() for t in found) if isinstance(found, tuple) else found
        wanted: Any = results["plain 0"]
        for name, found in results.items():
            pairs: Any = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
            for a, b in pairs:
                error = (a.float() - b.float()).abs().max() / a.float().abs().max()
                assert error < 0.02, f"{self.role} {name}: off by {error:.3f} of the largest value"

    def measure(self, direction: str, auto: Way) -> dict[str, Any]:
        """Plain, every way, the one that the rule chooses, and products alone."""
        ways = [PLAIN, *tried(self.role, direction, self.bench.size), Case("auto", auto), ALONE, AGAIN]
        calls = {case.name: self.call(case, direction) for case in ways}
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
            role: managed(role, bench.new(*((a // size, b) if role in COLUMNS else (a, b // size))))
            for role, (a, b) in shapes(model).items()
        }
        self.weights = {role: param for role, (param, _) in params.items()}
        norms = [managed(f"norm{i}", torch.ones(d, device=bench.device, dtype=torch.bfloat16)) for i in range(2)]
        self.norms = [param for param, _ in norms]
        self.grads = {f"norm{i}": grad for i, (_, grad) in enumerate(norms)}
        self.grads |= {role: grad for role, (_, grad) in params.items()}
        self.x = bench.new(bench.tokens // size, d).requires_grad_()
        self.g = bench.new(bench.tokens // size, d)

    def forward(self, tp: TensorParallel, ways: Mapping[str, Way]) -> Tensor:
        c, size = self.model, self.bench.size

        def apply(role: str, x: Tensor) -> Tensor:
            return linear(role, x, self.weights[role], tp, ways[role])

        qkv = apply("qkv", rms_norm(self.x, self.norms[0], c.norm_eps))
        heads, keys = c.heads // size, max(1, c.kv_heads // size)
        q, k, v = qkv.view(1, -1, heads + 2 * keys, c.head_dim).transpose(1, 2).split((heads, keys, keys), 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.x + apply("proj", o.transpose(1, 2).reshape(-1, heads * c.head_dim))
        return x + apply("fc2", swiglu(apply("fc1", rms_norm(x, self.norms[1], c.norm_eps))))

    def call(self, case: Case, ways: Mapping[str, Way]) -> Call:
        def step() -> object:
            queue = WgradQueue()
            with collecting(queue):
                y = self.forward(self.bench.use(case), ways)
            with torch.autograd.set_multithreading_enabled(False):
                (dx,) = torch.autograd.grad(y, self.x, self.g)
            queue.drain(lambda weight: self.grads[weight.name])
            return dx

        return step

    def measure(self, fastest: Mapping[str, Way], auto: Mapping[str, Way]) -> dict[str, Any]:
        """Forward and backward: plain, the fastest ways, those that the rule chooses, and products alone."""
        off: dict[str, Way] = {role: Way() for role in ROLES}
        calls = {
            "plain": self.call(PLAIN, off),
            "off": self.call(Case("off", Way()), off),
            "overlapped": self.call(Case("overlapped", Way()), fastest),
            "auto": self.call(Case("auto", Way()), auto),
            "products alone": self.call(ALONE, off),
            "plain again": self.call(AGAIN, off),
        }
        return self.bench.compare(calls)

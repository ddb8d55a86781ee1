"""What products in fp8 save: casts, each product, a dense layer and layers with experts, checked first and then timed.

    python -m benchmarks.fp8_products
    python -m benchmarks.fp8_products --only checks

Checks come first, on new random numbers and with new memory full of nan: casts against their formulas, byte for byte;
products against the same numbers multiplied in fp32, and against what was never rounded to fp8, within the format's
bound; and a repetition of each, bit for bit. Then casts are timed against a copy's bandwidth, products against those in
bf16, and layers as a plan runs them: managed weights, weight gradients that wait in a queue and are written to bf16.
Their weights are cast anew for each microbatch, as where each gathers them, or once, as where a step does. Times are
those of a CUDA graph where that can be recorded, so that no host is waited for.

A variant that fails is named with its error, and the others go on. About 75 s on one H200. Without a GPU the sizes are
tiny, formulas run, and it shows only that everything works.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels import seconds
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.config import ModelConfig
from hocket.kernels.usable import formulas
from hocket.model.layers import DenseLayer
from hocket.model.moe import ONLY, Experts, MoELayer
from hocket.parallel.linears import WHOLE, Fp8Linears, Linears
from hocket.runtime import fp8
from hocket.runtime.fp8 import ALL, Products, Rows
from hocket.runtime.fp8_experts import grouped_product, owners
from hocket.runtime.functional import grouped_mm
from hocket.runtime.segment import Segment
from hocket.runtime.weights import Weight, manage, put, write_product

BF16 = torch.bfloat16
LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Output and input width of the linears of one layer of Llama-3 8B."""
TOKENS = (2048, 8192)
EXPERTS = {"wide": (64, 2048, 1536, 8), "narrow": (64, 2048, 768, 8)}
"""Experts of a rank, hidden width, width of an expert, experts of a token."""
ROUNDED = 0.05
"""Largest difference of a product in fp8 from one of what was never rounded, relative to its norm: both operands are
rounded to 4 digits, by 2^-4 at most and 0.027 in the mean square."""
SAME = 0.006
"""The same from a product of the same rounded numbers in fp32: its result is rounded to bf16, sums to 13 digits."""
_FAST = 0.02
"""And of one whose sums tensor cores keep in their own format."""


@dataclass
class Found:
    """Results by kind, and what failed."""

    device: torch.device
    repeats: int
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Keep what one variant finds, or why it failed."""
        try:
            found = {"name": name, **run()}
        except Exception as error:
            self.failed.append(f"{kind} {name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            print(f"FAILED {self.failed[-1]}", flush=True)
            traceback.print_exc(limit=-4)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return
        self.results.setdefault(kind, []).append(found)
        words = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
        )
        print(f"{kind}: {words}", flush=True)

    def time(self, run: Callable[[], object]) -> float:
        return seconds(run, self.device, self.repeats)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers whose rows differ in size, as activations of tokens do."""
        x = torch.randn(shape, device=self.device) * scale
        return (x * torch.exp(torch.randn(*shape[:-1], 1, device=self.device) / 2)).to(BF16)

    def poison(self) -> None:
        """Fill memory with nan, in any format, and give it back to the allocator: the next tensors lie in it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            blocks = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in (6 << 30, 1 << 20)]
            for block in blocks:
                block.fill_(255)


def apart(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, over that of what is expected; inf where something is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def require(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise AssertionError(f"{name} is apart by {value:.3g}, and {most:.3g} is allowed")


# ------------------------------------------------------------------------------------------------------------ checks


def check_cast(f: Found, make: Callable[[], Rows], exact: bool) -> dict[str, Any]:
    """A cast against its formula: the same bytes, or, where sigmoids may differ, neighbours of few."""
    f.poison()
    found, again = make(), make()
    with formulas():
        expected = make()
    assert torch.equal(found.values.view(torch.uint8), again.values.view(torch.uint8)), "another cast, other bytes"
    assert torch.equal(found.scale, expected.scale), "other scales than the formula's"
    a, b = found.values.float(), expected.values.float()
    share = float((a != b).float().mean())
    if exact:
        assert share == 0.0, f"{share:.2%} of the bytes differ from the formula's"
    assert share < 0.01, f"{share:.2%} of the bytes differ from the formula's"
    assert bool(((a - b).abs() <= b.abs() / 8 + 2**-9).all()), "some differ by more than one number"
    return {"other_bytes": share}


def check_transposed(f: Found, rows: int, width: int) -> dict[str, Any]:
    x = fp8.cast_rows([f.normal(rows, width)])
    factors = 2.0 ** torch.randint(-30, 3, (rows,), device=f.device)
    f.poison()
    found = fp8.transposed(x.values), fp8.transposed(x.values, factors, factors.amax())
    with formulas():
        expected = fp8.transposed(x.values), fp8.transposed(x.values, factors, factors.amax())
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)), "other bytes"
    assert torch.equal(found[1].float(), expected[1].float()), "other bytes, with factors"
    return {}


def check_linear(f: Found, tokens: int, outs: Sequence[int], width: int) -> dict[str, Any]:
    """All three products of weights with one input, as a plan runs them: against fp32, and against their formulas."""
    x = f.normal(1, tokens, width).requires_grad_()
    params = [nn.Parameter(f.normal(out, width, scale=0.02)) for out in outs]
    gs = [f.normal(1, tokens, out, scale=1e-4) for out in outs]

    def run() -> list[Tensor]:
        f.poison()
        ys = fp8.fp8_linears(x, params, ALL)
        return [*ys, *torch.autograd.grad(ys, [x, *params], gs)]

    found, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "a repetition has other bits"
    with formulas():
        same = run()
    wide = [t.detach().float().requires_grad_() for t in (x, *params)]
    ys = [wide[0] @ p.t() for p in wide[1:]]
    exact = [*ys, *torch.autograd.grad(ys, wide, [g.float() for g in gs])]
    names = [*(f"y{i}" for i in range(len(outs))), "dx", *(f"dw{i}" for i in range(len(outs)))]
    worst = {"from_fp32": 0.0, "from_formula": 0.0}
    for name, a, b, c in zip(names, found, exact, same, strict=True):
        require(f"{name} from fp32", from_fp32 := apart(a, b), ROUNDED)
        require(f"{name} from its formula", from_formula := apart(a, c), SAME if name[0:2] == "dw" else _FAST)
        worst = {
            "from_fp32": max(worst["from_fp32"], from_fp32), "from_formula": max(worst["from_formula"], from_formula)
        }  # fmt: skip
    return worst


def check_added(f: Found, tokens: int, out: int, width: int) -> dict[str, Any]:
    """A weight gradient that is added to fp32, and one written to a view of a flat buffer whose neighbours stay."""
    x, g = fp8.cast_rows([f.normal(tokens, width)]), fp8.cast_rows([f.normal(tokens, out)])
    factors = fp8._Factors(g, x, None)
    exact = (g.values.float() * g.scale[:, None]).t() @ (x.values.float() * x.scale[:, None])
    total = torch.ones(out, width, device=f.device)
    factors.write(0, out, BF16, total, True, 0.5)
    flat = torch.full((out * width + 128,), 7.0, dtype=BF16, device=f.device)
    factors.write(0, out, BF16, flat[64:-64].view(out, width), False, 1.0)
    assert bool((flat[:64] == 7).all() and (flat[-64:] == 7).all()), "neighbours were written"
    require("an added gradient", apart(total - 1, exact / 2), SAME)
    require("a written gradient", found := apart(flat[64:-64].view(out, width), exact), SAME)
    return {"from_rounded": found}


def check_mlp(f: Found, tokens: int, width: int, inner: int) -> dict[str, Any]:
    x = f.normal(tokens, width).requires_grad_()
    into, out = (nn.Parameter(f.normal(*shape, scale=0.02)) for shape in ((2 * inner, width), (width, inner)))
    g = f.normal(tokens, width, scale=1e-4)

    def run() -> list[Tensor]:
        f.poison()
        y = fp8.fp8_mlp(x, into, out)
        return [y, *torch.autograd.grad(y, [x, into, out], g)]

    found, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "a repetition has other bits"
    with formulas():
        same = run()
    wide = [t.detach().float().requires_grad_() for t in (x, into, out)]
    gate, up = (wide[0] @ wide[1].t()).chunk(2, 1)
    y = (nn.functional.silu(gate) * up) @ wide[2].t()
    exact = [y, *torch.autograd.grad(y, wide, g.float())]
    for name, a, b, c in zip(("y", "dx", "dw_gate_up", "dw_down"), found, exact, same, strict=True):
        require(f"{name} from fp32", apart(a, b), 2.5 * ROUNDED)  # of several products, one after the other
        require(f"{name} from its formula", apart(a, c), 2 * _FAST)
    return {"from_fp32": max(map(apart, found, exact)), "from_formula": max(map(apart, found, same))}


def ends_of(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device)


def check_grouped(f: Found, counts: Sequence[int], more: int, width: int, inner: int) -> dict[str, Any]:
    """Grouped products; behind the last expert's rows there are `more`, full of nan, which nobody may read."""
    ends, rows = ends_of(counts, f.device), sum(counts)
    x, w = f.normal(rows + more, width), f.normal(len(counts), inner, width, scale=0.02)
    x[rows:] = float("nan")
    cast = fp8.cast_rows([w.flatten(0, 1)])
    stacked, scale = cast.values.view(w.shape), cast.scale.view(w.shape[:2])
    a = fp8.cast_rows([x])
    f.poison()
    found, again = (grouped_product(a, stacked, scale, ends, BF16)[:rows] for _ in range(2))
    assert torch.equal(found, again), "a repetition has other bits"
    exact, low = torch.empty(rows, inner, device=f.device), 0
    for e, high in enumerate(ends.tolist()):
        exact[low:high] = x[low:high].float() @ w[e].float().t()
        low = high
    with formulas():
        same = grouped_product(a, stacked, scale, ends, BF16)[:rows]
    require("from fp32", from_fp32 := apart(found, exact), ROUNDED)
    require("from its formula", from_formula := apart(found, same), _FAST)
    return {"from_fp32": from_fp32, "from_formula": from_formula}


def check_experts(f: Found, counts: Sequence[int], more: int, width: int, inner: int) -> dict[str, Any]:
    config = ModelConfig(experts=len(counts), hidden=width, expert_ffn=inner)
    ends, rows = ends_of(counts, f.device), sum(counts)
    count = torch.tensor([rows], dtype=torch.int32, device=f.device)
    x, g = f.normal(rows + more, width), f.normal(rows + more, width, scale=1e-4)
    x[rows:], g[rows:] = float("nan"), float("nan")
    params: list[Tensor] = []
    results = []
    for linears in (Fp8Linears(ALL), Fp8Linears(ALL), WHOLE):
        f.poison()
        experts = Experts(config, len(counts), linears).to_empty(device=f.device).to(BF16)
        params = params or [f.normal(*p.shape, scale=0.02) for p in experts.parameters()]
        for mine, value in zip(experts.parameters(), params, strict=True):
            mine.data = value.clone()
        leaf = x.clone().requires_grad_()
        y = experts(leaf, ends, count)
        grads = torch.autograd.grad(y, [leaf, *experts.parameters()], g)
        results.append([y[:rows].detach(), grads[0][:rows], *grads[1:]])
    found, again, expected = results
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "a repetition has other bits"
    for name, a, b in zip(("y", "dx", "dw_gate_up", "dw_down"), found, expected, strict=True):
        require(f"{name} from bf16", apart(a, b), 2.5 * ROUNDED)
    return {"from_bf16": max(map(apart, found, expected))}


def checks(f: Found, small: int) -> None:
    t, d, inner = 2048 // small, 4096 // small, 14336 // small
    x = f.normal(t, d)
    f.add("check", "cast", lambda: check_cast(f, partial(fp8.cast_rows, [x]), True))
    q, k, v = f.normal(t, d), f.normal(t, d // 4), f.normal(t, d // 4)
    fold = 2.0 ** torch.randint(-9, 3, (d + d // 2,), device=f.device)
    f.add("check", "cast of three, folded", lambda: check_cast(f, partial(fp8.cast_rows, [q, k, v], fold), True))
    wide = f.normal(t, 2 * inner)
    f.add("check", "cast of wide rows", lambda: check_cast(f, partial(fp8.cast_rows, [wide]), True))
    f.add("check", "cast of SwiGLU", lambda: check_cast(f, partial(fp8.swiglu_rows, wide), False))
    g, folds = f.normal(t, inner), 2.0 ** torch.randint(-9, 3, (2 * inner,), device=f.device)
    f.add("check", "of its backward", lambda: check_cast(f, partial(fp8.swiglu_rows_backward, g, wide, folds), False))
    f.add("check", "transposed", lambda: check_transposed(f, t, d))
    f.add("check", "transposed, odd sizes", lambda: check_transposed(f, 208, 1040))
    for name, (out, width) in LLAMA.items():
        outs = [out // small] if name != "qkv" else [4096 // small, 1024 // small, 1024 // small]
        f.add("check", f"linear {name}", partial(check_linear, f, t, outs, width // small))
    f.add("check", "gradients added and written", lambda: check_added(f, t, d, d))
    f.add("check", "MLP", lambda: check_mlp(f, t, d, inner))
    even, uneven = [256 // small * 16] * 8, [0, 1, 700 // small, 16, 33, 2049 // small, 5, 800 // small]
    width, wide_inner = 2048 // small, 1536 // small * 2
    f.add("check", "grouped, even", lambda: check_grouped(f, even, 0, width, wide_inner))
    f.add("check", "grouped, uneven", lambda: check_grouped(f, uneven, 0, width, wide_inner))
    f.add("check", "grouped, rows behind", lambda: check_grouped(f, uneven, 77, width, wide_inner))
    f.add("check", "experts, even", lambda: check_experts(f, even, 0, width, wide_inner // 2))
    f.add("check", "experts, uneven, rows behind", lambda: check_experts(f, uneven, 77, width, wide_inner // 2))


# ------------------------------------------------------------------------------------------------------------- times


def rate(f: Found, of: str, amount: float, run: Callable[[], object]) -> dict[str, Any]:
    """How long it takes, and how much of something it does in a second."""
    took = f.time(run)
    return {"microseconds": 1e6 * took, of: amount / took}


def casts(f: Found, small: int) -> None:
    """GB/s of casts: of what must be read and written at the least."""
    for tokens, width in ((2048, 4096), (2048, 14336), (8192, 4096), (8192, 14336), (8192, 28672)):
        casts_of(f, tokens // small, width // small, small)


def casts_of(f: Found, rows: int, width: int, small: int) -> None:
    x, n, fold = f.normal(rows, width), rows * width / 1e9, torch.ones(width, device=f.device)
    cast = fp8.cast_rows([x])
    limit, half = cast.scale.amax(), f.normal(rows, width // 2)
    ways: dict[str, tuple[float, Callable[[], object]]] = {
        "rows": (3 * n, lambda: fp8.cast_rows([x])),
        "rows, folded": (3 * n, lambda: fp8.cast_rows([x], fold)),
        "transposed": (2 * n, lambda: fp8.transposed(cast.values)),
        "transposed, weighed": (2 * n, lambda: fp8.transposed(cast.values, cast.scale, limit)),
    }
    if width == 28672 // small:
        ways["SwiGLU"] = 2.5 * n, lambda: fp8.swiglu_rows(x)
        ways["SwiGLU backward"] = 4 * n, lambda: fp8.swiglu_rows_backward(half, x, fold)
    if f.device.type == "cuda" and (rows, width) == (8192, 14336):
        from hocket.kernels import fp8 as kernels

        for tile in ((64, 4), (64, 2), (128, 8)):
            run = partial(kernels.transposed, cast.values, cast.scale, limit, *tile)
            ways[f"transposed, weighed, tiles of {tile[0]}, {tile[1]} warps"] = 2 * n, run
    for way, (moved, run) in ways.items():
        f.add("cast", f"{rows} x {width} {way}", partial(rate, f, "gb_per_s", moved, run))


def products(f: Found, small: int) -> None:
    """TFLOP/s of each product in bf16 and in fp8, casts left out."""
    for tokens in TOKENS:
        for name, (out, width) in LLAMA.items():
            products_of(f, f"{name} {tokens}", tokens // small, out // small, width // small)


def products_of(f: Found, name: str, t: int, n: int, k: int) -> None:
    x, w, g = f.normal(t, k), f.normal(n, k, scale=0.02), f.normal(t, n)
    x8, w8, g8 = (fp8.cast_rows([each]) for each in (x, w, g))
    xt, wt, gt = (each.transposed() for each in (x8, w8, g8))
    one_n, one_k = torch.ones(n, device=f.device), torch.ones(k, device=f.device)
    buffer, total = w.new_empty(n, k), torch.zeros(n, k, device=f.device)
    wide = {"out_dtype": torch.float32}

    def gradient(fast: bool, out: Tensor | None) -> Tensor:
        return fp8.product(gt, xt, one_n, None, BF16, fast=fast, out=out)

    ways: dict[str, Callable[[], object]] = {
        "forward bf16": lambda: x @ w.t(),
        "forward": lambda: fp8.product(x8.values, w8.values, x8.scale, w8.scale, BF16),
        "forward precise": lambda: fp8.product(x8.values, w8.values, x8.scale, w8.scale, BF16, fast=False),
        "dgrad bf16": lambda: g @ w,
        "dgrad": lambda: fp8.product(g8.values, wt, g8.scale, None, BF16),
        "wgrad bf16": lambda: write_product(g.t(), x, buffer, False),
        "wgrad": lambda: gradient(False, buffer),
        "wgrad fast": lambda: gradient(True, buffer),
        "wgrad bf16 added to fp32": lambda: write_product(g.t(), x, total, True, 0.5),
        "wgrad added to fp32": lambda: put(gradient(False, None), total, True, 0.5),
        "wgrad, result in fp32": lambda: torch._scaled_mm(gt, xt.t(), one_n[:, None], one_k[None], **wide),
        "wgrad, one scale, result in fp32": lambda: torch._scaled_mm(gt, xt.t(), one_n[0], one_k[0], **wide),
    }
    for way, run in ways.items():
        f.add("product", f"{name} {way}", partial(rate, f, "tflops", 2 * t * n * k / 1e12, run))


class Layer:
    """A layer as a plan runs it, with managed weights: forward, backward, and all weight gradients written to bf16."""

    def __init__(self, f: Found, module: nn.Module, inputs: Sequence[Any], cached: bool) -> None:
        module.to_empty(device=f.device)
        self.module, self.inputs, self.cached, self.weights = module, inputs, cached, list[Weight]()
        for name, param in module.named_parameters():
            weight = manage(param, name)
            value = torch.randn(param.shape, device=f.device) * 0.02 if param.dim() > 1 else torch.ones_like(param)
            weight.value = value.to(BF16)
            param.data = torch.empty(0)
            self.weights.append(weight)
        self.grads = {weight: torch.empty_like(weight.tensor()) for weight in self.weights}
        self.g = f.normal(*inputs[0].shape, scale=1e-4)
        self.forget()

    def forget(self) -> None:
        for weight in self.weights:
            weight.cast = None

    def step(self) -> None:
        """One microbatch."""
        if not self.cached:
            self.forget()
        segment = Segment()
        y = segment.forward(self.module, *self.inputs)
        del y
        segment.backward(self.g)
        segment.queue.drain(self.grads.__getitem__)


def time_layer(
    f: Found, make: Callable[[], nn.Module], inputs: Sequence[Any], cached: bool, graph: bool
) -> dict[str, Any]:
    layer = Layer(f, make(), inputs, cached)
    gpu = f.device.type == "cuda"
    for _ in range(3):
        layer.step()
    if gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    layer.step()
    peak = torch.cuda.max_memory_allocated() - before if gpu else 0
    finite = all(bool(torch.isfinite(grad).all()) for grad in layer.grads.values())
    assert finite, "a weight gradient is not finite"
    run: Callable[[], object] = layer.step
    if graph and gpu:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            layer.step()
        run = recorded.replay
    took = f.time(run)
    return {"milliseconds": 1e3 * took, "mib": peak >> 20}


WAYS: dict[str, tuple[Linears, bool]] = {
    "bf16": (WHOLE, True),
    "fp8": (Fp8Linears(ALL), False),
    "fp8, weights cast before": (Fp8Linears(ALL), True),
    "fp8 forward and dgrad": (Fp8Linears(Products(wgrad=False)), False),
}


def dense(f: Found, small: int) -> None:
    """One layer of Llama-3 8B."""
    d = 4096 // small
    config = ModelConfig(hidden=d, heads=32, kv_heads=8, head_dim=128 // small or 2, ffn=14336 // small)
    for tokens in TOKENS:
        x = f.normal(1, tokens // small, d)
        for way, (linears, cached) in WAYS.items():
            make = partial(DenseLayer, config, linears)
            for graph in (True, False) if way in ("bf16", "fp8") else (True,):
                name = f"{tokens} {way}{'' if graph else ', issued'}"
                f.add("dense layer", name, partial(time_layer, f, make, (x,), cached, graph))


def experts(f: Found, small: int) -> None:
    """Experts alone, on rows that are spread evenly, and grouped products alone."""
    for size, (count, d, inner, top_k) in EXPERTS.items():
        d, inner = d // small, max(inner // small, 16)
        rows = 8192 // small * top_k
        config = ModelConfig(experts=count, hidden=d, expert_ffn=inner, top_k=top_k)
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=f.device) * (rows // count)
        x = f.normal(rows, d)
        for way, (linears, cached) in WAYS.items():
            if "dgrad" not in way:
                make = partial(Experts, config, count, linears)
                f.add("experts", f"{size} {way}", partial(time_layer, f, make, (x, ends), cached, False))
        grouped_of(f, f"{size} gate_up", ends, rows, d, 2 * inner)
        grouped_of(f, f"{size} down", ends, rows, inner, d)


def grouped_of(f: Found, name: str, ends: Tensor, rows: int, k: int, n: int) -> None:
    a, w = f.normal(rows, k), f.normal(len(ends), n, k, scale=0.02)
    wt = w.transpose(1, 2).contiguous()
    a8, w8 = fp8.cast_rows([a]), fp8.cast_rows([w.flatten(0, 1)])
    b8, scale = w8.values.view(w.shape), w8.scale.view(w.shape[:2])
    owner, folds = owners(rows, ends), torch.ones(len(ends), k, device=f.device)
    ways: dict[str, Callable[[], object]] = {
        "bf16": lambda: grouped_mm(a, wt, ends),
        "fp8": lambda: grouped_product(a8, b8, scale, ends, BF16),
        "cast by owner": lambda: fp8.cast_rows([a], folds, owner),
    }
    for way, run in ways.items():
        f.add("grouped", f"{name} {way}", partial(rate, f, "tflops", 2 * rows * n * k / 1e12, run))


def moe(f: Found, small: int) -> None:
    """Whole layers with all experts on this rank; the host waits for the counts of rows."""
    for size, (count, d, inner, top_k) in EXPERTS.items():
        d, inner = d // small, max(inner // small, 16)
        config = ModelConfig(
            hidden=d, heads=32, kv_heads=4, head_dim=128 // small or 2, experts=count, expert_ffn=inner, top_k=top_k,
            routing="even", qk_norm=True,
        )  # fmt: skip
        x = f.normal(2, 4096 // small, d)
        for way, (linears, cached) in WAYS.items():
            if "dgrad" not in way:
                make = partial(MoELayer, config, linears=linears, ep=ONLY, aux_scale=1.0)
                f.add("MoE layer", f"{size} {way}", partial(time_layer, f, make, (x,), cached, False))


def table(f: Found) -> None:
    """The few numbers that matter, last."""
    rows = {kind: {row["name"]: row for row in found} for kind, found in f.results.items()}
    print(f"\n{len(rows.get('check', {}))} checks passed, {len(f.failed)} variants failed")
    for line in f.failed:
        print(f"  {line}")
    for kind in ("dense layer", "experts", "MoE layer"):
        for name, row in rows.get(kind, {}).items():
            first = name.split(" ")[0]
            base = rows[kind].get(f"{first} bf16, issued" if "issued" in name else f"{first} bf16")
            times = f", {base['milliseconds'] / row['milliseconds']:.2f} of bf16's speed" if base else ""
            print(f"  {kind:12} {name:36} {row['milliseconds']:8.3f} ms, {row['mib']:6} MiB{times}")
    sums: dict[str, list[float]] = {}
    for name, row in rows.get("product", {}).items():
        way = sums.setdefault(name.split(" ", 1)[1], [0.0, 0.0])
        way[0] += row["microseconds"]
        way[1] += row["microseconds"] * row["tflops"]
    for name, (took, work) in sums.items():
        print(f"  all four products {name:40} {took:8.1f} us {work / took:7.0f} tflops")
    for kind, unit in (("grouped", "tflops"), ("cast", "gb_per_s")):
        for name, row in rows.get(kind, {}).items():
            print(f"  {kind:8} {name:52} {row['microseconds']:8.1f} us {row[unit]:7.0f} {unit}")


PARTS: dict[str, Callable[[Found, int], None]] = {
    "checks": checks, "casts": casts, "products": products, "dense": dense, "experts": experts, "moe": moe,
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    wanted = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    f = Found(torch.device("cuda" if gpu else "cpu"), options.repeats if gpu else 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in wanted:
        PARTS[name](f, 1 if gpu else 64)
    table(f)
    print(write("fp8_products", {**f.results, "failed": f.failed}, options.out, options.commit))


if __name__ == "__main__":
    main()

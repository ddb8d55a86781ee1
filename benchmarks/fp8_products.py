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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fp8_checks import BF16, LLAMA, Found, checks
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.config import ModelConfig
from hocket.layers import fp8
from hocket.layers.fp8 import ALL, Products, grouped_product, owners
from hocket.layers.functional import grouped_mm
from hocket.layers.linears import WHOLE, Fp8Linears, Linears
from hocket.model.layers import DenseLayer
from hocket.model.moe import Experts, MoELayer
from hocket.model.parts import ONLY
from hocket.runtime.segment import Segment
from hocket.runtime.weights import Weight, manage, put, write_product

TOKENS = (2048, 8192)
EXPERTS = {"wide": (64, 2048, 1536, 8), "narrow": (64, 2048, 768, 8)}
"""Experts of a rank, hidden width, width of an expert, experts of a token."""
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
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
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

"""Rates of one GPU, under a load that lasts: what `hocket doctor --measure` keeps of compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from hocket.model.layers import swiglu
from hocket.runtime.lanes import drain

LOAD = {"cpu": 0.02, "cuda": 2.0}
"""Seconds of load, of which the second half counts: a clock takes most of a second to settle."""


@dataclass(frozen=True)
class Sizes:
    """What is timed. Products are of [n, n] matrices, attention of one sequence, kernels touch `nbytes` or more."""

    n: int
    heads: int
    sequence: int
    head_dim: int
    nbytes: int


SIZES = {"cpu": Sizes(128, 2, 128, 32, 1 << 20), "cuda": Sizes(8192, 32, 8192, 128, 1 << 29)}


def rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Work per second by the name of the field of `Hardware`; FLOPs and bytes are counted as `program/cost.py` does."""
    size = SIZES[device.type]
    calls = {**_products(size, device, dtype), **_kernels(size, device, dtype)}
    seconds = {name: _seconds(call, device) for name, (_, call) in calls.items()}
    found = {name: work / seconds[name] for name, (work, _) in calls.items()}
    forward, both = (seconds[name] for name in ("attention_fwd_flops", "attention_bwd_flops"))
    backward = max(both - forward, both / 2)  # on a busy host a difference may be anything
    return found | {"attention_bwd_flops": calls["attention_bwd_flops"][0] / backward}


def _attention_flops(size: Sizes) -> float:
    """Forward: causal, so half of the square."""
    return 2.0 * size.heads * size.sequence**2 * size.head_dim


Timed = tuple[float, Callable[[], object]]
"""Work, and a call that does it once; that of attention's backward has a forward in it."""


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
    """A copy, and SwiGLU for the kernels between matmuls: it reads twice what it writes."""
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
    """Seconds of one call under a load that lasts, of its second half."""
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

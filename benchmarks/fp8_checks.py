"""Whether products in fp8 are what they should be: the checks of `benchmarks.fp8_products`, and where results go."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels import seconds
from hocket.config import ModelConfig
from hocket.kernels import formulas
from hocket.layers import fp8
from hocket.layers.fp8 import ALL, Rows, grouped_product
from hocket.layers.linears import WHOLE, Fp8Linears
from hocket.model.moe import Experts

BF16 = torch.bfloat16
LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Output and input width of the linears of one layer of Llama-3 8B."""
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

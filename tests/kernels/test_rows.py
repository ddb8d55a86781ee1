"""The kernels that move rows, against the formulas in `hocket/layers/rows.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels import rows as kernels
from hocket.kernels.rows import BLOCK, PAIRS
from hocket.layers.routing import Routing, route
from hocket.layers.rows import spread, spread_weights, total

CONFIG = ModelConfig(experts=8, top_k=3)
DTYPES = [torch.float32, torch.bfloat16]
CASES = {
    "tokens": st.integers(0, 9),
    "top_k": st.integers(1, 8),
    "width": st.integers(1, 70) | st.sampled_from([PAIRS // 8 + 1, BLOCK - 1, BLOCK, BLOCK + 16]),
    "dtype": st.sampled_from(DTYPES),
    "spread_of_experts": st.sampled_from([0.0, 1.0, 50.0]),
    "seed": st.integers(0, 1000),
}
"""With a spread of 50 all tokens choose the same experts, and the others have none."""


def routed(tokens: int, top_k: int, spread_of_experts: float, seed: int) -> tuple[Tensor, Routing]:
    """Weights and routing of random logits."""
    torch.manual_seed(seed)
    logits = torch.randn(tokens, CONFIG.experts) + torch.randn(CONFIG.experts) * spread_of_experts
    return route(logits, replace(CONFIG, top_k=top_k))


def places(routing: Routing, missing: bool, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Place of every choice, and rows that choices stand for; some choices without a place if they may be `missing`."""
    place = routing.inverse_TK.clone()
    if missing:
        place[torch.rand(place.shape) < 0.4] = -1
        here = place >= 0
        place[here] = torch.randperm(int(here.sum()), dtype=torch.int32)
    return place, torch.randn(int((place >= 0).sum()), width).to(dtype)


def wide(x: Tensor) -> Tensor:
    """The same values as the first columns of something wider."""
    return torch.cat([x, torch.full((len(x), 16), torch.nan, dtype=x.dtype)], 1)[:, : x.shape[1]]


@given(**CASES, missing=st.booleans())
@settings(max_examples=10)
def test_spread(missing, **case) -> None:
    """Rows are copies, and their gradients are added in the order of choices: the same bits, both ways."""
    tokens, top_k, width, dtype, spread_of_experts, seed = (case[name] for name in CASES)
    _, routing = routed(tokens, top_k, spread_of_experts, seed)
    place, rows = places(routing, missing, width, dtype)
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    expected = spread(x, place, len(rows))
    for source, out in ((x.detach(), rows), (wide(x.detach()), wide(rows))):
        kernels.spread(source, place, out)
        assert torch.equal(out, expected)
    g = torch.randn(rows.shape).to(dtype)
    expected.backward(g)
    assert x.grad is not None
    assert torch.equal(kernels.total(g, None, place, None, None), x.grad)
    out = wide(torch.empty_like(x.detach()))
    assert torch.equal(kernels.total(wide(g), None, place, None, None, out), x.grad)
    weights, there, back = (
        torch.randn(place.shape, requires_grad=True),
        torch.zeros(len(rows)),
        torch.zeros(place.shape),
    )
    spread_weights(weights, place, len(rows)).backward(torch.arange(1.0, len(rows) + 1))
    kernels.weights(weights.detach(), there, place, back=False)
    kernels.weights(back, torch.arange(1.0, len(rows) + 1), place, back=True)
    here = place >= 0
    assert torch.equal(there[place[here].long()], weights.detach()[here])
    assert weights.grad is not None
    assert torch.equal(back, weights.grad)
    assert torch.equal(back[here].long() - 1, place[here].long())


@given(**CASES, missing=st.booleans(), has_shared=st.booleans(), has_residual=st.booleans())
@settings(max_examples=13)
def test_total(missing, has_shared, has_residual, **case) -> None:
    """The same bits, but for the gradients of weights, which are sums over columns."""
    tokens, top_k, width, dtype, spread_of_experts, seed = (case[name] for name in CASES)
    probs, routing = routed(tokens, top_k, spread_of_experts, seed)
    place, rows = places(routing, missing, width, dtype)
    rows.requires_grad_()
    residual, shared, g = (torch.randn(tokens, width).to(dtype) for _ in range(3))
    extra = residual if has_residual else None, shared if has_shared else None
    probs.requires_grad_()
    out = total(rows, probs, place, *extra)
    assert torch.equal(kernels.total(rows.detach(), probs.detach(), place, *extra), out)
    out.backward(g)
    g_rows, g_probs = kernels.total_backward(g, rows.detach(), probs.detach(), place)
    assert rows.grad is not None
    assert torch.equal(g_rows, rows.grad)
    torch.testing.assert_close(g_probs, probs.grad, rtol=1e-5, atol=1e-4)


@given(**CASES, missing=st.booleans())
@settings(max_examples=10)
def test_total_without_weights(missing, **case) -> None:
    tokens, top_k, width, dtype, spread_of_experts, seed = (case[name] for name in CASES)
    _, routing = routed(tokens, top_k, spread_of_experts, seed)
    place, rows = places(routing, missing, width, dtype)
    rows.requires_grad_()
    residual, g = (torch.randn(tokens, width).to(dtype) for _ in range(2))
    out = total(rows, None, place, residual)
    assert torch.equal(kernels.total(rows.detach(), None, place, residual, None), out)
    out.backward(g)
    g_rows = torch.empty_like(rows)
    kernels.spread(g, place, g_rows)
    assert rows.grad is not None
    assert torch.equal(g_rows, rows.grad)


@given(rows=st.integers(0, 9), width=CASES["width"], dtype=CASES["dtype"], seed=CASES["seed"])
@settings(max_examples=10)
def test_gather(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, order = torch.randn(rows, width).to(dtype), torch.randperm(rows).to(torch.int32)
    assert torch.equal(kernels.gather(x, order), x[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_strides(dtype: torch.dtype) -> None:
    """Gradients come as autograd made them: transposed, or one number for all."""
    probs, routing = routed(5, 3, 1.0, 0)
    place = routing.inverse_TK
    rows, x = torch.randn(8, 15).to(dtype).t(), torch.randn(16, 5).to(dtype).t()[:, ::2]
    straight = kernels.total(rows.contiguous(), None, place, None, None)
    assert torch.equal(kernels.total(rows, None, place, None, None), straight)
    spread_rows, expected = torch.empty(15, 8, dtype=dtype), torch.empty(15, 8, dtype=dtype)
    kernels.spread(x, place, spread_rows)
    kernels.spread(x.contiguous(), place, expected)
    assert torch.equal(spread_rows, expected)
    one = torch.ones((), dtype=dtype).expand(5, 8)
    for a, b in zip(
        kernels.total_backward(one, rows, probs, place),
        kernels.total_backward(one.contiguous(), rows.contiguous(), probs, place),
        strict=True,
    ):
        assert torch.equal(a, b)
    out = kernels.total(rows, probs, place, x, one)
    assert torch.equal(out, kernels.total(rows.contiguous(), probs, place, x.contiguous(), one.contiguous()))


def test_a_sum_is_rounded_once() -> None:
    """1 + 2^-9 eight times is lost if added up in bf16."""
    _, routing = routed(1, 8, 1.0, 0)
    g = torch.full((8, 5), 2.0**-9, dtype=torch.bfloat16)
    g[routing.inverse_R[0]] = 1.0
    summed = kernels.total(g, None, routing.inverse_TK, None, None)
    assert summed[0, 0].item() == 1.0 + 2.0**-6  # 1 + 7 * 2^-9, rounded once

"""The kernels that move rows, against the formulas in `hocket/parallel/dispatch.py`."""

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
from hocket.parallel.dispatch import permute, unpermute
from hocket.parallel.routing import Routing, route

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


@given(**CASES)
@settings(max_examples=40)
def test_permute(tokens, top_k, width, dtype, spread_of_experts, seed) -> None:
    """Rows are copies, and their gradients are added in the order of choices: the same bits, both ways."""
    _, routing = routed(tokens, top_k, spread_of_experts, seed)
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    rows = permute(x, routing)
    assert torch.equal(kernels.permute(x.detach(), routing.inverse_R, top_k), rows)
    g = torch.randn(rows.shape).to(dtype)
    rows.backward(g)
    assert x.grad is not None
    assert torch.equal(kernels.permute_backward(g, routing.inverse_R, top_k), x.grad)


@given(**CASES, has_shared=st.booleans())
@settings(max_examples=60)
def test_unpermute(tokens, top_k, width, dtype, spread_of_experts, seed, has_shared) -> None:
    """The same bits, but for the gradients of weights, which are sums over columns."""
    probs, routing = routed(tokens, top_k, spread_of_experts, seed)
    rows = torch.randn(tokens * top_k, width).to(dtype).requires_grad_()
    residual, shared, g = (torch.randn(tokens, width).to(dtype) for _ in range(3))
    extra = shared if has_shared else None
    probs.requires_grad_()
    out = unpermute(rows, probs, residual, extra, routing)
    assert torch.equal(kernels.unpermute(rows.detach(), probs.detach(), routing.inverse_R, residual, extra), out)
    out.backward(g)
    g_rows, g_probs = kernels.unpermute_backward(g, rows.detach(), probs.detach(), routing.inverse_R)
    assert rows.grad is not None
    assert torch.equal(g_rows, rows.grad)
    torch.testing.assert_close(g_probs, probs.grad, rtol=1e-5, atol=1e-4)


@given(rows=st.integers(0, 9), width=CASES["width"], dtype=CASES["dtype"], seed=CASES["seed"])
@settings(max_examples=20)
def test_gather(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, order = torch.randn(rows, width).to(dtype), torch.randperm(rows).to(torch.int32)
    assert torch.equal(kernels.gather(x, order), x[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_strides(dtype: torch.dtype) -> None:
    """Gradients come as autograd made them: transposed, or one number for all."""
    probs, routing = routed(5, 3, 1.0, 0)
    rows, x = torch.randn(8, 15).to(dtype).t(), torch.randn(16, 5).to(dtype).t()[:, ::2]
    assert torch.equal(
        kernels.permute_backward(rows, routing.inverse_R, 3),
        kernels.permute_backward(rows.contiguous(), routing.inverse_R, 3),
    )
    assert torch.equal(kernels.permute(x, routing.inverse_R, 3), kernels.permute(x.contiguous(), routing.inverse_R, 3))
    one = torch.ones((), dtype=dtype).expand(5, 8)
    for a, b in zip(
        kernels.unpermute_backward(one, rows, probs, routing.inverse_R),
        kernels.unpermute_backward(one.contiguous(), rows.contiguous(), probs, routing.inverse_R),
        strict=True,
    ):
        assert torch.equal(a, b)
    out = kernels.unpermute(rows, probs, routing.inverse_R, x, one)
    assert torch.equal(
        out, kernels.unpermute(rows.contiguous(), probs, routing.inverse_R, x.contiguous(), one.contiguous())
    )


def test_a_sum_is_rounded_once() -> None:
    """1 + 2^-9 eight times is lost if added up in bf16."""
    _, routing = routed(1, 8, 1.0, 0)
    g = torch.full((8, 5), 2.0**-9, dtype=torch.bfloat16)
    g[routing.inverse_R[0]] = 1.0
    assert kernels.permute_backward(g, routing.inverse_R, 8)[0, 0].item() == 1.0 + 2.0**-6  # 1 + 7 * 2^-9, rounded once

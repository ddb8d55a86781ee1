"""Gradients of a router's product against float64, and the function that has them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import products as router
from hocket.layers import functional
from hocket.layers.functional import score
from tests.ranks.test_segments import CONFIGS, BySegments, batch, gradients, model

BF16 = torch.bfloat16
TOKENS = st.sampled_from([0, 1, 2, 63, 65, 130])
SIZES = st.sampled_from([(4, 64), (5, 24), (16, 16), (33, 40), (130, 8), (8, 300)])


@given(tokens=TOKENS, sizes=SIZES, more=st.booleans(), scale=st.sampled_from([1e-20, 1.0, 1e20]))
@settings(max_examples=8, deadline=None)
def test_input_gradient(tokens: int, sizes: tuple[int, int], more: bool, scale: float) -> None:
    """Rounded once, and two parts: terms that nearly cancel out show whether the second one is there."""
    experts, width = sizes
    g = torch.randn(tokens, experts)
    g = scale * (g - g.mean(1, keepdim=True))
    w, added = (4 + 0.1 * torch.randn(sizes)).to(BF16), scale * torch.randn(tokens, width)
    found = router.input_gradient(g, w, added.to(BF16) if more else None)
    assert found.dtype is BF16
    exact = g.double() @ w.double() + (added.to(BF16).double() if more else 0)
    terms = g.double().abs() @ w.double().abs()
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-16 * terms).all()


@given(tokens=TOKENS, sizes=SIZES, into=st.sampled_from([(BF16, False), (torch.float32, False), (torch.float32, True)]))
@settings(max_examples=8, deadline=None)
def test_weight_gradient(tokens: int, sizes: tuple[int, int], into: tuple[torch.dtype, bool]) -> None:
    """As exact as in fp32. Without the third part up to 2^-16 of every term would be missing."""
    (experts, width), (dtype, add) = sizes, into
    g, x = torch.randn(tokens, experts), torch.randn(tokens, width).to(BF16)
    before = torch.randn(sizes).to(dtype) if add else torch.full(sizes, float("nan"), dtype=dtype)
    found = before.clone()
    router.weight_gradient(g, x, found, add, 0.5)
    exact = 0.5 * g.double().t() @ x.double() + (before.double() if add else 0)
    terms = 0.5 * g.double().abs().t() @ x.double().abs() + (before.double().abs() if add else 0)
    rounding = 2**-8 if dtype is BF16 else 0.0
    assert ((found.double() - exact).abs() <= rounding * exact.abs() + 2**-21 * terms).all()


def test_all_bits_of_one_token() -> None:
    """Multiplied with 1 its gradient comes back as it was."""
    g, out = torch.randn(1, 40), torch.empty(40, 16)
    router.weight_gradient(g, torch.ones(1, 16, dtype=BF16), out)
    assert torch.equal(out, g.t().expand(40, 16))


def test_tokens_know_nothing_of_each_other() -> None:
    g, w = torch.randn(3, 5), torch.randn(5, 16).to(BF16)
    alone = router.input_gradient(g[:1], w)
    g[1] = float("inf")
    found = router.input_gradient(g, w)
    assert torch.equal(found[:1], alone)
    assert not found[1].isfinite().any()


def test_any_strides() -> None:
    g, x, w = torch.randn(6, 4).t(), torch.randn(8, 4).to(BF16).t(), torch.randn(8, 6).to(BF16).t()
    assert torch.equal(router.input_gradient(g, w, x), router.input_gradient(g.contiguous(), w.contiguous(), x + 0))
    outs = torch.empty(2, 6, 8)
    router.weight_gradient(g, x, outs[0])
    router.weight_gradient(g.contiguous(), x.contiguous(), outs[1])
    assert torch.equal(outs[0], outs[1])


def read_twice(x: Tensor, p: Tensor) -> Tensor:
    """Logits, and what else reads the input."""
    x, logits = score(x, p)
    return torch.cat([logits, 3 * x.float()], 1)


@pytest.mark.parametrize("shape", [(7, 16), (1, 16), (0, 16)])
@pytest.mark.parametrize("read", [read_twice, lambda x, p: score(x, p)[1]], ids=["both", "logits"])
def test_managed_equals_ordinary_and_the_formula(shape, read, monkeypatch: pytest.MonkeyPatch) -> None:
    x, value = torch.randn(shape).to(BF16), torch.randn(24, 16).to(BF16)
    formula = gradients(read, x, value, False)
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    assert ("_Score" in str(score(x.clone().requires_grad_(), value)[1].grad_fn)) == bool(x.numel())
    ordinary, managed = gradients(read, x, value, False), gradients(read, x, value, True)
    for a, b, c in zip(ordinary, managed, formula, strict=True):
        assert a.dtype == c.dtype
        assert torch.equal(a, b)
        # A product in fp32 may be added up in another order. The formula rounds two gradients of x and their sum.
        rtol, atol = (1e-5, 1e-5) if a.dtype is torch.float32 else (2**-6, 2**-6)
        torch.testing.assert_close(a, c, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["mixed_shared", "sigmoid"])
def test_a_model_by_segments_has_the_bits_of_a_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nearly the gradients of formulas, in which more is rounded."""
    ids, targets = batch((1, 6))
    formula = model(CONFIGS[name], BF16)
    formula.loss(formula(ids), targets).backward(torch.tensor(0.5))
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    plain = model(CONFIGS[name], BF16)
    with patch.object(router, "input_gradient", wraps=router.input_gradient) as called:
        loss = plain.loss(plain(ids), targets)
        loss.backward(torch.tensor(0.5))
    assert called.call_count == 2
    segments = BySegments(model(CONFIGS[name], BF16), defer=True)
    assert torch.equal(loss, segments.step(ids, targets))
    grads = {name: segments.grads[weight] for weight, name in segments.weights.items()}
    for (param_name, param), other in zip(plain.named_parameters(), formula.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        assert torch.equal(param.grad, grads[param_name]), param_name
        assert (param.grad - other.grad).norm() <= 0.03 * other.grad.norm(), param_name


def test_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    x, p = torch.randn(3, 8).to(BF16), torch.randn(4, 8).requires_grad_()
    assert "_Score" not in str(score(x, p)[1].grad_fn)
    assert "_Score" not in str(score(x.float(), p)[1].grad_fn)


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    x, p = torch.randn(3, 8).to(BF16).requires_grad_(), torch.randn(4, 8).to(BF16)
    score(x, p)[1].sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(score(x, p)[1].sum(), x, create_graph=True)

"""fp32 numbers in thirds, and the linear layer that multiplies them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels.thirds import BLOCK, thirds
from hocket.runtime import functional
from tests.ranks.test_islands import gradients

BF16 = torch.bfloat16


@given(tokens=st.integers(0, 5) | st.just(BLOCK), width=st.integers(1, 9), scale=st.sampled_from([1e-20, 1.0, 1e30]))
@settings(max_examples=30)
def test_they_add_up_to_every_bit(tokens: int, width: int, scale: float) -> None:
    x = scale * torch.randn(tokens, width)
    parts = thirds(x)
    assert parts.dtype is BF16
    first, second, third = parts.view(tokens, 3, width).float().unbind(1)
    assert torch.equal(first.to(BF16), x.to(BF16))
    assert torch.equal(first + (second + third), x)


def test_any_strides() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(thirds(x.t()), thirds(x.t().contiguous()))


def wide(x: Tensor, p: Tensor) -> Tensor:
    return functional.linear(x, p, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16), (1, 1, 16), (0, 16)])
def test_managed_equals_ordinary_and_the_formula(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, value = torch.randn(shape).to(BF16), torch.randn(24, 16).to(BF16)
    formula = gradients(wide, x, value, False)
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    ordinary, managed = gradients(wide, x, value, False), gradients(wide, x, value, True)
    assert ("_WideLinear" in str(ordinary[0].grad_fn)) == bool(x.numel())
    for a, b, c in zip(ordinary, managed, formula, strict=True):
        assert a.dtype == c.dtype
        assert torch.equal(a, b)
        # A product in fp32 may be added up in another order, and is rounded to bf16 after that.
        torch.testing.assert_close(a, c, rtol=1e-5 if a.dtype is torch.float32 else 2**-7, atol=1e-5)


def test_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    x, p = torch.randn(3, 8).to(BF16), torch.randn(4, 8).requires_grad_()
    assert "_WideLinear" not in str(wide(x, p).grad_fn)
    assert "_WideLinear" not in str(functional.linear(x, p.to(BF16)).grad_fn)


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)
    x, p = torch.randn(3, 8).to(BF16).requires_grad_(), torch.randn(4, 8).to(BF16)
    wide(x, p).sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(wide(x, p).sum(), x, create_graph=True)

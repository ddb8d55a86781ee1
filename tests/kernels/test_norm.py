"""The norm's kernels against its formula in float64, and its autograd function against both ways to hold a weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import norm
from hocket.layers import norms
from tests.ranks.test_segments import gradients

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""A bf16 result has been rounded once, by half of this at most."""


def exact(x: Tensor, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, input gradient, weight gradient) of the formula in float64."""
    x, p = x.double().requires_grad_(), p.double().requires_grad_()
    y = F.rms_norm(x, (x.shape[-1],), None, EPS) * p
    y.backward(g.double())
    assert x.grad is not None
    assert p.grad is not None
    return y.detach(), x.grad, p.grad


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=2e-5)


@given(
    shape=st.lists(st.integers(0, 5), max_size=2).map(tuple),
    width=st.integers(1, 40) | st.sampled_from([127, 128, 5000]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=13)
def test_against_float64(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    """Rows are no shorter than their width asks for, for a gradient is a difference of numbers like 1 / length."""
    x, g, p = (torch.randn(n).to(dtype) for n in ((*shape, width), (*shape, width), (width,)))
    x = x + x.sign()
    y, dx, dp = exact(x, p, g)
    total, found = norm.forward(x, p, EPS)
    assert total is x
    assert found.dtype == dtype
    close(found, y, TOLERANCE[dtype])
    found, parts = norm.backward(g, x, p, EPS)
    assert found.dtype == dtype
    close(found, dx, TOLERANCE[dtype])
    close(parts.sum(0), dp, 1e-5)


def test_programs_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, and a last tile that is not full."""
    x, g, p = torch.randn(27, 70), torch.randn(27, 70), torch.randn(70)
    monkeypatch.setattr(norm, "TILE", 256)
    _, dx, dp = exact(x, p, g)
    for programs in (1, 3, 1000):
        monkeypatch.setattr(norm, "PROGRAMS", programs)
        found, parts = norm.backward(g, x, p, EPS)
        assert parts.shape == (min(programs, 14), 70)
        close(found, dx, 1e-5)
        close(parts.sum(0), dp, 1e-5)


@given(
    parts=st.integers(1, 5) | st.sampled_from([63, 64, 65, 264]),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=10)
def test_sum_of_parts(parts: int, width: int, dtype: torch.dtype) -> None:
    partial, out = torch.randn(parts, width), torch.full((width + 1,), float("nan"), dtype=dtype)
    norm.sum_parts(partial, out[:-1])
    torch.testing.assert_close(out[:-1].float(), partial.sum(0), rtol=TOLERANCE[dtype], atol=1e-5)
    assert out[-1].isnan()  # which belongs to no row


def test_any_strides() -> None:
    x, g, p = torch.randn(6, 5, 8).transpose(0, 1), torch.randn(6, 5, 1).expand(6, 5, 8).transpose(0, 1), torch.randn(8)
    y, dx, dp = exact(x, p, g)
    close(norm.forward(x, p, EPS)[1], y, 1e-5)
    found, parts = norm.backward(g, x, p, EPS)
    close(found, dx, 1e-5)
    close(parts.sum(0), dp, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 16), (3, 4, 2, 8), (0, 16)])
def test_managed_equals_ordinary(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(x: Tensor, p: Tensor) -> Tensor:
        return norms.rms_norm(x, p, EPS)

    x, value = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    formula = gradients(normed, x, value, False)
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    ordinary, managed = gradients(normed, x, value, False), gradients(normed, x, value, True)
    assert "_RmsNorm" in type(ordinary[0].grad_fn).__name__
    for a, b, c in zip(ordinary, managed, formula, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == dtype
        torch.testing.assert_close(a, c, rtol=4 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_residual_stream(added: bool, managed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that goes on beside the norm, with gradients of its own, and what is added to it."""
    x, more, value = (torch.randn(n).to(dtype) for n in ((2, 5, 16), (2, 5, 16), (16,)))

    def run() -> list[Tensor]:
        leaf, nodes = more.clone().requires_grad_(), []

        def stream(x: Tensor, p: Tensor) -> Tensor:
            total, y = norms.add_rms_norm(x, leaf if added else None, p, EPS)
            nodes.append(str(y.grad_fn))
            return torch.cat([total, y], -1)

        found = [*gradients(stream, x, value, managed)]
        assert ("_AddNorm" in nodes[0]) == fused
        return [*found, leaf.grad] if leaf.grad is not None else found

    fused = False
    formula = run()
    fused = True
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    for a, b in zip(run(), formula, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=4 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])


def test_the_sum_is_what_torch_adds() -> None:
    x, more = torch.randn(9, 33).bfloat16(), torch.randn(9, 33).bfloat16()
    total, y = norm.forward(x, torch.ones(33).bfloat16(), EPS, more)
    assert torch.equal(total, x + more)
    assert torch.equal(y, norm.forward(x + more, torch.ones(33).bfloat16(), EPS)[1])


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    x, p = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    norms.rms_norm(x, p, EPS).sum().backward()
    assert x.grad is not None
    assert p.grad is None
    p.requires_grad_()
    norms.rms_norm(x.detach(), p, EPS).sum().backward()
    assert p.grad is not None
    with torch.no_grad():
        assert norms.rms_norm(x, p, EPS).grad_fn is None


def test_two_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    assert norms.rms_norm(torch.randn(3, 8).bfloat16(), torch.randn(8), EPS).dtype is torch.float32


def test_second_derivatives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(norms.rms_norm(x, torch.randn(8), EPS).sum(), x, create_graph=True)

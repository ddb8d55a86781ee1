"""The kernels of SwiGLU against its formula, also in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels.swiglu import swiglu
from hocket.model import layers

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def with_limit(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def both(fn, gate_up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(output, input gradient)."""
    gate_up = gate_up.detach().requires_grad_()
    y = fn(gate_up)
    y.backward(g)
    assert gate_up.grad is not None
    return y.detach(), gate_up.grad


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple),
    width=st.integers(1, 40) | st.sampled_from([127, 128, 384, 768, 1030]),
    dtype=st.sampled_from(list(TOLERANCE)),
    size=st.sampled_from([1.0, 30.0, 1000.0]),
)
@settings(max_examples=13)
def test_against_float64(shape: tuple[int, ...], width: int, dtype: torch.dtype, size: float) -> None:
    """Also where a sigmoid is 0 or 1 to the last bit."""
    gate_up, g = (size * torch.randn(*shape, 2 * width)).to(dtype), torch.randn(*shape, width).to(dtype)
    expected = both(formula, gate_up.double(), g.double())
    for a, b in zip(both(swiglu, gate_up, g), expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[dtype], atol=1e-6 * size)


@given(
    rows=st.integers(0, 6),
    width=st.integers(1, 40) | st.sampled_from([127, 384, 1030]),
    dtype=st.sampled_from(list(TOLERANCE)),
    limit=st.sampled_from([0.5, 7.0]),
    alpha=st.sampled_from([1.0, 1.702]),
)
@settings(max_examples=8)
def test_with_a_limit_against_float64(rows: int, width: int, dtype: torch.dtype, limit: float, alpha: float) -> None:
    """Of gates and ups within the limit, at it, and beyond on either side."""
    gate_up, g = (limit * torch.randn(rows, 2 * width)).to(dtype), torch.randn(rows, width).to(dtype)
    gate_up[:, ::7], gate_up[:, 3::7] = limit, -limit
    expected = both(lambda x: with_limit(x, limit, alpha), gate_up.double(), g.double())
    for fn in (swiglu, layers.swiglu):
        for a, b in zip(both(lambda x, fn=fn: fn(x, None, limit, alpha), gate_up, g), expected, strict=True):
            assert a.dtype == dtype
            loose = TOLERANCE[dtype] * (1 if fn is swiglu else 8)  # the formula rounds between its operations
            torch.testing.assert_close(a.double(), b, rtol=loose, atol=loose * limit if fn is not swiglu else 1e-5)


@given(
    rows=st.integers(0, 20),
    width=st.integers(1, 40) | st.sampled_from([127, 384, 768, 1030]),
    dtype=st.sampled_from(list(TOLERANCE)),
    limit=st.sampled_from([0.0, 7.0]),
)
@settings(max_examples=8)
def test_with_weights_of_rows_against_float64(rows: int, width: int, dtype: torch.dtype, limit: float) -> None:
    """Also the gradient of the weights, a sum over columns; the formula of CPUs rounds between its operations."""
    gate_up, g, weights = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype), torch.randn(rows)

    def run(fn, exact: bool) -> list[Tensor | None]:
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in (gate_up, weights)]
        y = fn(*leaves)
        y.backward(g.to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    plain = formula if not limit else lambda x: with_limit(x, limit, 1.702)
    wanted = run(lambda x, w: plain(x) * w[:, None], True)
    for fn in (swiglu, layers.swiglu):
        found = run(lambda x, w, fn=fn: fn(x, None, limit, 1.702, w), False)
        loose = TOLERANCE[dtype] * (1 if fn is swiglu else 8)
        for a, b, sums in zip(found, wanted, (1, 1, width), strict=True):
            assert a is not None
            assert a.dtype in (dtype, torch.float32)
            torch.testing.assert_close(a.double(), b, rtol=loose, atol=loose * max(1, limit) * sums**0.5)


def test_a_limit_hands_on_what_is_no_number() -> None:
    gate_up = torch.tensor([[1.0, float("nan"), 2.0, 1.0, 1.0, float("nan")]])
    assert swiglu(gate_up, None, 7.0, 1.702).isnan().tolist() == [[False, True, True]]


def test_many_tiles() -> None:
    gate_up, g = torch.randn(37, 2 * 300), torch.randn(37, 300)
    for a, b in zip(both(swiglu, gate_up, g), both(formula, gate_up, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_any_strides() -> None:
    gate_up, g = torch.randn(12, 7).t(), torch.randn(1, 6).expand(7, 6)
    for a, b in zip(both(swiglu, gate_up, g), both(formula, gate_up, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 20, 37, 99])
def test_only_the_first_rows(count: int) -> None:
    """Rows beyond the count do not matter."""
    gate_up, g = torch.randn(37, 2 * 300), torch.randn(37, 300)
    wanted, kept = both(swiglu, gate_up, g), min(count, 37)
    gate_up[count:] = float("nan")
    x, rows = gate_up.clone().requires_grad_(), torch.tensor([count], dtype=torch.int32)
    out = swiglu(x, rows)
    out.backward(g)
    assert x.grad is not None
    assert torch.equal(out[:kept], wanted[0][:kept])
    assert torch.equal(x.grad[:kept], wanted[1][:kept])


def test_layers_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = torch.randn(3, 8, requires_grad=True)
    assert "_Swiglu" not in type(layers.swiglu(gate_up).grad_fn).__name__
    monkeypatch.setattr(layers, "usable", lambda *tensors: True)
    assert "_Swiglu" in type(layers.swiglu(gate_up).grad_fn).__name__


def test_second_derivatives_are_refused() -> None:
    gate_up = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(swiglu(gate_up).sum(), gate_up, create_graph=True)

"""Casts to fp8 against their formulas, bit for bit, and against what scales are for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import fp8 as kernels
from hocket.layers import fp8
from hocket.layers.fp8 import E4M3, LEAST


def same(found: tuple[Tensor, Tensor], expected: fp8.Rows) -> None:
    values, scale = found
    assert values.dtype == E4M3
    assert torch.equal(values.float(), expected.values.float())  # 0 and -0 are one
    assert torch.equal(scale, expected.scale)


def numbers(*shape: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (size * torch.randn(*shape) * 10 ** torch.randn(*shape)).to(dtype)


@given(
    rows=st.integers(0, 7),
    widths=st.lists(st.integers(1, 50), min_size=1, max_size=3) | st.just([2048, 512, 512]),
    folds=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    size=st.sampled_from([1.0, 1e-8, 1e8, 1e-30]),
)
@settings(max_examples=15)
def test_rows(rows: int, widths: list[int], folds: bool, dtype: torch.dtype, size: float) -> None:
    parts = [numbers(rows, width, size=size, dtype=dtype) for width in widths]
    fold = 2.0 ** torch.randint(-9, 9, (sum(widths),)) if folds else None
    expected = fp8.cast_rows(parts, fold)
    same(kernels.cast_rows(parts, fold), expected)
    value = torch.cat(parts, 1).float() * (1 if fold is None else fold)
    # Three digits and the leading one; below 2^-6 of the scale's unit, its smallest steps.
    bound = value.abs() * 2**-4 + 2**-10 * expected.scale[:, None]
    assert ((expected.values.float() * expected.scale[:, None] - value).abs() <= bound).all()
    assert all(math.frexp(scale)[0] == 0.5 for scale in expected.scale.tolist())
    assert (expected.scale >= 2.0**LEAST).all()


@pytest.mark.parametrize("largest", [448.0, 448.00006, 256.0, 447.99997, 1.0, 0.875, 0.8750001, 1e-30, 0.0, 3e38])
def test_scales_are_the_least_with_which_a_row_fits(largest: float) -> None:
    x = torch.tensor([[largest, -largest / 3]])
    expected = fp8.cast_rows([x])
    same(kernels.cast_rows([x]), expected)
    scale = expected.scale.item()
    assert x[0, 0].item() <= 448 * scale
    assert scale == 2.0**LEAST or x[0, 0].item() > 448 * scale / 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_all_that_reads_it_nan(bad: float) -> None:
    x, w = torch.randn(4, 32), torch.randn(16, 32)
    x[2, 5] = bad
    for rows in (fp8.cast_rows([x]), fp8.Rows(*kernels.cast_rows([x]))):
        ones = torch.ones(16)
        y = fp8.product(rows.values, fp8.cast_rows([w]).values, rows.scale, ones, torch.float32)
        assert y.isnan().all(1).tolist() == [False, False, True, False]
        g = fp8._Factors(fp8.cast_rows([torch.randn(4, 16)]), rows, None)
        dw = torch.zeros(16, 32)
        g.write(0, 16, torch.float32, dw, False, 1.0)
        assert dw.isnan().all()


@pytest.mark.parametrize("shape", [(0, 16), (16, 48), (152, 130), (4, 300)])
def test_transposed(shape: tuple[int, int]) -> None:
    x = fp8.cast_rows([numbers(*shape)])
    turned = kernels.transposed(x.values)
    assert torch.equal(turned.view(torch.uint8), x.values.view(torch.uint8).t())
    assert torch.equal(fp8.transposed(x.values).view(torch.uint8), turned.view(torch.uint8))
    if not shape[0]:
        return
    factors = 2.0 ** torch.randint(-120, 2, shape[:1])
    found = kernels.transposed(x.values, factors, factors.amax())
    assert torch.equal(found.float(), fp8.transposed(x.values, factors, factors.amax()).float())
    assert torch.equal(found.float(), (x.values.float() * (factors / factors.amax())[:, None]).t().to(E4M3).float())


@pytest.mark.parametrize("width", [16, 48, 1030])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_swiglu(width: int, size: float) -> None:
    """The sigmoid of two libraries may differ in the last digit, and then a number is rounded to its neighbour."""
    gate_up, g, fold = numbers(9, 2 * width, size=size), numbers(9, width), 2.0 ** torch.randint(-9, 9, (2 * width,))
    pairs = (
        (kernels.swiglu_rows(gate_up), fp8.swiglu_rows(gate_up)),
        (kernels.swiglu_rows_backward(g, gate_up, fold), fp8.swiglu_rows_backward(g, gate_up, fold)),
    )
    weights, grads = torch.randn(9), [torch.zeros(9), torch.zeros(9)]
    both = [(weights, grad) for grad in grads]
    pairs += (
        (kernels.swiglu_rows(gate_up, weights_R=weights), fp8.swiglu_rows(gate_up, weights_R=weights)),
        (
            kernels.swiglu_rows_backward(g, gate_up, weights=both[0]),
            fp8.swiglu_rows_backward(g, gate_up, weights=both[1]),
        ),
    )
    for (values, scale), expected in pairs:
        assert torch.equal(scale, expected.scale)
        a, b = values.float(), expected.values.float()
        assert (a != b).float().mean() < 0.01
        assert ((a - b).abs() <= b.abs() / 8 + 2**-9).all()
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4 * grads[1].abs().max().item())


def test_swiglu_is_that_of_bf16() -> None:
    gate_up, g = numbers(9, 96).float().requires_grad_(), numbers(9, 48).float()
    gate, up = gate_up.chunk(2, 1)
    y = torch.nn.functional.silu(gate) * up
    y.backward(g, retain_graph=True)
    assert gate_up.grad is not None
    weights, grad = torch.rand(9), torch.zeros(9)
    (weighted,) = torch.autograd.grad(
        torch.nn.functional.silu(gate) * up * weights[:, None], gate_up, g, retain_graph=True
    )
    again = fp8.swiglu_rows_backward(g, gate_up.detach(), torch.ones(96), weights=(weights, grad))
    torch.testing.assert_close(grad, (g * y.detach()).sum(1), rtol=1e-5, atol=1e-5)
    for rows, exact in (
        (again, weighted),
        (fp8.swiglu_rows(gate_up.detach(), weights_R=weights), y.detach() * weights[:, None]),
        (fp8.swiglu_rows(gate_up.detach()), y.detach()),
        (fp8.swiglu_rows_backward(g, gate_up.detach(), torch.ones(96)), gate_up.grad),
    ):
        found = rows.values.float() * rows.scale[:, None]
        assert ((found - exact).abs() <= exact.abs() * 2**-3.9 + 2**-9 * rows.scale[:, None]).all()

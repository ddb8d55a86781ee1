"""The kernel that adds up squares in fp64, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fsdp.grad_norm import norm_of
from hocket.kernels.squares import BLOCK, launch


@given(
    numel=st.integers(1, 40) | st.integers(BLOCK - 1, BLOCK + 1) | st.integers(4 * BLOCK, 5 * BLOCK),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    programs=st.integers(1, 3),
)
@settings(max_examples=30)
def test_equals_torch_but_for_the_order_of_additions(numel, dtype, programs) -> None:
    values = (torch.randn(numel + 1) * 10 ** torch.randn(numel + 1)).to(dtype)
    values[-1] = float("nan")  # which is nobody's
    found = launch(values[:-1], programs)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values[:-1].double().square().sum(), rtol=1e-14, atol=0.0)


def test_squares_are_added_up_in_fp64() -> None:
    """In fp32 those of the small ones would be lost, or those of the large ones infinite."""
    small = torch.cat([torch.ones(1), torch.full((3 * BLOCK,), 1e-5)])
    torch.testing.assert_close(launch(small), small.double().square().sum(), rtol=1e-14, atol=0.0)
    assert launch(small) > 1.0
    assert launch(torch.tensor([1e30])).item() == pytest.approx(1e60)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_and_no_numbers_are_seen(value: float) -> None:
    values = torch.ones(BLOCK + 7)
    values[-1] = value
    assert not launch(values).isfinite()


def test_the_norm_of_a_gradient_is_that_of_torch() -> None:
    torch.manual_seed(0)
    for grad in (
        torch.randn(5000), torch.randn(70, 90).t(), torch.randn(0), torch.randn(33).double(),
        torch.randn(2 * BLOCK).bfloat16(), torch.randn(40, dtype=torch.complex64),
    ):  # fmt: skip
        expected = torch.linalg.vector_norm(grad.to(torch.complex128 if grad.is_complex() else torch.float64))
        found = norm_of(grad)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)

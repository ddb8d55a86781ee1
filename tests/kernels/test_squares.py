"""The kernel that adds up squares in fp64, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fsdp.buffers import squares_of
from hocket.kernels.sums import BLOCK, squares


@given(
    numel=st.integers(1, 40) | st.integers(BLOCK - 1, BLOCK + 1) | st.integers(4 * BLOCK, 5 * BLOCK),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    programs=st.integers(1, 3),
)
@settings(max_examples=15)
def test_equals_torch_but_for_the_order_of_additions(numel, dtype, programs) -> None:
    values = (torch.randn(numel + 1) * 10 ** torch.randn(numel + 1)).to(dtype)
    values[-1] = float("nan")  # which belongs to no tensor
    tensors = [values[:-1], values[:0], values[: numel // 2]]
    found = squares(tensors, programs)
    assert found.dtype == torch.float64
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)


def test_squares_are_added_up_in_fp64() -> None:
    """In fp32 those of the small ones would be lost, or those of the large ones infinite."""
    small = torch.cat([torch.ones(1), torch.full((3 * BLOCK,), 1e-5)])
    found = squares([small, torch.tensor([1e30])]).tolist()
    assert found == pytest.approx([small.double().square().sum().item(), 1e60], rel=1e-7)
    assert found[0] - 1 == pytest.approx(3e-10 * BLOCK)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_and_no_numbers_are_seen(value: float) -> None:
    values = torch.ones(BLOCK + 7)
    values[-1] = value
    assert squares([values, values[:-1]]).isfinite().tolist() == [False, True]


def test_squares_of_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    kinds = (
        torch.randn(5000), torch.randn(70, 90).t(), torch.randn(0), torch.randn(33).double(),
        torch.randn(2 * BLOCK).bfloat16(), torch.randn(40, dtype=torch.complex64),
    )  # fmt: skip
    for grads in (kinds, kinds[:1], kinds[2:3], (kinds[0], kinds[4])):
        expected = [grad.to(torch.complex128).abs().square().sum() for grad in grads]
        found = squares_of(grads)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-13, atol=0.0)

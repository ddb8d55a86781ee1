"""The kernel that makes one of two results of attention, against the formula."""

from __future__ import annotations

import pytest
import torch

from hocket.kernels.sums import merge
from hocket.model.heads import merged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 64), (5, 3, 64), (17, 4, 128)])
def test_both_are_weighed_as_the_formula_does(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    one, other = torch.randn(2, tokens, heads, width).to(dtype)
    lse, more = torch.randn(2, heads, tokens) * 20
    wanted, total = merged(one.double(), lse.t().double(), other.double(), more.t().double())
    out, total_HT = merge(one, lse, other, more)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(total_HT.t().double(), total, rtol=1e-5, atol=1e-5)


def test_rows_of_wider_tensors_are_taken_where_they_lie() -> None:
    wide = torch.randn(2, 6, 3, 64)
    one, other = wide[:, ::2].contiguous()[0], wide[1, 1::2]
    lse, more = torch.randn(2, 3, 3)
    assert other.stride(0) == 2 * 3 * 64
    out, _ = merge(one, lse, other, more)
    torch.testing.assert_close(out, merged(one, lse.t(), other, more.t())[0], rtol=1e-5, atol=1e-5)

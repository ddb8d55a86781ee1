"""The kernel of experts' weight gradients against its formula, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels.products import Tile, weight_gradients

SMALL = Tile(16, 16, 16, warps=4, stages=2)


def formula(x_RD: Tensor, g_RF: Tensor, counts: list[int]) -> Tensor:
    """fp64 [E, D, F]."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return torch.stack([x_RD[here].double().t() @ g_RF[here].double() for here in rows])


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@given(
    counts=st.lists(st.sampled_from([0, 1, 7, 15, 16, 17, 33]), min_size=1, max_size=4),
    beyond=st.integers(0, 20),
    width=st.sampled_from([8, 16, 24, 40]),
    inner=st.sampled_from([8, 16, 40]),
    into=st.sampled_from([(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]),
    scale=st.sampled_from([1.0, 0.25]),
)
@settings(max_examples=6, deadline=None)
def test_against_float64(counts, beyond, width, inner, into, scale) -> None:
    """For all numbers of rows of experts and all edges of tiles. Rows without an expert mean nothing."""
    dtype, add = into
    rows = sum(counts)
    x, g = torch.randn(rows + beyond, width).bfloat16(), torch.randn(rows + beyond, inner).bfloat16()
    x[rows:] = g[rows:] = float("nan")
    before = torch.randn(len(counts), width, inner).to(dtype)
    out = before.clone()
    weight_gradients(x, g, ends_of(counts), out, add, scale, SMALL)
    expected = scale * formula(x, g, counts) + (before.double() if add else 0)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_an_expert_without_rows_gets_zeros_or_nothing() -> None:
    x, g = torch.randn(20, 16).bfloat16(), torch.randn(20, 16).bfloat16()
    out = torch.full((3, 16, 16), 7.0)
    weight_gradients(x, g, ends_of([0, 20, 0]), out, add=True, tile=SMALL)
    assert (out[0] == 7).all()
    assert (out[2] == 7).all()
    weight_gradients(x, g, ends_of([0, 20, 0]), out, tile=SMALL)
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()


def test_microbatches_add_up_in_their_order() -> None:
    """To the bits of fp32 products that are added one after another."""
    xs, gs = torch.randn(3, 37, 24).bfloat16(), torch.randn(3, 37, 16).bfloat16()
    ends, total, parts = ends_of([30, 7]), torch.empty(2, 24, 16), []
    for m, (x, g) in enumerate(zip(xs, gs, strict=True)):
        weight_gradients(x, g, ends, total, m > 0, 0.5, SMALL)
        parts.append(torch.empty_like(total))
        weight_gradients(x, g, ends, parts[-1], False, 0.5, SMALL)
    assert torch.equal(total, (parts[0] + parts[1]) + parts[2])
    assert not torch.equal(total, (parts[2] + parts[1]) + parts[0])


def test_operands_of_any_strides() -> None:
    x, g = torch.randn(16, 40).bfloat16().t(), torch.randn(40, 32).bfloat16()[:, ::2]
    out = torch.empty(1, 16, 16)
    weight_gradients(x, g, ends_of([40]), out, tile=SMALL)
    torch.testing.assert_close(out.double(), formula(x, g, [40]), rtol=1e-5, atol=1e-4)


def test_what_is_added_to_is_fp32() -> None:
    x = torch.randn(8, 16).bfloat16()
    with pytest.raises(AssertionError):
        weight_gradients(x, x, ends_of([8]), torch.zeros(1, 16, 16).bfloat16(), add=True, tile=SMALL)

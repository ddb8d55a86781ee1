"""The kernel that sums what has arrived, against the formula, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.kernels.sums import BLOCK, launch
from hocket.runtime.transports import local_sum


@given(
    world=st.integers(1, 9),
    numel=st.integers(1, 40) | st.integers(BLOCK - 1, BLOCK + 1) | st.integers(4 * BLOCK, 5 * BLOCK),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    scale=st.sampled_from([1.0, 0.25, 1 / 3]),
    add=st.booleans(),
    programs=st.integers(1, 3),
)
@settings(max_examples=15)
def test_same_bits_as_the_formula(world, numel, dtype, scale, add, programs) -> None:
    parts = torch.randn(world, numel).to(dtype)
    before = torch.randn(numel + 1)
    expected, into = before.clone(), before.clone()
    local_sum(parts, expected[:-1], scale, add)
    launch(parts, into[:-1], scale, add, programs=programs)
    assert torch.equal(into, expected)  # the last element too, which no part has
    rank = numel % world  # a row that lies elsewhere, and others that lie further apart
    wide = torch.full((world - 1, numel + 16), torch.nan, dtype=dtype)
    wide[:, :numel], into = torch.cat([parts[:rank], parts[rank + 1 :]]), before.clone()
    launch(wide[:, :numel], into[:-1], scale, add, (rank, parts[rank].clone()), programs)
    assert torch.equal(into, expected)


def test_order_of_the_rows_counts() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8]])
    for rows, total in ([0, 1, 2], 0.0), ([0, 2, 1], 1.0):
        into = torch.zeros(1)
        launch(parts[rows], into, 1.0)
        assert into.item() == total


@pytest.mark.parametrize("add", [True, False])
def test_infinite_and_no_numbers_stay(add: bool) -> None:
    parts = torch.tensor([[float("inf"), float("nan"), 1.0], [float("-inf"), 0.0, float("inf")]])
    expected, into = torch.ones(3), torch.ones(3)
    local_sum(parts, expected, 0.5, add)
    launch(parts, into, 0.5, add)
    assert torch.equal(into, expected) or torch.equal(into.isnan(), expected.isnan())
    assert into.isnan().tolist() == [True, True, False]
    assert into[2] == float("inf")

"""The kernel that sums what has arrived, against the formula, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fsdp.layout import FlatLayout
from hocket.kernels.pieces import Own
from hocket.kernels.sums import BLOCK, launch, place
from hocket.runtime.transports import local_sum, place_own


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


@given(
    world=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 40) | st.sampled_from([64, 4096, BLOCK + 1, 3 * BLOCK]), min_size=1, max_size=5),
    align=st.sampled_from([1, 64]),
    window=st.tuples(st.floats(0, 0.5), st.floats(0.5, 1)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    programs=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=25)
def test_chunks_in_a_buffer(world, lengths, align, window, dtype, programs, data) -> None:
    """A rank's row is in chunks between those of others; gaps are left alone."""
    layout = FlatLayout.build([(str(n), (world * length,)) for n, length in enumerate(lengths)], world, align)
    pieces, rank = layout.pieces, data.draw(st.integers(0, world - 1))
    low, high = (int(share * pieces.size) // align * align for share in window)
    high = max(high, low + 1)
    whole, parts = torch.randn(layout.total).to(dtype), torch.randn(world - 1, pieces.size).to(dtype)
    parts_WS, own = parts[:, low:high], Own(rank, whole, pieces, low)
    into = torch.randn(pieces.size)
    expected = into.clone()
    for view, here in own.chunks(high):
        rows = torch.stack([*parts_WS[:rank, here], view, *parts_WS[rank:, here]])
        local_sum(rows, expected[low:high][here], 0.25)
    found = into.clone()
    local_sum(parts_WS, found[low:high], 0.25, own=own)
    assert torch.equal(found, expected)
    found = into.clone()
    launch(parts_WS, found[low:high], 0.25, True, own, programs)
    assert torch.equal(found, expected)

    expected = whole.clone()
    for view, here in own._replace(whole=expected).chunks(high):
        view.copy_(into[low:high][here])
    for put in place_own, place:  # in torch's operations, and the kernel
        found, packed = whole.clone(), torch.full((pieces.size,), 7.0).to(dtype)
        put(into, own._replace(whole=found), high, packed[low:high])
        assert torch.equal(found, expected)
        for _, here in own.chunks(high):
            assert torch.equal(packed[low:high][here], into[low:high][here].to(dtype))
        assert (packed[:low] == 7).all()
        assert (packed[high:] == 7).all()


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

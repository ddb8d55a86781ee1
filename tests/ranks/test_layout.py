"""Layouts of units: every element of every parameter is kept by exactly one rank, as torch's `Shard` divides rows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.fsdp.layout import FlatLayout
from hocket.kernels.pieces import Pieces

SHAPES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=7)
WORLDS = st.integers(1, 6)
ALIGNS = st.sampled_from([1, 4, 64])


def build(shapes, world, align):
    return FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align)


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS)
def test_every_element_has_one_place_and_one_rank(shapes, world, align):
    layout = build(shapes, world, align)
    assert [entry.shape for entry in layout.entries] == shapes
    wholes = [torch.randn(shape) for shape in shapes]
    flat = torch.full((layout.total,), torch.nan)
    for view, whole in zip(layout.views(flat), wholes, strict=True):
        view.copy_(whole)
    for lo, hi in layout.gaps:
        assert flat[lo:hi].isnan().all()
        flat[lo:hi] = 0
    for entry, whole in zip(layout.entries, wholes, strict=True):
        if entry.is_kept_by_all:
            flat[entry.offset : entry.offset + world] = whole
    assert not flat.isnan().any()
    shards = layout.pieces.pack(flat, torch.full((layout.total,), torch.nan)).view(world, layout.shard)
    for i, whole in enumerate(wholes):
        chunks = list(whole.chunk(world)) if whole.dim() and whole.numel() else []
        for rank, shard in enumerate(shards):
            mine = chunks[rank] if rank < len(chunks) else torch.zeros(0)
            mine = mine if whole.dim() else whole  # every rank keeps a single number
            assert torch.equal(shard[layout.slices(rank)[i]], mine.reshape(-1))
    for lo, hi in layout.pieces.gaps:
        assert shards[:, lo:hi].isnan().all()
    assert torch.equal(layout.pieces.unpack(shards, flat.clone()), flat)


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS)
def test_a_chunk_begins_at_a_multiple_of_the_alignment(shapes, world, align):
    layout = build(shapes, world, align)
    assert layout.shard % align == 0
    assert all(entry.start % align == 0 for entry in layout.entries)
    used = sum(math.ceil(math.prod(s[:1]) / world) * math.prod(s[1:]) for s in shapes)
    assert layout.shard - used < align * (len(shapes) + 1)


@given(cuts=st.lists(st.integers(0, 40), max_size=8), world=WORLDS, low=st.integers(0, 40), high=st.integers(0, 40))
def test_a_range_of_a_shard_is_found_in_the_buffer(cuts, world, low, high):
    cuts = sorted(set(cuts))
    pieces = Pieces(tuple((lo, hi - lo) for lo, hi in zip(cuts[::2], cuts[1::2], strict=False)), 40, world)
    shards = torch.randn(world, 40)
    for lo, hi in pieces.gaps:
        shards[:, lo:hi] = 0
    whole = pieces.unpack(shards, torch.zeros(40 * world))
    found = torch.zeros(world, 40)
    for place, at, count, step in pieces.between(low, high).T.tolist():
        for rank in range(world):
            found[rank, low + at : low + at + count] = whole[place + rank * step :][:count]
    inside = torch.zeros(world, 40)
    inside[:, low:high] = shards[:, low:high]
    assert torch.equal(found, inside)


@pytest.mark.parametrize("alike", [1, 2, 3])
def test_ranks_with_the_same_shard_can_divide_it(alike):
    layout = FlatLayout.build([("a", (8, 8)), ("b", (4, 16)), ("c", (7,))], 2, 4, alike)
    assert layout.world == 2
    assert layout.shard % (4 * alike) == 0


def test_shards_of_aligned_parameters_have_no_padding():
    shapes = [(7168,), (2048, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168,)]
    layout = FlatLayout.build([(str(i), s) for i, s in enumerate(shapes)], 64)
    assert layout.total == sum(math.prod(s) for s in shapes) + 2 * (16 * 64)


def test_a_name_twice_is_a_mistake():
    with pytest.raises(AssertionError, match="same name"):
        FlatLayout.build([("a", (2,)), ("a", (3,))], 1)

"""Layouts that never split a row, or a parameter."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.fsdp.layout import FlatLayout

SHAPES = st.lists(st.lists(st.integers(1, 12), max_size=3).map(tuple), min_size=1, max_size=7)
WORLDS = st.integers(1, 6)
ALIGNS = st.sampled_from([1, 4, 64])


def build(shapes, world, align, granularity):
    return FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align, granularity)


def row(entry):
    return max(1, math.prod(entry.shape[1:]))


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS, granularity=st.sampled_from(["element", "row", "tensor"]))
def test_every_element_has_one_place_and_one_rank(shapes, world, align, granularity):
    layout = build(shapes, world, align, granularity)
    assert [entry.shape for entry in layout.entries] == shapes
    taken = [0] * layout.total
    for entry in layout.entries:
        for rank in range(world):
            local = layout.local(entry.name, rank)
            start = rank * layout.shard + local.offset
            assert len(local) == 0 or start == entry.offset + local.lo
            for i in range(start, start + len(local)):
                taken[i] += 1
    for lo, hi in layout.gaps:
        assert not any(taken[lo:hi])
    assert max(taken) <= 1
    assert sum(taken) == sum(math.prod(shape) for shape in shapes)
    assert sum(hi - lo for lo, hi in layout.gaps) == layout.total - sum(taken)


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS)
def test_no_row_is_split(shapes, world, align):
    layout = build(shapes, world, align, "row")
    assert layout.shard % align == 0
    for entry in layout.entries:
        assert entry.offset % align == 0
        for rank in range(world):
            local = layout.local(entry.name, rank)
            assert local.lo % row(entry) == 0
            assert local.hi % row(entry) == 0


@given(shapes=SHAPES, world=WORLDS)
def test_large_parameters_are_spread_over_as_few_chunks_as_possible(shapes, world):
    layout = build(shapes, world, 1, "row")
    chunk = math.lcm(*(row(entry) for entry in layout.entries))
    assert layout.shard % chunk == 0
    for entry in layout.entries:
        if entry.numel >= chunk:
            touched = -(-entry.end // chunk) - entry.offset // chunk
            assert touched == math.ceil(Fraction(entry.numel, chunk))


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS)
def test_no_tensor_is_split(shapes, world, align):
    layout = build(shapes, world, align, "tensor")
    assert layout.shard % align == 0
    loads = [0] * world
    for entry in layout.entries:
        assert entry.offset % align == 0
        keepers = [rank for rank in range(world) if len(layout.local(entry.name, rank))]
        assert len(keepers) == 1
        loads[keepers[0]] += -(-entry.numel // align) * align
    # No rank has more than its share and one parameter besides.
    largest = max(-(-math.prod(shape) // align) * align for shape in shapes)
    assert max(loads) == layout.shard
    assert layout.shard <= sum(loads) / world + largest


def test_rows_of_a_small_example():
    shapes = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]
    layout = build(shapes, 5, 1, "row")
    assert [entry.offset for entry in layout.entries] == [0, 12, 32, 28, 48]
    assert layout.total == 60
    assert layout.gaps == ((30, 32), (54, 60))


def test_tensors_of_a_small_example():
    layout = build([(3,), (5,), (4,), (2,)], 2, 1, "tensor")
    assert [entry.offset for entry in layout.entries] == [11, 0, 7, 5]
    assert layout.shard == 7
    assert layout.local("p2", 1) == layout.local("p2", 1)
    assert (len(layout.local("p2", 0)), len(layout.local("p2", 1))) == (0, 4)


def test_rows_cost_padding_where_elements_cost_none():
    shapes = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    used = sum(math.prod(shape) for shape in shapes)
    assert build(shapes, 256, 64, "element").total / used < 1.001
    assert 1.2 < build(shapes, 256, 64, "row").total / used < 1.5


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_neighbouring_shards_can_be_taken_as_one(granularity, parts):
    cut = build([(8, 8), (4, 16), (7,)], 6, 1, granularity)
    layout = cut.joined(parts)
    assert layout.total == cut.total
    for entry in layout.entries:
        for rank in range(layout.world):
            whole = layout.local(entry.name, rank)
            pieces = [cut.local(entry.name, rank * parts + i) for i in range(parts)]
            assert sum(map(len, pieces)) == len(whole)
    with pytest.raises(AssertionError, match="4 at a time"):
        cut.joined(4)


def test_views_and_slices_are_what_entries_and_locals_say():
    layout = build([(3, 2), (5,), ()], 2, 1, "element")
    flat = torch.arange(layout.total)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == [(3, 2), (5,), ()]
    for rank in range(2):
        shard = flat[rank * layout.shard :][: layout.shard]
        for entry, view, here in zip(layout.entries, views, layout.slices(rank), strict=True):
            local = layout.local(entry.name, rank)
            assert torch.equal(shard[here], view.flatten()[local.lo : local.hi])

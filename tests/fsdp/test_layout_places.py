"""Where parameters are in a buffer, and what ranks keep of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.fsdp.layout import FlatLayout

SHAPES = st.lists(st.lists(st.integers(1, 12), max_size=3).map(tuple), min_size=1, max_size=7)
WORLDS = st.integers(1, 6)
ALIGNS = st.sampled_from([1, 4, 64])


def build(shapes, world, align):
    return FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align)


@given(shapes=SHAPES, world=WORLDS, align=ALIGNS)
def test_every_element_has_one_place_and_one_rank(shapes, world, align):
    layout = build(shapes, world, align)
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


@pytest.mark.parametrize("alike", [1, 2, 3])
def test_ranks_with_the_same_shard_can_divide_it(alike):
    layout = FlatLayout.build([("a", (8, 8)), ("b", (4, 16)), ("c", (7,))], 2, 4, alike)
    assert layout.world == 2
    assert layout.shard % (4 * alike) == 0
    assert layout.total - 4 * alike * 2 < 64 + 64 + 7 <= layout.total


def test_views_and_slices_are_what_entries_and_locals_say():
    layout = build([(3, 2), (5,), ()], 2, 1)
    flat = torch.arange(layout.total)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == [(3, 2), (5,), ()]
    for rank in range(2):
        shard = flat[rank * layout.shard :][: layout.shard]
        for entry, view, here in zip(layout.entries, views, layout.slices(rank), strict=True):
            local = layout.local(entry.name, rank)
            assert torch.equal(shard[here], view.flatten()[local.lo : local.hi])

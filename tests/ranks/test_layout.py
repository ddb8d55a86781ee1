"""Flat layouts: every element of every parameter is kept by exactly one rank."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.fsdp.layout import ALIGN, FlatLayout

SHAPES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes=SHAPES, world=st.integers(1, 9), align=st.sampled_from([1, 8, 64]))
def test_ranks_share_every_element_once(shapes, world, align):
    layout = FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align)
    buffer: list[tuple[str, int] | None] = [None] * layout.total
    for entry in layout.entries:
        assert entry.offset % align == 0
        buffer[entry.offset : entry.end] = [(entry.name, i) for i in range(entry.numel)]
    for lo, hi in layout.gaps:
        assert buffer[lo:hi] == [None] * (hi - lo)
    assert sum(hi - lo for lo, hi in layout.gaps) == layout.total - sum(math.prod(s) for s in shapes)
    for entry in layout.entries:
        kept = []
        for rank in range(world):
            local = layout.local(entry.name, rank)
            start = rank * layout.shard + local.offset
            assert buffer[start : start + len(local)] == [(entry.name, i) for i in range(local.lo, local.hi)]
            assert 0 <= local.offset <= layout.shard - len(local)
            kept += range(local.lo, local.hi)
        assert kept == list(range(entry.numel))


@given(shapes=SHAPES, world=st.integers(1, 9), align=st.sampled_from([1, 8, 64]))
def test_padding_is_bounded(shapes, world, align):
    layout = FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align)
    assert layout.total - sum(math.prod(s) for s in shapes) < align * (len(shapes) + world)


def test_shards_of_aligned_parameters_have_no_padding():
    # The attention of a large model, where shards of whole rows would be 88 % padding at 1024 ranks.
    shapes = [(7168,), (1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512), (7168, 16384), (7168,)]
    layout = FlatLayout.build([(str(i), s) for i, s in enumerate(shapes)], 1024)
    used = sum(math.prod(s) for s in shapes)
    assert layout.total - used < 1024 * ALIGN
    assert layout.total / used < 1.001


def test_a_name_twice_is_a_mistake():
    with pytest.raises(AssertionError, match="same name"):
        FlatLayout.build([("a", (2,)), ("a", (3,))], 1)

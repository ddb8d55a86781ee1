"""Unions of intervals against a brute-force implementation on a grid of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hocket_trace.intervals import Spans, clip, covered, intersect, length, subtract, union

SIZE = 24
intervals = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=8)


def columns(found: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(found, np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def cells(found: list[list[int]]) -> set[int]:
    """The unit cells of a grid that intervals cover."""
    return {cell for start, end in found for cell in range(start, end)}


def cells_of(spans: Spans) -> set[int]:
    return cells([[int(a), int(b)] for a, b in spans])


def is_canonical(spans: Spans) -> bool:
    """Ascending, disjoint, not empty."""
    flat = spans.ravel()
    return bool((np.diff(flat)[::2] > 0).all() and (np.diff(flat)[1::2] >= 0).all())


@given(intervals)
def test_union(a: list[list[int]]) -> None:
    spans = union(*columns(a))
    assert cells_of(spans) == cells(a)
    assert (np.diff(spans.ravel()) > 0).all()  # what touches is one
    assert length(spans) == len(cells(a))


@given(intervals, intervals)
def test_intersect_and_subtract(a: list[list[int]], b: list[list[int]]) -> None:
    one, other = union(*columns(a)), union(*columns(b))
    assert cells_of(intersect(one, other)) == cells(a) & cells(b)
    assert cells_of(subtract(one, other)) == cells(a) - cells(b)
    assert is_canonical(intersect(one, other))
    assert is_canonical(subtract(one, other))
    assert length(intersect(one, other)) + length(subtract(one, other)) == length(one)


@given(intervals, intervals)
def test_covered(a: list[list[int]], b: list[list[int]]) -> None:
    found = covered(*columns(a), union(*columns(b)))
    assert found.tolist() == [len(cells([each]) & cells(b)) for each in a]


@given(intervals, st.integers(0, SIZE), st.integers(0, SIZE))
def test_clip(a: list[list[int]], start: int, end: int) -> None:
    low, high = sorted((start, end))
    assert cells_of(clip(union(*columns(a)), low, high)) == cells(a) & set(range(low, high))


def test_real_numbers_keep_their_precision() -> None:
    """Microseconds of a trace far from zero: 4e6 seconds after it."""
    start = 4.0e6 + 1e-6 * np.array([0.0, 5.0, 20.0])
    end = start + 1e-6 * np.array([10.0, 10.0, 1.0])
    np.testing.assert_allclose(length(union(start, end)), 16e-6, atol=2e-9)

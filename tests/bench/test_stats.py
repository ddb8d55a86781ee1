"""Figures of benchmarks, against answers worked out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.bench.stats import noise, off_clock, ratio


def test_a_ratio_pairs_blocks_of_the_same_round():
    # Both drift by a factor of 10, and the ratio of every round is 2: nothing of the drift is left.
    found = ratio([2.0, 20.0, 6.0], [1.0, 10.0, 3.0])
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_median_and_spans_what_was_seen():
    above, below = [1.0, 1.1, 1.2, 1.3, 4.0], [1.0] * 5
    found = ratio(above, below)
    assert found.median == pytest.approx(1.2)  # of 1, 1.1, 1.2, 1.3, 4
    assert 1.0 <= found.low < found.median < found.high <= 4.0
    assert ratio(above, below) == found, "the same blocks give the same interval"


def test_the_ratio_of_the_other_way_round_is_its_inverse():
    a, b = [1.0, 1.2, 0.9, 1.4], [2.0, 2.1, 2.2, 2.6]
    there, back = ratio(a, b), ratio(b, a)
    assert there.median == pytest.approx(1 / back.median)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low), rel=0.02)


def test_noise_is_the_median_step_between_neighbouring_blocks():
    # Steps by factors 1.1, 1.21, 1.1: the median is 1.1.
    assert noise([1.0, 1.1, 1.331, 1.331 / 1.1]) == pytest.approx(0.1)
    assert noise([3.0, 3.0, 3.0]) == 0.0
    assert noise([3.0]) == 0.0
    assert noise([1.0, math.e]) == pytest.approx(math.e - 1)


def test_blocks_at_another_clock_are_marked():
    assert off_clock([1000.0, 1010.0, 979.0, 1030.0]) == [False, False, True, True]  # the median is 1005
    assert off_clock([None, None]) == [False, False]
    assert off_clock([1000.0, None, 1000.0]) == [False, False, False]

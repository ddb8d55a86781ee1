"""A step looks the same predicted and measured: two distributions draw it."""

from __future__ import annotations

import pytest

from hocket.program import timeline
from hocket_trace import columns, scene


def test_colours_are_the_same() -> None:
    assert {name: scene.COLORS[name] for name in timeline.COLORS} == timeline.COLORS


@pytest.mark.parametrize("seconds", [0.0, 3e-6, 9.9949e-4, 9.996e-4, 0.0125, 0.99949, 0.9996, 1.25, -2.5, 1e4])
def test_durations_are_the_same(seconds: float) -> None:
    assert columns.duration(seconds) == timeline.duration(seconds)

"""Pictures of a measured step: what is where."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import numpy as np
import pytest

from hocket_trace.data import RankTrace, Step
from hocket_trace.exposure import exposed, idle, late, report
from hocket_trace.intervals import length
from hocket_trace.picture import COLORS, GUTTER, Box, columns, draw, lanes, svg, typical
from tests.trace.reports import Row, busy, step_of, trace
from tests.trace.reports import report as made

ROWS: list[Row] = [
    (0, 40, "compute", "compute", "mm", "fwd attn m0 c0 l0"),
    (20, 60, "gather", "gather", "all_gather", "gather dense t0 c0 l1"),
    (60, 80, "compute", "compute", "mm", "bwd attn m0 c0 l0"),
    (85, 90, "stream 20", "compute", "copy", ""),
]
STEPS = (Step(3, 0.0, 0.1),)
WIDTH = GUTTER + 12 + 1000  # so that a millisecond is ten pixels


def toy() -> RankTrace:
    """A gather of 40 ms of which the last 20 are exposed; then a gap of 5 ms: the host is late for 4 of them."""
    return trace(ROWS, STEPS)


def found(boxes: Sequence[Box], color: str) -> list[tuple[float, float]]:
    return [(round(box.x - GUTTER, 3), round(box.width, 3)) for box in boxes if box.color == color]


def test_bars_lie_where_the_activities_ran() -> None:
    scene = draw([toy()], 3, "head", WIDTH)
    assert found(scene.boxes, "fwd")[0] == (0, 399.5)
    assert found(scene.boxes, "bwd")[0] == (600, 199.5)
    assert found(scene.boxes, "gather")[0] == (200, 399.5)
    assert found(scene.boxes, "exposed")[0] == (400, 200)
    assert found(scene.boxes, "late")[0] == (800, 40)
    words = [ElementTree.fromstring(word).text for word in scene.words]
    assert words[:5] == ["rank 0", "compute", "gather", "stream 20", "head"]
    assert "10 ms" in words


def test_exposed_idle_and_late_stretches() -> None:
    one = toy()
    assert exposed(one, 0, 0.1).tolist() == [[0.04, 0.06]]
    assert np.allclose(idle(one, 0, 0.1), [[0.08, 0.085], [0.09, 0.1]])
    assert np.allclose(late(one, 0, 0.1), [[0.08, 0.084]])


def test_stretches_are_those_of_the_report() -> None:
    one = busy(500)
    for step, row in zip(one.steps, report([one]).steps, strict=True):
        assert length(exposed(one, step.start, step.end)) == pytest.approx(row.exposed, rel=1e-9)
        assert length(idle(one, step.start, step.end)) == pytest.approx(row.idle, rel=1e-9)
        assert length(late(one, step.start, step.end)) == pytest.approx(row.host_bound, rel=1e-9, abs=1e-12)


def test_lanes_stand_in_the_order_of_the_plan_and_streams_in_that_of_their_numbers() -> None:
    names = ["stream 20", "reduce", "a2a", "compute", "stream 7"]
    rows: list[Row] = [
        (n, n + 1, name, "compute" if name == "compute" else "a2a", "x", "") for n, name in enumerate(names)
    ]
    shown = lanes(trace(rows, STEPS))
    assert [lane.name for lane in shown] == ["compute", "a2a", "reduce", "stream 7", "stream 20"]
    assert [lane.compute for lane in shown] == [True, False, False, False, False]


def test_pixels_are_as_opaque_as_they_are_filled() -> None:
    """Ten bars of 0.5 pixels at 0, 1, 2 ...; one of 0.8 that begins at 20.6, of another colour."""
    left = np.arange(10.0)
    boxes = list(columns({"fwd": (left, left + 0.5), "bwd": (np.array([20.6]), np.array([21.4]))}, "bars"))
    assert [(box.x, box.width, box.color, box.opacity) for box in boxes] == [
        (0, 10, "fwd", 0.5),
        (20, 2, "bwd", 0.5),
    ]
    assert [box.title for box in boxes] == ["10 bars", "1 bars"]
    assert not list(columns({}, "bars"))


def test_many_short_kernels_make_a_small_picture() -> None:
    many = busy(40_000)
    text = svg(report([many]), [many])
    assert len(text) < 100_000
    scene = draw([many], 1, "")
    assert sum(box.width * box.opacity for box in scene.boxes if box.color == "fwd") > 200


def test_svg_is_a_document_with_titles_and_colours() -> None:
    root = ElementTree.fromstring(svg(report([toy()]), [toy()], width=WIDTH))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{space}title")]
    assert "fwd attn m0 c0 l0, aten::mm, mm: 40 ms, 0 µs to 40 ms" in titles
    assert "communication is exposed for 20 ms" in titles
    fills = {rect.get("fill") for rect in root.iter(f"{space}rect")}
    assert {COLORS[name] for name in ("fwd", "bwd", "gather", "exposed")} <= fills
    assert "step 3, 100 ms, communication exposed for 20.0 %, NVIDIA H200" in [
        t.text for t in root.iter(f"{space}text")
    ]


def test_the_picture_is_of_the_median_step_unless_one_is_named() -> None:
    slow = made(steps=(step_of(0, 4, late=0.03), step_of(0, 5), step_of(0, 6, late=0.01)))
    assert typical(slow) == 6
    many = busy(100)
    assert "step 2, " in svg(report([many]), [many], step=2)


def test_a_picture_without_steps_is_refused() -> None:
    empty = trace(ROWS, ())
    with pytest.raises(ValueError, match="no step to draw"):
        svg(report([empty]), [empty])


def test_loud_words_are_in_the_picture() -> None:
    one = toy()
    text = svg(made(steps=(step_of(0, 3),), transport="slow"), [one])
    assert "EMULATED NETWORK" in text
    assert set(COLORS) >= {"compute", "gather", "reduce", "a2a", "pp", "tp", "control", "other"}

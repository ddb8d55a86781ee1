"""Lanes by themselves: what is ordered behind what when a step is interrupted. Streams are stand-ins without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hocket.engine.graphed import recorder_of
from hocket.program.ops import LANES
from hocket.runtime.lanes import CpuLanes, CudaLanes, SideStream
from hocket.runtime.transports import Pending

GPU = torch.device("cuda", 0)


class Stream:
    """Notes what it was told to come behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream, self.behind, self.recorded = id(self), list[Stream](), False

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)

    def wait_event(self, event: Event) -> None:
        self.behind += event.of


class Event:
    def __init__(self, **_: Any) -> None:
        self.of: list[Stream] = []

    def record(self, stream: Stream) -> None:
        self.of = [stream]

    @property
    def cuda_event(self) -> int:
        return id(self)


class Reader:
    """Says of all events what it is told to say."""

    over_is: bool | None = True

    def over(self, event: int) -> bool | None:
        return self.over_is


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The current stream, alone in a list."""
    now = [Stream()]

    def choose(stream: Stream) -> None:
        now[0] = stream

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        before = now[0]
        choose(stream)
        try:
            yield
        finally:
            choose(before)

    for name, stand_in in (
        ("Stream", Stream),
        ("Event", Event),
        ("current_stream", lambda device: now[0]),
        ("set_stream", choose),
        ("stream", inside),
        ("is_current_stream_capturing", lambda: now[0].recorded),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("hocket.runtime.lanes.reader", Reader)
    return now


def test_the_caller_comes_behind_all_that_an_interrupted_step_has_issued(current: list[Stream]) -> None:
    (outer,), side = list(current), SideStream(GPU)
    lanes = CudaLanes(GPU, [side])
    lanes.begin()
    lanes.use("compute")
    with side.forked():
        (beside,) = current
    assert current[0] is lanes._streams["compute"]
    outer.behind.clear()
    lanes.abort()  # no lane has waited for the ops on the side
    assert current == [outer]
    assert set(outer.behind) == {*(lanes._streams[lane] for lane in LANES), beside}


def test_a_recording_waits_for_no_side_that_takes_no_part_in_it(current: list[Stream]) -> None:
    (outer,), side = list(current), SideStream(GPU)
    lanes = CudaLanes(GPU, [side])
    outer.recorded = True
    lanes.begin()
    lanes.abort()
    with side.on():
        (beside,) = current
    assert beside not in outer.behind
    beside.recorded = True
    lanes.abort()
    assert beside in outer.behind


def test_a_recording_that_cannot_be_ended_leaves_the_caller_on_its_stream(
    current: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def capture(graph: object, **how: object) -> Iterator[None]:
        current[0] = Stream()
        yield
        raise RuntimeError("work is left that was not joined")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    (outer,) = current
    with pytest.raises(RuntimeError, match="not joined"):
        recorder_of(CudaLanes(GPU))(list)
    assert current == [outer]


def test_a_caller_who_has_left_a_step_stays_on_its_stream(current: list[Stream]) -> None:
    """A recorded step is issued on a stream of its own, and replayed on the caller's."""
    lanes, outer = CudaLanes(GPU), current[0]
    for leave in (lanes.end, lanes.abort):
        current[0] = recording = Stream()
        lanes.begin()
        lanes.use("a2a")
        leave()
        assert current == [recording]
        current[0] = outer
        lanes.abort()
        assert current == [outer]
        assert set(outer.behind) == {lanes._streams[lane] for lane in LANES}
        outer.behind.clear()


def test_what_a_recording_holds_is_not_known_to_be_done(current: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = CudaLanes(GPU)
    lanes.begin()
    lanes.use("compute")
    lanes.issued("compute", 3, None, awaited=True)
    assert lanes.completed("compute", 3)
    for told in (False, None):  # as of an event that was last recorded in a recording
        monkeypatch.setattr(Reader, "over_is", told)
        assert lanes.completed("compute", 3) is told


def test_what_another_program_has_done_says_nothing_of_this_one(current: list[Stream]) -> None:
    lanes = CudaLanes(GPU)
    for awaited in (True, False):
        lanes.begin()
        lanes.use("compute")
        lanes.issued("compute", 3, None, awaited)
        assert lanes.completed("compute", 3) == (True if awaited else None)
        lanes.end()


def test_without_streams_the_host_waits_for_what_an_interrupted_step_has_issued() -> None:
    lanes, ended = CpuLanes(), list[int]()

    def fail() -> None:
        ended.append(1)
        raise RuntimeError("the other rank has gone")

    lanes.begin()
    for position, wait in enumerate((lambda: ended.append(0), fail, lambda: ended.append(2))):
        lanes.issued("gather", position, Pending(wait), awaited=True)
    lanes.abort()
    assert ended == [0, 1, 2]
    lanes.begin()  # nothing is pending

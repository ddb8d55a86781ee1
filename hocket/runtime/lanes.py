"""Lanes: the ordered queues on which ops run. Only this file makes CUDA streams and events of planned steps.

Note: [Lane semantics]
Ops of one lane run in issue order. An op that waits for position p of another lane runs after p and everything before p
there. Nothing else is ordered. On a GPU a lane is a stream, events implement the waits, and the host never waits. On a
CPU compute ops run when issued; a collective is pending until waited for, which also waits for all earlier ones of its
lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import cycle
from typing import Protocol

import torch

from hocket.program.ops import COMPUTING, LANES, Lane
from hocket.runtime.driver import reader
from hocket.runtime.transports import Pending


def spinner(device: torch.device) -> Callable[[float], None]:
    """Calibrate and return a function that keeps the current CUDA stream busy for so many seconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    with torch.cuda.device(device):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    per_second = cycles / (start.elapsed_time(end) / 1e3)
    return lambda seconds: torch.cuda._sleep(int(seconds * per_second))


def drain(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def stream_handle(device: torch.device) -> int:
    """Handle of the current stream; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def wait_for_stream(device: torch.device, handle: int) -> None:
    """Make the current stream wait for another one, given by its handle. Does nothing while a graph is captured."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        other = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
        torch.cuda.current_stream(device).wait_stream(other)


class SideStream:
    """A stream for communication inside an op: the `tp` lane.

    `fork` orders it after the current stream; calling a `mark` orders the current stream after it. An op joins before
    it frees memory that the side stream uses, so other lanes and the allocator need not know of it. On a CPU there is
    one queue and communication is `Pending`.
    """

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        """`priority` is -1 for communication, 0 for additional compute."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        if self._stream is not None:
            # Events are reused, since making one costs the host more than recording it. A wait refers to the last
            # record before it, so one event serves all forks, and a mark that is waited for late may stand for a later
            # point.
            self._forked = torch.cuda.Event()
            self._marks = cycle([torch.cuda.Event() for _ in range(16)])

    def current(self) -> int:
        return stream_handle(self._device)

    def fork(self) -> tuple[int, int]:
        """Make the side stream wait for the current stream. Returns the handles of both."""
        if self._stream is None:
            return 0, 0
        current = torch.cuda.current_stream(self._device)
        self._forked.record(current)
        self._stream.wait_event(self._forked)
        return current.cuda_stream, self._stream.cuda_stream

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Fork; inside, work is issued on the side stream."""
        if self._stream is None:
            yield
            return
        self.fork()
        with self.on():
            yield

    def on(self) -> AbstractContextManager[object]:
        """Inside, work is issued on the side stream without a fork."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """Return a call that makes the then current stream wait for the work on the side stream so far."""
        if self._stream is None:
            return lambda: None
        event = next(self._marks)
        event.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        """After an interrupted op: make the current stream wait for the side stream, unless only one of them is
        captured.
        """
        if self._stream is None:
            return
        with self.on():
            recorded = torch.cuda.is_current_stream_capturing()
        if recorded == torch.cuda.is_current_stream_capturing():
            self.mark()()


class Lanes(Protocol):
    """What the executor needs of lanes. Positions index a rank's op list."""

    @property
    def needs_rehearsal(self) -> bool:
        """Whether the first step runs one op at a time (`engine/executor.py`)."""
        ...

    def begin(self, names: Sequence[str] | None = None) -> None:
        """Order every lane after the caller's work so far.

        With the ops' `names`, by position, the step is being profiled and host waits appear in the trace.
        """

    def use(self, lane: Lane) -> None:
        """Issue the following work on `lane`."""

    def allocating(self, lane: Lane) -> AbstractContextManager[object]:
        """Inside, tensors are allocated on `lane`, which the current lane has waited for."""
        ...

    def wait(self, producer: Lane, position: int) -> None:
        """Make the current lane wait for the op at `position` of lane `producer`."""

    def issued(self, lane: Lane, position: int, pending: Pending | None, awaited: bool) -> None:
        """Record that the op at `position` was issued; `awaited` if another lane waits for it."""

    def settle(self) -> None:
        """Wait until the current lane has completed all its work."""

    def end(self) -> None:
        """Order the caller's following work after the compute lane, and leave the lanes."""

    def abort(self) -> None:
        """Leave the lanes after an interrupted step."""

    def completed(self, lane: Lane, position: int) -> bool | None:
        """Whether an issued op is done; None if unknown. For reports; never waits."""


class CpuLanes:
    """Lanes without streams. See Note: [Lane semantics]."""

    needs_rehearsal = False

    def __init__(self, lanes: Sequence[Lane] = LANES) -> None:
        self._lanes = lanes
        self._pending: dict[Lane, deque[tuple[int, Pending]]] = {lane: deque() for lane in lanes}
        self._done: dict[Lane, int] = dict.fromkeys(lanes, -1)
        self._names: Sequence[str] | None = None

    def begin(self, names: Sequence[str] | None = None) -> None:
        assert not any(self._pending.values()), "a collective of the last step is still pending"
        self._done = dict.fromkeys(self._lanes, -1)
        self._names = names

    def use(self, lane: Lane) -> None:
        pass

    def allocating(self, lane: Lane) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, producer: Lane, position: int) -> None:
        queue = self._pending[producer]
        while queue and queue[0][0] <= position:
            reached, pending = queue[0]
            if self._names is None or pending.done:  # not profiled, or no wait
                pending.wait()
            else:
                with torch.profiler.record_function(f"wait {self._names[reached]}"):
                    pending.wait()
            queue.popleft()
            self._done[producer] = reached

    def issued(self, lane: Lane, position: int, pending: Pending | None, awaited: bool) -> None:
        if pending is None:
            self._done[lane] = position
        else:
            self._pending[lane].append((position, pending))

    def settle(self) -> None:
        """Nothing to do: compute is synchronous, and a pending collective may need ops not yet issued."""

    def end(self) -> None:
        for lane in self._lanes:
            self.wait(lane, 1 << 60)

    def abort(self) -> None:
        """The host waits, since pending collectives write memory that the next step uses. Errors count as
        completion.
        """
        for queue in self._pending.values():
            for _, pending in queue:
                with suppress(Exception):
                    pending.wait()
            queue.clear()

    def completed(self, lane: Lane, position: int) -> bool | None:
        return self._done[lane] >= position


class CudaLanes:
    """One stream per lane; communication lanes have high priority, so that they start at once.

    Tests of timing independence set `delays`: lengths in clock cycles of spins before ops, used in turn.
    """

    needs_rehearsal = True

    def __init__(self, device: torch.device, sides: Sequence[SideStream] = (), lanes: Sequence[Lane] = LANES) -> None:
        """`sides` are the streams that ops fork to. Only an interrupted op leaves unjoined work there."""
        self._device, self._sides = device, sides
        self._streams = {lane: torch.cuda.Stream(device, priority=0 if lane in COMPUTING else -1) for lane in lanes}
        self._events: dict[int, torch.cuda.Event] = {}
        self._reader = reader()
        self._current = self._outer = torch.cuda.current_stream(device)
        self._inside = False
        self.delays: Sequence[int] = ()
        self._count = 0

    def begin(self, names: Sequence[str] | None = None) -> None:  # the host waits for nothing, so there is none to show
        self._current = self._outer = torch.cuda.current_stream(self._device)
        self._inside, self._count = True, 0
        for stream in self._streams.values():
            stream.wait_stream(self._outer)

    def use(self, lane: Lane) -> None:
        stream = self._streams[lane]
        if stream is not self._current:
            torch.cuda.set_stream(stream)
            self._current = stream
        if self.delays:
            torch.cuda._sleep(self.delays[self._count % len(self.delays)])
            self._count += 1

    def allocating(self, lane: Lane) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[lane])

    def wait(self, producer: Lane, position: int) -> None:
        self._current.wait_event(self._events[position])

    def issued(self, lane: Lane, position: int, pending: Pending | None, awaited: bool) -> None:
        if not awaited:  # a stale event of another program
            self._events.pop(position, None)
            return
        event = self._events.get(position)
        if event is None:
            event = self._events[position] = torch.cuda.Event()
        event.record(self._streams[lane])

    def settle(self) -> None:
        self._current.synchronize()

    def end(self) -> None:
        self._leave()
        self._outer.wait_stream(self._streams["compute"])

    def _leave(self) -> None:
        torch.cuda.set_stream(self._outer)
        self._inside = False

    def join(self) -> None:
        outer = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            outer.wait_stream(stream)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Restore the current stream on exit."""
        outer = torch.cuda.current_stream(self._device)
        try:
            yield
        finally:
            torch.cuda.set_stream(outer)

    def abort(self) -> None:
        if self._inside:  # the caller's stream may have changed, as after a recording, and stays
            self._leave()
        self.join()
        for side in self._sides:
            side.join()

    def completed(self, lane: Lane, position: int) -> bool | None:
        event = self._events.get(position)  # ops that no lane awaits have none
        return None if event is None else self._reader.over(event.cuda_event)

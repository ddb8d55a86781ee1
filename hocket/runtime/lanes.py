"""Lanes: the ordered queues on which ops run. The only place that makes CUDA streams and events.

Note: [What a lane promises]
Ops of one lane run in the order in which they are issued. An op of another lane that was told to wait for
position p of this lane runs after p and everything before it. Nothing else is ordered. On a GPU a lane is a
stream and the promise is kept by events; the host never waits. On a CPU compute ops run when they are issued
and a collective is pending until somebody waits for it; waiting for one waits for all earlier ones of its
lane, because a queue is in order.
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
    """A function that keeps the current CUDA stream busy for so many seconds. Takes a moment to be calibrated."""
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
    """Wait until the current stream has done all that was issued on it."""
    torch.cuda.current_stream(device).synchronize()


def stream_handle(device: torch.device) -> int:
    """The handle of the current queue; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def wait_for_stream(device: torch.device, handle: int) -> None:
    """Order the current queue behind all that was issued on another one, given by its handle. Not in a recording."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        other = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
        torch.cuda.current_stream(device).wait_stream(other)


class SideStream:
    """A queue beside the one in use, for communication in the middle of an op: the `tp` lane.

    What is issued on it comes behind all that was issued before, and the queue in use comes behind a `mark` of it only
    when somebody asks. Whoever forks joins before memory that was used there is given back: so to other lanes, and to
    the allocator, an op that communicates inside is like any other. On a CPU there is one queue, and what is on its way
    are `Pending`s.
    """

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        """Communication goes before what computes; a queue for more products, of priority 0, does not."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        if self._stream is not None:
            # Making events takes the host longer than using them. A wait is for what an event stood for when the wait
            # was issued; so one serves all forks, and a mark that is asked for late stands for a later point.
            self._forked = torch.cuda.Event()
            self._marks = cycle([torch.cuda.Event() for _ in range(16)])

    def current(self) -> int:
        """The handle of the current queue; 0 on a CPU."""
        return stream_handle(self._device)

    def fork(self) -> tuple[int, int]:
        """Order the side behind all that the current queue has been given so far: handles of the current, the side."""
        if self._stream is None:
            return 0, 0
        current = torch.cuda.current_stream(self._device)
        self._forked.record(current)
        self._stream.wait_event(self._forked)
        return current.cuda_stream, self._stream.cuda_stream

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Fork, and inside, work is issued on the side."""
        if self._stream is None:
            yield
            return
        self.fork()
        with self.on():
            yield

    def on(self) -> AbstractContextManager[object]:
        """Inside, work is issued on the side, behind what is there and nothing else."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """A call that orders the then current queue behind all that is on the side now."""
        if self._stream is None:
            return lambda: None
        event = next(self._marks)
        event.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        """After an interrupted op: order the current queue behind the side, if one recording has both or none."""
        if self._stream is None:
            return
        with self.on():
            recorded = torch.cuda.is_current_stream_capturing()
        if recorded == torch.cuda.is_current_stream_capturing():
            self.mark()()


class Lanes(Protocol):
    """What the executor asks of lanes. Positions are those of a rank's op list."""

    @property
    def needs_rehearsal(self) -> bool:
        """Whether the first step must run one op at a time (see `engine/executor.py`)."""
        ...

    def begin(self, names: Sequence[str] | None = None) -> None:
        """Order every lane behind the work that the caller has issued so far.

        With the ops' `names`, by position, the step is being profiled: waits of the host are to be seen in the trace.
        """

    def use(self, lane: Lane) -> None:
        """Make `lane` the one on which the following work is issued."""

    def allocating(self, lane: Lane) -> AbstractContextManager[object]:
        """Inside, new tensors are memory of `lane`, which the lane in use comes behind."""
        ...

    def wait(self, producer: Lane, position: int) -> None:
        """Order what follows on the lane in use behind the op at `position` of lane `producer`."""

    def issued(self, lane: Lane, position: int, pending: Pending | None, awaited: bool) -> None:
        """Note that the op at `position` has been issued; `awaited` if another lane will wait for it."""

    def settle(self) -> None:
        """Wait until all that was issued on the lane in use is done."""

    def end(self) -> None:
        """Order the caller's following work behind the compute lane and leave the lanes."""

    def abort(self) -> None:
        """Leave the lanes after an interrupted step."""

    def completed(self, lane: Lane, position: int) -> bool | None:
        """Whether an op that was issued is done; None if nothing says so (for reports; never waits)."""


class CpuLanes:
    """Lanes without streams. See Note: [What a lane promises]."""

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
            if self._names is None or pending.done:  # nobody waits, or nobody looks
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
        """Nothing to do: compute is done when it is issued, and a pending collective may need ops not yet issued."""

    def end(self) -> None:
        for lane in self._lanes:
            self.wait(lane, 1 << 60)

    def abort(self) -> None:
        """The host waits: what is under way goes on writing memory that the next step uses. What fails is over, too."""
        for queue in self._pending.values():
            for _, pending in queue:
                with suppress(Exception):
                    pending.wait()
            queue.clear()

    def completed(self, lane: Lane, position: int) -> bool | None:
        return self._done[lane] >= position


class CudaLanes:
    """One stream per lane; communication lanes have the higher priority, so that they start at once.

    `delays`, if set, are lengths in clock cycles of spins put in front of ops, one per issued op, over and
    over: a test that results do not depend on timing.
    """

    needs_rehearsal = True

    def __init__(self, device: torch.device, sides: Sequence[SideStream] = (), lanes: Sequence[Lane] = LANES) -> None:
        """`sides` are what ops fork to. Only an interrupted one leaves work there that nobody has waited for."""
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
        if not awaited:  # an event of that position is another program's
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
        """Order the caller's following work behind all lanes."""
        outer = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            outer.wait_stream(stream)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Behind this the current stream is the one that it was before, however what is inside ends."""
        outer = torch.cuda.current_stream(self._device)
        try:
            yield
        finally:
            torch.cuda.set_stream(outer)

    def abort(self) -> None:
        if self._inside:  # else the caller may be on another stream by now, as behind a recording, and stays there
            self._leave()
        self.join()
        for side in self._sides:
            side.join()

    def completed(self, lane: Lane, position: int) -> bool | None:
        event = self._events.get(position)  # ops that nobody awaits have none
        return None if event is None else self._reader.over(event.cuda_event)

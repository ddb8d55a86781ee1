"""Queues: ordered work beside the caller's, for sharded modules that run without a plan.

Note: [What a queue promises]
Work of one queue runs in the order in which it is submitted, after the tickets it was given, and nothing else is
ordered. A ticket stands for work that was issued; whoever waits for it comes after that work and everything before it
in its queue. On a GPU a queue is a stream and a ticket is an event: the host never waits. On a CPU work runs when it is
submitted, and what it returns is a collective under way until somebody waits for it or for a later one of its queue. So
a CPU is the stricter one: work that needs the result of earlier work of its own queue must name its ticket, where a
stream would be in order anyway.

A queue is not a lane (`runtime/lanes.py`): lanes are told by a plan who waits for which position and know all of that
beforehand, queues find out while the model runs, from whatever thread autograd uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.autograd import profiler

from hocket.runtime.transports import Pending

Work = Callable[[], Pending | None]
"""Issues something. What it returns is a collective under way, None if there is none."""


class Ticket:
    """Something that was issued, behind which others can be ordered."""

    __slots__ = ("_capture", "_event", "_queue", "_recorded_on", "_waited_on", "done", "name")

    def __init__(self, name: str, queue: Queue) -> None:
        self.name = name
        self.done = False
        """Whether it is known to be over. Never asks the GPU, where it stays False."""
        self._queue = queue
        self._event: torch.cuda.Event | None = None
        self._recorded_on = self._waited_on = -1  # streams; the default one is 0
        self._capture = 0  # in which of its queue's captures it was recorded; 0 is outside of any

    def __repr__(self) -> str:
        return f"Ticket({self.name})"

    def wait(self) -> None:
        """Order the caller's following work behind this. On a CPU the host waits. Waiting again costs nothing."""
        self._queue._wait_for(self)

    def covers(self, earlier: Ticket) -> bool:
        """Whether what comes behind this comes behind `earlier` too: both are marks of one stream."""
        return self._recorded_on == earlier._recorded_on

    def __del__(self) -> None:
        # Nobody can wait for it any more, and a stream that was told to wait keeps the recording, not the event.
        if self._event is not None:
            self._queue._events.append(self._event)


class Queue:
    """An ordered queue of work: a stream of high priority on a GPU. See Note: [What a queue promises]."""

    def __init__(self, name: str, device: torch.device | str) -> None:
        self.name, self.device = name, torch.device(device)
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._captures = 0
        self._pending: deque[tuple[Ticket, Pending]] = deque()

    def __repr__(self) -> str:
        return f"Queue({self.name})"

    def submit(self, name: str, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        """Run `work` after everything submitted before and after the tickets. Raises what `work` raises."""
        ticket = Ticket(name, self)
        if self._stream is not None:
            self._issue_on_stream(self._stream, ticket, work, after)
        else:
            self._issue(ticket, work, after)
        return ticket

    def mark(self, name: str) -> Ticket:
        """A ticket for everything that the caller has issued so far. On a CPU all of that is done."""
        ticket = Ticket(name, self)
        if self._stream is None:
            ticket.done = True
        else:
            self._record(ticket, torch.cuda.current_stream(self.device))
        return ticket

    def caller(self) -> int:
        """Which stream the caller issues its work on. A CPU has one."""
        return 0 if self._stream is None else torch.cuda.current_stream(self.device).cuda_stream

    def join(self) -> None:
        """Order the caller's following work behind everything submitted so far."""
        if self._stream is not None:
            self._order_caller_behind(self._stream)
        elif self._pending:
            self._finish(self._pending[-1][0])

    def abort(self) -> None:
        """After an exception: end what is under way. On a GPU the caller's following work comes behind it.

        On a CPU the host waits, since a collective goes on reading and writing memory that is about to be used for
        something else. One that fails has ended as well.
        """
        if self._stream is not None:
            self._order_caller_behind(self._stream)
        for ticket, pending in self._pending:
            with suppress(Exception):
                pending.wait()
            ticket.done = True
        self._pending.clear()

    def _wait_for(self, ticket: Ticket) -> None:
        if self._stream is None:
            self._finish(ticket)
            return
        stream = torch.cuda.current_stream(self.device)
        if ticket._waited_on != stream.cuda_stream:
            self._order(stream, ticket)
            ticket._waited_on = stream.cuda_stream

    # Without streams

    def _issue(self, ticket: Ticket, work: Work, after: Sequence[Ticket]) -> None:
        for earlier in after:
            earlier._queue._finish(earlier)
        with named(ticket.name):
            pending = work()
        if pending is not None and not pending.done:
            self._pending.append((ticket, pending))
        elif self._pending:  # over itself, but a ticket stands for what came before it too
            self._pending.append((ticket, Pending()))
        else:
            ticket.done = True

    def _finish(self, ticket: Ticket) -> None:
        """Have the host wait for a ticket and everything before it."""
        while not ticket.done:
            first, pending = self._pending[0]
            with named(f"wait {first.name}"):
                pending.wait()
            self._pending.popleft()
            first.done = True

    # With streams

    def _issue_on_stream(self, stream: torch.cuda.Stream, ticket: Ticket, work: Work, after: Sequence[Ticket]) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._enter_capture()
        with torch.cuda.stream(stream):
            for earlier in after:
                earlier._queue._order(stream, earlier)
            with named(ticket.name):
                pending = work()
                if pending is not None:
                    pending.wait()
            self._record(ticket, stream)

    def _record(self, ticket: Ticket, stream: torch.cuda.Stream) -> None:
        """Let a ticket stand for what has been issued on `stream`, which is the current one."""
        if torch.cuda.is_current_stream_capturing():
            self._enter_capture()
            ticket._capture = self._captures
        ticket._event = self._events.pop() if self._events else torch.cuda.Event()
        ticket._event.record(stream)
        ticket._recorded_on = stream.cuda_stream

    def _order(self, stream: torch.cuda.Stream, ticket: Ticket) -> None:
        """Order `stream`, the current one, behind a ticket of this queue."""
        if ticket._recorded_on == stream.cuda_stream:
            return
        capture = 0
        if torch.cuda.is_current_stream_capturing():
            self._enter_capture()
            capture = self._captures
        if ticket._capture == capture:  # see Note: [Tickets and graphs]
            assert ticket._event is not None
            stream.wait_event(ticket._event)

    def _enter_capture(self) -> None:
        """Take part in the capture of the current stream.

        Note: [Tickets and graphs]
        A CUDA graph being captured can't wait for work outside of it, and nothing outside can wait for what has only
        been captured. Neither has to: `torch.cuda.graph` waits for the whole device before it begins, and a replay is
        in order with the stream it is launched on. So tickets of the other side count as over. A queue's stream becomes
        part of the capture with the first thing it is asked during it, and must be joined before the capture ends.
        """
        assert self._stream is not None
        caller = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            if not torch.cuda.is_current_stream_capturing():
                self._stream.wait_stream(caller)
                self._captures += 1

    def _order_caller_behind(self, stream: torch.cuda.Stream) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._enter_capture()
        torch.cuda.current_stream(self.device).wait_stream(stream)


_queues: dict[tuple[str, torch.device], Queue] = {}


def queue_of(name: str, device: torch.device) -> Queue:
    """The queue of that name on a device.

    Note: [Models share queues]
    Models over the same ranks share groups, and a backward may run through several of them. A group has one place for
    what a reduction receives, until it is added up: so the reductions of a group are all on one queue.
    """
    if (name, device) not in _queues:
        _queues[name, device] = Queue(name, device)
    return _queues[name, device]


class HostEvent:
    """A place in the order of a device's work, at which the host waits. A CPU has passed it when it comes there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: torch.cuda.Event | None = None

    def record(self) -> None:
        """It is behind what the current stream has."""
        if self.device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Have the host wait until the device has passed it, if it was noted."""
        if self._event is not None:
            self._event.synchronize()


def named(name: str) -> AbstractContextManager[Any]:
    """A range of that name in a profile; nothing when nobody profiles."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()

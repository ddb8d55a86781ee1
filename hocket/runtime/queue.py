"""Queues: ordered asynchronous work for sharded modules that run without a plan.

Note: [Queue semantics]
Work of one queue runs in submission order, after the tickets passed to it; nothing else is ordered. Waiting for a
ticket waits for its work and everything before it in the queue. On a GPU a queue is a stream, a ticket is an event, and
the host never waits. On a CPU work runs when submitted, and a returned collective is pending until waited for. So the
CPU is stricter: work that needs an earlier result of its own queue must pass its ticket.

Lanes (`runtime/lanes.py`) know all waits from a plan; queues learn them while the model runs, from whichever thread
autograd uses.
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
"""Issues something; returns the pending collective, if any."""


class Ticket:
    """A point in a queue that other work can wait for."""

    __slots__ = ("_event", "_queue", "_recorded_on", "_waited_on", "done", "name")

    def __init__(self, name: str, queue: Queue) -> None:
        self.name = name
        self.done = False
        """Whether it is known to be complete. Never queries the GPU, where it stays False."""
        self._queue = queue
        self._event: torch.cuda.Event | None = None
        self._recorded_on = self._waited_on = -1  # stream handles; the default stream is 0

    def __repr__(self) -> str:
        return f"Ticket({self.name})"

    def wait(self) -> None:
        """Order the caller's following work after this; on a CPU the host waits. Repeated waits are free."""
        self._queue._wait_for(self)

    def covers(self, earlier: Ticket) -> bool:
        """Whether waiting for this also waits for `earlier`: both were recorded on one stream."""
        return self._recorded_on == earlier._recorded_on


class Queue:
    """An ordered queue of work; on a GPU a high-priority stream. See Note: [Queue semantics]."""

    def __init__(self, name: str, device: torch.device | str) -> None:
        self.name, self.device = name, torch.device(device)
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._pending: deque[tuple[Ticket, Pending]] = deque()

    def __repr__(self) -> str:
        return f"Queue({self.name})"

    def submit(self, name: str, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
        """Run `work` after the tickets and everything submitted before. Raises what `work` raises."""
        ticket = Ticket(name, self)
        if self._stream is not None:
            self._issue_on_stream(self._stream, ticket, work, after)
        else:
            self._issue(ticket, work, after)
        return ticket

    def mark(self, name: str) -> Ticket:
        """A ticket for the caller's work so far. On a CPU that work is done."""
        ticket = Ticket(name, self)
        if self._stream is None:
            ticket.done = True
        else:
            self._record(ticket, torch.cuda.current_stream(self.device))
        return ticket

    def caller(self) -> int:
        return 0 if self._stream is None else torch.cuda.current_stream(self.device).cuda_stream

    def join(self) -> None:
        """Order the caller's following work after everything submitted so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        elif self._pending:
            self._finish(self._pending[-1][0])

    def abort(self) -> None:
        """After an exception: order the caller's following work after what is in flight.

        On a CPU the host waits, since pending collectives still access memory that is about to be reused. Errors count
        as completion.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
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
        elif self._pending:  # complete itself, but a ticket covers earlier work too
            self._pending.append((ticket, Pending()))
        else:
            ticket.done = True

    def _finish(self, ticket: Ticket) -> None:
        """Make the host wait for a ticket and everything before it."""
        while not ticket.done:
            first, pending = self._pending[0]
            with named(f"wait {first.name}"):
                pending.wait()
            self._pending.popleft()
            first.done = True

    # With streams

    def _issue_on_stream(self, stream: torch.cuda.Stream, ticket: Ticket, work: Work, after: Sequence[Ticket]) -> None:
        with torch.cuda.stream(stream):
            for earlier in after:
                earlier._queue._order(stream, earlier)
            with named(ticket.name):
                pending = work()
                if pending is not None:
                    pending.wait()
            self._record(ticket, stream)

    def _record(self, ticket: Ticket, stream: torch.cuda.Stream) -> None:
        """Record a ticket on `stream`, the current one."""
        ticket._event = torch.cuda.Event()
        ticket._event.record(stream)
        ticket._recorded_on = stream.cuda_stream

    def _order(self, stream: torch.cuda.Stream, ticket: Ticket) -> None:
        """Make `stream`, the current one, wait for a ticket of this queue."""
        if ticket._recorded_on != stream.cuda_stream:
            assert ticket._event is not None
            stream.wait_event(ticket._event)


_queues: dict[tuple[str, torch.device], Queue] = {}


def queue_of(name: str, device: torch.device) -> Queue:
    """The queue of that name on a device.

    Note: [Models share queues]
    Models over the same ranks share groups, and one backward may run through several models. A group has one receive
    buffer for reductions, so all reductions of a group use one queue.
    """
    if (name, device) not in _queues:
        _queues[name, device] = Queue(name, device)
    return _queues[name, device]


class HostEvent:
    """An event that the host can wait for. On a CPU it has always passed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: torch.cuda.Event | None = None

    def record(self) -> None:
        if self.device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def named(name: str) -> AbstractContextManager[Any]:
    """A named range in a profile; no-op without a profiler."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()

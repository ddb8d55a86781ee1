"""A record of queues: what was submitted, and what is ordered after what. Structure tests read it instead of a trace.

Every entry is a node of the happens-before graph. Its edges come from the entry before it in its queue and from the
tickets it was given. What the caller issues, between waits, is a queue of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.fsdp.module_context import ShardContext
from hocket.runtime.queue import Queue, Ticket, Work

CALLER = "caller"
"""The queue of what the caller issues itself: marks, waits, and notes of compute."""


@dataclass(frozen=True)
class Entry:
    """Something that was issued."""

    index: int
    queue: str
    name: str
    after: tuple[str, ...]
    """Names of the entries that it was told to follow."""


class History:
    """A record of the queues that are given to `watch`."""

    def __init__(self) -> None:
        self.entry_of: dict[Ticket, Entry] = {}
        self._waited: set[Ticket] = set()
        self.entries: list[Entry] = []
        self._before: list[int] = []  # for each entry the set of all that come before it, as bits
        self._last: dict[str, Entry] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: without tickets, which belong to queues of this one."""
        return {**self.__dict__, "entry_of": {}, "_waited": set()}

    def add(self, queue: str, name: str, after: Sequence[Entry] = ()) -> Entry:
        """Note an entry of a queue, behind the entries of `after`; those of an older record are over."""
        predecessors = [one for one in after if one.index < len(self.entries) and self.entries[one.index] is one]
        entry = Entry(len(self.entries), queue, name, tuple(one.name for one in predecessors))
        if queue in self._last:
            predecessors.append(self._last[queue])
        before = 0
        for one in predecessors:
            before |= self._before[one.index] | 1 << one.index
        self.entries.append(entry)
        self._before.append(before)
        self._last[queue] = entry
        return entry

    def note(self, name: str) -> Entry:
        """Note what the caller issues now, such as the compute of a module."""
        return self.add(CALLER, name)

    def wait(self, name: str, entry: Entry | None) -> Entry:
        """Note that what the caller issues from now on comes behind `entry`."""
        return self.add(CALLER, name, [entry] if entry is not None else [])

    def last(self, queue: str) -> Entry | None:
        """The newest entry of a queue."""
        return self._last.get(queue)

    def all(self, name: str) -> list[Entry]:
        """The entries of a name, oldest first."""
        return [entry for entry in self.entries if entry.name == name]

    def one(self, name: str, number: int = 0) -> Entry:
        """Entry `number` of a name; -1 is the newest."""
        found = self.all(name)
        assert found, f"nothing is named {name!r}; there are {sorted({entry.name for entry in self.entries})}"
        return found[number]

    def waits(self) -> list[str]:
        """Names of what the caller has waited for, in order."""
        return [e.name for e in self.entries if e.queue == CALLER and e.name.startswith(("wait ", "join "))]

    def before(self, a: Entry, b: Entry) -> bool:
        """Whether `a` is over when `b` begins."""
        return bool(self._before[b.index] >> a.index & 1)

    def concurrent(self, a: Entry, b: Entry) -> bool:
        """Whether `a` and `b` may run at the same time."""
        return a is not b and not self.before(a, b) and not self.before(b, a)

    def clear(self) -> None:
        """Forget everything but what the next entries come behind."""
        self.entries.clear()
        self._before.clear()
        self._last.clear()

    def watch(self, queue: Any) -> Any:
        """Note from now on what a queue is asked for."""

        def submit(name: str, work: Work, after: Sequence[Ticket] = ()) -> Ticket:
            known = [self.entry_of[one] for one in after if one in self.entry_of]
            entry = self.add(queue.name, name, known)
            ticket = Queue.submit(queue, name, work, after)
            self.entry_of[ticket] = entry
            return ticket

        def mark(name: str) -> Ticket:
            entry = self.note(name)
            ticket = Queue.mark(queue, name)
            self.entry_of[ticket] = entry
            return ticket

        def join() -> None:
            self.wait(f"join {queue.name}", self.last(queue.name))
            Queue.join(queue)

        def wait_for(ticket: Ticket) -> None:
            if ticket in self.entry_of and ticket not in self._waited:
                self.wait(f"wait {ticket.name}", self.entry_of[ticket])
                self._waited.add(ticket)
            Queue._wait_for(queue, ticket)

        queue.submit, queue.mark, queue.join, queue._wait_for = submit, mark, join, wait_for
        return queue


def record(context: ShardContext) -> History:
    """Note from now on what the queues of a sharded model are asked for."""
    history = History()
    for queue in {context.gathering, context.reducing, context.outer}:
        history.watch(queue)
    return history

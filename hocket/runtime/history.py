"""What was submitted to queues, and what is ordered behind what: structure tests read it instead of a GPU's trace.

Every entry is a node of the happens-before graph. Its edges come from the entry before it in its queue, from the
tickets it was given, and from the entry before it on the same process group, since collectives of a group run one after
the other whatever the queue. What the caller issues, between waits, is a queue of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CALLER = "caller"
"""The queue of what the caller issues itself: marks, waits, and notes of compute."""


@dataclass(frozen=True)
class Entry:
    """Something that was issued."""

    index: int
    queue: str
    name: str
    after: tuple[str, ...]
    """Names of the entries that it was told to come behind."""
    group: str
    """Process group of its collective, as far as somebody said it."""


class History:
    """A record of queues. Hand one to every `Queue` that is to be in it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._before: list[int] = []  # for each entry the set of all that come before it, as bits
        self._last: dict[str, Entry] = {}
        self._last_of_group: dict[str, Entry] = {}

    def add(self, queue: str, name: str, after: Sequence[Entry] = (), group: str = "") -> Entry:
        """Note an entry of a queue, behind the entries of `after`; those of an older record are over."""
        predecessors = [one for one in after if one.index < len(self.entries) and self.entries[one.index] is one]
        entry = Entry(len(self.entries), queue, name, tuple(one.name for one in predecessors), group)
        if queue in self._last:
            predecessors.append(self._last[queue])
        if group:
            if group in self._last_of_group:
                predecessors.append(self._last_of_group[group])
            self._last_of_group[group] = entry
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
        self._last_of_group.clear()

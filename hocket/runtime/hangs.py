"""Hang reports: what a rank records of a step, which rank the others wait for, and a watchdog.

A hang shows on all ranks, but its cause is on one: the rank that others wait for and that waits for none. Exchanges of
a group have the same numbers on all its ranks, so comparing `RankState`s (`engine/hang_report.py`) finds it: `culprit`.

Note: [The watchdog never blocks]
A report queries a device that may not answer, so it runs in a thread of its own. If that is late, the watchdog reports
without the device. A thread that hangs while it holds the GIL stops the watchdog too. For that case `faulthandler`,
which needs no GIL, dumps all stacks and ends the process; the watchdog postpones it while it runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hocket.program.ops import Op

ALONE = "hocket: rank "
STATE = "hocket: state "
"""Start of a report's machine-readable line."""


@dataclass
class Issued:
    """The exchanges of one group that a rank has issued since a step began."""

    calls: list[tuple[str, float]] = field(default_factory=list)
    """(collective, `time.monotonic` of the call)."""
    marks: list[int] = field(default_factory=list)
    """Counters of the transport's `Flags`."""


@dataclass(frozen=True)
class FlagProgress:
    """Progress of a rank's exchanges in a step, read from flags."""

    done: int | None = None
    """Exchanges completed on this rank; None if unknown."""
    absent: tuple[int, ...] = ()
    """Ranks of the group whose flag this rank waits for."""
    turns: tuple[int, int] | None = None
    """If the flags count turns rather than calls of the group: (begun on the device, issued)."""


class Flags(Protocol):
    """Memory flags by which ranks of a group wait for each other, without a timeout or with one that names no rank."""

    def begin(self) -> list[int]:
        """Begin a step. Returns marks, to which the step's exchanges are added."""
        ...

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """Progress of the exchanges in `marks`; None if the device does not answer. Waits for nothing else.

        In a `replayed` step the flags take the same values every time, so less is known.
        """
        ...


@dataclass(frozen=True)
class GroupProgress:
    """A rank's progress with the exchanges of one group in a step."""

    name: str
    key: str
    """Identifies the group on all its ranks."""
    ranks: tuple[int, ...]
    """World ranks. On an edge, the sender of activations comes first."""
    issued: int
    reached: int
    """How many may have begun on the device."""
    done: int
    """How many are known to be complete."""
    until: int = 0
    """The last exchange issued by the op of the first one not known to be complete."""
    what: str = ""
    """The first exchange not known to be complete: its op, or its call."""
    absent: tuple[int, ...] = ()
    """World ranks whose flag this rank waits for, if known."""

    def as_text(self, number: int) -> str:
        """An exchange of this step as text; counted from 1."""
        if self.key.startswith(("act ", "grad ")):
            noun = "activation" if self.key.startswith("act ") else "gradient"
            return f"{noun} {number} of edge {self.ranks[0]}→{self.ranks[1]}"
        return f"exchange {number} of {self.name} (ranks {', '.join(map(str, self.ranks))})"


@dataclass(frozen=True)
class RankState:
    """What one rank is doing and waiting for."""

    rank: int
    step: int
    """Steps and validations begun."""
    where: str
    at: tuple[str, ...] = ()
    """Ops that the device (on a CPU: pending collectives) is at."""
    waits: tuple[str, ...] = ()
    """Keys of the groups it waits for, each in its first incomplete exchange."""
    groups: tuple[GroupProgress, ...] = ()

    def group(self, key: str) -> GroupProgress | None:
        return next((group for group in self.groups if group.key == key), None)

    def waiting(self) -> list[GroupProgress]:
        return [group for group in self.groups if group.key in self.waits]

    def as_line(self) -> str:
        return STATE + json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> RankState:
        def tuples(known: dict[str, Any]) -> dict[str, Any]:  # JSON has lists only
            return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}

        known = tuples(json.loads(line.removeprefix(STATE)))
        known["groups"] = tuple(GroupProgress(**tuples(group)) for group in known["groups"])
        return RankState(**known)


# -------------------------------------------------------------------------------------------------- who waits for whom


def culprit(states: Mapping[int, RankState], others: Collection[int]) -> str:
    """One line that names the rank the others wait for. `states` are of ranks that reported; `others` did not."""
    newest = max((state.step for state in states.values()), default=0)
    waits = {rank: _waits(state, states, newest) for rank, state in states.items()}
    awaited = [rank for found in waits.values() for rank in found]
    ends = [rank for rank in awaited if not waits.get(rank)]
    if ends:
        end = max(sorted(set(ends)), key=lambda rank: (rank in others, ends.count(rank)))
        missing = next(found[end] for found in waits.values() if end in found)
        return f"rank {end} {missing}, and {_does(end, states)}"
    if awaited:  # every awaited rank waits too, so following them finds a cycle
        path, rank = list[int](), next(rank for rank, found in waits.items() if found)
        while rank not in path:
            path.append(rank)
            rank = min(waits[rank])
        circle = path[path.index(rank) :]
        legs = zip(circle, [*circle[1:], rank], strict=True)
        told = "; ".join(f"rank {a} waits for rank {b}, which {waits[a][b]}" for a, b in legs)
        return f"ranks wait in a circle: {told}"
    if others:
        return f"rank {min(others)} did not say what it does, and no rank is known to wait for another"
    busy = [state.rank for state in states.values() if not state.waits and state.at]
    return f"rank {busy[0]} {_does(busy[0], states)}" if busy else "no rank is known to be behind another one"


def _waits(state: RankState, states: Mapping[int, RankState], newest: int) -> dict[int, str]:
    """Rank waited for -> what it has not done."""
    found: dict[int, str] = {}
    if state.step < newest:  # other ranks are past everything that this rank waits for
        return found
    for group in state.waiting():
        for rank in group.absent or group.ranks:
            other = states.get(rank)
            theirs = other.group(group.key) if other is not None and other.step == state.step else None
            reached = group.done if other is None else theirs.reached if theirs is not None else 0
            if rank == state.rank or (reached >= group.until and rank not in group.absent):
                continue
            number = (group.done if reached >= group.until else reached) + 1
            what = {"recv": "has not sent", "send": "has not received"}.get(group.name.split("_")[0], "has not come to")
            op = f" ({group.what} on rank {state.rank})" if number == group.done + 1 and group.what else ""
            found.setdefault(rank, f"{what} {group.as_text(number)}{op}")
    return found


def _does(rank: int, states: Mapping[int, RankState]) -> str:
    """What a rank does if it waits for no other rank."""
    state = states.get(rank)
    if state is None:
        return "did not say what it does"
    at = [op for op in state.at if op not in state.where]
    return f"is {state.where}{', with the device at ' if at else ''}{'; '.join(at)}"


# ----------------------------------------------------------------------------------------------------- the watchdog

HANG_EXIT_CODE = 75
"""Exit status of a rank that the watchdog ended."""

HANG_HEADLINE = "hocket: no progress"

ANSWER = 5.0
"""Seconds for a report that queries the device."""

LINGER = 2.0
"""Seconds between a rank's report and its exit. Other ranks hang too and check every second; an earlier exit would
break their connections, and they would report that instead."""

MARGIN = 20.0
"""Seconds by which collectives outwait the watchdog, whose report says more."""


class Recorder:
    """The ops that a rank issues in a step, in order, with times from `time.monotonic`."""

    def __init__(self, ops: Sequence[Op], begin_exchanges: Callable[[], Mapping[str, Issued]] = dict) -> None:
        """`begin_exchanges` starts recording the groups' calls and returns them by group name."""
        self.ops = ops
        self._begin_exchanges = begin_exchanges
        self.issued: list[int] = []
        self._times: list[float] = []
        self.exchanges: Mapping[str, Issued] = {}
        """Calls issued by the ops."""
        self.last_progress = time.monotonic()
        self.active = self.replayed = False
        self.inside = ""
        """What the host does outside of ops: a part of the step's end, or work after all ops."""

    def begin(self, replayed: bool = False) -> None:
        """Begin a step: from now on a lack of progress is a hang. A `replayed` step repeats what was issued last."""
        begun = self._begin_exchanges()
        if not replayed:
            self.issued, self._times, self.exchanges = [], [], begun
        self.inside = "a replayed step, or the optimizer after it" if replayed else ""
        self.last_progress, self.active, self.replayed = time.monotonic(), True, replayed

    def end(self) -> None:
        self.active = False

    def issue(self, position: int) -> None:
        now = time.monotonic()
        self.issued.append(position)
        self._times.append(now)
        self.last_progress, self.inside = now, ""

    def enter(self, what: str) -> None:
        """Record that the host enters something other than an op that may wait for other ranks."""
        self.last_progress, self.inside = time.monotonic(), what

    def at(self, when: float) -> int | None:
        count = bisect_right(self._times, when)
        return self.issued[count - 1] if count else None

    def where(self) -> str:
        seconds = time.monotonic() - self.last_progress
        last = f"op {self.issued[-1]}: {self.ops[self.issued[-1]]}" if self.issued and not self.replayed else ""
        if self.inside:
            return f"stuck for {seconds:.0f} s in {self.inside}" + (f"; the last issued is {last}" if last else "")
        return f"stuck for {seconds:.0f} s at {last}" if last else "no op has been issued"


class Watchdog:
    """Ends the process with a report if a step makes no progress for `limit` seconds.

    `report` gets whether it may query the device. See Note: [The watchdog never blocks].
    """

    def __init__(self, limit: float, report: Callable[[bool], str], recorder: Callable[[], Recorder | None]) -> None:
        self._limit = limit
        self._report = report
        self._recorder = recorder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hocket-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            recorder = self._recorder()
            if recorder is None or not recorder.active:
                faulthandler.cancel_dump_traceback_later()
                continue
            with contextlib.suppress(Exception):  # standard error may not be a file
                faulthandler.dump_traceback_later(self._limit + ANSWER + LINGER, exit=True, file=sys.stderr)
            if time.monotonic() - recorder.last_progress > self._limit:
                with contextlib.suppress(Exception):  # exit even if the disk is full
                    sys.stderr.write(f"{HANG_HEADLINE} for {self._limit:g} s\n{self._said()}\n")
                    sys.stderr.flush()
                time.sleep(LINGER)
                os._exit(HANG_EXIT_CODE)
        faulthandler.cancel_dump_traceback_later()

    def _said(self) -> str:
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(self._ask(True)), daemon=True)
        asking.start()
        asking.join(ANSWER)
        return answers[0] if answers else f"{self._ask(False)}\nthe device did not answer within {ANSWER:g} s"

    def _ask(self, device: bool) -> str:
        try:
            return self._report(device)
        except Exception as error:  # a failed or capturing GPU refuses queries
            return f"what this rank waits for cannot be told: {error}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

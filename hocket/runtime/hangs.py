"""Hangs: what a rank notes of a step, who waits for whom, and a watchdog that ends a rank that makes no progress.

A hang is seen on all ranks, and its cause is on one: the rank that the others wait for, and that waits for nobody. The
exchanges of a group have the same numbers on all of its ranks, so whoever compares what ranks say (`RankState`, made by
`engine/standstill.py`) can tell who is behind: `culprit` says it in one line.

Note: [The watchdog waits for nobody]
What a rank waits for is asked of a device that may not answer, while other threads may hold what an answer needs. So
the report is made in a thread of its own, and if that is late the watchdog tells what it knows without the device. A
thread that is blocked while it holds the interpreter stops the watchdog too. For that there is a second one, which
needs no interpreter (`faulthandler`): it is put off while the first one lives, and else writes where all threads are,
and ends the process.
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
"""How the line begins in which a rank tells what it alone knows of a hang."""
STATE = "hocket: state "
"""How the line of a report begins that a program reads."""


@dataclass
class Issued:
    """The exchanges of one group that a rank has issued since a step began."""

    calls: list[tuple[str, float]] = field(default_factory=list)
    """What was called, and when, as `time.monotonic` says it."""
    marks: list[int] = field(default_factory=list)
    """What the transport's `Flags` count."""


@dataclass(frozen=True)
class FlagProgress:
    """What memory says of the exchanges that a rank has issued in a step."""

    done: int | None = None
    """How many are over on this rank; None if that cannot be told."""
    absent: tuple[int, ...] = ()
    """Ranks of the group for whose flag this rank waits."""
    turns: tuple[int, int] | None = None
    """Where what is counted are no calls of the group: how many have begun on the device, and were issued."""


class Flags(Protocol):
    """Flags in memory by which ranks of a group wait for each other, with no limit, or only one that says nothing."""

    def begin(self) -> list[int]:
        """A step begins: marks that grow with what is issued in it."""
        ...

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """What the flags say of what these marks are of; None if the device does not answer. Waits no longer than that.

        Of a `replayed` step, whose flags have the same values each time, less can be told.
        """
        ...


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank has come with the exchanges of one group in a step."""

    name: str
    """The group's, as this rank calls it."""
    key: str
    """The same on all ranks of the group, and of no other group."""
    ranks: tuple[int, ...]
    """Its ranks in the world. On an edge, the one that sends activations comes first."""
    issued: int
    reached: int
    """How many may have begun on the device; no more have."""
    done: int
    """How many are known to be over here."""
    until: int = 0
    """The last that the op of the first which is not known to be over has issued."""
    what: str = ""
    """The first that is not known to be over: its op, or its call."""
    absent: tuple[int, ...] = ()
    """Ranks in the world for whose flag in memory this rank waits, as far as memory says."""

    def thing(self, number: int) -> str:
        """An exchange as text: it is counted from 1, in this step."""
        if self.key.startswith(("act ", "grad ")):
            noun = "activation" if self.key.startswith("act ") else "gradient"
            return f"{noun} {number} of edge {self.ranks[0]}→{self.ranks[1]}"
        return f"exchange {number} of {self.name} (ranks {', '.join(map(str, self.ranks))})"


@dataclass(frozen=True)
class RankState:
    """What one rank does and waits for."""

    rank: int
    step: int
    """Steps and validations that have begun."""
    where: str
    """What its host is at."""
    at: tuple[str, ...] = ()
    """What its device, or on a CPU what is pending, stands at."""
    waits: tuple[str, ...] = ()
    """Keys of the groups for whose first exchange that is not over it waits."""
    groups: tuple[GroupProgress, ...] = ()

    def group(self, key: str) -> GroupProgress | None:
        return next((group for group in self.groups if group.key == key), None)

    def waiting(self) -> list[GroupProgress]:
        """Of the groups that it waits for."""
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
    """One line that names the rank for which the others wait. `states` are of ranks that reported; `others` did not."""
    newest = max((state.step for state in states.values()), default=0)
    waits = {rank: _waits(state, states, newest) for rank, state in states.items()}
    awaited = [rank for found in waits.values() for rank in found]
    ends = [rank for rank in awaited if not waits.get(rank)]
    if ends:
        end = max(sorted(set(ends)), key=lambda rank: (rank in others, ends.count(rank)))
        missing = next(found[end] for found in waits.values() if end in found)
        return f"rank {end} {missing}, and {_does(end, states)}"
    if awaited:  # every awaited rank waits too, so whoever follows them comes around
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
    """Rank that a rank waits for -> what that one has not done."""
    found: dict[int, str] = {}
    if state.step < newest:  # other ranks have passed everything that this rank still does
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
            found.setdefault(rank, f"{what} {group.thing(number)}{op}")
    return found


def _does(rank: int, states: Mapping[int, RankState]) -> str:
    """What a rank does instead of waiting for another."""
    state = states.get(rank)
    if state is None:
        return "did not say what it does"
    at = [op for op in state.at if op not in state.where]
    return f"is {state.where}{', with the device at ' if at else ''}{'; '.join(at)}"


# ----------------------------------------------------------------------------------------------------- the watchdog

HANG_EXIT_CODE = 75
"""Exit status of a rank that the watchdog ended."""

HANG_HEADLINE = "hocket: no progress"
"""How the report of a hang begins."""

ANSWER = 5.0
"""Seconds in which a report that asks the device must be there."""

LINGER = 2.0
"""Seconds between a rank's report and its end. Others hang with it and look once a second: an end would break their
connections, and they would tell of that instead."""

MARGIN = 20.0
"""Seconds by which collectives wait longer than the watchdog, which knows more about a hang than they do."""


class Recorder:
    """The ops that a rank issues in a step, in order, with times from `time.monotonic`."""

    def __init__(self, ops: Sequence[Op], begin_exchanges: Callable[[], Mapping[str, Issued]] = dict) -> None:
        """`begin_exchanges` has groups note what they are asked for from then on, by their names."""
        self.ops = ops
        self._begin_exchanges = begin_exchanges
        self.issued: list[int] = []
        self._times: list[float] = []
        self.exchanges: Mapping[str, Issued] = {}
        """What was issued together with the ops."""
        self.last_progress = time.monotonic()
        self.active = self.replayed = False
        self.inside = ""
        """What the host is at that is no op: a part of the step's end, or what comes behind all ops."""

    def begin(self, replayed: bool = False) -> None:
        """A step starts: from now on a standstill is a hang. A `replayed` one issues once more what was issued last."""
        begun = self._begin_exchanges()
        if not replayed:
            self.issued, self._times, self.exchanges = [], [], begun
        self.inside = "a replayed step, or the optimizer behind it" if replayed else ""
        self.last_progress, self.active, self.replayed = time.monotonic(), True, replayed

    def end(self) -> None:
        """The step is over: nobody waits for what it issued."""
        self.active = False

    def issue(self, position: int) -> None:
        """Note that the op at `position` is being issued."""
        now = time.monotonic()
        self.issued.append(position)
        self._times.append(now)
        self.last_progress, self.inside = now, ""

    def enter(self, what: str) -> None:
        """Note that the host goes on to something that is no op of its own and may have to wait for other ranks."""
        self.last_progress, self.inside = time.monotonic(), what

    def at(self, when: float) -> int | None:
        """The op that was being issued at some time of this step; None before the first."""
        count = bisect_right(self._times, when)
        return self.issued[count - 1] if count else None

    def where(self) -> str:
        """What the host is at."""
        seconds = time.monotonic() - self.last_progress
        last = f"op {self.issued[-1]}: {self.ops[self.issued[-1]]}" if self.issued and not self.replayed else ""
        if self.inside:
            return f"stuck for {seconds:.0f} s in {self.inside}" + (f"; the last issued is {last}" if last else "")
        return f"stuck for {seconds:.0f} s at {last}" if last else "no op has been issued"


class Watchdog:
    """Ends the process with a report when a step makes no progress for `limit` seconds.

    `report` is told whether it may ask the device. See Note: [The watchdog waits for nobody].
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
            with contextlib.suppress(Exception):  # a standard error that is no file
                faulthandler.dump_traceback_later(self._limit + ANSWER + LINGER, exit=True, file=sys.stderr)
            if time.monotonic() - recorder.last_progress > self._limit:
                with contextlib.suppress(Exception):  # a full disk is no reason to go on
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
        except Exception as error:  # a GPU that has failed, or records a step, answers no questions
            return f"what this rank waits for cannot be told: {error}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

"""Which exchanges a rank has issued in a step, group by group, and how far they have come: for a report of a hang.

A hang is seen on all ranks, and its cause is on one: the rank that the others wait for, and that waits for nobody. The
exchanges of a group have the same numbers on all of its ranks, so whoever compares reports can tell who is behind.
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

from hocket.program.ops import Lane, Op

ALONE = "hocket: rank "
"""How the line begins in which a rank tells what it alone knows of a hang."""
STATE = "hocket: state "
"""How the line of a report begins that a program reads (`runtime/hangs.py`)."""


@dataclass
class Issued:
    """The exchanges of one group that a rank has issued since a step began."""

    calls: list[tuple[str, float]] = field(default_factory=list)
    """What was called, and when, as `time.monotonic` says it."""
    marks: list[int] = field(default_factory=list)
    """What the transport's `Words` count."""


@dataclass(frozen=True)
class Told:
    """What memory says of the exchanges that a rank has issued in a step."""

    text: str
    done: int | None = None
    """How many are over on this rank; None if that cannot be told."""
    absent: tuple[int, ...] = ()
    """Ranks of the group for whose word this rank waits."""
    turns: tuple[int, int] | None = None
    """Where what is counted are no calls of the group: how many have begun on the device, and were issued."""


class Words(Protocol):
    """Words in memory by which ranks of a group wait for each other, with no limit, or only one that says nothing."""

    def begin(self) -> list[int]:
        """A step begins: marks that grow with what is issued in it."""
        ...

    def told(self, marks: list[int], replayed: bool) -> Told | None:
        """What the words say of what these marks are of; None if the device does not answer. Waits no longer than that.

        Of a `replayed` step, whose words have the same values each time, less can be told.
        """
        ...


@dataclass(frozen=True)
class Came:
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
    seconds: float = 0.0
    """Since that was issued."""
    last: str = ""
    """The one that was issued last."""
    absent: tuple[int, ...] = ()
    """Ranks in the world for whose word in memory this rank waits, as far as memory says."""
    told: str = ""
    """What memory says."""

    def thing(self, number: int) -> str:
        """An exchange in words: it is counted from 1, in this step."""
        if self.key.startswith(("act ", "grad ")):
            noun = "activation" if self.key.startswith("act ") else "gradient"
            return f"{noun} {number} of edge {self.ranks[0]}→{self.ranks[1]}"
        return f"exchange {number} of {self.name} (ranks {', '.join(map(str, self.ranks))})"

    def line(self) -> str:
        """For a person."""
        known = f", {self.done} known to be over" if self.done < self.issued else ", all over"
        told = f"; in memory: {self.told}" if self.told else ""
        return f"{self.name} of ranks {', '.join(map(str, self.ranks))}: {self.issued}{known}, last {self.last}{told}"


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
    doubts: tuple[str, ...] = ()
    """What it may be at instead of waiting: ops of which nothing tells whether they are complete."""
    waits: tuple[str, ...] = ()
    """Keys of the groups for whose first exchange that is not over it waits."""
    groups: tuple[Came, ...] = ()

    def came(self, key: str) -> Came | None:
        return next((group for group in self.groups if group.key == key), None)

    def as_line(self) -> str:
        return STATE + json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> RankState:
        known = _with_tuples(json.loads(line.removeprefix(STATE)))
        known["groups"] = tuple(Came(**_with_tuples(group)) for group in known["groups"])
        return RankState(**known)


def _with_tuples(known: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


# -------------------------------------------------------------------------------------------------------------- culprit
#
# Finds the rank that causes a hang: other ranks wait for it, and it waits for no rank.


Waits = dict[int, tuple[Came, int]]
"""What one rank waits for: awaited rank -> (the exchange as the waiting rank sees it, the number of the first exchange
that the awaited rank has not come to)."""


def culprit(states: Mapping[int, RankState], others: Collection[int]) -> str:
    """One line that names the rank for which the others wait. `states` are of ranks that reported; `others` did not."""
    newest = max((state.step for state in states.values()), default=0)
    waits = {rank: _waits(state, states, newest) for rank, state in states.items()}
    awaited = [rank for found in waits.values() for rank in found]
    ends = [rank for rank in awaited if not waits.get(rank)]
    if ends:
        end = max(sorted(set(ends)), key=lambda rank: (rank in others, ends.count(rank)))
        rank = next(rank for rank, found in waits.items() if end in found)
        return f"rank {end} {_missing(rank, *waits[rank][end])}, and {_does(end, states)}"
    if awaited:
        circle = _circle(waits)
        legs = [f"rank {a} waits for rank {b}, which {_missing(a, *waits[a][b])}" for a, b in circle]
        busy = [f"rank {a} is at {' or '.join(states[a].doubts)}" for a, _ in circle if states[a].doubts]
        unless = f", unless {' or '.join(busy)}" if busy else ""
        return f"ranks wait in a circle: {'; '.join(legs)}{unless}"
    if others:
        return f"rank {min(others)} did not say what it does, and no rank is known to wait for another"
    busy = [state for state in states.values() if not state.waits and state.at]
    if busy:
        return f"rank {busy[0].rank} {_does(busy[0].rank, states)}"
    return "no rank is known to be behind another one"


def _waits(state: RankState, states: Mapping[int, RankState], newest: int) -> Waits:
    found: Waits = {}
    if state.step < newest:  # other ranks have passed everything that this rank still does
        return found
    for key in state.waits:
        came = state.came(key)
        assert came is not None
        for rank in came.absent or came.ranks:
            if rank == state.rank:
                continue
            other = states.get(rank)
            if other is None:
                found.setdefault(rank, (came, came.done + 1))
                continue
            theirs = other.came(key)
            reached = theirs.reached if theirs is not None and other.step == state.step else 0
            if reached < came.until:
                found.setdefault(rank, (came, reached + 1))
            elif rank in came.absent:
                found.setdefault(rank, (came, came.done + 1))
    return found


def _missing(rank: int, came: Came, number: int) -> str:
    """What the awaited rank has not done. `rank` is the rank that waits."""
    what = {"recv": "has not sent", "send": "has not received"}.get(came.name.split("_")[0], "has not come to")
    op = f" ({came.what} on rank {rank})" if number == came.done + 1 and came.what else ""
    return f"{what} {came.thing(number)}{op}"


def _does(rank: int, states: Mapping[int, RankState]) -> str:
    """What a rank does instead of waiting for another."""
    state = states.get(rank)
    if state is None:
        return "did not say what it does"
    at = [op for op in state.at if op not in state.where]
    return f"is {state.where}{', with the device at ' if at else ''}{'; '.join(at)}"


def _circle(waits: Mapping[int, Waits]) -> Sequence[tuple[int, int]]:
    """Pairs (waiting rank, awaited rank) that form a circle. Every awaited rank waits too, so there is a circle."""
    rank = next(rank for rank, found in waits.items() if found)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank])
    circle = path[path.index(rank) :]
    return list(zip(circle, [*circle[1:], rank], strict=True))


# --------------------------------------------------------------------------------------------------------------- stands
#
# Where a rank's lanes stand, told from which of its ops are known to be complete.
#
# Ops that no other lane waits for leave no event, so nothing says when they are complete. But a lane is in order: what
# stands before an op that is complete is complete too. What stands behind the last such op of a lane is *open*. A lane
# can be at its open ops up to the first of which an event says that it is not complete. If one of these waits for an
# open op of another lane, then that is where the lane waits, unless it is still at those before it, which is a *doubt*.
# Otherwise it *stands at* them, at one of which nobody knows.


class Stands:
    """What is open of a rank's step. Positions are those of the rank's list."""

    def __init__(
        self,
        ops: Sequence[Op],
        issued: Sequence[int],
        completed: Callable[[Op, int], bool | None],
        streams: bool = True,
    ) -> None:
        """`issued` are positions in their order; of the last it is not known whether it was issued to its end.

        `completed` says of any other whether it is complete; None if nothing tells. `streams`: the ops of a lane begin
        one after the other, and not when the host issues them.
        """
        self._ops, self._streams = ops, streams
        self._lanes: dict[Lane, list[int]] = {}
        self._index: dict[int, int] = {}
        for position in issued:
            lane = self._lanes.setdefault(ops[position].lane, [])
            self._index[position] = len(lane)
            lane.append(position)
        last = issued[-1] if issued else -1
        self.doubts: list[tuple[int, ...]] = []
        """Ops at one of which a lane may be that seems to wait, as found by `at`."""
        self._complete: dict[Lane, int] = {}
        self._begun: dict[Lane, int] = {}
        for lane in self._lanes:
            self._complete[lane], self._begun[lane] = self._counts(lane, completed, last)

    def _counts(self, lane: Lane, completed: Callable[[Op, int], bool | None], last: int) -> tuple[int, int]:
        """How many ops of a lane are known to be complete, and how many may have been begun, for all that is known."""
        positions = self._lanes[lane]
        begun = len(positions)
        for count in range(len(positions), 0, -1):
            position = positions[count - 1]
            known = completed(self._ops[position], position) if position != last else None
            if known:
                return count, begun
            if known is False:
                begun = count
        return 0, begun

    def open(self, position: int) -> bool:
        """Whether an op that was issued is not known to be complete."""
        return self._index[position] >= self._complete[self._ops[position].lane]

    def reached(self, position: int) -> bool:
        """Whether an op may have begun."""
        if not self._streams:
            return True
        lane = self._ops[position].lane
        blocked = next((p for p in self._open_ops(lane) if self._waits_for(p)), None)
        return self._index[position] < (self._begun[lane] if blocked is None else self._index[blocked])

    def _waits_for(self, position: int) -> list[int]:
        """Open ops of other lanes that an op waits for."""
        return [p for p in self._ops[position].deps if p in self._index and self.open(p)]

    def _open_ops(self, lane: Lane, up_to: int = -1) -> list[int]:
        """Ops at which a lane may be, as far as it alone is concerned; up to one of them, if that is said."""
        positions = self._lanes[lane]
        end = self._begun[lane] if up_to < 0 else min(self._begun[lane], self._index[up_to] + 1)
        return positions[self._complete[lane] : end]

    def at(self) -> list[tuple[int, ...]]:
        """What all that is open waits for in the end: each time the ops at one of which a lane stands.

        Seen from the op that was issued last and from the compute lane: what only others wait for, such as a send for a
        late receiver, keeps this rank from nothing.
        """
        last = list(self._index)[-1:]
        seen, found = set[int](), dict[Lane, tuple[int, ...]]()
        left = [*last, *self._lanes.get("compute", [])[-1:]]
        while left:
            position = left.pop()
            if position in seen or not self.open(position):
                continue
            seen.add(position)
            lane = self._ops[position].lane
            at_once = position in last and not self._streams
            before = [position] if at_once else self._open_ops(lane, position)
            waits = next((p for p in before if self._waits_for(p)), None)
            if waits is not None:
                left += self._waits_for(waits)
                if self._streams and waits != before[0]:
                    self.doubts.append(tuple(before[: before.index(waits)]))
            elif lane not in found or len(before) < len(found[lane]):  # up to the first that is asked for
                found[lane] = tuple(before)
        return list(found.values())


# ------------------------------------------------------------------------------------------------------------- recorder
#
# What a rank has issued, and a watchdog that says what it hangs on.
#
# When no op has been issued for the time limit, the watchdog has the rank reported: what it does and waits for
# (`engine/standstill.py`). Then it ends the process: a rank that hangs would otherwise hang all others without a word.
#
# Note: [The watchdog waits for nobody]
# What a rank waits for is asked of a device that may not answer, while other threads may hold what an answer needs. So
# the report is made in a thread of its own, and if that is late the watchdog tells what it knows without the device. A
# thread that is blocked while it holds the interpreter stops the watchdog too. For that there is a second one, which
# needs no interpreter (`faulthandler`): it is put off while the first one lives, and else writes where all threads are,
# and ends the process.


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
            self._put_off()
            if time.monotonic() - recorder.last_progress > self._limit:
                with contextlib.suppress(Exception):  # a full disk is no reason to go on
                    sys.stderr.write(f"{HANG_HEADLINE} for {self._limit:g} s\n{self._said()}\n")
                    sys.stderr.flush()
                time.sleep(LINGER)
                os._exit(HANG_EXIT_CODE)
        faulthandler.cancel_dump_traceback_later()

    def _put_off(self) -> None:
        """Have the process ended if this thread does not come back in time."""
        with contextlib.suppress(Exception):  # a standard error that is no file
            faulthandler.dump_traceback_later(self._limit + ANSWER + LINGER, exit=True, file=sys.stderr)

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

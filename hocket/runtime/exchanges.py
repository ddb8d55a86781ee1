"""Which exchanges a rank has issued in a step, group by group, and how far they have come: for a report of a hang.

A hang is seen on all ranks, and its cause is on one: the rank that the others wait for, and that waits for nobody. The
exchanges of a group have the same numbers on all of its ranks, so whoever compares reports can tell who is behind.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

ALONE = "hocket: rank "
"""How the line begins in which a rank tells what it alone knows of a hang."""
STATE = "hocket: state "
"""How the line of a report begins that a program reads (`runtime/culprit.py`)."""


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

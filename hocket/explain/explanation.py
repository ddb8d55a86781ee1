"""Everything that is known about a run before it starts, as one value. Seconds, bytes and elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hocket.settings.decision import Decision
from hocket.variables import Finding

Axis = Literal["tp", "cp", "dp", "pp", "ep"]
State = Literal["on", "off", "n/a"]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One communication, and what hides it."""

    axis: Axis
    what: str
    under: str
    """What runs meanwhile; empty if nothing does."""
    state: State
    setting: str
    """That decides; empty if nothing does."""
    source: str
    why: str
    kind: str = ""
    """Kind of communication whose predicted times are these; empty where another row has them."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """One kind of communication in one step: the mean over pipeline ranks."""

    seconds: float
    """On its lanes."""
    exposed: float
    """While no compute runs."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The step as the simulator sees it."""

    hardware: str
    step: float
    """0 where the step was not simulated."""
    compute: float
    idle: float
    kinds: Mapping[str, Times]
    note: str = ""
    """Where these figures do not come from simulating the whole step."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A transfer or product that was timed on this host; seconds, on the slowest rank."""

    what: str
    predicted: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class UnitRow:
    """What is gathered and reduced as one; all units of a kind."""

    unit: str
    count: int
    """In the whole model."""
    elements: int
    """Of one."""
    padding: float
    """Share of what is sent that is padding."""
    members: int
    """Ranks over which it is spread."""
    nbytes: int
    """Of one, whole, in the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """Weights that the optimizer treats alike."""

    what: str
    count: int
    """Parameters."""
    elements: int
    decay: float
    names: str
    """A few of them."""


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """All process groups of one purpose."""

    purpose: str
    members: int
    count: int
    lanes: tuple[str, ...]
    moved_by: str


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """What one pipeline rank holds; bytes."""

    rank: int
    state: int
    """Shards, main weights and optimizer."""
    slots: int
    """Gathered weights and gradients on their way."""
    peak: int
    """All of it with activations, at its most; 0 where the step was not simulated."""
    arrivals: int
    """Beside it, where other ranks write what they send."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What was decided about a run, and what it will do."""

    name: str
    heading: str
    digest: str
    overlaps: tuple[Overlap, ...]
    predicted: Predicted
    decisions: tuple[Decision, ...]
    units: tuple[UnitRow, ...]
    groups: tuple[GroupRow, ...]
    memory: tuple[MemoryRow, ...]
    environment: tuple[Finding, ...]
    check: tuple[str, ...]
    """Commands that measure what is predicted here."""
    optimizer: tuple[OptimizerRow, ...] = ()
    probed: tuple[Probed, ...] = ()
    """What was timed on this host, if anything was."""
    probed_on: str = ""
    measured: Predicted | None = None
    """The step as traces of a run show it, if there are any."""
    refused: tuple[str, ...] = ()
    """Why a run would not start; empty if it would."""

    @property
    def unmet(self) -> tuple[Decision, ...]:
        """What was asked for and did not happen."""
        return tuple(decision for decision in self.decisions if decision.unmet)

    @property
    def without_effect(self) -> tuple[Decision, ...]:
        """What was asked for and changes nothing."""
        return tuple(d for d in self.decisions if d.fix and not d.unmet)

    def as_json(self) -> dict[str, Any]:
        """Every field, for machines."""
        return asdict(self) | {"decisions": [decision.as_json() for decision in self.decisions]}

"""Everything that is known about a run before it starts, as one value. Units: seconds, bytes and elements."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from hocket.config.rule import show
from hocket.decision import Decision
from hocket.sizes import duration
from hocket.variables import Finding

FILE = "explanation.json"
"""File name in the folder of a run."""

Axis = Literal["tp", "cp", "dp", "pp", "ep"]
State = Literal["on", "off", "n/a"]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One communication, and what hides it."""

    axis: Axis
    what: str
    under: str
    """The work that overlaps with it; empty if there is none."""
    state: State
    setting: str
    """The deciding setting; empty if there is none."""
    source: str
    why: str
    kind: str = ""
    """Kind of communication whose predicted times the row shows; empty if another row shows them."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """One kind of communication in one step: the mean over pipeline ranks."""

    seconds: float
    """Time on its lanes."""
    exposed: float
    """Time without concurrent compute."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The step as the simulator sees it."""

    hardware: str
    step: float
    """0 if the step was not simulated."""
    compute: float
    idle: float
    kinds: Mapping[str, Times]
    note: str = ""
    """How these figures were made, if not by simulating the whole step."""


Row = Mapping[str, Any]
"""A row of one of `TABLES`, by its keys."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The decisions about a run, and its predicted step."""

    name: str
    recipe: str
    """The recipe or file that starts it."""
    steps: int
    """Steps of the whole run."""
    heading: str
    digest: str
    overlaps: tuple[Overlap, ...]
    predicted: Predicted
    decisions: tuple[Decision, ...]
    units: tuple[Row, ...]
    """Units that are gathered and reduced as one, by kind; elements and bytes are those of one unsharded unit."""
    groups: tuple[Row, ...]
    """Process groups by purpose."""
    memory: tuple[Row, ...]
    """Bytes of each pipeline rank. `arrivals`, the buffers that other ranks write into, are not part of the peak."""
    environment: tuple[Finding, ...]
    check: tuple[str, ...]
    """Commands that measure the predicted step."""
    optimizer: tuple[Row, ...] = ()
    """Groups of weights that the optimizer treats alike."""
    measured: Predicted | None = None
    """The step in traces of a run, if there are any."""
    refused: tuple[str, ...] = ()
    """Why a run would not start; empty if it would."""

    @property
    def unmet(self) -> tuple[Decision, ...]:
        """Requests that were not met."""
        return tuple(decision for decision in self.decisions if decision.unmet)

    @property
    def without_effect(self) -> tuple[Decision, ...]:
        """Requests that change nothing."""
        return tuple(d for d in self.decisions if d.fix and not d.unmet)

    def as_json(self) -> dict[str, Any]:
        """Every field, as JSON values."""
        return asdict(self) | {"decisions": [decision.as_json() for decision in self.decisions]}


# -- An explanation as text --------------------------------------------------------------------------------------------

WIDTH = 120
GIB, MIB = 2**30, 2**20

Lines = Iterator[str]


def to_text(found: Explanation) -> str:
    """Everything, by section."""
    lines = [f"{found.name}: {found.heading}", f"digest {found.digest}"]
    for title, section in SECTIONS:
        rows = list(section(found))
        if rows:
            lines += ["", title, *rows]
    return "\n".join(line.rstrip() for line in lines)


def _overlaps(found: Explanation) -> Lines:
    head = ("axis", "what", "hidden under", "state", "decided by", "predicted per step")
    rows = [(o.axis, o.what, o.under or "-", o.state, o.source, _predicted(found, o)) for o in found.overlaps]
    yield from table([head, *rows])
    for overlap in found.overlaps:
        if overlap.why and overlap.state != "n/a":
            setting = f" ({overlap.setting})" if overlap.setting else ""
            yield from paragraph(f"{overlap.axis} {overlap.what}{setting}: {overlap.why}", "  ")


def _predicted(found: Explanation, overlap: Overlap) -> str:
    """The times of a row, or why there are none."""
    times = found.predicted.kinds.get(overlap.kind)
    if overlap.state == "n/a":
        return overlap.why
    if times is None:
        return ""
    return f"{duration(times.seconds - times.exposed)} of {duration(times.seconds)} hidden"


def _step(found: Explanation) -> Lines:
    p = found.predicted
    if p.step:
        exposed = sum(times.exposed for times in p.kinds.values())
        yield (
            f"  {duration(p.step)} on {p.hardware}: compute {duration(p.compute)}, exposed communication "
            f"{duration(exposed)}, nothing at all {duration(p.idle)}; mean over pipeline ranks"
        )
        by_kind = ", ".join(f"{kind} {duration(times.exposed)}" for kind, times in p.kinds.items())
        yield f"  exposed by kind: {by_kind}" if by_kind else "  no communication"
    if p.note:
        yield from paragraph(p.note, "  ")


def _measured(found: Explanation) -> Lines:
    m, p = found.measured, found.predicted
    if m is None:
        return
    yield from paragraph(f"on {m.hardware}, {m.note}; means over ranks, the step is that of the slowest", "  ")
    rows = [("step", p.step, m.step), ("compute", p.compute, m.compute), ("nothing at all", p.idle, m.idle)]
    nothing = Times(seconds=0.0, exposed=0.0)
    for kind in dict.fromkeys((*p.kinds, *m.kinds)):
        here, there = p.kinds.get(kind, nothing), m.kinds.get(kind, nothing)
        rows += [(kind, here.seconds, there.seconds), (f"{kind}, exposed", here.exposed, there.exposed)]
    head = ("", "predicted", "measured", "measured / predicted")
    body = [(name, duration(a), duration(b), f"{b / a:.2f}" if a else "-") for name, a, b in rows]
    yield from table([head, *body], right=(1, 2, 3))


def _unmet(found: Explanation) -> Lines:
    for decision in found.unmet:
        yield from paragraph(str(decision), "  ")


def _without_effect(found: Explanation) -> Lines:
    for decision in found.without_effect:
        value = f"{decision.setting} = {show(decision.value)} ({decision.source})"
        yield from paragraph(f"{value}: {decision.reason}; fix: {decision.fix}", "  ")


def _decisions(found: Explanation) -> Lines:
    shown = {overlap.setting for overlap in found.overlaps if overlap.state != "n/a"}
    for d in found.decisions:
        if not d.unmet and not d.fix and d.setting not in shown:
            yield from paragraph(str(d), "  ")


class Column(NamedTuple):
    """A column of a table."""

    head: str
    key: str
    shown: Callable[[Any], str] = str
    right: bool = False


def size(nbytes: int) -> str:
    """Bytes with a unit."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"


TABLES: Mapping[str, tuple[Column, ...]] = {
    "units": (
        Column("unit", "unit"),
        Column("how many", "count", right=True),
        Column("parameters", "elements", "{:,}".format, True),
        Column("whole", "nbytes", size, True),
        Column("over ranks", "members", right=True),
        Column("padding", "padding", "{:.2%}".format, True),
    ),
    "optimizer": (
        Column("weights", "what"),
        Column("how many", "count", right=True),
        Column("parameters", "elements", "{:,}".format, True),
        Column("decay", "decay", "{:g}".format, True),
        Column("such as", "names"),
    ),
    "groups": (
        Column("group", "purpose"),
        Column("ranks", "members", right=True),
        Column("groups", "count", right=True),
        Column("lanes", "lanes", lambda lanes: " ".join(lanes) or "-"),
        Column("moved by", "moved_by"),
    ),
    "memory": (
        Column("pipeline rank", "rank", right=True),
        Column("shards, optimizer", "state", size, True),
        Column("slots", "slots", size, True),
        Column("peak", "peak", size),
        Column("", "fits", lambda fits: "" if fits else "DOES NOT FIT"),
    ),
}
"""Field of an explanation -> its columns."""


def _rows(name: str) -> Callable[[Explanation], Lines]:
    """The section of a table; empty without rows."""

    def section(found: Explanation) -> Lines:
        if rows := getattr(found, name):
            columns = TABLES[name]
            body = ([column.shown(row[column.key]) for column in columns] for row in rows)
            right = [n for n, column in enumerate(columns) if column.right]
            yield from table([[column.head for column in columns], *body], right)

    return section


def _memory(found: Explanation) -> Lines:
    yield from _rows("memory")(found)
    if arrivals := max((m["arrivals"] for m in found.memory), default=0):
        yield f"  and {size(arrivals)} on each, where other ranks write what they send"


def _environment(found: Explanation) -> Lines:
    if not found.environment:
        return
    head = ("variable", "wanted", "found", "")
    yield from table([head, *((f.name, f.wanted or "-", f.found or "-", STATES[f.state]) for f in found.environment)])
    for finding in found.environment:
        if finding.fix:
            yield from paragraph(f"{finding.name}: {finding.cost}; fix: {finding.fix}", "  ")


STATES = {
    "ok": "ok", "set": "set by hocket", "missing": "not set", "late": "set too late", "kept": "kept",
    "refused": "refused",
}  # fmt: skip


def _check(found: Explanation) -> Lines:
    yield from (f"  {command}" for command in found.check)


SECTIONS: Sequence[tuple[str, Callable[[Explanation], Lines]]] = (
    ("WHAT IS HIDDEN", _overlaps),
    ("PREDICTED STEP", _step),
    ("MEASURED STEP", _measured),
    ("NOT DONE AS ASKED", _unmet),
    ("ASKED FOR, WITHOUT EFFECT", _without_effect),
    ("CHOICES", _decisions),
    ("OPTIMIZER", _rows("optimizer")),
    ("UNITS", _rows("units")),
    ("GROUPS", _rows("groups")),
    ("MEMORY", _memory),
    ("ENVIRONMENT", _environment),
    ("TO CHECK", _check),
)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Lines:
    """Rows in columns, indented; the first row is the header. `right` are right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(cells).rstrip()


def paragraph(text: str, indent: str) -> list[str]:
    """Text in lines of at most WIDTH characters."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )

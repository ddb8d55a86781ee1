"""When every op of a program would run, given what each costs: the predicted timeline of a step.

Pure arithmetic on the costs' own numbers (`int`, `float` or `Fraction`): no rounding, no tolerance. With fractions
the result is exact. Nothing here knows how an op's cost was found; see `cost.py`.

Note: [What the simulator believes]
An op starts when the op before it on its lane and all its `deps` have ended, as a CUDA stream with events does it.
A send takes no lane time: it is posted, and its data may leave from then on. The matching recv starts when it is at the
head of its lane and the send is posted, and lasts one hop. The optimizer step begins with the norm of the whole
gradient, so no rank's starts before all have come to it. Data- and expert-parallel ranks run the same list on equal
loads, so a collective starts when this rank reaches it. Lanes don't slow each other down, links don't queue, and the
host is always ahead. So contention and stragglers are not in the prediction: a measured step is longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

from hocket.plan.ops import Key, Lane, Op, Program
from hocket.plan.values import follows

Time = int | float | Fraction
"""Seconds, or any other unit that the costs use."""

Kind = Literal["a2a", "pp", "gather", "reduce"]
"""A kind of communication, as reports name it."""

KINDS: tuple[Kind, ...] = ("a2a", "pp", "gather", "reduce")

KIND_OF: Mapping[Lane, Kind] = {
    "a2a": "a2a", "send_act": "pp", "recv_act": "pp", "send_grad": "pp", "recv_grad": "pp",
    "gather": "gather", "reduce": "reduce",
}  # fmt: skip


class Costs(Protocol):
    """What the simulator asks about an op of a pipeline rank."""

    def seconds(self, rank: int, op: Op) -> Time:
        """How long the op occupies its lane; of a recv, the hop. A send's is not asked for: it takes none."""
        ...

    def output_bytes(self, rank: int, op: Op) -> int:
        """Size of the value the op produces."""
        ...

    def saved_bytes(self, rank: int, op: Op) -> int:
        """Size of what the op keeps for the op that continues it: fwd for bwd, bwd for wgrad."""
        ...

    def fixed_bytes(self, program: Program, rank: int) -> int:
        """Size of what is held for the whole step: shards, optimizer state, weight and gradient slots."""
        ...


class Span(NamedTuple):
    """When one op runs."""

    rank: int
    position: int
    start: Time
    end: Time


@dataclass(frozen=True)
class Usage:
    """How one pipeline rank spends a step: busy + exposed_total + idle is the makespan.

    `exposed[kind]` is the time in which communication of that kind runs and no compute op does. Where several kinds
    run at once the time counts for the one that ends last, for that is the one compute would still wait for; so the
    kinds add up to `exposed_total`. In `idle` nothing runs at all: the pipeline bubble. `peak_bytes` is the most
    memory held at any moment.
    """

    busy: Time
    exposed: Mapping[Kind, Time]
    exposed_total: Time
    idle: Time
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """A predicted step. `spans[rank][position]` is the span of that op."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: Time
    ranks: tuple[Usage, ...]


def simulate(program: Program, costs: Costs) -> Timeline:
    """Predict one step of every pipeline rank, in time linear in the number of ops (but for one sort).

    Raises ValueError if the program cannot finish, naming the ops at which it stops.
    """
    before = _predecessors(program)
    durations = [0 if op.verb == "send" else costs.seconds(rank, op) for rank, _, op in program]
    starts, ends = _schedule(program, before, durations)
    spans: list[tuple[Span, ...]] = []
    first = 0
    for rank, ops in enumerate(program.ranks):
        spans.append(tuple(Span(rank, p, starts[first + p], ends[first + p]) for p in range(len(ops))))
        first += len(ops)
    makespan = max(ends, default=0)
    ranks = tuple(
        _usage(ops, row, makespan, costs.fixed_bytes(program, rank) + _peak_values(rank, ops, row, costs))
        for rank, (ops, row) in enumerate(zip(program.ranks, spans, strict=True))
    )
    return Timeline(tuple(spans), makespan, ranks)


def _predecessors(program: Program) -> list[list[int]]:
    """For each op, numbered through all ranks, the ops that must have ended before it starts."""
    sends: dict[tuple[int, Key], int] = {}
    for number, (rank, _, op) in enumerate(program):
        if op.verb == "send":
            sends[rank, op.key] = number
    before: list[list[int]] = []
    for rank, ops in enumerate(program.ranks):
        first = len(before)
        last_on_lane: dict[Lane, int] = {}
        for position, op in enumerate(ops):
            needed = [first + dep for dep in op.deps]
            if op.lane in last_on_lane:
                needed.append(last_on_lane[op.lane])
            last_on_lane[op.lane] = first + position
            if op.verb == "recv":
                peer = program.layout.peer(op, rank)
                if peer not in sends:
                    raise ValueError(f"rank {rank} waits at '{op}' for a send that rank {peer[0]} does not have")
                needed.append(sends[peer])
            before.append(needed)
    steps = [number for number, (_, _, op) in enumerate(program) if op.verb == "step"]
    together = [earlier for number in steps for earlier in before[number]]
    for number in steps:
        before[number] = together
    return before


def _schedule(program: Program, before: list[list[int]], durations: list[Time]) -> tuple[list[Time], list[Time]]:
    """Start and end of every op: each as early as its predecessors allow, found in topological order."""
    waiting = [len(needed) for needed in before]
    after: list[list[int]] = [[] for _ in before]
    for number, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(number)
    ready = [number for number, count in enumerate(waiting) if count == 0]
    starts: list[Time] = [0] * len(before)
    ends: list[Time] = [0] * len(before)
    done = 0
    while ready:
        number = ready.pop()
        done += 1
        end = starts[number] + durations[number]
        ends[number] = end
        for later in after[number]:
            starts[later] = max(starts[later], end)
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    if done < len(before):
        raise ValueError(_stuck(program, waiting))
    return starts, ends


def _stuck(program: Program, waiting: list[int]) -> str:
    """Name the first op of every lane that never runs."""
    heads: dict[tuple[int, Lane], str] = {}
    for number, (rank, position, op) in enumerate(program):
        if waiting[number]:
            heads.setdefault((rank, op.lane), f"rank {rank} lane {op.lane}: '{op}' (position {position})")
    return "the program never finishes, its ops wait for each other in a circle; stuck at " + "; ".join(heads.values())


def _usage(ops: Sequence[Op], spans: Sequence[Span], makespan: Time, peak_bytes: int) -> Usage:
    """Sweep over the moments at which an op of this rank starts or ends. A lane runs one op at a time."""
    moments: list[tuple[Time, bool, Lane, Time]] = []
    for op, span in zip(ops, spans, strict=True):
        if span.end > span.start:
            moments.append((span.start, True, op.lane, span.end))
            moments.append((span.end, False, op.lane, span.end))
    moments.sort()  # at one moment, ends come before starts
    running: dict[Lane, Time] = {}
    exposed: dict[Kind, Time] = dict.fromkeys(KINDS, 0)
    busy: Time = 0
    idle: Time = 0
    now: Time = 0
    for moment, starts, lane, end in moments:
        if moment > now:
            if "compute" in running:
                busy += moment - now
            elif running:
                exposed[KIND_OF[max(running, key=running.__getitem__)]] += moment - now
            else:
                idle += moment - now
            now = moment
        if starts:
            running[lane] = end
        else:
            del running[lane]
    return Usage(busy, exposed, sum(exposed.values()), idle + makespan - now, peak_bytes)


def _peak_values(rank: int, ops: Sequence[Op], spans: Sequence[Span], costs: Costs) -> int:
    """The most bytes of values and saved state that a rank holds at one moment.

    A value lives from the start of the op that writes it to the end of the op that frees it. Saved state lives from the
    end of its op, since until then the inputs it keeps still count as values, to the end of the op that continues it.
    """
    freed_by = {value: position for position, op in enumerate(ops) for value in op.frees}
    position_of = {op.key: position for position, op in enumerate(ops) if op.verb in ("fwd", "bwd")}
    continued_by = {position_of[key]: p for p, op in enumerate(ops) for key in follows(op) if key in position_of}
    changes: list[tuple[Time, int]] = []
    for position, op in enumerate(ops):
        size = costs.output_bytes(rank, op)
        if size:
            changes.append((spans[position].start, size))
            if position in freed_by:
                changes.append((spans[freed_by[position]].end, -size))
        if position in continued_by:
            saved = costs.saved_bytes(rank, op)
            changes.append((spans[position].end, saved))
            changes.append((spans[continued_by[position]].end, -saved))
    changes.sort()  # at one moment, what is dropped goes first: its memory is taken again
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak

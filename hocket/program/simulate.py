"""When every op of a program would run, given what each costs: the predicted timeline of a step.

Pure arithmetic on the costs' own numbers (`int`, `float` or `Fraction`): no rounding, no tolerance. With fractions
the result is exact. Nothing here knows how an op's cost was found; see `cost.py`.

An op's start and end come from `schedule.py`; its Note says what the simulator believes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from hocket.program.offload import HOST_BLOCK, host_slots
from hocket.program.ops import COMPUTING, HOST, Lane, Op, Program
from hocket.program.schedule import KINDS, NO_OVERHEADS, Kind, Overheads, Time, kind_of, schedule
from hocket.program.values import Name, UnitName, meanings, unit_moved
from hocket_trace.without_collector import without_collector


class Costs(Protocol):
    """What the simulator asks about an op of a pipeline rank."""

    def seconds(self, rank: int, op: Op) -> Time:
        """How long the op occupies its lane; of a recv, the p2p transfer. A send's is not asked for: it takes none."""
        ...

    def inner_seconds(self, rank: int, op: Op) -> Time:
        """In how much of that a compute op waits for tensor-parallel peers."""
        ...

    def output_bytes(self, rank: int, op: Op) -> int:
        """Size of the value the op produces."""
        ...

    def saved_bytes(self, rank: int, op: Op) -> int:
        """Size of what the op keeps for the op that continues it: fwd for bwd, bwd for wgrad."""
        ...

    def grad_bytes(self, rank: int, op: Op) -> int:
        """Size of the reduced gradients of a wgrad's unit, or of the sum that an add makes beside them."""
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
    kinds add up to `exposed_total`. Time in which compute ops wait for tensor-parallel peers is exposed too, of a kind
    that is there only if there is any. In `idle` nothing runs at all: the pipeline bubble. `peak_bytes` is the most
    memory held at any moment, `host_bytes` what offloads take of the host's.
    """

    busy: Time
    exposed: Mapping[Kind, Time]
    exposed_total: Time
    idle: Time
    peak_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """A predicted step. `spans[rank][position]` is the span of that op."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: Time
    ranks: tuple[Usage, ...]


@without_collector()
def simulate(program: Program, costs: Costs, overheads: Overheads = NO_OVERHEADS) -> Timeline:
    """Predict one step of every pipeline rank, in time linear in the number of ops (but for sorting by time).

    Raises ValueError if the program cannot finish, naming the ops at which it stops.
    """
    starts, ends = schedule(program, _durations(program, costs), overheads)
    spans = [spans_of(program, rank, starts, ends) for rank in range(len(program.ranks))]
    last = max(ends, default=0)
    own = [kind for lane in program.layout.lanes if (kind := kind_of(lane)) and kind not in KINDS]
    ranks = tuple(
        _usage(ops, row, last, peak_bytes(program, rank, row, costs), own)
        for rank, (ops, row) in enumerate(zip(program.ranks, spans, strict=True))
    )
    ranks = tuple(replace(use, host_bytes=host_bytes(program, rank, costs)) for rank, use in enumerate(ranks))
    return Timeline(tuple(spans), last, _with_inner(ranks, program, costs))


def spans_of(program: Program, rank: int, starts: Sequence[Time], ends: Sequence[Time]) -> tuple[Span, ...]:
    """The spans of one rank's ops, of times that are numbered through all ranks."""
    first, count = sum(map(len, program.ranks[:rank])), len(program.ranks[rank])
    return tuple(Span(rank, p, starts[first + p], ends[first + p]) for p in range(count))


def times(program: Program, costs: Costs) -> tuple[list[Time], list[Time]]:
    """Starts and ends of all ops, numbered through all ranks."""
    return schedule(program, _durations(program, costs), NO_OVERHEADS)


def quiet_end(program: Program, ends: Sequence[Time], rank: int) -> Time:
    """How much earlier than the last of the others a rank ends its last compute op; ends as of `times`.

    Negative if it ends last.
    """
    last: list[Time] = [0] * len(program.ranks)
    for number, (where, _, op) in enumerate(program):
        if op.lane == "compute" and op.verb != "step":
            last[where] = max(last[where], ends[number])
    mine = last.pop(rank)
    return max(last, default=mine) - mine


def _durations(program: Program, costs: Costs) -> list[Time]:
    return [0 if op.verb == "send" else costs.seconds(rank, op) for rank, _, op in program]


def _communicated(lane: Lane) -> Kind:
    kind = kind_of(lane)
    assert kind is not None, f"{lane} computes"
    return kind


def _usage(
    ops: Sequence[Op], spans: Sequence[Span], makespan: Time, peak_bytes: int, own: Sequence[Kind] = ()
) -> Usage:
    """Sweep over the moments at which an op of this rank starts or ends. A lane runs one op at a time.

    `own` are kinds of communication on lanes that parts have brought.
    """
    moments: list[tuple[Time, bool, Lane, Time]] = []
    for op, span in zip(ops, spans, strict=True):
        if span.end > span.start:
            moments.append((span.start, True, op.lane, span.end))
            moments.append((span.end, False, op.lane, span.end))
    moments.sort()  # at one moment, ends come before starts
    running: dict[Lane, Time] = {}
    exposed: dict[Kind, Time] = dict.fromkeys((*KINDS, *own), 0)
    busy: Time = 0
    idle: Time = 0
    now: Time = 0
    for moment, starts, lane, end in moments:
        if moment > now:
            if not running.keys().isdisjoint(COMPUTING):
                busy += moment - now
            elif running:
                exposed[_communicated(max(running, key=running.__getitem__))] += moment - now
            else:
                idle += moment - now
            now = moment
        if starts:
            running[lane] = end
        else:
            del running[lane]
    return Usage(busy, exposed, sum(exposed.values()), idle + makespan - now, peak_bytes)


def _with_inner(ranks: tuple[Usage, ...], program: Program, costs: Costs) -> tuple[Usage, ...]:
    """The same, with what compute ops wait inside taken from busy to exposed."""
    waits = [sum(costs.inner_seconds(rank, op) for op in ops) for rank, ops in enumerate(program.ranks)]
    if not any(waits):
        return ranks
    return tuple(
        replace(use, busy=use.busy - w, exposed={**use.exposed, "tp": w}, exposed_total=use.exposed_total + w)
        for use, w in zip(ranks, waits, strict=True)
    )


def peak_bytes(program: Program, rank: int, spans: Sequence[Span], costs: Costs) -> int:
    """The most bytes that a rank holds at one moment: what it always holds, values, saved state, reduced gradients.

    A value lives from the start of the op that writes it to the end of the op that frees it. Saved state lives from the
    end of its op, since until then the inputs it keeps still count as values, to the end of the op that continues it.
    Gradients live from the start of their unit's first wgrad to the end of the step, sums of them from the first add.
    Those that a step left to the next one's updates are there when that begins. What an offload hands over is its
    forward's saved state until it ends, and its value from then on.
    """
    ops, known = program.ranks[rank], meanings(program.layout, rank)
    freed_by = {value: position for position, op in enumerate(ops) for value in op.frees}
    freed_by |= {value: position for position, op in enumerate(ops) for value in op.trims}  # nearly all of its bytes
    changes: list[tuple[Time, int]] = []
    written: set[tuple[str, UnitName]] = set()
    where: dict[tuple[Name, int], int] = {}
    for position, op in enumerate(ops):
        meaning = known.of(op)
        unit = unit_moved(op) if op.verb == "add" else meaning.unit_written
        if unit is not None and (op.verb, unit) not in written:
            written.add((op.verb, unit))
            changes.append((spans[position].start, costs.grad_bytes(rank, op)))
        size = costs.output_bytes(rank, op)
        if size:
            span = spans[position]
            begins = 0 if op.verb == "update" else span.end if op.verb == "offload" else span.start
            changes.append((begins, size))
            if position in freed_by:
                changes.append((spans[freed_by[position]].end, -size))
        if op.verb in ("fwd", "recompute", "bwd", *HOST):
            where[(op.verb, op.part, op.chunk, op.layer), op.microbatch] = position
        if meaning.follows is not None and (continued := where.get((meaning.follows, op.microbatch))) is not None:
            saved = costs.saved_bytes(rank, ops[continued])
            changes.append((spans[continued].end, saved))
            changes.append((spans[position].end, -saved))
    changes.sort()  # at one moment, what is dropped goes first: its memory is taken again
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return costs.fixed_bytes(program, rank) + peak


def host_bytes(program: Program, rank: int, costs: Costs) -> int:
    """Bytes of the host's memory that a rank's offloads need, with rows spread evenly over experts."""
    slots = host_slots(program.ranks[rank])
    largest = dict.fromkeys(slots, 0)
    for op in program.ranks[rank]:
        if op.verb == "offload":
            largest[op.part] = max(largest[op.part], costs.output_bytes(rank, op))
    return sum(slots[part] * -(-nbytes // HOST_BLOCK) * HOST_BLOCK for part, nbytes in largest.items())

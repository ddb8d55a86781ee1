"""What the checker knows about one rank: where each op is, what happens before what, which passes overlap.

Note: [Happens-before is judged rank by rank]
Op a happens before op b of the same rank if a chain of lane order and dependencies leads from a to b. A path may also
lead over other ranks (a send, its receive, ... , a receive here), but memory safety should not rely on it: the checker
demands a chain within the rank. So it may refuse a program that would have run; it never accepts one because of an
assumption about another rank. Only deadlock needs all ranks at once (`check.py`).

Note: [A clock per op]
For every op we keep, per lane, the position of the latest op of that lane that happens before it, itself included. The
lanes are FIFO, so "a happens before b" is one comparison, and all clocks take one pass over the list. The lowering
keeps similar clocks (`connect.py`). This code is separate on purpose: a proof that shares its arithmetic with what it
proves would share its mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hocket.program.ops import UNIT_VERBS, Key, Layout, Op, Program
from hocket.program.parts import UNITS
from hocket.program.values import reads, reads_itself

INVARIANTS = {
    1: "no deadlock",
    2: "sends match receives",
    3: "merged halves are independent",
    4: "every part once",
    5: "gradients follow their backward",
    6: "values outlive their readers",
    7: "slots outlive their readers",
    8: "side values run backward first",
    9: "microbatches accumulate in order",
    10: "lanes carry their own kind",
    11: "activations in flight",
    12: "nothing is left",
    13: "work is queued before the host waits",
    14: "values go when they may",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: its number and name, the rank, and the positions of the ops involved on that rank."""

    invariant: int
    name: str
    rank: int
    ops: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return f"invariant {self.invariant} ({self.name}), rank {self.rank}: {self.message}"


@dataclass(frozen=True, slots=True)
class Span:
    """A forward or backward of one (microbatch, chunk): positions of its first and last layer op."""

    verb: str
    microbatch: int
    chunk: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.verb} m{self.microbatch} c{self.chunk}"


@dataclass(frozen=True)
class Facts:
    """One rank of a program, indexed.

    `where` is the position of every key (the last one, if a key occurs twice), `reads` the keys whose values each
    op uses, `readers` the positions that use the value of a position; an update or offload counts as its own reader.
    `late_deps` are (op, dependency) pairs whose dependency isn't an earlier position; the clocks ignore them.
    `merged` are the pairs of spans that overlap in the list.
    """

    program: Program
    rank: int
    ops: tuple[Op, ...]
    lane: list[int]
    placed: list[bool]
    """Whether each op `has_place`."""
    where: dict[Key, int]
    reads: list[list[Key]]
    readers: dict[int, list[int]]
    clocks: list[list[int]]
    late_deps: list[tuple[int, int]]
    spans: list[Span]
    merged: list[tuple[Span, Span]]
    forward_only: bool = False

    @property
    def layout(self) -> Layout:
        return self.program.layout

    def before(self, a: int, b: int) -> bool:
        """Whether op a happens before op b, or is op b."""
        return self.clocks[b][self.lane[a]] >= a

    def fail(self, invariant: int, message: str, *positions: int) -> Violation:
        return Violation(invariant, INVARIANTS[invariant], self.rank, positions, message)

    def comes_after(
        self, invariant: int, i: int, p: int, why: str = "", what: str = "may run before"
    ) -> tuple[Violation, ...]:
        """A violation unless op p happens before op i."""
        if self.clocks[i][self.lane[p]] >= p:
            return ()
        return (self.fail(invariant, f"{self.show(i)} {what} {self.show(p)}{why}", i, p),)

    def show(self, position: int) -> str:
        """An op's position and name, as `12 bwd attn m0 c0 l1`."""
        return f"{position} {self.ops[position]}"


def has_place(op: Op, layout: Layout) -> bool:
    """Whether an op's chunk and layer exist, and its part belongs to the layer or names a unit."""
    if op.verb == "step":
        return True
    if not (0 <= op.chunk < layout.chunks and -1 <= op.layer < len(layout.kinds)):
        return False
    if op.verb in UNIT_VERBS:
        return op.part in UNITS
    return op.verb in ("send", "recv") or layout.has_part(op.part, op.layer)


def gather_facts(program: Program, rank: int, forward_only: bool = False) -> Facts:
    ops = program.ranks[rank]
    numbers = {name: n for n, name in enumerate(program.layout.lanes)}
    lane = [numbers[op.lane] for op in ops]
    clocks, late_deps = _clocks(ops, lane, len(numbers))
    spans = _spans(ops)
    where = {op.key: position for position, op in enumerate(ops)}
    placed = [has_place(op, program.layout) for op in ops]
    keys = [reads(op, program.layout, rank) if there else [] for op, there in zip(ops, placed, strict=True)]
    readers: dict[int, list[int]] = {}
    for i, wanted in enumerate(keys):
        for key in wanted:
            if key in where:
                readers.setdefault(where[key], []).append(i)
        if reads_itself(ops[i]):
            readers.setdefault(i, []).append(i)
    merged = list(_overlaps(spans))
    return Facts(program, rank, ops, lane, placed, where, keys, readers, clocks, late_deps, spans, merged, forward_only)


def _clocks(ops: tuple[Op, ...], lane: list[int], lanes: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """See Note: [A clock per op]. Also returns the dependencies that don't point to an earlier position."""
    latest = [[-1] * lanes for _ in range(lanes)]
    clocks: list[list[int]] = []
    late: list[tuple[int, int]] = []
    for i, op in enumerate(ops):
        clock = latest[lane[i]].copy()
        for d in op.deps:
            if not 0 <= d < i:
                late.append((i, d))
            elif clock[lane[d]] < d:  # otherwise the clock already includes everything before d
                clock = list(map(max, clock, clocks[d]))
        clock[lane[i]] = i
        latest[lane[i]] = clock
        clocks.append(clock)
    return clocks, late


def _spans(ops: tuple[Op, ...]) -> list[Span]:
    ends: dict[tuple[str, int, int], list[int]] = {}
    for i, op in enumerate(ops):
        if op.layer >= 0 and op.verb in ("fwd", "bwd"):
            ends.setdefault((op.verb, op.microbatch, op.chunk), [i, i])[1] = i
    return [Span(*key, first, last) for key, (first, last) in ends.items()]


def _overlaps(spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans of which neither ends before the other begins; `spans` is in order of their first op."""
    active: list[Span] = []
    for span in spans:
        active = [other for other in active if other.last > span.first]
        yield from ((other, span) for other in active)
        active.append(span)

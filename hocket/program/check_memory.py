"""Invariants about memory: of values (6, 12, 14), of activations in flight and received tensors (11), and of slots."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hocket.program.facts import Facts, Violation
from hocket.program.ops import TIED, WHOLE_MATRICES, Op, Program
from hocket.program.transformer import EMBED
from hocket.program.values import UnitName, first_reader, memory_lane, unit_moved, unit_read, unit_written


def values_live(facts: Facts) -> Iterator[Violation]:
    """Invariant 6: a value is made before its readers and dropped once, by its own lane, after them all.

    Also invariant 12: every value is dropped.
    """
    readers = facts.readers
    for i, keys in enumerate(facts.reads):
        for key in keys:
            p = facts.where.get(key)
            if p is None:
                verb, part, m, c, layer = key
                yield facts.fail(
                    6, f"{facts.show(i)} reads the value of {verb} {part} m{m} c{c} l{layer}: no such op", i
                )
                continue
            yield from facts.comes_after(6, i, p, ", whose value it reads")
    dropped: dict[int, int] = {}
    for q, op in enumerate(facts.ops):
        for p in op.frees:
            if p not in readers:
                yield facts.fail(6, f"{facts.show(q)} drops the value of op {p}, which nobody reads", q, p)
            elif p in dropped:
                yield facts.fail(6, f"{facts.show(q)} drops {facts.show(p)} a second time", q, p, dropped[p])
            else:
                dropped[p] = q
                yield from _late_enough(facts, p, q, "the value", readers[p])
        for p in op.trims:
            share = first_reader(facts.ops[p], facts.layout) if 0 <= p < q and facts.placed[p] else ""
            if share:
                yield from _late_enough(facts, p, q, "a share", _first_readers(facts, p))
            else:
                yield facts.fail(6, f"{facts.show(q)} drops a share of op {p}, which has none", q)
    for p in readers:
        if p not in dropped:
            yield facts.fail(12, f"the value of {facts.show(p)} is never dropped", p)


def values_dropped_in_time(facts: Facts) -> Iterator[Violation]:
    """Invariant 14: a value, and the first reader's share of it, is dropped by the first op that may do so.

    That is the first op after the readers on the lane that owns the memory. A later drop would hold memory longer than
    the plan has counted.
    """
    trimmed, newest = {p for op in facts.ops for p in op.trims}, dict[str, int]()
    for q, op in enumerate(facts.ops):
        drops = [("the value", p, facts.readers.get(p, [])) for p in op.frees]
        shares = [*op.trims, *(p for p in op.frees if p not in trimmed)]
        for what, p, readers in [*drops, *(("a share", p, _first_readers(facts, p)) for p in shares)]:
            earlier = newest.get(memory_lane(facts.ops[p]), -1) if readers else -1
            if earlier >= max(readers, default=0) and all(facts.before(i, earlier) for i in readers):
                message = (
                    f"{facts.show(q)} drops {what} of {facts.show(p)}, which {facts.show(earlier)} could have done"
                )
                yield facts.fail(14, message, q, p, earlier)
        newest[op.lane] = q


def _first_readers(facts: Facts, p: int) -> list[int]:
    """Readers of the first share of a value; none if it has no shares."""
    readers = facts.readers.get(p, [])
    first = first_reader(facts.ops[p], facts.layout) if readers and facts.placed[p] else ""
    return [i for i in readers if facts.ops[i].part == first]


def _late_enough(facts: Facts, p: int, q: int, what: str, readers: list[int]) -> Iterator[Violation]:
    """A drop is on the lane that owns the value's memory, or by the step, and after the readers."""
    owner, lane = memory_lane(facts.ops[p]), facts.ops[q].lane
    if owner != lane and facts.ops[q].verb != "step":
        wrong = f"whose memory belongs to lane {owner}: only that lane, or the step, can tell when it is free"
        yield facts.fail(6, f"{facts.show(q)} on lane {lane} drops {what} of {facts.show(p)}, {wrong}", q, p)
    for reader in readers:
        if reader > q or not facts.before(reader, q):
            message = f"{facts.show(q)} drops {what} of {facts.show(p)}, but {facts.show(reader)} may still read it"
            yield facts.fail(6, message, q, p, reader)


def activations_capped(facts: Facts) -> Iterator[Violation]:
    """Invariant 11: a chunk is in flight from its first forward op to its last backward op; the plan has a cap."""
    caps = facts.program.in_flight
    if facts.rank >= len(caps):
        yield facts.fail(11, f"in_flight={caps} gives no cap for this rank")
        return
    cap, live = caps[facts.rank], 0
    events = [(span.first, 1) if span.verb == "fwd" else (span.last, -1) for span in facts.spans]
    for position, change in sorted(events):
        live += change
        if live > cap and change > 0:
            yield facts.fail(
                11, f"{facts.show(position)} makes {live} chunk activations in flight, cap {cap}", position
            )


def reloads_paced(facts: Facts) -> Iterator[Violation]:
    """Invariant 11 for reloads: they allocate memory no earlier than their place in the list says.

    By then the compute lane, which owns that memory, has finished with its previous content.
    """
    computed = -1
    for i, op in enumerate(facts.ops):
        if op.verb == "reload" and computed >= 0:
            yield from facts.comes_after(11, i, computed, what="may be issued before")
        computed = i if op.lane == "compute" else computed


def receives_paced(facts: Facts) -> Iterator[Violation]:
    """Invariant 11 for received tensors: a tensor whose reader comes earlier in the list is read before the next recv.

    A receive occupies memory once it is posted, and only a dependency keeps the host from posting all receives of a
    step at once. Two tensors may wait for their readers, since a step of two items reads two.
    """
    waiting: dict[str, list[int]] = {}
    for i, op in enumerate(facts.ops):
        if op.verb == "recv":
            earlier = waiting.setdefault(op.part, [])
            late = [p for p in earlier if not any(facts.before(reader, i) for reader in facts.readers.get(p, ())[:1])]
            read = [p for p in late if facts.readers.get(p, [i])[0] < i]
            if read or len(late) > 1:
                p = (read or late)[0]
                yield facts.fail(11, f"{facts.show(i)} may be posted before {facts.show(p)} has a reader", i, p)
            waiting[op.part] = [*late, i][-2:]


# --------------------------------------------------------------------------------------------------------------- slots
#
# Invariants about slots: weights (7, 12), gradients (5, 7, 9, 12), whole matrices (5, 7) and the host's memory (7, 12).
#
# Ops fill, read and end the content of a slot. One walk over a rank's list in host order, in which an executor also
# assigns slots, checks that happens-before implies that order.


class Use(NamedTuple):
    """An op's access to the content of a slot."""

    kind: Literal["weights", "gradients", "matrices", "results", "saved tensors"]
    owner: Hashable
    """The unit, or other owner, of the content."""
    role: Literal["fill", "read", "end"]
    slot: tuple[str, int] | None = None
    """None: the slot that its owner has."""


_BROKEN: Mapping[str, int] = {"gradients": 5, "matrices": 5, "results": 5}
"""Kind of a slot -> the invariant that is violated if the slot ends too early; 7 for all others."""


def _uses(op: Op, program: Program) -> Iterator[Use]:
    layout, slot = program.layout, (op.part, op.slot)
    match op.verb:
        case "gather" | "release":
            yield Use("weights", unit_moved(op), "fill" if op.verb == "gather" else "end", slot)
        case "add" | "reduce":
            yield Use("gradients", (unit_moved(op), op.microbatch), "end", slot)
        case "offload" | "reload":
            yield Use("saved tensors", op.key[1:], "fill" if op.verb == "offload" else "end", slot)
        case "collect":
            yield Use("matrices", unit_moved(op), "fill", slot)
        case "orthogonalise":
            yield Use("matrices", unit_moved(op), "read", slot)
        case "scatter":
            yield Use("matrices", unit_moved(op), "end", slot)
            yield Use("results", unit_moved(op), "fill", slot)
        case "update" if op.slot >= 0:
            yield Use("results", unit_moved(op), "end", slot)
    if (written := unit_written(op, layout)) is not None:
        yield Use("gradients", (written, op.microbatch), "fill", (written[0], op.slot))
    if (read := unit_read(op, layout)) is not None and read[0] in program.weight_slots:
        yield Use("weights", read, "read")


@dataclass
class _Content:
    """The content of a slot: its owner, and the ops that have filled and read it."""

    owner: Hashable
    fills: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


class _Slots:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.counts = {"weights": facts.program.weight_slots, "gradients": facts.program.grad_slots}
        self.contents: dict[tuple[str, tuple[str, int]], _Content] = {}
        self.place: dict[tuple[str, Hashable], tuple[str, int]] = {}
        """(kind, owner) -> the slot that has it."""
        self.ended: dict[tuple[str, Hashable], int] = {}
        """(kind, slot), and (kind, owner) -> its latest end."""

    def fill(self, i: int, use: Use, slot: tuple[str, int]) -> Iterator[Violation]:
        facts, counts = self.facts, self.counts.get(use.kind)
        count = counts.get(slot[0], 0) if counts is not None else slot[1] + 1
        if not 0 <= slot[1] < count:
            yield facts.fail(7, f"{facts.show(i)}: {slot[0]} has {count} slots of {use.kind}", i)
        content, held = self.contents.get((use.kind, slot)), self.place.get((use.kind, use.owner))
        if held not in (None, slot) or (content and content.owner == use.owner and use.kind != "gradients"):
            if (there := self.contents.get((use.kind, held or slot))) is not None:  # else already reported
                p = there.fills[-1]
                yield facts.fail(7, f"{facts.show(i)} fills a slot with what {facts.show(p)} has in one already", i, p)
        if content and content.owner != use.owner:
            p = content.fills[-1]
            yield facts.fail(7, f"{facts.show(i)} overwrites {facts.show(p)}, which is still needed", i, p)
            content = None
        if use.kind != "weights" and (use.kind, use.owner) in self.ended:
            p = self.ended[use.kind, use.owner]
            yield facts.fail(5, f"{facts.show(i)} comes after {facts.show(p)}, which needs it", i, p)
        for p in {self.ended[use.kind, key] for key in (slot, use.owner) if (use.kind, key) in self.ended}:
            yield from facts.comes_after(7, i, p, " has read it", "may overwrite its slot before")
        content = self.contents[use.kind, slot] = content or _Content(use.owner)
        self.place[use.kind, use.owner] = slot
        content.fills.append(i)

    def read(self, i: int, use: Use) -> Iterator[Violation]:
        slot = use.slot or self.place.get((use.kind, use.owner))
        content = self.contents.get((use.kind, slot)) if slot else None
        if content is None or content.owner != use.owner:
            yield self.facts.fail(7, f"{self.facts.show(i)} reads {use.kind} that are in no slot", i)
            return
        content.reads.append(i)
        yield from self.facts.comes_after(7, i, content.fills[-1])

    def end(self, i: int, use: Use, slot: tuple[str, int]) -> Iterator[Violation]:
        content, number = self.contents.get((use.kind, slot)), _BROKEN.get(use.kind, 7)
        if content is None or content.owner != use.owner:
            yield self.facts.fail(number, f"{self.facts.show(i)} finds no {use.kind} of its own in its slot", i)
        else:
            for p in (*content.fills, *content.reads):
                yield from self.facts.comes_after(number, i, p, ", which uses the same slot")
            del self.contents[use.kind, slot]
            self.place.pop((use.kind, use.owner), None)
        self.ended[use.kind, slot] = self.ended[use.kind, use.owner] = i


def slots_kept(facts: Facts) -> Iterator[Violation]:
    """Invariants 5, 7 and 12: a slot's content is filled, then read, then ended, and only then overwritten."""
    slots = _Slots(facts)
    for i, op in enumerate(facts.ops):
        for use in _uses(op, facts.program) if facts.placed[i] else ():
            if use.role == "read" or use.slot is None:
                yield from slots.read(i, use)
            else:
                yield from (slots.fill if use.role == "fill" else slots.end)(i, use, use.slot)
    for (kind, _), content in slots.contents.items():
        p = content.fills[-1]
        yield facts.fail(12, f"the {kind} of {facts.show(p)} are never read and let go", p)


def gathers_counted(facts: Facts) -> Iterator[Violation]:
    """Invariant 7: a unit's gathers are numbered from 0 on, and a release has the number of its gather."""
    turns: dict[UnitName, int] = {}
    for i, op in enumerate(facts.ops):
        if op.verb in ("gather", "release") and facts.placed[i]:
            unit = unit_moved(op)
            turn = turns[unit] = turns.get(unit, -1) + (op.verb == "gather")
            if op.microbatch != turn:
                yield facts.fail(7, f"{facts.show(i)} belongs to the unit's gather number {turn}", i)


def gradients_in_order(facts: Facts) -> Iterator[Violation]:
    """Invariants 5, 9 and 12: a unit's gradients are summed in ascending order of microbatches and reduced once.

    The weight gradients of a part ascend too, because the ops that compute them may accumulate.
    """
    written: dict[tuple[UnitName, str], int] = {}  # a part of a unit -> the latest op that wrote its gradient
    latest: dict[UnitName, int] = {}  # unit -> its latest add or reduce
    sums: dict[UnitName, int] = {}  # unit -> its latest add, until its reduce
    ended: dict[UnitName, int] = {}  # unit -> the reduce that took its sum in
    for i, op in enumerate(facts.ops):
        if not facts.placed[i]:
            continue
        if op.verb == "send" and op.part == TIED:  # the sum of all microbatches
            for p in (p for p, other in enumerate(facts.ops) if other.verb == "reduce" and other.part == EMBED.unit):
                yield from facts.comes_after(5, i, p)
        elif (unit := unit_written(op, facts.layout)) is not None:
            p = written.get((unit, op.part))
            if p is not None and facts.ops[p].microbatch >= op.microbatch:
                yield facts.fail(9, f"{facts.show(i)} comes after {facts.show(p)}: not ascending", i, p)
            written[unit, op.part] = i
        elif op.verb in ("add", "reduce"):
            unit = unit_moved(op)
            before = latest.get(unit, -1)
            if before >= 0 and (facts.ops[before].microbatch >= op.microbatch or not facts.before(before, i)):
                message = f"{facts.show(i)} adds to what {facts.show(before)} did: not ascending"
                yield facts.fail(9, message, i, before)
            if unit in ended:
                p = ended[unit]
                yield facts.fail(5, f"{facts.show(i)} comes after {facts.show(p)}, which ended the unit's sum", i, p)
            latest[unit] = i
            if op.verb == "add":
                sums[unit] = i
            elif sums.pop(unit, None) is not None:  # the order after the latest add was checked above
                ended[unit] = i
    for p in sums.values():
        yield facts.fail(12, f"what {facts.show(p)} added up is never reduced", p)


def updates_first(facts: Facts) -> Iterator[Violation]:
    """Invariants 4 and 7: a step that updates weights updates all units, before they are read or gathered.

    And before new gradients overwrite the old ones. If Muon needs whole matrices of a class of units, every unit of the
    class has collect, orthogonalise, scatter and update.
    """
    layout = facts.layout
    places = [i for i, there in enumerate(facts.placed) if there]
    found = {(verb, unit_moved(facts.ops[i])): i for i in places if (verb := facts.ops[i].verb) in _OF_MATRICES}
    whole = {unit[0] for verb, unit in found if verb != "update"}
    for unit in dict.fromkeys(unit for _, unit in found if unit[0] in whole):
        if missing := [verb for verb in _OF_MATRICES if (verb, unit) not in found]:
            i = next(i for (_, other), i in found.items() if other == unit)
            yield facts.fail(4, f"{facts.show(i)} is of a unit without {missing[0]}", i)
    updates = {unit: i for (verb, unit), i in found.items() if verb == "update"}
    for i in updates.values():
        if facts.ops[i].microbatch >= 0:
            yield facts.fail(4, f"{facts.show(i)} is of one microbatch, but an update is of a whole step", i)
    absent = set[UnitName]()
    for i in places if updates else ():
        op = facts.ops[i]
        unit = unit_moved(op) if op.verb == "gather" else unit_read(op, layout) or unit_written(op, layout)
        if unit in updates:
            yield from facts.comes_after(7, i, updates[unit])
        elif unit is not None and unit not in absent:
            absent.add(unit)
            yield facts.fail(4, f"{facts.show(i)} needs a unit that is never updated, as others are", i)


_OF_MATRICES = (*WHOLE_MATRICES, "update")

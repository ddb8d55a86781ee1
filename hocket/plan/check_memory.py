"""Invariants about memory: values (6, 12), weight and gradient slots (5, 7, 9, 12) and activations in flight (11)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hocket.plan.facts import Facts, Violation
from hocket.plan.values import UnitName, unit_read, unit_written


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
            if not facts.before(p, i):
                yield facts.fail(6, f"{facts.show(i)} may run before {facts.show(p)}, whose value it reads", i, p)
    dropped: dict[int, int] = {}
    for q, op in enumerate(facts.ops):
        for p in op.frees:
            if p not in readers:
                yield facts.fail(6, f"{facts.show(q)} drops the value of op {p}, which nobody reads", q, p)
            elif p in dropped:
                yield facts.fail(6, f"{facts.show(q)} drops {facts.show(p)} a second time", q, p, dropped[p])
            else:
                dropped[p] = q
                yield from _dropped_late_enough(facts, p, q, readers[p])
    for p in readers:
        if p not in dropped:
            yield facts.fail(12, f"the value of {facts.show(p)} is never dropped", p)


def _dropped_late_enough(facts: Facts, p: int, q: int, readers: list[int]) -> Iterator[Violation]:
    if facts.lane[p] != facts.lane[q] and facts.ops[q].verb != "step":
        yield facts.fail(
            6,
            f"{facts.show(q)} on lane {facts.ops[q].lane} drops {facts.show(p)}, whose memory belongs to lane "
            f"{facts.ops[p].lane}: only that lane, or the step, can tell when it is free",
            q,
            p,
        )
    for reader in readers:
        if reader > q or not facts.before(reader, q):
            yield facts.fail(
                6, f"{facts.show(q)} drops the value of {facts.show(p)}, but {facts.show(reader)} may still read it",
                q, p, reader,
            )  # fmt: skip


@dataclass(slots=True)
class _Lease:
    """A unit in its weight slot: the gather that brought it, and who has read it since."""

    gather: int
    slot: int
    readers: list[int] = field(default_factory=list)


def weights_resident(facts: Facts) -> Iterator[Violation]:
    """Invariant 7 for weights: readers come after the gather and before the release, the next gather after it.

    Also invariant 12: every slot is released.
    """
    slots = facts.program.weight_slots
    resident: dict[UnitName, _Lease] = {}
    user: dict[tuple[str, int], UnitName] = {}
    released: dict[tuple, int] = {}  # slot, and unit -> its latest release
    for i, op in enumerate(facts.ops):
        if op.verb == "gather":
            unit, slot = _unit(facts, i), (op.part, op.slot)
            if not 0 <= op.slot < slots.get(op.part, 0):
                yield facts.fail(7, f"{facts.show(i)}: {op.part} has {slots.get(op.part, 0)} weight slots", i)
            if unit in resident:
                p = resident[unit].gather
                yield facts.fail(7, f"{facts.show(i)} gathers what {facts.show(p)} already holds", i, p)
            elif slot in user:
                p = resident[user[slot]].gather
                yield facts.fail(7, f"{facts.show(i)} overwrites {facts.show(p)}, not released yet", i, p)
            for p in {released[place] for place in (slot, unit) if place in released}:
                if not facts.before(p, i):
                    yield facts.fail(7, f"{facts.show(i)} may run before {facts.show(p)}", i, p)
            resident[unit] = _Lease(i, op.slot)
            user[slot] = unit
        elif op.verb == "release":
            unit = _unit(facts, i)
            lease = resident.pop(unit, None)
            if lease is None or lease.slot != op.slot:
                yield facts.fail(7, f"{facts.show(i)} releases what is not in its slot", i)
                continue
            user.pop((op.part, op.slot), None)
            released[op.part, op.slot] = released[unit] = i
            for p in lease.readers:
                if not facts.before(p, i):
                    yield facts.fail(
                        7, f"{facts.show(i)} may come before {facts.show(p)}, which reads the weights", i, p
                    )
        elif (read := unit_read(op, facts.layout)) is not None and read[0] in slots:
            lease = resident.get(read)
            if lease is None:
                yield facts.fail(7, f"{facts.show(i)} reads weights that are not gathered", i)
                continue
            lease.readers.append(i)
            if not facts.before(lease.gather, i):
                yield facts.fail(7, f"{facts.show(i)} may run before {facts.show(lease.gather)}", i, lease.gather)
    for lease in resident.values():
        yield facts.fail(12, f"{facts.show(lease.gather)} is never released", lease.gather)


def _unit(facts: Facts, position: int) -> UnitName:
    op = facts.ops[position]
    assert op.part in ("embed", "dense", "experts", "head"), f"{op} works on no unit"
    return (op.part, op.chunk, op.layer)


@dataclass(slots=True)
class _Gradient:
    """A gradient slot in use: whose gradient it is, and which ops have written to it."""

    owner: tuple[UnitName, int]
    writers: list[int] = field(default_factory=list)


class _GradientSlots:
    """Walks a rank's list and follows every gradient from its first write to its reduce."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.used: dict[tuple[str, int], _Gradient] = {}
        self.slot_of: dict[tuple[UnitName, int], int] = {}
        self.reduced_slot: dict[tuple[str, int], int] = {}  # slot -> its latest reduce
        self.reduced: dict[tuple[UnitName, int], int] = {}
        self.latest: dict[UnitName, int] = {}  # unit -> its latest reduce

    def write(self, i: int, unit: UnitName) -> Iterator[Violation]:
        facts, op = self.facts, self.facts.ops[i]
        owner, slot = (unit, op.microbatch), (unit[0], op.slot)
        count = facts.program.grad_slots.get(unit[0], 0)
        if not 0 <= op.slot < count:
            yield facts.fail(7, f"{facts.show(i)}: {unit[0]} has {count} gradient slots", i)
        if owner in self.reduced:
            p = self.reduced[owner]
            yield facts.fail(5, f"{facts.show(i)} comes after {facts.show(p)}, which needs it", i, p)
        if self.slot_of.setdefault(owner, op.slot) != op.slot:
            yield facts.fail(
                7, f"{facts.show(i)} writes a gradient whose other parts are in slot {self.slot_of[owner]}", i
            )
        gradient = self.used.get(slot)
        if gradient is not None and gradient.owner != owner:
            p = gradient.writers[-1]
            yield facts.fail(7, f"{facts.show(i)} overwrites {facts.show(p)}, not reduced yet", i, p)
            gradient = None
        if slot in self.reduced_slot and not facts.before(self.reduced_slot[slot], i):
            p = self.reduced_slot[slot]
            yield facts.fail(7, f"{facts.show(i)} may overwrite its slot before {facts.show(p)} has read it", i, p)
        if gradient is None:
            gradient = self.used[slot] = _Gradient(owner)
        gradient.writers.append(i)

    def reduce(self, i: int) -> Iterator[Violation]:
        facts, op = self.facts, self.facts.ops[i]
        unit = _unit(facts, i)
        slot = (op.part, op.slot)
        gradient = self.used.get(slot)
        if gradient is None or gradient.owner != (unit, op.microbatch):
            yield facts.fail(5, f"{facts.show(i)} finds no gradient of its own in its slot", i)
        else:
            del self.used[slot]
            for p in gradient.writers:
                if not facts.before(p, i):
                    yield facts.fail(5, f"{facts.show(i)} may run before {facts.show(p)}", i, p)
        if unit in self.latest:
            p = self.latest[unit]
            if facts.ops[p].microbatch >= op.microbatch or not facts.before(p, i):
                yield facts.fail(9, f"{facts.show(i)} adds to the gradient after {facts.show(p)}: not ascending", i, p)
        self.latest[unit] = self.reduced[unit, op.microbatch] = self.reduced_slot[slot] = i

    def finish(self) -> Iterator[Violation]:
        for gradient in self.used.values():
            p = gradient.writers[-1]
            yield self.facts.fail(12, f"the gradient of {self.facts.show(p)} is never reduced", p)


def gradients_kept(facts: Facts) -> Iterator[Violation]:
    """Invariants 5, 7, 9 and 12 for gradients: written, reduced once complete, in ascending microbatch order."""
    slots = _GradientSlots(facts)
    for i, op in enumerate(facts.ops):
        if op.verb == "reduce":
            yield from slots.reduce(i)
        elif (unit := unit_written(op, facts.layout)) is not None:
            yield from slots.write(i, unit)
    yield from slots.finish()


def activations_capped(facts: Facts) -> Iterator[Violation]:
    """Invariant 11: from its first forward op to its last backward op a chunk is in flight; the plan says how many."""
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


def receives_paced(facts: Facts) -> Iterator[Violation]:
    """Invariant 11 for received tensors: at most one per direction waits for its first reader.

    A receive takes memory from the moment it is posted, and nothing but a dependency keeps the host from posting
    all of a step at once.
    """
    waiting: dict[str, int] = {}
    for i, op in enumerate(facts.ops):
        if op.verb == "recv":
            p = waiting.get(op.part)
            if p is not None and not any(facts.before(reader, i) for reader in facts.readers.get(p, ())[:1]):
                yield facts.fail(11, f"{facts.show(i)} may be posted before {facts.show(p)} has a reader", i, p)
            waiting[op.part] = i

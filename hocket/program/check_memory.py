"""Invariants about memory of values (6, 12, 14), of activations in flight and of received tensors (11)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hocket.program.facts import Facts, Violation, has_place
from hocket.program.ops import TIED, WHOLE_MATRICES
from hocket.program.transformer import EMBED
from hocket.program.values import UnitName, first_reader, memory_of, unit_moved, unit_read, unit_written


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
            share = (
                first_reader(facts.ops[p], facts.layout) if 0 <= p < q and has_place(facts.ops[p], facts.layout) else ""
            )
            if share:
                yield from _late_enough(facts, p, q, "a share", _first_readers(facts, p))
            else:
                yield facts.fail(6, f"{facts.show(q)} drops a share of op {p}, which has none", q)
    for p in readers:
        if p not in dropped:
            yield facts.fail(12, f"the value of {facts.show(p)} is never dropped", p)


def values_dropped_in_time(facts: Facts) -> Iterator[Violation]:
    """Invariant 14: a value, and the first reader's share of it, is dropped by the first op that may do so.

    That is the first op of the lane to which the memory belongs that comes after the readers. A later one holds memory
    that no plan has counted.
    """
    trimmed, newest = {p for op in facts.ops for p in op.trims}, dict[str, int]()
    for q, op in enumerate(facts.ops):
        drops = [("the value", p, facts.readers.get(p, [])) for p in op.frees]
        shares = [*op.trims, *(p for p in op.frees if p not in trimmed)]
        for what, p, readers in [*drops, *(("a share", p, _first_readers(facts, p)) for p in shares)]:
            earlier = newest.get(memory_of(facts.ops[p]), -1) if readers else -1
            if earlier >= max(readers, default=0) and all(facts.before(i, earlier) for i in readers):
                message = (
                    f"{facts.show(q)} drops {what} of {facts.show(p)}, which {facts.show(earlier)} could have done"
                )
                yield facts.fail(14, message, q, p, earlier)
        newest[op.lane] = q


def _first_readers(facts: Facts, p: int) -> list[int]:
    """Who reads the share of a value that goes first; none if it has no shares."""
    readers = facts.readers.get(p, [])
    first = first_reader(facts.ops[p], facts.layout) if readers and has_place(facts.ops[p], facts.layout) else ""
    return [i for i in readers if facts.ops[i].part == first]


def _late_enough(facts: Facts, p: int, q: int, what: str, readers: list[int]) -> Iterator[Violation]:
    """What an op drops of a value is dropped by the lane that owns its memory, or by the step, after its readers."""
    owner, lane = memory_of(facts.ops[p]), facts.ops[q].lane
    if owner != lane and facts.ops[q].verb != "step":
        wrong = f"whose memory belongs to lane {owner}: only that lane, or the step, can tell when it is free"
        yield facts.fail(6, f"{facts.show(q)} on lane {lane} drops {what} of {facts.show(p)}, {wrong}", q, p)
    for reader in readers:
        if reader > q or not facts.before(reader, q):
            message = f"{facts.show(q)} drops {what} of {facts.show(p)}, but {facts.show(reader)} may still read it"
            yield facts.fail(6, message, q, p, reader)


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


def reloads_paced(facts: Facts) -> Iterator[Violation]:
    """Invariant 11 for what comes back from the host: it takes memory no earlier than its place in the list says.

    By then the compute lane, to which that memory belongs, is done with what was there before.
    """
    computed = -1
    for i, op in enumerate(facts.ops):
        if op.verb == "reload" and computed >= 0:
            yield from facts.comes_after(11, i, computed, what="may be issued before")
        computed = i if op.lane == "compute" else computed


def receives_paced(facts: Facts) -> Iterator[Violation]:
    """Invariant 11 for received tensors: what the list has a reader for is read before the next receive is posted.

    A receive takes memory from the moment it is posted, and nothing but a dependency keeps the host from posting
    all of a step at once. Two may wait for their readers, since neighbours that are three steps apart post one step
    earlier.
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
# Invariants about slots: weights (7, 12), gradients (5, 7, 9, 12) and the host's memory (7, 12).
#
# All walk a rank's list in host order, which is also the order in which an executor hands out slots, and ask of
# every step whether happens-before bears it out.

Slot = tuple[str, int]


def weights_resident(facts: Facts) -> Iterator[Violation]:
    """Invariant 7 for weights: readers come after the gather and before the release, the next gather after it.

    Also invariant 12: every slot is released.
    """
    resident: dict[UnitName, list[int]] = {}  # unit in its slot -> the gather that brought it, and readers since
    tenant: dict[Slot, int] = {}  # slot -> its latest gather, until it is released
    released: dict[Slot | UnitName, int] = {}  # slot, and unit -> its latest release
    turns: dict[UnitName, int] = {}  # unit -> how often it was gathered
    for i, op in enumerate(facts.ops):
        if not has_place(op, facts.layout):
            continue
        if op.verb == "gather":
            unit, slot = unit_moved(op), (op.part, op.slot)
            count = facts.program.weight_slots.get(op.part, 0)
            if not 0 <= op.slot < count:
                yield facts.fail(7, f"{facts.show(i)}: {op.part} has {count} weight slots", i)
            if op.microbatch != turns.get(unit, 0):
                yield facts.fail(7, f"{facts.show(i)} is the unit's gather number {turns.get(unit, 0)}", i)
            turns[unit] = op.microbatch + 1
            if unit in resident:
                p = resident[unit][0]
                yield facts.fail(7, f"{facts.show(i)} gathers what {facts.show(p)} already holds", i, p)
            elif slot in tenant:
                p = tenant[slot]
                yield facts.fail(7, f"{facts.show(i)} overwrites {facts.show(p)}, not released yet", i, p)
            for p in {released[place] for place in (slot, unit) if place in released}:
                yield from facts.comes_after(7, i, p)
            resident[unit], tenant[slot] = [i], i
        elif op.verb == "release":
            unit, slot = unit_moved(op), (op.part, op.slot)
            gather, *readers = resident.pop(unit, (-1,))
            gathered = facts.ops[gather]
            if gather < 0 or (gathered.slot, gathered.microbatch) != (op.slot, op.microbatch):
                yield facts.fail(7, f"{facts.show(i)} releases what was not gathered so", i)
                continue
            tenant.pop(slot, None)
            released[slot] = released[unit] = i
            for p in readers:
                yield from facts.comes_after(7, i, p, ", which reads the weights")
        elif (unit := unit_read(op, facts.layout)) is not None and unit[0] in facts.program.weight_slots:
            if unit not in resident:
                yield facts.fail(7, f"{facts.show(i)} reads weights that are not gathered", i)
                continue
            resident[unit].append(i)
            yield from facts.comes_after(7, i, resident[unit][0])
    for gather, *_ in resident.values():
        yield facts.fail(12, f"{facts.show(gather)} is never released", gather)


class _GradientSlots:
    """Follows every gradient from its first write to its reduce, by way of its unit's sum where there is an add."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.used: dict[Slot, tuple[tuple[UnitName, int], list[int]]] = {}  # slot -> whose gradient, and its writers
        self.slot_of: dict[tuple[UnitName, int], int] = {}
        self.read_slot: dict[Slot, int] = {}  # slot -> its latest add or reduce
        self.read: dict[tuple[UnitName, int], int] = {}  # likewise, of a unit's microbatch
        self.latest: dict[UnitName, int] = {}  # likewise, of a unit
        self.parts: dict[tuple[UnitName, str], int] = {}  # a part of a unit -> the latest op that wrote its gradient
        self.sums: dict[UnitName, int] = {}  # unit -> its latest add, until its reduce
        self.ended: dict[UnitName, int] = {}  # unit -> the reduce that took its sum in

    def write(self, i: int, unit: UnitName) -> Iterator[Violation]:
        facts, op = self.facts, self.facts.ops[i]
        owner, slot, part = (unit, op.microbatch), (unit[0], op.slot), (unit, op.part)
        earlier = self.parts.get(part)
        if earlier is not None and facts.ops[earlier].microbatch >= op.microbatch:  # products may add them up
            yield facts.fail(9, f"{facts.show(i)} comes after {facts.show(earlier)}: not ascending", i, earlier)
        self.parts[part] = i
        count = facts.program.grad_slots.get(unit[0], 0)
        if not 0 <= op.slot < count:
            yield facts.fail(7, f"{facts.show(i)}: {unit[0]} has {count} gradient slots", i)
        if owner in self.read:
            p = self.read[owner]
            yield facts.fail(5, f"{facts.show(i)} comes after {facts.show(p)}, which needs it", i, p)
        other = self.slot_of.setdefault(owner, op.slot)
        if other != op.slot:
            yield facts.fail(7, f"{facts.show(i)} writes a gradient whose other parts are in slot {other}", i)
        found, writers = self.used.get(slot, (owner, []))
        if found != owner:
            yield facts.fail(
                7, f"{facts.show(i)} overwrites {facts.show(writers[-1])}, not reduced yet", i, writers[-1]
            )
            writers = []
        if slot in self.read_slot:
            yield from facts.comes_after(7, i, self.read_slot[slot], " has read it", "may overwrite its slot before")
        self.used[slot] = owner, [*writers, i]

    def read_by(self, i: int) -> Iterator[Violation]:
        """What an add and a reduce ask of the slot that they read."""
        facts, op = self.facts, self.facts.ops[i]
        unit, slot = unit_moved(op), (op.part, op.slot)
        found, writers = self.used.get(slot, (None, []))
        if found != (unit, op.microbatch):
            yield facts.fail(5, f"{facts.show(i)} finds no gradient of its own in its slot", i)
        else:
            del self.used[slot]
            for p in writers:
                yield from facts.comes_after(5, i, p)
        if unit in self.latest:
            p = self.latest[unit]
            if facts.ops[p].microbatch >= op.microbatch or not facts.before(p, i):
                yield facts.fail(9, f"{facts.show(i)} adds to the gradient after {facts.show(p)}: not ascending", i, p)
        if unit in self.ended:
            p = self.ended[unit]
            yield facts.fail(5, f"{facts.show(i)} comes after {facts.show(p)}, which ended the unit's sum", i, p)
        self.latest[unit] = self.read[unit, op.microbatch] = self.read_slot[slot] = i
        if op.verb == "add":
            self.sums[unit] = i
        elif self.sums.pop(unit, None) is not None:  # that it comes behind the latest add was asked above
            self.ended[unit] = i


def gradients_kept(facts: Facts) -> Iterator[Violation]:
    """Invariants 5, 7, 9 and 12 for gradients: written, reduced once complete, in ascending microbatch order."""
    slots = _GradientSlots(facts)
    for i, op in enumerate(facts.ops):
        if not has_place(op, facts.layout):
            continue
        if op.verb in ("add", "reduce"):
            yield from slots.read_by(i)
        elif op.verb == "send" and op.part == TIED:  # the sum of all microbatches
            for p in (p for p, other in enumerate(facts.ops) if other.verb == "reduce" and other.part == EMBED.unit):
                yield from facts.comes_after(5, i, p)
        elif (unit := unit_written(op, facts.layout)) is not None:
            yield from slots.write(i, unit)
    for _, writers in slots.used.values():
        yield facts.fail(12, f"the gradient of {facts.show(writers[-1])} is never reduced", writers[-1])
    for p in slots.sums.values():
        yield facts.fail(12, f"what {facts.show(p)} added up is never reduced", p)


def updates_first(facts: Facts) -> Iterator[Violation]:
    """Invariants 4 and 7: where a step updates weights, it does so of all units, before these are read or gathered.

    And before new gradients are written where the old ones rest.
    """
    layout = facts.layout
    updates = {unit_moved(op): i for i, op in enumerate(facts.ops) if op.verb == "update" and has_place(op, layout)}
    for i in updates.values():
        if facts.ops[i].microbatch >= 0:
            yield facts.fail(4, f"{facts.show(i)} is of one microbatch, but an update is of a whole step", i)
    missing = set[UnitName]()
    for i, op in enumerate(facts.ops if updates else ()):
        if not has_place(op, layout):
            continue
        unit = unit_moved(op) if op.verb == "gather" else unit_read(op, layout) or unit_written(op, layout)
        if unit is None or unit in missing:
            continue
        if unit not in updates:
            missing.add(unit)
            yield facts.fail(4, f"{facts.show(i)} needs a unit that is never updated, as others are", i)
        else:
            yield from facts.comes_after(7, i, updates[unit])


def matrices_whole(facts: Facts) -> Iterator[Violation]:
    """Invariants 4, 5 and 7 for Muon: a unit's matrices are collected, made orthogonal, scattered, and then moved.

    All units of a class are, or none; and a slot is filled again when those who read it have.
    """
    ops = [i for i, op in enumerate(facts.ops) if has_place(op, facts.layout)]
    found = {(verb, unit_moved(facts.ops[i])): i for i in ops if (verb := facts.ops[i].verb) in _OF_MATRICES}
    classes = {unit[0] for verb, unit in found if verb != "update"}
    collected: dict[tuple[str, int], UnitName] = {}
    for unit in dict.fromkeys(unit for _, unit in found if unit[0] in classes):
        places = [found.get((verb, unit)) for verb in _OF_MATRICES]
        if None in places:
            missing = _OF_MATRICES[places.index(None)]
            i = next(place for place in places if place is not None)
            yield facts.fail(4, f"{facts.show(i)} is of a unit without {missing}", i)
            continue
        mine = [place for place in places if place is not None]
        slot = (unit[0], facts.ops[mine[0]].slot)
        yield from facts.comes_after(5, mine[-1], mine[-2])  # that the others are in order is shown with backwards
        for p, i in pairwise(mine):
            if facts.ops[i].slot != slot[1] or slot[1] < 0:
                yield facts.fail(7, f"{facts.show(i)} has another slot than {facts.show(p)}, or none", i, p)
        if (former := collected.get(slot)) is not None:
            for writer, reader in (("collect", "scatter"), ("scatter", "update")):
                yield from facts.comes_after(
                    7, found[writer, unit], found[reader, former], " reads", "may overwrite what"
                )
        collected[slot] = unit


_OF_MATRICES = (*WHOLE_MATRICES, "update")


def host_slots_kept(facts: Facts) -> Iterator[Violation]:
    """Invariants 7 and 12 for the host's memory: what an offload leaves in a slot stays until its reload has read."""
    there: dict[tuple[str, int], int] = {}  # slot -> the offload that was the last to write it, until its reload
    read: dict[tuple[str, int], int] = {}  # slot -> its latest reload
    for i, op in enumerate(facts.ops):
        slot = (op.part, op.slot)
        if op.verb == "offload":
            if op.slot < 0:
                yield facts.fail(7, f"{facts.show(i)} has no slot", i)
            elif slot in there:
                p = there[slot]
                yield facts.fail(7, f"{facts.show(i)} overwrites what {facts.show(p)} has left, not read yet", i, p)
            elif slot in read:
                yield from facts.comes_after(7, i, read[slot], " has read it", "may overwrite its slot before")
            there[slot] = i
        elif op.verb == "reload":
            p = there.pop(slot, None)
            if p is None or facts.ops[p].key[1:] != op.key[1:]:
                yield facts.fail(7, f"{facts.show(i)} finds nothing of its own in its slot", i)
            read[slot] = i
    for p in there.values():
        yield facts.fail(12, f"what {facts.show(p)} has left is never read", p)

"""Invariants about cloned experts: their weights are there for all readers (7), all gradients come home (4, 5)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from hocket.program.clone_ops import CLONED
from hocket.program.facts import Facts, Violation, has_place
from hocket.program.values import UnitName, unit_moved, unit_read, unit_written


def clones_served(facts: Facts) -> Iterator[Violation]:
    """Invariants 4, 5 and 7 for clones: whoever reads experts comes behind the clone of what was gathered last.

    Each gradient comes home behind the ops that wrote it and in front of its reduce: in every microbatch, or behind all
    of a step.
    """
    moved = [i for i, op in enumerate(facts.ops) if op.verb in ("clone", "home")]
    if not facts.layout.clones:
        for i in moved:
            yield facts.fail(4, f"{facts.show(i)} is of clones, and the layout has no room for any", i)
        return
    for i in moved:
        if facts.ops[i].part != CLONED:
            yield facts.fail(4, f"{facts.show(i)} is of a unit that is never cloned", i)
    yield from _weights(facts)
    yield from _gradients(facts)


def _weights(facts: Facts) -> Iterator[Violation]:
    gathered: dict[UnitName, int] = {}
    cloned: dict[UnitName, int] = {}
    for i, op in enumerate(facts.ops):
        if not has_place(op, facts.layout):
            continue
        if op.verb == "gather":
            gathered[unit_moved(op)] = i
            cloned.pop(unit_moved(op), None)
        elif op.verb == "clone":
            unit = unit_moved(op)
            p = gathered.get(unit)
            gathers = CLONED in facts.program.weight_slots
            found = facts.ops[p] if p is not None else op
            if gathers and (p is None or (found.microbatch, found.slot) != (op.microbatch, op.slot)):
                yield facts.fail(7, f"{facts.show(i)} does not follow the gather of its slot", i)
            elif not gathers and (op.microbatch, op.slot) != (0, -1):
                yield facts.fail(7, f"{facts.show(i)} is of a unit that is held whole, and cloned once", i)
            elif unit in cloned:
                yield facts.fail(4, f"{facts.show(i)} comes behind {facts.show(cloned[unit])}", i, cloned[unit])
            elif p is not None and not facts.before(p, i):
                yield facts.fail(7, f"{facts.show(i)} may run before {facts.show(p)}", i, p)
            cloned[unit] = i
        elif (read := unit_read(op, facts.layout)) is not None and read[0] == CLONED:
            p = cloned.get(read)
            if p is None:
                yield facts.fail(7, f"{facts.show(i)} reads clones that are not there", i)
            elif not facts.before(p, i):
                yield facts.fail(7, f"{facts.show(i)} may run before {facts.show(p)}", i, p)


def _gradients(facts: Facts) -> Iterator[Violation]:
    written: dict[UnitName, list[int]] = defaultdict(list)  # since the latest home
    homes: dict[UnitName, int] = {}  # until its reduce
    counts: Counter[tuple[str, UnitName]] = Counter()
    for i, op in enumerate(facts.ops):
        if not has_place(op, facts.layout):
            continue
        wrote = unit_written(op, facts.layout)
        if wrote is not None and wrote[0] == CLONED:
            written[wrote].append(i)
        if op.verb not in ("home", "reduce") or op.part != CLONED:
            continue
        unit = unit_moved(op)
        counts[op.verb, unit] += 1
        if op.verb == "home":
            for p in written.pop(unit, []):
                if not facts.before(p, i):
                    yield facts.fail(5, f"{facts.show(i)} may run before {facts.show(p)}", i, p)
            homes[unit] = i
        elif (p := homes.pop(unit, None)) is not None:
            if facts.ops[p][2:7] != op[2:7] or not facts.before(p, i):
                yield facts.fail(5, f"{facts.show(i)} is not the reduce behind {facts.show(p)}", i, p)
    for p in homes.values():
        yield facts.fail(5, f"{facts.show(p)} comes behind its reduce", p)
    for places in written.values():
        yield facts.fail(5, f"the gradient of {facts.show(places[-1])} never comes home", places[-1])
    for unit in {unit for verb, unit in counts if verb == "home"}:
        if counts["home", unit] not in (1, counts["reduce", unit]):
            yield facts.fail(5, f"gradients of {unit} come home before some of their reduces alone")

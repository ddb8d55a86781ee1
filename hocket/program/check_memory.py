"""Invariants about memory of values (6, 12, 14), of activations in flight and of received tensors (11)."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.program.facts import Facts, Violation, has_place
from hocket.program.values import first_reader, memory_of


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
        yield from _trimmed_late_enough(facts, q)
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


def _dropped_late_enough(facts: Facts, p: int, q: int, readers: list[int]) -> Iterator[Violation]:
    owner = memory_of(facts.ops[p])
    if owner != facts.ops[q].lane and facts.ops[q].verb != "step":
        yield facts.fail(
            6,
            f"{facts.show(q)} on lane {facts.ops[q].lane} drops {facts.show(p)}, whose memory belongs to lane "
            f"{owner}: only that lane, or the step, can tell when it is free",
            q,
            p,
        )
    for reader in readers:
        if reader > q or not facts.before(reader, q):
            yield facts.fail(
                6, f"{facts.show(q)} drops the value of {facts.show(p)}, but {facts.show(reader)} may still read it",
                q, p, reader,
            )  # fmt: skip


def _trimmed_late_enough(facts: Facts, q: int) -> Iterator[Violation]:
    """What an op drops of a value, the first reader's share, is dropped by the lane that owns it, after that reader."""
    op = facts.ops[q]
    for p in op.trims:
        first = first_reader(facts.ops[p], facts.layout) if 0 <= p < q and has_place(facts.ops[p], facts.layout) else ""
        if not first:
            yield facts.fail(6, f"{facts.show(q)} drops a share of op {p}, which has none", q)
            continue
        owner = memory_of(facts.ops[p])
        if owner != op.lane and op.verb != "step":
            yield facts.fail(
                6, f"{facts.show(q)} drops a share of {facts.show(p)}, whose memory is lane {owner}'s", q, p
            )
        for i in _first_readers(facts, p):
            if i > q or not facts.before(i, q):
                yield facts.fail(
                    6,
                    f"{facts.show(q)} drops the share of {facts.show(p)} that {facts.show(i)} may still read",
                    q,
                    p,
                    i,
                )


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
        if op.verb == "reload" and not (computed < 0 or facts.before(computed, i)):
            yield facts.fail(11, f"{facts.show(i)} may be issued before {facts.show(computed)}", i, computed)
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

"""The last passes: dependencies from what ops read, and the place where each value is dropped.

Note: [Only cross-lane dependencies are written down]
The ops of a lane run in list order, so a dependency on the same lane says nothing new, and of several on one
other lane the latest says it all. What is left is at most one per other lane: on a GPU, at most one event to
wait for per lane.

Note: [A receive is not posted early]
On a GPU a posted receive is a kernel that spins until its data arrives. So a receive waits for the compute op
that stands before it in the list, the one that makes what this rank sends; from then on its data may come.

Note: [A value is dropped by its own lane]
A tensor returns to the memory pool of the stream that allocated it, and that stream may hand it out again at
once. Dropping it is safe as soon as the owner's lane is known to run after every reader: then whatever the
lane does next with that memory comes after them. Waiting for the readers just to drop a value would stall the
lane; instead the value is dropped by the first op of its lane that already comes after all of them. Nothing
waits, nothing is recorded on the allocator, and memory stays a few ops longer. What is left at the end is
dropped by the step, which comes after everything; the next step's first ops come after it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace

from hocket.plan.ops import LANES, Key, Lane, Layout, Op
from hocket.plan.values import UnitName, follows, reads, unit_read, unit_written

Clock = list[int]
"""For every lane, the position of the latest op on it that is known to be done."""


def connect(ops: list[Op], layout: Layout, rank: int) -> tuple[Op, ...]:
    """The ops of one rank with `deps` and `frees` filled in."""
    readers: dict[int, list[int]] = defaultdict(list)
    all_deps = _needs(ops, layout, rank, readers)
    deps = [_latest_per_lane(ops, i, needed) for i, needed in enumerate(all_deps)]
    frees = _frees(ops, clocks(ops, deps), readers)
    return tuple(
        replace(op, deps=tuple(deps[i]), frees=tuple(frees.get(i, ()))) if deps[i] or i in frees else op
        for i, op in enumerate(ops)
    )


def _needs(ops: list[Op], layout: Layout, rank: int, readers: dict[int, list[int]]) -> list[list[int]]:
    """Everything that each op must come after, by position; fills `readers` with who reads each value."""
    where: dict[Key, int] = {}
    gathered: dict[UnitName, int] = {}  # unit -> its latest gather
    released: dict[tuple, int] = {}  # weight slot, or unit -> its latest release
    slot_reduced: dict[tuple[str, int], int] = {}  # gradient slot -> its latest reduce
    last_reader: dict[UnitName, int] = {}
    written: dict[tuple[UnitName, int], int] = {}  # (unit, microbatch) -> latest weight gradient
    computed = -1  # the latest compute op
    needs: list[list[int]] = []
    for i, op in enumerate(ops):
        need = [where[key] for key in reads(op, layout, rank)]
        for p in need:
            readers[p].append(i)
        need += [where[key] for key in follows(op)]
        if (unit := unit_read(op, layout)) is not None:
            last_reader[unit] = i
            if unit in gathered:
                need.append(gathered[unit])
        elif (unit := unit_written(op, layout)) is not None:
            slot = (unit[0], op.slot)
            if slot in slot_reduced:
                need.append(slot_reduced[slot])
            written[unit, op.microbatch] = i
        elif op.verb == "recv" and computed >= 0:  # see Note: [A receive is not posted early]
            need.append(computed)
        elif op.verb == "gather":
            # The slot's former tenant has left, and the unit itself has left its former slot.
            need += [released[place] for place in ((op.part, op.slot), _unit(op)) if place in released]
            gathered[_unit(op)] = i
        elif op.verb == "release":
            need.append(last_reader[_unit(op)])
            released[op.part, op.slot] = released[_unit(op)] = i
        elif op.verb == "reduce":
            need.append(written[_unit(op), op.microbatch])
            slot_reduced[op.part, op.slot] = i
        elif op.verb == "step":
            need += list({other.lane: p for p, other in enumerate(ops[:i])}.values())
        if op.lane == "compute":
            computed = i
        where[op.key] = i
        needs.append(need)
    return needs


def _unit(op: Op) -> UnitName:
    assert op.part in ("embed", "dense", "experts", "head")
    return (op.part, op.chunk, op.layer)


def _latest_per_lane(ops: list[Op], position: int, needed: list[int]) -> list[int]:
    """See Note: [Only cross-lane dependencies are written down]."""
    latest: dict[str, int] = {}
    for p in needed:
        lane = ops[p].lane
        if lane != ops[position].lane and p > latest.get(lane, -1):
            latest[lane] = p
    return sorted(latest.values())


def clocks(ops: list[Op], deps: list[list[int]]) -> list[Clock]:
    """For every op, how far each lane is known to have come when the op runs (the op itself included)."""
    index = {lane: n for n, lane in enumerate(LANES)}
    latest: dict[str, Clock] = {lane: [-1] * len(LANES) for lane in LANES}
    out: list[Clock] = []
    for i, op in enumerate(ops):
        clock = latest[op.lane]
        for p in deps[i]:
            clock = [a if a > b else b for a, b in zip(clock, out[p], strict=True)]
        clock = clock.copy()
        clock[index[op.lane]] = i
        latest[op.lane] = clock
        out.append(clock)
    return out


def _frees(ops: list[Op], clock: list[Clock], readers: dict[int, list[int]]) -> dict[int, list[int]]:
    """Which op drops which values. See Note: [A value is dropped by its own lane]."""
    index = {lane: n for n, lane in enumerate(LANES)}
    last = {p: _last_readers(ops, who) for p, who in readers.items()}
    frees: dict[int, list[int]] = defaultdict(list)
    waiting: dict[str, list[tuple[int, int]]] = {lane: [] for lane in LANES}  # heaps of (latest reader, value)
    by_reader: dict[int, list[int]] = defaultdict(list)
    for p, per_lane in last.items():
        by_reader[max(per_lane.values())].append(p)
    for i, op in enumerate(ops):
        heap = waiting[op.lane]
        held = []
        newest = max(clock[i])
        while heap and heap[0][0] <= newest:
            entry = heapq.heappop(heap)
            p = entry[1]
            if all(clock[i][index[lane]] >= reader for lane, reader in last[p].items()):
                frees[i].append(p)
            else:
                held.append(entry)
        for entry in held:
            heapq.heappush(heap, entry)
        for p in by_reader.get(i, ()):
            if ops[p].lane == op.lane and all(clock[i][index[lane]] >= r for lane, r in last[p].items()):
                frees[i].append(p)
            else:
                heapq.heappush(waiting[ops[p].lane], (i, p))
    left = [p for heap in waiting.values() for _, p in heap]
    if left:
        frees[len(ops) - 1] += left
    return {i: sorted(values) for i, values in frees.items()}


def _last_readers(ops: list[Op], who: list[int]) -> dict[Lane, int]:
    return {ops[i].lane: i for i in who}

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

Note: [What comes back acknowledges what was sent]
Nothing reads a send, so the compute lane would never learn that one is done, and would hold every sent value
until the step. But what this rank receives tells: the neighbour had received so much from us before it made
this. So the first reader of a received value also waits for the latest send that must have arrived by then.
It is done in fact, so nobody ever waits for it and no circle can close; it only has to be known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.plan.ops import LANES, Key, Lane, Layout, Op
from hocket.plan.values import UnitName, follows, reads, unit_moved, unit_read, unit_written

Clock = list[int]
"""For every lane, the position of the latest op on it that is known to be done."""


@dataclass
class _Rank:
    """One rank on its way: what every op must come after, and who reads each value, by position."""

    ops: list[Op]
    needs: list[list[int]]
    readers: dict[int, list[int]]

    def deps(self) -> list[list[int]]:
        return [_latest_per_lane(self.ops, i, needed) for i, needed in enumerate(self.needs)]


def connect(
    ranks: list[list[Op]], layout: Layout, also: Sequence[Mapping[Key, Key]] = (), frees: bool = True
) -> tuple[tuple[Op, ...], ...]:
    """The ops of all ranks with `deps` and `frees` filled in.

    `also` has, for every rank, ops that wait for another one whose value they don't read. Without `frees` it is not
    found out where values are dropped, nor who learns when that is safe, which times do not depend on.
    """
    connected = [_rank(ops, layout, rank) for rank, ops in enumerate(ranks)]
    for rank, waits in zip(connected, also, strict=False):
        where = {op.key: i for i, op in enumerate(rank.ops)}
        for op, other in waits.items():
            rank.needs[where[op]].append(where[other])
    if layout.pp > 1 and frees:
        _acknowledge(connected, layout)
    return tuple(_finish(rank, frees) for rank in connected)


def connect_rank(ops: list[Op], layout: Layout, rank: int) -> tuple[Op, ...]:
    """One rank by itself: without what it can know from the others."""
    return _finish(_rank(ops, layout, rank))


def _rank(ops: list[Op], layout: Layout, rank: int) -> _Rank:
    readers: dict[int, list[int]] = defaultdict(list)
    return _Rank(ops, _needs(ops, layout, rank, readers), readers)


def _finish(rank: _Rank, frees: bool = True) -> tuple[Op, ...]:
    deps = rank.deps()
    dropped = _frees(rank.ops, clocks(rank.ops, deps), rank.readers) if frees else {}
    return tuple(
        _with(op, tuple(deps[i]), tuple(dropped.get(i, ()))) if deps[i] or i in dropped else op
        for i, op in enumerate(rank.ops)
    )


def _with(op: Op, deps: tuple[int, ...], frees: tuple[int, ...]) -> Op:
    """`dataclasses.replace` takes three times as long, and programs have many ops."""
    return Op(op.verb, op.part, op.microbatch, op.chunk, op.layer, op.lane, op.slot, deps, frees)


def _acknowledge(ranks: list[_Rank], layout: Layout) -> None:
    """Have the first reader of a received value wait for the latest send known to be done: see
    Note: [What comes back acknowledges what was sent].
    """
    where = [{op.key: i for i, op in enumerate(rank.ops)} for rank in ranks]
    known = [clocks(rank.ops, rank.deps()) for rank in ranks]
    received: dict[tuple[int, Lane, int], list[int]] = defaultdict(list)  # (rank, lane, source) -> positions
    for r, rank in enumerate(ranks):
        for i, op in enumerate(rank.ops):
            if op.verb == "recv":
                received[r, op.lane, layout.peer(op, r)[0]].append(i)
    for r, rank in enumerate(ranks):
        for i, op in enumerate(rank.ops):
            if op.verb != "recv":
                continue
            peer, key = layout.peer(op, r)
            lane: Lane = "recv_grad" if op.part == "act" else "recv_act"
            arrived = bisect_right(received[peer, lane, r], known[peer][where[peer][key]][LANES.index(lane)])
            if arrived:
                _, sent = layout.peer(ranks[peer].ops[received[peer, lane, r][arrived - 1]], peer)
                rank.needs[rank.readers[i][0]].append(where[r][sent])


def _needs(ops: list[Op], layout: Layout, rank: int, readers: dict[int, list[int]]) -> list[list[int]]:
    """Everything that each op must come after, by position; fills `readers` with who reads each value."""
    where: dict[Key, int] = {}
    gathered: dict[UnitName, int] = {}  # unit -> its latest gather
    released: dict[tuple[str, int], int] = {}  # weight slot -> its latest release
    slot_read: dict[tuple[str, int], int] = {}  # gradient slot -> its latest add or reduce
    last_reader: dict[UnitName, int] = {}
    updated: dict[UnitName, int] = {}
    written: dict[tuple[UnitName, int], int] = {}  # (unit, microbatch) -> latest weight gradient
    computed = -1  # the latest compute op
    needs: list[list[int]] = []
    for i, op in enumerate(ops):
        need = [where[key] for key in reads(op, layout, rank)]
        for p in need:
            readers[p].append(i)
        need += [where[key] for key in follows(op, layout)]
        if (unit := unit_read(op, layout)) is not None:
            last_reader[unit] = i
            if unit in gathered:
                need.append(gathered[unit])
        elif (unit := unit_written(op, layout)) is not None:
            slot = (unit[0], op.slot)
            if slot in slot_read:
                need.append(slot_read[slot])
            written[unit, op.microbatch] = i
        elif op.verb == "recv" and computed >= 0:  # see Note: [A receive is not posted early]
            need.append(computed)
        elif op.verb == "gather":
            # That the unit has left its former slot follows: that slot's next tenant waited for it on this lane.
            if (op.part, op.slot) in released:
                need.append(released[op.part, op.slot])
            if unit_moved(op) in updated:
                need.append(updated[unit_moved(op)])
            gathered[unit_moved(op)] = i
        elif op.verb == "update":  # before what reads a weight that is held whole, or writes a gradient: on this lane
            updated[unit_moved(op)] = i
        elif op.verb == "release":
            need.append(last_reader[unit_moved(op)])
            released[op.part, op.slot] = i
        elif op.verb in ("add", "reduce"):
            # That a reduce comes behind its unit's adds follows: they are on this lane too, before that gradient.
            need.append(written[unit_moved(op), op.microbatch])
            slot_read[op.part, op.slot] = i
        elif op.verb == "step":
            need += list({other.lane: p for p, other in enumerate(ops[:i])}.values())
        if op.lane == "compute":
            computed = i
        where[op.key] = i
        needs.append(need)
    return needs


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
    positions: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        positions[op.lane].append(i)
    frees: dict[int, list[int]] = defaultdict(list)
    for p, who in readers.items():
        last = [(index[lane], i) for lane, i in {ops[i].lane: i for i in who}.items()]
        mine = positions[ops[p].lane]

        def knows(i: int, last: list[tuple[int, int]] = last) -> bool:
            return all(clock[i][lane] >= reader for lane, reader in last)

        k = bisect_left(mine, True, key=knows)  # what a lane knows only grows
        frees[mine[k] if k < len(mine) else len(ops) - 1].append(p)
    return {i: sorted(values) for i, values in frees.items()}

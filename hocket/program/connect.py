"""The last passes: dependencies from what ops read, and the place where each value is dropped.

Note: [Only cross-lane dependencies are written down]
The ops of a lane run in list order, so a dependency within a lane is redundant, and of several on one other lane the
latest implies the rest. At most one per other lane remains: on a GPU, at most one event to wait for per lane.

Note: [A receive is not posted early]
On a GPU a posted receive is a kernel that spins until its data arrives. So a receive waits for the compute op before it
in the list, which makes the tensor that this rank sends; the peer's data may arrive from then on.

A reload waits for the same op. Otherwise it would run as soon as the copies before it are done, and its tensors would
occupy memory long before they are read.

Note: [A value is dropped by its own lane]
A tensor returns to the memory pool of the stream that allocated it, and that stream may reuse it at once. Dropping it
is safe as soon as the owner's lane is known to run after every reader: then whatever the lane does next with that
memory comes after them. Waiting for the readers just to drop a value would stall the lane; instead the value is dropped
by the first op of its lane that already comes after all of them. Nothing waits, nothing is recorded on the allocator,
and memory stays allocated for a few more ops. The step drops the remaining values: it comes after everything, and the
next step's first ops come after it.

Note: [A received tensor acknowledges sends]
No op reads a send, so the compute lane would not learn that one is done, and would hold every sent value until the
step. But a received tensor acknowledges sends: the neighbour had received so many of them before it made this tensor.
So the first reader of a received value also waits for the latest send that must have arrived by then. That send is
already done, so this wait costs nothing and adds no cycle: it only informs the compute lane.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hocket.program.ops import TIED, Key, Lane, Layout, Op
from hocket.program.transformer import EMBED
from hocket.program.values import Meanings, Name, UnitName, meanings, memory_lane, reads_itself, unit_moved


def connect(
    ranks: Sequence[list[Op]], layout: Layout, also: Sequence[Mapping[Key, Sequence[Key]]] = ()
) -> tuple[tuple[Op, ...], ...]:
    """The ops of all ranks with `deps` filled in.

    `also` has, for every rank, ops that wait for others whose values they don't read.
    """
    return tuple(_connected(ops, meanings(layout, r), also[r] if also else {}) for r, ops in enumerate(ranks))


def _connected(ops: list[Op], known: Meanings, also: Mapping[Key, Sequence[Key]]) -> tuple[Op, ...]:
    lanes, needs = [op.lane for op in ops], _needs(ops, known)
    where = {op.key: i for i, op in enumerate(ops)} if also else {}
    for op, others in also.items():
        needs[where[op]] += [where[other] for other in others]
    deps = [latest_per_lane(lanes, i, needed) for i, needed in enumerate(needs)]
    return tuple(Op(*op[:7], found) if found else op for op, found in zip(ops, deps, strict=True))


def free(ranks: Sequence[Sequence[Op]], layout: Layout, only: int | None = None) -> tuple[tuple[Op, ...], ...]:
    """The connected ops of all ranks with `frees` filled in, and with the waits that this needs.

    With `only`, those of one rank; the others are unchanged.
    """
    acknowledged = _acknowledgments(ranks, layout)
    return tuple(
        _with_frees(_rank(ops, layout, rank, acknowledged)) if only in (None, rank) else tuple(ops)
        for rank, ops in enumerate(ranks)
    )


@dataclass(frozen=True)
class _Rank:
    """One rank's connected ops, what they wait for, and who reads each value; all by position."""

    ops: Sequence[Op]
    lanes: list[Lane]
    deps: list[tuple[int, ...]]
    readers: dict[int, list[int]]
    first_readers: dict[int, list[int]]
    """For values with shares for several parts: the readers of the first share."""


def _rank(
    ops: Sequence[Op], layout: Layout, rank: int, acknowledged: Callable[[int], Iterator[tuple[int, int]]]
) -> _Rank:
    """With acknowledgments: see Note: [A received tensor acknowledges sends]."""
    known = meanings(layout, rank)
    where: dict[int, dict[Name, int]] = defaultdict(dict)  # microbatch -> position of each named op
    readers: dict[int, list[int]] = defaultdict(list)
    first: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        there, mine = where[op.microbatch], (op.verb, op.part, op.chunk, op.layer)
        for name in known[mine].reads:
            readers[there[name]].append(i)
            if known[name].first_reader == op.part:
                first[there[name]].append(i)
        if reads_itself(op):
            readers[i].append(i)
        there[mine] = i
    lanes, deps = [op.lane for op in ops], [op.deps for op in ops]
    for received, sent in acknowledged(rank) if layout.pp > 1 else ():
        if not readers[received]:
            raise ValueError(f"this order cannot run: nothing reads what '{ops[received]}' receives")
        reader = readers[received][0]
        deps[reader] = latest_per_lane(lanes, reader, [*deps[reader], sent])
    return _Rank(ops, lanes, deps, readers, first)


def _with_frees(rank: _Rank) -> tuple[Op, ...]:
    dropped, trimmed = _dropped_by(rank)
    return tuple(
        Op(*op[:7], deps, tuple(dropped.get(i, ())), tuple(trimmed.get(i, ())))
        if i in dropped or i in trimmed or deps is not op.deps
        else op
        for i, (op, deps) in enumerate(zip(rank.ops, rank.deps, strict=True))
    )


Acknowledged = Callable[[int], Iterator[tuple[int, int]]]
"""Of a rank: pairs (receive, send) of positions. The receive proves that this send, the latest so far, is done."""


def _acknowledgments(ranks: Sequence[Sequence[Op]], layout: Layout) -> Acknowledged:
    """See Note: [A received tensor acknowledges sends]."""

    @cache
    def transfers(rank: int) -> dict[Key, int]:
        return {op.key: i for i, op in enumerate(ranks[rank]) if op.verb in ("send", "recv")}

    @cache
    def received(rank: int) -> dict[tuple[Lane, int], list[int]]:
        """(lane, source) -> positions of a rank's receives."""
        found: dict[tuple[Lane, int], list[int]] = defaultdict(list)
        for i in transfers(rank).values():
            if (op := ranks[rank][i]).verb == "recv":
                found[op.lane, layout.peer(op, rank)[0]].append(i)
        return found

    @cache
    def known(rank: int, lane: Lane) -> list[int]:
        ops = ranks[rank]
        return known_done([op.lane for op in ops], [op.deps for op in ops], lane)

    def of(rank: int) -> Iterator[tuple[int, int]]:
        for position, op in enumerate(ranks[rank]):
            if op.verb != "recv":
                continue
            peer, key = layout.peer(op, rank)
            lane: Lane = "recv_grad" if op.part == "act" else "recv_act"
            there = received(peer)[lane, rank]
            if arrived := bisect_right(there, known(peer, lane)[transfers(peer)[key]]):
                yield position, transfers(rank)[layout.peer(ranks[peer][there[arrived - 1]], peer)[1]]

    return of


def _needs(ops: list[Op], known: Meanings) -> list[list[int]]:
    """All ops that each op must run after, by position."""
    where: dict[int, dict[Name, int]] = defaultdict(dict)  # microbatch -> position of each named op
    gathered: dict[UnitName, int] = {}  # unit -> its latest gather
    released: dict[tuple[str, int], int] = {}  # weight slot -> its latest release
    slot_read: dict[tuple[str, int], int] = {}  # gradient slot -> its latest add or reduce
    last_reader: dict[UnitName, int] = {}
    updated: dict[UnitName, int] = {}
    written: dict[tuple[UnitName, int], int] = {}  # (unit, microbatch) -> latest weight gradient
    reloaded: dict[tuple[str, int], int] = {}  # slot in host memory -> the latest reload
    computed = reduced = -1  # the latest compute op, and the latest add or reduce of an embedding
    needs: list[list[int]] = []
    for i, op in enumerate(ops):
        verb, part, microbatch, chunk, layer, lane, slot, _, _, _ = op
        name, there = (verb, part, chunk, layer), where[microbatch]
        meaning = known[name]
        try:
            need = [there[needed] for needed in meaning.needs]
        except KeyError as missing:
            raise ValueError(_not_yet(op, missing.args[0], ops)) from None
        if (unit := meaning.unit_read) is not None:
            last_reader[unit] = i
            if unit in gathered:
                need.append(gathered[unit])
            elif unit in updated:  # not sharded
                need.append(updated[unit])
        elif (unit := meaning.unit_written) is not None:
            if (unit[0], slot) in slot_read:
                need.append(slot_read[unit[0], slot])
            written[unit, microbatch] = i
        elif verb == "send" and part == TIED and reduced >= 0:
            need.append(reduced)
        elif verb in ("recv", "reload"):  # see Note: [A receive is not posted early]
            need += [computed] if computed >= 0 else []
            reloaded[part, slot] = i
        elif verb == "offload":
            need += [reloaded[part, slot]] if (part, slot) in reloaded else []
        elif verb == "gather":
            # The unit's former slot needs no wait: the next gather into that slot, on this lane, has waited for it.
            if (part, slot) in released:
                need.append(released[part, slot])
            if unit_moved(op) in updated:
                need.append(updated[unit_moved(op)])
            gathered[unit_moved(op)] = i
        elif verb == "update":  # new gradients come after it without a wait: wgrads come after readers of the weights
            updated[unit_moved(op)], need = i, [there["scatter", part, chunk, layer]] if slot >= 0 else []
        elif verb == "release":
            need.append(last_reader[unit_moved(op)])
            released[part, slot] = i
        elif verb in ("add", "reduce"):
            # A reduce needs no wait for its unit's adds: their lane is that of this gradient, and they come before it.
            need.append(written[unit_moved(op), microbatch])
            slot_read[part, slot] = i
            reduced = i if part == EMBED.unit else reduced
        elif verb == "step":
            need += list({other.lane: p for p, other in enumerate(ops[:i])}.values())
        if lane == "compute":
            computed = i
        there[name] = i
        needs.append(need)
    return needs


def _not_yet(op: Op, missing: Name, ops: Sequence[Op]) -> str:
    """Why an order of ops cannot run."""
    verb, part, chunk, layer = missing
    name = str(Op(verb, part, op.microbatch, chunk, layer))  # pyrefly: ignore[bad-argument-type]
    comes = "comes later in the order" if name in map(str, ops) else "is not in the order"
    return f"this order cannot run: '{op}' needs '{name}', which {comes}"


def latest_per_lane(lanes: Sequence[Lane], position: int, needed: Sequence[int]) -> tuple[int, ...]:
    """See Note: [Only cross-lane dependencies are written down]."""
    mine = lanes[position]
    others = [p for p in needed if lanes[p] != mine]
    if len(others) < 2:
        return tuple(others)
    others.sort()
    latest = {lanes[p]: p for p in others}
    return tuple(others if len(latest) == len(others) else sorted(latest.values()))


def known_done(lanes: Sequence[Lane], deps: Sequence[Sequence[int]], lane: Lane) -> list[int]:
    """For every op, the latest position on `lane` that is known to be done when it runs (its own included)."""
    latest: dict[Lane, int] = dict.fromkeys({*lanes, lane}, -1)
    known: list[int] = []
    for i, (mine, before) in enumerate(zip(lanes, deps, strict=True)):
        if mine == lane:
            latest[mine] = i
        else:
            for p in before:
                if known[p] > latest[mine]:
                    latest[mine] = known[p]
        known.append(latest[mine])
    return known


def _dropped_by(rank: _Rank) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Which op drops which values, and which op drops a first reader's share, where that is earlier.

    See Note: [A value is dropped by its own lane].
    """
    lanes, frees, trims = rank.lanes, defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    positions: dict[Lane, list[int]] = defaultdict(list)
    turn = []  # for each op, its index in its lane
    for i, lane in enumerate(lanes):
        turn.append(len(positions[lane]))
        positions[lane].append(i)

    @cache
    def known(other: Lane) -> list[int]:
        return known_done(lanes, rank.deps, other)

    @cache
    def learned(lane: Lane, other: Lane) -> list[int]:
        """For each op of a lane, the latest op of another lane known to be done; ascending."""
        return [known(other)[i] for i in positions[lane]]

    def first_after(p: int, who: Sequence[int]) -> int:
        """The first op, of the lane that owns a value's memory, that comes after its readers."""
        mine, k = memory_lane(rank.ops[p]), 0
        for i in who:
            k = max(k, turn[i] if lanes[i] == mine else bisect_left(learned(mine, lanes[i]), i))
        return positions[mine][k] if k < len(positions[mine]) else len(lanes) - 1

    for p, who in rank.readers.items():
        last = first_after(p, who)
        frees[last].append(p)
        if p in rank.first_readers and (first := first_after(p, rank.first_readers[p])) < last:
            trims[first].append(p)
    return _sorted(frees), _sorted(trims)


def _sorted(values: Mapping[int, list[int]]) -> dict[int, list[int]]:
    return {i: sorted(positions) for i, positions in values.items()}

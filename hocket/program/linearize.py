"""One legal order of all ranks' ops: what a CPU executes, and what the dry run walks through.

Note: [Why blocking sends cannot deadlock]
Every rank executes its own part of one global order, in which a send and its receive are adjacent. Take the earliest op
in that order that hasn't been executed. Its rank has executed all its earlier ops; if the op is a send or a receive, so
has the peer's rank, and the two match. So some op can always run, even if each send waits for its receiver. The step
communicates with all ranks, and it comes last on each.
"""

from __future__ import annotations

import heapq
import random
from graphlib import CycleError, TopologicalSorter

from hocket.program.ops import Program

Node = tuple[int, int]
"""(rank, position)."""

_ANY_LANE = 0.02
"""Probability of taking any ready op, whatever the ranking of lanes."""


def linearize(program: Program, seed: int | None) -> list[Node]:
    """(rank, position) of every op, in an order that keeps lanes and dependencies and joins sends to receives.

    The same seed gives the same order in every process; None gives the one that stays close to the lists. See
    Note: [Why blocking sends cannot deadlock]. Raises ValueError if there is no legal order.
    """
    before, receive_of = waits(program)
    paired = {*receive_of, *receive_of.values()}
    for rank, position, op in program:
        if op.verb in ("send", "recv") and (rank, position) not in paired:
            raise ValueError(f"no legal order: rank {rank}: {position} {op} has no partner")
    graph = TopologicalSorter(before)
    try:
        graph.prepare()
    except CycleError as error:
        raise ValueError(f"no legal order: {cycle_of(error, program)[1]}") from None
    pick = _Closest() if seed is None else _Ranked(program, seed)
    order: list[Node] = []
    steps: list[Node] = []
    while graph.is_active():
        for node in graph.get_ready():
            pick.add(node)
        node = pick.next()
        (steps if program.ranks[node[0]][node[1]].verb == "step" else order).append(node)
        order += [receive_of[node]] if node in receive_of else []
        graph.done(node)
    return order + sorted(steps)


def waits(program: Program) -> tuple[dict[Node, set[Node]], dict[Node, Node]]:
    """The ops that each op must directly follow, and the receive of each send. A pair runs together, as the send."""
    where = {(rank, op.key): (rank, position) for rank, position, op in program}
    sends = ((rank, position, program.layout.peer(op, rank)) for rank, position, op in program if op.verb == "send")
    receive_of = {(rank, position): where[peer] for rank, position, peer in sends if peer in where}
    send_of = {receive: send for send, receive in receive_of.items()}
    before: dict[Node, set[Node]] = {}
    previous: dict[tuple[int, str], Node] = {}
    for rank, position, op in program:
        earlier = {(rank, d) for d in op.deps if 0 <= d < len(program.ranks[rank])}
        if (rank, op.lane) in previous:
            earlier.add(previous[rank, op.lane])
        previous[rank, op.lane] = (rank, position)
        node = send_of.get((rank, position), (rank, position))
        before.setdefault(node, set()).update(send_of.get(each, each) for each in earlier)
    return before, receive_of


def cycle_of(error: CycleError, program: Program) -> tuple[list[Node], str]:
    """A cycle of ops that wait for each other, and a text about it with the first and last op of each lane."""
    nodes: list[Node] = error.args[1][:0:-1]
    lanes = [(rank, program.ranks[rank][position].lane) for rank, position in nodes]
    ends = [n for n, lane in enumerate(lanes) if lane != lanes[n - 1] or lane != lanes[(n + 1) % len(lanes)]]
    shown = [nodes[n] for n in ends] or nodes
    names = (f"rank {rank}: {position} {program.ranks[rank][position]}" for rank, position in shown)
    return shown, f"these wait for each other in a circle: {' <- '.join(names)} <- ..."


class _Closest:
    """Takes the ready op that comes first in its rank's list."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []

    def add(self, node: Node) -> None:
        heapq.heappush(self._ready, node[::-1])

    def next(self) -> Node:
        return heapq.heappop(self._ready)[::-1]


class _Ranked:
    """Takes a ready op of the lane that ranks highest; now and then one of any lane.

    The ranking is random. So some lanes run as early as they can and others are starved, which exposes missing
    dependencies.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._ready: dict[tuple[int, str], Node] = {}  # each lane has at most one next op
        lanes: list[tuple[int, str]] = [
            (rank, lane) for rank in range(len(program.ranks)) for lane in program.layout.lanes
        ]
        self._random.shuffle(lanes)
        self._ranking = {lane: place for place, lane in enumerate(lanes)}

    def add(self, node: Node) -> None:
        self._ready[node[0], self._program.ranks[node[0]][node[1]].lane] = node

    def next(self) -> Node:
        if self._random.random() < _ANY_LANE:
            lane = self._random.choice(list(self._ready))
        else:
            lane = min(self._ready, key=lambda lane: self._ranking[lane])
        return self._ready.pop(lane)

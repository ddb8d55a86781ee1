"""One legal order of all ranks' ops: what a CPU executes, and what the dry run walks through.

Note: [Why blocking sends cannot deadlock]
Every rank executes its own part of one global order, and a send and its receive stand side by side in it.
Take the earliest op in that order that hasn't been executed. Its rank has done all it had to do before, and if
the op is a send or a receive, so has its partner's rank: the two meet. So there is always an op that can run,
even if each send waits for its receiver. The step talks to all ranks, and it comes last on each.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict

from hocket.program.ops import Program

Node = tuple[int, int]
"""(rank, position)."""

_NEVER: Node = (-1, -1)
"""Stands for a partner that is missing."""

_ANY_LANE = 0.02
"""Chance to take any ready op, whatever the ranking of lanes."""


def linearize(program: Program, seed: int | None) -> list[Node]:
    """(rank, position) of every op, in an order that keeps lanes and dependencies and joins sends to receives.

    The same seed gives the same order in every process; None gives the one that stays close to the lists. See
    Note: [Why blocking sends cannot deadlock]. Raises ValueError if there is no legal order.
    """
    graph = _Graph(program)
    pick = _Closest() if seed is None else _Ranked(program, seed)
    order: list[Node] = []
    steps: list[Node] = []
    for node in graph.start():
        pick.add(node)
    while (node := pick.next()) is not None:
        for done in graph.joined(node):
            (steps if program.ranks[done[0]][done[1]].verb == "step" else order).append(done)
            for ready in graph.finish(done):
                pick.add(ready)
    order += sorted(steps)
    if len(order) < len(program):
        raise ValueError(f"no legal order: {_stuck(program, order)}")
    return order


def _stuck(program: Program, order: list[Node]) -> str:
    done = set(order)
    first: dict[tuple[int, str], str] = {}
    for rank, position, op in program:
        if (rank, position) not in done:
            first.setdefault((rank, op.lane), f"rank {rank}: {position} {op}")
    return f"{len(program) - len(order)} ops can never run, first of their lanes: {'; '.join(first.values())}"


class _Graph:
    """What each op still waits for. A send and its receive on another rank run together, named by the send."""

    def __init__(self, program: Program) -> None:
        self._followers: dict[Node, list[Node]] = defaultdict(list)
        self._waits: dict[Node, int] = {}
        self._receiver: dict[Node, Node] = {}
        self._sender: dict[Node, Node] = {}
        where = {(rank, op.key): (rank, position) for rank, position, op in program}
        previous: dict[tuple[int, str], Node] = {}
        for rank, position, op in program:
            node = (rank, position)
            before = {(rank, d) for d in op.deps}
            if (rank, op.lane) in previous:
                before.add(previous[rank, op.lane])
            previous[rank, op.lane] = node
            if op.verb in ("send", "recv"):
                partner = where.get(program.layout.peer(op, rank))
                if partner is None:
                    before.add(_NEVER)
                else:
                    self._join(*((node, partner) if op.verb == "send" else (partner, node)))
            self._waits[node] = len(before)
            for other in before:
                self._followers[other].append(node)

    def _join(self, send: Node, receive: Node) -> None:
        self._receiver[send], self._sender[receive] = receive, send

    def _ready(self, node: Node) -> Node | None:
        """The name under which `node` can run now, if it can."""
        send = self._sender.get(node, node)
        return send if all(self._waits[part] == 0 for part in self.joined(send)) else None

    def joined(self, node: Node) -> list[Node]:
        """`node`, and its receive if it is a send."""
        return [node, self._receiver[node]] if node in self._receiver else [node]

    def start(self) -> list[Node]:
        names = (self._ready(node) for node, count in self._waits.items() if count == 0)
        return list(dict.fromkeys(name for name in names if name is not None))

    def finish(self, node: Node) -> list[Node]:
        """What becomes ready when `node` has run."""
        names = []
        for follower in self._followers[node]:
            self._waits[follower] -= 1
            if self._waits[follower] == 0:
                names.append(self._ready(follower))
        return [name for name in names if name is not None]


class _Closest:
    """Takes the ready op that comes first in its rank's list."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, int]] = []

    def add(self, node: Node) -> None:
        heapq.heappush(self._ready, node[::-1])

    def next(self) -> Node | None:
        return heapq.heappop(self._ready)[::-1] if self._ready else None


class _Ranked:
    """Takes a ready op of the lane that ranks highest; now and then one of any lane.

    The ranking is random. So some lanes run as far ahead as they may, others are starved: the orders in which
    a missing dependency shows.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._ready: dict[tuple[int, str], Node] = {}  # at most one op of a lane can be next
        lanes: list[tuple[int, str]] = [
            (rank, lane) for rank in range(len(program.ranks)) for lane in program.layout.lanes
        ]
        self._random.shuffle(lanes)
        self._ranking = {lane: place for place, lane in enumerate(lanes)}

    def add(self, node: Node) -> None:
        self._ready[node[0], self._program.ranks[node[0]][node[1]].lane] = node

    def next(self) -> Node | None:
        if not self._ready:
            return None
        if self._random.random() < _ANY_LANE:
            lane = self._random.choice(list(self._ready))
        else:
            lane = min(self._ready, key=lambda lane: self._ranking[lane])
        return self._ready.pop(lane)

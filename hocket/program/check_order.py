"""Invariants about order between ranks and inside merged steps: 1, 2, 3 and 13.

Note: [A send and its receive are one event]
A send is done only when the peer's receive has been posted and has run, and both stand in FIFO lanes. So for the
question of deadlock the two are one node of the graph. That is why sends and receives need lanes of their own:
in an interleaved order rank 0 sends its second microbatch before it receives what the last rank sends back,
and with one lane for both every rank would wait for the next one around the ring.

Note: [The host waits too]
Issuing a forward dispatch stops the host until the routing counts, made by the attention part before it,
have arrived. Ops that come later in the list cannot start before that, on any lane. A program whose lanes
alone are free of cycles can deadlock for this reason, so these waits are edges of the graph.

Note: [One host wait without work per merged step]
While the host waits, the GPU should have compute to do: in a merged layer step some compute op stands between
the attention part and the dispatch. The first layer of a step has the previous step's ops still queued, so one
per merged step is allowed. A forward that runs alone has nothing else to queue: the invariant is about merged
layers only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from hocket.program.facts import Facts, Span, Violation, has_place
from hocket.program.ops import COMPUTING, LANES, Key, stops_host

Node = tuple[int, int]
"""(rank, position)."""

_P2P_LANES = tuple(lane for lane in LANES if lane not in (*COMPUTING, "a2a", "gather", "reduce"))
_EXPOSED_WAITS_ALLOWED = 1
_HALVES = ("fwd", "recompute", "bwd", "wgrad")
"""Verbs of which a pass consists."""


def deadlock_free(ranks: list[Facts]) -> Iterator[Violation]:
    """Invariant 1: all ranks' lanes, dependencies, sends and receives together have no cycle."""
    for facts in ranks:
        for i, d in facts.late_deps:
            what = facts.show(d) if 0 <= d < len(facts.ops) else f"op {d}, which there is not"
            yield facts.fail(1, f"{facts.show(i)} waits for {what}: the host can only wait for earlier ops", i, d)
    cycle = _find_cycle(_waits(ranks))
    if cycle:
        names = [f"rank {rank}: {ranks[rank].show(position)}" for rank, position in cycle]
        rank = cycle[0][0]
        here = [position for r, position in cycle if r == rank]
        yield ranks[rank].fail(1, f"these wait for each other in a circle: {' <- '.join(names)} <- ...", *here)


def _waits(ranks: list[Facts]) -> dict[Node, list[Node]]:
    """For every op of a pipeline lane, the ops of pipeline lanes that it comes right after.

    The ops of other lanes are left out: the clocks bridge them. See Note: [A send and its receive are one event].
    """
    send_of = _sends_by_receive(ranks)
    waits: dict[Node, list[Node]] = defaultdict(list)
    for facts in ranks:
        for i, before in _pipeline_waits(facts):
            node = send_of.get((facts.rank, i), (facts.rank, i))
            waits[node] += [send_of.get((facts.rank, p), (facts.rank, p)) for p in before]
    return waits


def _sends_by_receive(ranks: list[Facts]) -> dict[Node, Node]:
    send_of: dict[Node, Node] = {}
    for facts in ranks:
        for i, op in enumerate(facts.ops):
            if op.verb == "send" and op.lane in _P2P_LANES:
                peer, key = facts.layout.peer(op, facts.rank)
                j = ranks[peer].where.get(key)
                if j is not None and ranks[peer].ops[j].lane in _P2P_LANES:
                    send_of[peer, j] = (facts.rank, i)
    return send_of


def _pipeline_waits(facts: Facts) -> Iterator[tuple[int, list[int]]]:
    """(position, latest earlier position on each pipeline lane that must be done) of the ops on pipeline lanes."""
    lanes = [LANES.index(lane) for lane in _P2P_LANES]
    host = [-1] * len(facts.layout.lanes)
    previous = [-1] * len(facts.layout.lanes)
    for i, op in enumerate(facts.ops):
        counted = _counted(facts, i)  # see Note: [The host waits too]
        if counted is not None and counted < i:
            host = list(map(max, host, facts.clocks[counted]))
        if op.lane in _P2P_LANES:
            mine = facts.lane[i]
            known = [max(host[lane], previous[lane] if lane == mine else facts.clocks[i][lane]) for lane in lanes]
            previous[mine] = i
            yield i, [p for p in known if p >= 0]


def _find_cycle(waits: dict[Node, list[Node]]) -> list[Node]:
    """Some cycle, each node followed by one that it waits for; empty if there is none."""
    followers: dict[Node, list[Node]] = defaultdict(list)
    open_waits = {node: len(before) for node, before in waits.items()}
    for node, before in waits.items():
        for other in before:
            followers[other].append(node)
    ready = [node for node, count in open_waits.items() if count == 0]
    while ready:
        for node in followers[ready.pop()]:
            open_waits[node] -= 1
            if open_waits[node] == 0:
                ready.append(node)
    stuck = {node for node, count in open_waits.items() if count > 0}
    if not stuck:
        return []
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(next(node for node in waits[path[-1]] if node in stuck))
    return path[path.index(path[-1]) : -1]


def sends_match(ranks: list[Facts]) -> Iterator[Violation]:
    """Invariant 2: between two ranks, per direction, what is sent is received, in the same order."""
    sent: dict[tuple[int, int, str], list[Key]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[Key]] = defaultdict(list)
    for facts in ranks:
        for op in facts.ops:
            if op.verb == "send":
                peer, key = facts.layout.peer(op, facts.rank)
                sent[facts.rank, peer, op.part].append(key)
            elif op.verb == "recv":
                peer, _ = facts.layout.peer(op, facts.rank)
                received[peer, facts.rank, op.part].append(op.key)
    for (source, target, part), keys in received.items():
        both = set(keys) & set(sent[source, target, part])
        theirs = [key for key in sent[source, target, part] if key in both]
        mine = [key for key in keys if key in both]
        for theirs_next, mine_next in zip(theirs, mine, strict=False):
            if theirs_next != mine_next:
                facts = ranks[target]
                a, b = facts.where[mine_next], facts.where[theirs_next]
                yield facts.fail(
                    2, f"{facts.show(a)} comes next, but rank {source} sends for {facts.show(b)} first", a, b
                )
                break


def halves_independent(facts: Facts) -> Iterator[Violation]:
    """Invariant 3: two passes that overlap in the list have no data path and no dependency between them.

    All passes of one microbatch are joined by a data path; passes of two microbatches never are. What is left
    is a dependency between two ops of different passes, which would serialise what is meant to overlap.
    """
    merged: set[frozenset[tuple[str, int, int]]] = set()
    for a, b in facts.merged:
        merged.add(frozenset([(a.verb, a.microbatch, a.chunk), (b.verb, b.microbatch, b.chunk)]))
        if a.microbatch == b.microbatch:
            yield facts.fail(3, f"{a} is merged with {b} of its own microbatch", a.first, b.first)
    if not merged:
        return
    for i, op in enumerate(facts.ops):
        if op.deps and op.verb in _HALVES:
            for d in op.deps:
                other = facts.ops[d] if 0 <= d < i else op
                if other.microbatch != op.microbatch and other.verb in _HALVES:
                    if frozenset([_pass(op.key), _pass(other.key)]) in merged:
                        yield facts.fail(3, f"{facts.show(i)} waits for {facts.show(d)} of the other half", i, d)


def _pass(key: Key) -> tuple[str, int, int]:
    return ("fwd" if key[0] == "fwd" else "bwd", key[2], key[3])


def work_queued(facts: Facts) -> Iterator[Violation]:
    """Invariant 13, see Note: [One host wait without work per merged step]."""
    if not facts.merged:
        return
    computed = [0, *accumulate(op.lane == "compute" for op in facts.ops)]
    waits: dict[tuple[int, int], list[int]] = defaultdict(list)  # (microbatch, chunk) -> its forward dispatches
    for i, op in enumerate(facts.ops):
        if _counted(facts, i) is not None:
            waits[op.microbatch, op.chunk].append(i)
    for pair in facts.merged:
        for forward, other in (pair, pair[::-1]):
            if forward.verb == "fwd":
                yield from _exposed_waits(facts, forward, other, waits[forward.microbatch, forward.chunk], computed)


def _exposed_waits(
    facts: Facts, forward: Span, other: Span, dispatches: list[int], computed: list[int]
) -> Iterator[Violation]:
    exposed = []
    for i in dispatches[bisect_right(dispatches, other.first) : bisect_right(dispatches, other.last)]:
        source = _counted(facts, i)
        if source is not None and source < i and computed[i] == computed[source + 1]:
            exposed.append((i, source))
    for i, source in exposed[_EXPOSED_WAITS_ALLOWED:]:
        yield facts.fail(
            13,
            f"{facts.show(i)} stops the host right behind {facts.show(source)} with no compute op queued between them, "
            f"and is not the first to do so while {forward} is merged with {other}",
            i,
            source,
        )


def _counted(facts: Facts, i: int) -> int | None:
    """Position of the op that makes the counts for which the host waits while it issues op i; None if it does not."""
    op = facts.ops[i]
    if not has_place(op, facts.layout) or not stops_host(op, facts.layout):
        return None
    source = facts.layout.part(op.part, op.layer).sources[0]
    return facts.where.get(("fwd", source, *op.key[2:]))

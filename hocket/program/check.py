"""Proves a program: 14 invariants; each violation is reported with the ops involved.

    1  All ranks' lists with sends, receives and host waits have no cycle.
    2  Between two ranks, sends and receives come in the same order.
    3  The halves of a merged step are independent.
    4  Every part runs forward, backward and, with weights, wgrad exactly once,
       and forward once more if it is recomputed, or to the host and back.
    5  bwd after fwd, wgrad after bwd, reduce after all wgrads, step after it.    here and in check_memory.py
    6  A value is made before its readers and dropped once, after them.           check_memory.py
    7  Weight and gradient slots keep what readers need; the bound holds.         check_memory.py
    8  A side value's consumer runs backward before its producer.
    9  A unit's gradients accumulate in ascending microbatch order.               check_memory.py
    10 Every op is on a lane of its kind.
    11 Activations in flight stay under the cap; receives, reloads do not run     check_memory.py
       earlier than the list says.
    12 At the end nothing is left: values, weight slots, gradient slots, ops.     and check_memory.py
    13 Compute is queued before the host waits.
    14 A value, or its first reader's share, is dropped as soon as it may be.     check_memory.py

Invariants without a file are checked here. `values.py` defines what an op reads, `facts.py` what "after" means. All
checks take time linear in the number of ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate

from hocket.collector import without_collector
from hocket.program.check_memory import (
    activations_capped,
    gathers_counted,
    gradients_in_order,
    receives_paced,
    reloads_paced,
    slots_kept,
    updates_first,
    values_dropped_in_time,
    values_live,
)
from hocket.program.facts import INVARIANTS, Facts, Violation, gather_facts
from hocket.program.linearize import cycle_of, waits
from hocket.program.ops import HOST, TIED, Key, Layout, Op, Program, stops_host, tied_lane
from hocket.program.transformer import EMBED, HEAD
from hocket.program.values import follows

__all__ = ["INVARIANTS", "Violation", "assert_valid", "check"]

_SHOWN = 10


@without_collector()
def check(program: Program, forward_only: bool = False) -> list[Violation]:
    """All violations, by invariant and rank; empty for a valid program.

    `forward_only`: the program is a validation and must have no backward.
    """
    if len(program.ranks) != program.layout.pp:
        message = f"{len(program.ranks)} ranks have ops, the layout has {program.layout.pp}"
        return [Violation(4, INVARIANTS[4], 0, (), message)]
    ranks = [gather_facts(program, rank, forward_only) for rank in range(len(program.ranks))]
    found = [*deadlock_free(program, ranks), *sends_match(ranks)]
    for facts in ranks:
        for rule in _RULES:
            found += rule(facts)
    return sorted(found, key=lambda violation: (violation.invariant, violation.rank, violation.ops))


def assert_valid(program: Program, forward_only: bool = False) -> None:
    """Raise ValueError with up to ten violations."""
    found = check(program, forward_only)
    if found:
        shown = [str(violation) for violation in found[:_SHOWN]]
        more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise ValueError("\n".join([f"the program breaks {len(found)} rules:", *shown, *more]))


def expected(program: Program, rank: int, forward_only: bool = False) -> Iterator[Key]:
    """Keys of every fwd, recompute, offload, reload, bwd, wgrad, send and recv that a rank must have."""
    layout = program.layout
    for c in range(layout.chunks):
        parts: list[tuple[str, str, int]] = []
        ends = [(EMBED.name, layout.is_first(rank, c)), (HEAD.name, layout.is_last(rank, c))]
        for part in [part for part, here in ends if here]:
            parts += [(verb, part, -1) for verb in ("fwd", "bwd", "wgrad")]
        for layer in layout.layers(rank, c):
            there = layout.forward_parts(layer)
            parts += [(verb, part, layer) for part in there for verb in ("fwd", "bwd")]
            parts += [("wgrad", part, layer) for part in layout.weighted_parts(layer)]
            parts += [("recompute", part, layer) for part in there if layout.recomputes(part, layer)]
            parts += [(verb, part, layer) for part in there if layout.offloads(part, layer) for verb in HOST]
        if layout.receives(rank, c, "act"):
            parts += [("recv", "act", -1), ("send", "grad", -1)]
        if layout.receives(rank, c, "grad"):
            parts += [("send", "act", -1), ("recv", "grad", -1)]
        if forward_only:
            parts = [name for name in parts if name[0] == "fwd" or name[1] == "act"]
        for m in range(program.microbatches):
            for verb, part, layer in parts:
                yield (verb, part, m, c, layer)
        if layout.apart.get(rank) == c and not forward_only:
            yield from (("send", TIED, -1, c, -1), ("recv", TIED, -1, c, -1))


def complete(facts: Facts) -> Iterator[Violation]:
    """Invariants 4 and 2: exactly the required ops, once each."""
    missing = dict.fromkeys(expected(facts.program, facts.rank, facts.forward_only))
    seen: Counter[Key] = Counter()
    for i, op in enumerate(facts.ops):
        key = op.key
        seen[key] += 1
        if seen[key] > 1:
            yield facts.fail(_completeness(key[0]), f"{facts.show(i)} is there {seen[key]} times", i, facts.where[key])
        elif key in missing:
            del missing[key]
        elif op.verb in ("fwd", "recompute", "bwd", "wgrad", "send", "recv", *HOST) or not facts.placed[i]:
            yield facts.fail(_completeness(key[0]), f"{facts.show(i)} has no place in this layout", i)
    for verb, part, m, c, layer in missing:
        name = f"{verb} {part} m{m} c{c}" + (f" l{layer}" if layer >= 0 else "")
        yield facts.fail(_completeness(verb), f"{name} is missing")


def _completeness(verb: str) -> int:
    return 2 if verb in ("send", "recv") else 4


def backward_after_forward(facts: Facts) -> Iterator[Violation]:
    """Invariant 5: recompute, offload, reload, bwd, wgrad of a part come in order after fwd; one step, at the end."""
    for i, op in enumerate(facts.ops):
        for key in follows(op, facts.layout):
            p = facts.where.get(key)
            if p is not None:
                yield from facts.comes_after(5, i, p)
    steps = [i for i, op in enumerate(facts.ops) if op.verb == "step"]
    last = len(facts.ops) - 1
    if steps != [last]:
        yield facts.fail(5, f"a rank's list ends with its one step, got steps at {steps} of {last + 1} ops", *steps)
        return
    chunk = -1 if facts.forward_only else facts.layout.apart.get(facts.rank, -1)
    if facts.ops[last].chunk != chunk:
        yield facts.fail(5, f"{facts.show(last)} is of chunk {chunk}, whose gradient another rank adds to", last)
    for i, op in enumerate(facts.ops):
        yield from facts.comes_after(5 if op.verb == "reduce" else 12, last, i)


def side_values_reversed(facts: Facts) -> Iterator[Violation]:
    """Invariant 8: if the forward of x reads a value of y, the backward of x comes before that of y."""
    for op, keys in zip(facts.ops, facts.reads, strict=True):
        if op.verb == "fwd":
            x = facts.where.get(("bwd", *op.key[1:]))
            for key in keys:
                y = facts.where.get(("bwd", *key[1:]))
                if key[0] == "fwd" and x is not None and y is not None:
                    yield from facts.comes_after(8, y, x, ", which makes its input")


def lane_kinds(facts: Facts) -> Iterator[Violation]:
    """Invariant 10: communication lanes carry only communication, each of its own kind."""
    for i, op in enumerate(facts.ops):
        lanes = _lanes_for(op, facts.layout, facts.rank)
        if op.lane not in lanes:
            yield facts.fail(10, f"{facts.show(i)} is on lane {op.lane}, not {' or '.join(lanes)}", i)


def _lanes_for(op: Op, layout: Layout, rank: int) -> tuple[str, ...]:
    match op.verb:
        case "send" | "recv" if op.part == TIED:
            return (tied_lane(op.verb, layout.is_first(rank, op.chunk)),)
        case "send":
            return (f"send_{op.part}_back" if layout.turns(op.chunk) else f"send_{op.part}",)
        case "recv":
            return (f"recv_{op.part}",)
        case "gather" | "offload" | "reload":
            return (op.verb,)
        case "reduce" | "collect" | "scatter":
            return ("reduce",)
        case "update" | "orthogonalise":
            return ("update",)
        case "release":
            return ("compute", "gather")
        case _:
            known = op.verb in ("fwd", "recompute", "bwd") and layout.has_part(op.part, op.layer)
            return (layout.part(op.part, op.layer).lane,) if known else ("compute",)


# ---------------------------------------------------------------------------------------------------------- check order
#
# Invariants about order between ranks and inside merged steps: 1, 2, 3 and 13.
#
# Note: [A send and its receive are one event]
# A send is done only when the peer's receive has been posted and has run, and both are on FIFO lanes. So for deadlock
# the two are one node of the graph. That is why sends and receives need separate lanes: in an interleaved order rank 0
# sends its second microbatch before it receives from the last rank, and with one lane for both every rank would wait
# for the next one around the ring.
#
# Note: [The host waits too]
# Issuing a forward dispatch blocks the host until the routing counts, made by the attention part before it, have
# arrived. Later ops of the list cannot start before that, on any lane. A program whose lanes alone have no cycle can
# deadlock for this reason, so these waits are edges of the graph.
#
# Note: [One host wait without work per merged step]
# While the host waits, the GPU should have compute queued: in a merged layer step some compute op comes between the
# attention part and the dispatch. At the first layer of a step the previous step's ops are still queued, so one wait
# without work per merged step is allowed. A forward that runs alone has nothing else to queue: the invariant is about
# merged layers only.


_EXPOSED_WAITS_ALLOWED = 1
_HALVES = ("fwd", "recompute", "bwd", "wgrad")
"""Verbs of a pass."""


def deadlock_free(program: Program, ranks: list[Facts]) -> Iterator[Violation]:
    """Invariant 1: all ranks' lanes, dependencies, sends and receives together have no cycle."""
    for facts in ranks:
        for i, d in facts.late_deps:
            what = facts.show(d) if 0 <= d < len(facts.ops) else f"op {d}, which there is not"
            yield facts.fail(1, f"{facts.show(i)} waits for {what}: the host can only wait for earlier ops", i, d)
    before, receive_of = waits(program)
    send_of = {receive: send for send, receive in receive_of.items()}
    for facts in ranks:  # see Note: [The host waits too]
        asked, told = list[int](), dict[str, int]()
        for i, op in enumerate(facts.ops):
            counted = _counted(facts, i)
            asked += [counted] if counted is not None and counted < i else []
            news, told[op.lane] = asked[told.get(op.lane, 0) :], len(asked)
            node = (facts.rank, i)
            before[send_of.get(node, node)].update((facts.rank, p) for p in news)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        nodes, text = cycle_of(error, program)
        here = [position for rank, position in nodes if rank == nodes[0][0]]
        yield ranks[nodes[0][0]].fail(1, text, *here)


def sends_match(ranks: list[Facts]) -> Iterator[Violation]:
    """Invariant 2: between two ranks, per direction, sends and receives match, in the same order."""
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

    All passes of one microbatch are joined by a data path; passes of two microbatches never are. The other case is a
    dependency between two ops of different passes, which would serialise passes meant to overlap.
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
    for forward, other in (pair for both in facts.merged for pair in (both, both[::-1]) if pair[0].verb == "fwd"):
        dispatches = waits[forward.microbatch, forward.chunk]
        exposed = []
        for i in dispatches[bisect_right(dispatches, other.first) : bisect_right(dispatches, other.last)]:
            source = _counted(facts, i)
            if source is not None and source < i and computed[i] == computed[source + 1]:
                exposed.append((i, source))
        for i, source in exposed[_EXPOSED_WAITS_ALLOWED:]:
            message = (
                f"{facts.show(i)} stops the host right after {facts.show(source)} with no compute op queued between "
                f"them, and is not the first to do so while {forward} is merged with {other}"
            )
            yield facts.fail(13, message, i, source)


def _counted(facts: Facts, i: int) -> int | None:
    """Position of the op that makes the counts for which the host waits while it issues op i; None if it does not."""
    op = facts.ops[i]
    if not facts.placed[i] or not stops_host(op, facts.layout):
        return None
    source = facts.layout.part(op.part, op.layer).sources[0]
    return facts.where.get(("fwd", source, *op.key[2:]))


_RULES = (
    complete,
    backward_after_forward,
    side_values_reversed,
    lane_kinds,
    halves_independent,
    work_queued,
    values_live,
    values_dropped_in_time,
    slots_kept,
    gathers_counted,
    gradients_in_order,
    updates_first,
    activations_capped,
    receives_paced,
    reloads_paced,
)
"""Checks of one rank at a time."""

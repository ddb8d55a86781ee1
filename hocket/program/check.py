"""Proves a program: the 14 invariants, each broken one reported with the ops involved.

    1  All ranks' lists with sends, receives and host waits have no cycle.        check_order.py
    2  Between two ranks, sends and receives come in the same order.              here, check_order.py
    3  The halves of a merged step are independent.                               check_order.py
    4  Every part runs forward, backward and, with weights, wgrad exactly once,   here
       and forward once more if it is recomputed, or to the host and back.
    5  bwd after fwd, wgrad after bwd, reduce after all wgrads, step after it.    here, check_slots.py
    6  A value is made before its readers and dropped once, after them.           check_memory.py
    7  Weight and gradient slots keep what readers need; the bound holds.         check_slots.py
    8  A side value's consumer runs backward before its producer.                 here
    9  A unit's gradients accumulate in ascending microbatch order.               check_slots.py
    10 Every op is on a lane of its kind.                                         here
    11 Activations in flight stay under the cap; receives, reloads do not run     check_memory.py
       ahead of the list.
    12 At the end nothing is left: values, weight slots, gradient slots, ops.     here, and both of these
    13 Compute is queued before the host waits.                                   check_order.py
    14 A value, or its first reader's share, is dropped as soon as it may be.     check_memory.py

What an op reads is in `values.py`; what "after" means is in
`facts.py`. Everything takes time linear in the number of ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hocket.program.check_memory import (
    activations_capped,
    receives_paced,
    reloads_paced,
    values_dropped_in_time,
    values_live,
)
from hocket.program.check_order import deadlock_free, halves_independent, sends_match, work_queued
from hocket.program.check_slots import gradients_kept, host_slots_kept, matrices_whole, updates_first, weights_resident
from hocket.program.facts import INVARIANTS, Facts, Violation, gather_facts, has_place
from hocket.program.ops import HOST, TIED, Key, Layout, Op, Program, tied_lane
from hocket.program.transformer import EMBED, HEAD
from hocket.program.values import follows
from hocket_trace.without_collector import without_collector

__all__ = ["INVARIANTS", "Violation", "assert_valid", "check"]

_SHOWN = 10


@without_collector()
def check(program: Program, forward_only: bool = False) -> list[Violation]:
    """All broken invariants, by number and rank; empty for a valid program.

    `forward_only` says that the program is a validation: it must have no backward.
    """
    if len(program.ranks) != program.layout.pp:
        message = f"{len(program.ranks)} ranks have ops, the layout has {program.layout.pp}"
        return [Violation(4, INVARIANTS[4], 0, (), message)]
    ranks = [gather_facts(program, rank, forward_only) for rank in range(len(program.ranks))]
    found = [*deadlock_free(ranks), *sends_match(ranks)]
    for facts in ranks:
        for rule in _RULES:
            found += rule(facts)
    return sorted(found, key=lambda violation: (violation.invariant, violation.rank, violation.ops))


def assert_valid(program: Program, forward_only: bool = False) -> None:
    """Raise ValueError with up to ten broken invariants."""
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
    """Invariants 4 and 2: the ops that must be there are, once each, and no others."""
    missing = dict.fromkeys(expected(facts.program, facts.rank, facts.forward_only))
    seen: Counter[Key] = Counter()
    for i, op in enumerate(facts.ops):
        key = op.key
        seen[key] += 1
        if seen[key] > 1:
            yield facts.fail(_completeness(key[0]), f"{facts.show(i)} is there {seen[key]} times", i, facts.where[key])
        elif key in missing:
            del missing[key]
        elif op.verb in ("fwd", "recompute", "bwd", "wgrad", "send", "recv", *HOST) or not has_place(op, facts.layout):
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
            if p is not None and not facts.before(p, i):
                yield facts.fail(5, f"{facts.show(i)} may run before {facts.show(p)}", i, p)
    steps = [i for i, op in enumerate(facts.ops) if op.verb == "step"]
    last = len(facts.ops) - 1
    if steps != [last]:
        yield facts.fail(5, f"a rank's list ends with its one step, got steps at {steps} of {last + 1} ops", *steps)
        return
    chunk = -1 if facts.forward_only else facts.layout.apart.get(facts.rank, -1)
    if facts.ops[last].chunk != chunk:
        yield facts.fail(5, f"{facts.show(last)} is of chunk {chunk}, whose gradient another rank adds to", last)
    for i, op in enumerate(facts.ops):
        if not facts.before(i, last):
            number = 5 if op.verb == "reduce" else 12
            yield facts.fail(number, f"{facts.show(last)} may run before {facts.show(i)}", last, i)


def side_values_reversed(facts: Facts) -> Iterator[Violation]:
    """Invariant 8: if the forward of x reads a value of y, the backward of x comes before that of y."""
    for op, keys in zip(facts.ops, facts.reads, strict=True):
        if op.verb == "fwd":
            x = facts.where.get(("bwd", *op.key[1:]))
            for key in keys:
                y = facts.where.get(("bwd", *key[1:]))
                if key[0] == "fwd" and x is not None and y is not None and not facts.before(x, y):
                    yield facts.fail(8, f"{facts.show(y)} may run before {facts.show(x)}, which makes its input", y, x)


def lane_kinds(facts: Facts) -> Iterator[Violation]:
    """Invariant 10: communication lanes carry only communication, and each its own kind."""
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


_RULES = (
    complete,
    backward_after_forward,
    side_values_reversed,
    lane_kinds,
    halves_independent,
    work_queued,
    values_live,
    values_dropped_in_time,
    weights_resident,
    gradients_kept,
    updates_first,
    matrices_whole,
    host_slots_kept,
    activations_capped,
    receives_paced,
    reloads_paced,
)
"""The rules that look at one rank at a time."""

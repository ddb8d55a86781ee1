"""How many of the head's weight gradients run at the end of a step, where `overlap.pp.defer_head` is `auto`.

The rank of the head has one product more than others, and is done before them: it sends its last gradient, and they
still have to pass it on. Weight gradients of the head that are left for then shorten what everybody waits for; more of
them than fit into that time would lengthen the step again, and each keeps the logits' gradients of a microbatch. So as
many as fill the time are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.plan.held import at_most
from hocket.plan.ops import Op, Program
from hocket.plan.simulate import makespan, quiet_end
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import few_microbatches, separate_wgrads
from hocket.settings.predicted import Trials, memory_of, room
from hocket.settings.rule import Host

_HEAD = "overlap.pp.defer_head"
_WORTH = 0.995
"""Share of a step's time that deferral must bring it to."""
_HALVINGS = 2
"""How often half as many are tried, where those that fill the time had been hidden and make the step longer."""


def choose_head(c: Config, host: Host, trials: Trials) -> Iterator[tuple[str, int, str]]:
    """Setting, value and reason, if it is open in a configuration that is sound otherwise."""
    if c.overlap.pp.defer_head == "auto":
        idle = _nothing_to_gain(c)
        value, reason = (0, idle) if idle else _simulated(c, host, trials)
        yield _HEAD, value, reason


def _nothing_to_gain(c: Config) -> str:
    if c.mesh.pp == 1:
        return "the only pipeline rank waits for no other at the end"
    if c.overlap.defer_wgrad == "off":
        return "weight gradients are not deferred (overlap.defer_wgrad = off)"
    return ""


def _simulated(c: Config, host: Host, trials: Trials) -> tuple[int, str]:
    count, costs = few_microbatches(c), trials.costs(c)
    plain = trials.program(c, count)
    rank, _ = plain.layout.owner(plain.layout.stages - 1)
    one = float(costs.seconds(rank, Op("wgrad", "head")))
    ends = trials.times(c, count)[1]
    before, quiet = float(max(ends)), float(quiet_end(plain, ends, rank))
    if quiet <= 0 or not one:
        return 0, "the rank of the head computes until the end"
    wanted = min(count, math.ceil(quiet / one))
    times = {n: 0.0 for halving in range(_HALVINGS + 1) if (n := wanted >> halving)}
    for wanted in times:
        times[wanted] = after = float(makespan(moved(plain, rank, wanted), costs))
        if after <= _WORTH * before:
            break
    else:
        return 0, f"{count} microbatches would take {duration(min(times.values()))} instead of {duration(before)}"
    fitting = _fitting(c, trials, plain, wanted, room(memory_of(c, host)))
    if not fitting:
        return 0, f"what it keeps of a microbatch until the end does not fit into {hardware_of(c).name}"
    if fitting < wanted:
        after = float(makespan(moved(plain, rank, fitting), costs))
    less = "" if fitting == wanted else f"; for {wanted}, for which there is time, there is no memory"
    return fitting, (
        f"its rank is done {duration(quiet)} before the last: {count} microbatches take {duration(after)} instead of "
        f"{duration(before)}{less}"
    )


def moved(program: Program, rank: int, count: int) -> Program:
    """A program with the head's last weight gradients, and what reads them, in front of the optimizer.

    Within a per cent it takes as long as what `build_program` makes of the setting, and is made much sooner.
    """
    ops = program.ranks[rank]
    found = [p for p, op in enumerate(ops) if op.part == "head" and op.verb in ("wgrad", "add", "reduce")]
    late = set(found[next((i for i, p in enumerate(found) if ops[p].microbatch >= program.microbatches - count), 0) :])
    order = [p for p in range(len(ops) - 1) if p not in late] + sorted(late) + [len(ops) - 1]
    position = {old: new for new, old in enumerate(order)}
    again = tuple(ops[p]._replace(deps=tuple(sorted(position[d] for d in ops[p].deps))) for p in order)
    return replace(program, ranks=(*program.ranks[:rank], again, *program.ranks[rank + 1 :]))


def _fitting(c: Config, trials: Trials, plain: Program, wanted: int, memory: int) -> int:
    """How many of these weight gradients leave a step that fits into so many bytes, 0 for any; 0 if none does."""
    costs, (rank, _) = trials.costs(c), plain.layout.owner(plain.layout.stages - 1)
    each = costs.saved_bytes(rank, Op("bwd", "head"))
    if not memory or not each:
        return wanted
    beside = trials.beside(c, plain.microbatches)
    if at_most(plain, costs, rank, wanted) + beside <= memory and not separate_wgrads(c):
        return wanted
    missing = trials.peak(changed(c, {_HEAD: wanted}), plain.microbatches, rank) + beside - memory
    return wanted if missing <= 0 else max(0, wanted - math.ceil(missing / each))

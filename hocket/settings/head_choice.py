"""How many of the head's weight gradients run at the end of a step, where `overlap.pp.defer_head` is `auto`.

The rank of the head has one product more than others, and is done before them: it sends its last gradient, and they
still have to pass it on. Weight gradients of the head that are left for then shorten what everybody waits for; more of
them than fit into that time would lengthen the step again, and each keeps the logits' gradients of a microbatch. So as
many as fill the time are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.parallel.stages import layout_of, sharding_of
from hocket.plan.cost import CostTable
from hocket.plan.lower import build_program
from hocket.plan.ops import Op
from hocket.plan.simulate import Timeline, quiet_end, simulate
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import group_of

_HEAD = "overlap.pp.defer_head"
_MOST = 128
"""Microbatches times pipeline ranks of a simulated step, unless one group has more already."""
_WORTH = 0.995
"""Share of a step's time that deferral must bring it to."""
_USABLE = 0.9
"""Share of the memory that values may fill as predicted."""


def choose_head(c: Config, costs: CostTable) -> Iterator[tuple[str, int, str]]:
    """Setting, value and reason, if it is open in a configuration that is sound otherwise."""
    if c.overlap.pp.defer_head == "auto":
        idle = _nothing_to_gain(c)
        value, reason = (0, idle) if idle else _simulated(c, costs)
        yield _HEAD, value, reason


def _nothing_to_gain(c: Config) -> str:
    if c.mesh.pp == 1:
        return "the only pipeline rank waits for no other at the end"
    if c.overlap.defer_wgrad == "off":
        return "weight gradients are not deferred (overlap.defer_wgrad = off)"
    return ""


def _simulated(c: Config, costs: CostTable) -> tuple[int, str]:
    layout, group = layout_of(c), group_of(c)
    count = min(c.train.microbatches, group * min(3, max(1, _MOST // (group * c.mesh.pp))))
    plain = build_program(layout, count, changed(c, {_HEAD: 0}), sharding_of(c), frees=False)
    rank, _ = layout.owner(layout.stages - 1)
    before, quiet = (float(value) for value in quiet_end(plain, costs, rank))
    one = float(costs.seconds(rank, Op("wgrad", "head")))
    if quiet <= 0 or not one:
        return 0, "the rank of the head computes until the end"
    wanted = min(count, math.ceil(quiet / one))
    late = _step(c, costs, count, wanted)
    if late.makespan > _WORTH * before:
        return 0, f"{count} microbatches would take {duration(float(late.makespan))} instead of {duration(before)}"
    fitting = _fitting(c, late.ranks[rank].peak_bytes, wanted, costs.saved_bytes(rank, Op("bwd", "head")))
    if not fitting:
        return 0, f"what it keeps of a microbatch until the end does not fit into {hardware_of(c).name}"
    less = "" if fitting == wanted else f"; for {wanted}, for which there is time, there is no memory"
    late = late if fitting == wanted else _step(c, costs, count, fitting)
    return fitting, (
        f"its rank is done {duration(quiet)} before the last: {count} microbatches take "
        f"{duration(float(late.makespan))} instead of {duration(before)}{less}"
    )


def _fitting(c: Config, peak: int, wanted: int, each: int) -> int:
    """How many of these weight gradients leave a step that fits into memory, if the wanted ones need `peak` bytes."""
    missing = peak - _USABLE * hardware_of(c).memory
    if not hardware_of(c).memory or missing <= 0:
        return wanted
    return max(0, wanted - math.ceil(missing / each)) if each else 0


def _step(c: Config, costs: CostTable, microbatches: int, late: int) -> Timeline:
    c = changed(c, {_HEAD: late})
    return simulate(build_program(layout_of(c), microbatches, c, sharding_of(c)), costs)

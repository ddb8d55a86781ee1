"""A step as the simulator expects it, for choices that compare several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.config import Config
from hocket.parallel.stages import layout_of, sharding_of
from hocket.plan.cost import CostTable
from hocket.plan.lower import build_program
from hocket.plan.schedule import cost_key
from hocket.plan.simulate import simulate
from hocket.settings.plan_rules import group_of

USABLE = 0.9
"""Share of the memory that values may fill as predicted: the allocator and libraries need the rest."""
_GROUPS = 3
"""Groups of microbatches of a simulated step: what a rank holds at most is reached by then."""


@dataclass(frozen=True)
class Predicted:
    """A step of a few microbatches, on the slowest rank, or the one that needs most."""

    microbatches: int
    seconds: float
    nbytes: int
    """Memory."""
    moved: int
    """Bytes of gathers and reduces."""


def predicted(c: Config, price: Callable[[Config], CostTable]) -> Predicted:
    """The step that a configuration makes; what is still open in it is taken as it comes."""
    count = min(c.train.microbatches, _GROUPS * group_of(c))
    layout, costs = layout_of(c), price(c)
    program = build_program(layout, count, c, sharding_of(c))
    timeline = simulate(program, costs)
    moved = [
        sum(costs.table[cost_key(op, layout.kinds)].wire_bytes for op in ops if op.verb in ("gather", "reduce"))
        for ops in program.ranks
    ]
    return Predicted(count, float(timeline.makespan), max(use.peak_bytes for use in timeline.ranks), max(moved))


def gib(size: float) -> str:
    """Memory in words."""
    return f"{size / 2**30:.0f} GiB"

"""How `plan.recompute` is chosen where it is `auto`: as little as makes the step fit into memory.

Forwards that run once more cost time and hide nothing but all-to-alls that would be exposed, so nothing is recomputed
where everything fits. Else all sets of parts are simulated, and of those that fit the shortest step wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.parallel.stages import layout_of, sharding_of
from hocket.plan.cost import CostTable
from hocket.plan.lower import build_program
from hocket.plan.ops import Recomputable, recomputable
from hocket.plan.simulate import simulate
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import group_of

_USABLE = 0.9
"""Share of the memory that values may fill as predicted: the allocator and libraries need the rest."""
_GROUPS = 3
"""Groups of microbatches of a simulated step: what a rank holds at most is reached by then."""


def choose_recompute(
    c: Config, price: Callable[[Config], CostTable]
) -> Iterator[tuple[str, tuple[Recomputable, ...], str]]:
    """Setting, value and reason, if it is open in a configuration that is sound otherwise."""
    if c.plan.recompute != ("auto",):
        return
    hardware = hardware_of(c)
    if not hardware.memory:
        yield "plan.recompute", (), f"how much memory a {hardware.name} rank can use is not known"
        return
    room = _USABLE * hardware.memory
    seconds, held = _step(c, (), price)
    if held <= room:
        yield "plan.recompute", (), f"{_gib(held)} of {_gib(hardware.memory)} are needed without"
        return
    steps = {parts: _step(c, parts, price) for parts in _sets(c)}
    fitting = [parts for parts, (_, nbytes) in steps.items() if nbytes <= room]
    best = min(fitting, key=lambda p: steps[p][0]) if fitting else min(steps, key=lambda p: steps[p][1])
    longer, less = steps[best][0] / seconds - 1, steps[best][1]
    fits = "" if fitting else "; that is the least, and does not fit either"
    yield (
        "plan.recompute",
        best,
        f"{_gib(less)} instead of {_gib(held)}, of {_gib(hardware.memory)}, for {longer:.1%} more time{fits}",
    )


def _sets(c: Config) -> Iterator[tuple[Recomputable, ...]]:
    parts = recomputable(c.model.kinds())
    for count in range(1, len(parts) + 1):
        yield from combinations(parts, count)


def _step(c: Config, parts: tuple[Recomputable, ...], price: Callable[[Config], CostTable]) -> tuple[float, int]:
    """Predicted seconds and bytes of a step of a few microbatches."""
    c = changed(c, {"plan.recompute": parts})
    count = min(c.train.microbatches, _GROUPS * group_of(c))
    timeline = simulate(build_program(layout_of(c), count, c, sharding_of(c)), price(c))
    return float(timeline.makespan), max(use.peak_bytes for use in timeline.ranks)


def _gib(size: float) -> str:
    return f"{size / 2**30:.0f} GiB"

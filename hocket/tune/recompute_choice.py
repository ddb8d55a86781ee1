"""How `plan.recompute` is chosen where it is `auto`: as little as makes the step fit into memory.

Forwards that run once more cost time and hide nothing but all-to-alls that would be exposed, so nothing is recomputed
where everything fits. Else sets of parts are simulated, and of those that fit the shortest step wins. More parts than
those of a set that fits only take longer; all parts need the least memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hocket.config import Config
from hocket.plan.network import hardware_of
from hocket.plan.ops import Recomputable, recomputable
from hocket.settings.leaves import changed
from hocket.settings.rule import Host
from hocket.tune.trials import Trials, fits, gib, memory_of


def choose_recompute(c: Config, host: Host, trials: Trials) -> tuple[tuple[Recomputable, ...], str]:
    memory = memory_of(c, host)
    if not memory:
        return (), f"how much memory a {hardware_of(c).name} rank can use is not known"
    without = trials.step(changed(c, {"plan.recompute": ()}))
    if fits(without.nbytes, memory):
        return (), f"{gib(without.nbytes)} of {gib(memory)} are needed without"
    steps = {parts: trials.step(changed(c, {"plan.recompute": parts})) for parts in _sets(c)}
    fitting: list[tuple[Recomputable, ...]] = []
    for parts, step in steps.items():
        if not any(set(fewer) < set(parts) for fewer in fitting) and step.fits(memory):
            fitting.append(parts)
    best = min(fitting, key=lambda parts: steps[parts].seconds) if fitting else max(steps, key=len)
    longer, less = steps[best].seconds / without.seconds - 1, steps[best].nbytes
    short = "" if fitting else "; that is the least, and does not fit either"
    return best, f"{gib(less)} instead of {gib(without.nbytes)}, of {gib(memory)}, for {longer:.1%} more time{short}"


def _sets(c: Config) -> Iterator[tuple[Recomputable, ...]]:
    parts = recomputable(c.model.kinds())
    for count in range(1, len(parts) + 1):
        yield from combinations(parts, count)

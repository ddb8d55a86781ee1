"""How `overlap.dp.strategy` is chosen where it is `auto`: the shortest predicted step that fits into memory.

The more of weights and gradients stays on every rank, the less is gathered and reduced: once a step, instead of in
every microbatch. Most of that is hidden either way, and steps take the same time but for contention, which is left out
here. What is hidden still holds SMs, power and memory bandwidth: so of steps that are about as short the one wins that
moves the fewest bytes, and of these the one that needs the least memory.
"""

from __future__ import annotations

from typing import get_args

from hocket.config import Config, Strategy
from hocket.plan.network import hardware_of
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import shares_units
from hocket.settings.rule import Host
from hocket.tune.trials import Predicted, Trials, gib, memory_of

_SETTING = "overlap.dp.strategy"
_LEAST: Strategy = "optim_grads_params"
"""What needs the least memory."""
_SAME = 0.01
"""By how much longer a step is as short as another one."""


def choose_strategy(c: Config, host: Host, trials: Trials) -> tuple[Strategy, str]:
    memory = memory_of(c, host)
    if not shares_units(c):
        return _LEAST, "with one data-parallel rank nothing is shared out"
    if not memory:
        return _LEAST, f"how much memory a {hardware_of(c).name} rank can use is not known, and this needs the least"
    steps: dict[Strategy, Predicted] = {s: trials.step(changed(c, {_SETTING: s})) for s in reversed(get_args(Strategy))}
    least = steps[_LEAST]
    fitting: dict[Strategy, Predicted] = {}
    for name, step in steps.items():
        if not step.fits(memory):
            break  # those that follow keep more
        fitting[name] = step
    if not fitting:
        return _LEAST, f"{gib(least.nbytes)} of {gib(memory)} are needed, and the others need more"
    shortest = min(step.seconds for step in fitting.values())
    short = {name: step for name, step in fitting.items() if step.seconds <= (1 + _SAME) * shortest}
    fewest = min(step.moved for step in short.values())
    best = next(name for name, step in short.items() if step.moved == fewest)
    return best, _reason(best, steps[best], least, memory)


def _reason(best: Strategy, step: Predicted, least: Predicted, memory: int) -> str:
    needs = f"{gib(step.nbytes)} of {gib(memory)}"
    if best == _LEAST:
        return f"it is the shortest step that fits, with {needs}"
    plural = "es" if step.microbatches > 1 else ""
    return (
        f"a step of {step.microbatches} microbatch{plural} is predicted to take {duration(step.seconds)} and move "
        f"{_moved(step)} per rank, instead of {duration(least.seconds)} and {_moved(least)} with {_LEAST}; it needs "
        f"{needs}"
    )


def _moved(step: Predicted) -> str:
    return f"{step.moved / 2**30:.1f} GiB"

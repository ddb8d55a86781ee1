"""Chooses `plan.loss_pieces` where it is `auto`: no more than let a step fit into memory.

Pieces of the head cost one product of it, whatever their number. That is less than what most recomputation costs. So
they come first, and what does not fit with them is left to `plan.recompute`.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.trials import Trials, fits, gib, memory_of

PIECES = (2, 4, 8, 16, 32, 64)
_WORTH = 0.98
"""Share of the bytes of a step below which pieces are worth taking where they do not make it fit."""
_LOSS = "plan.loss_pieces"


def choose_loss_pieces(c: Config, host: Host, trials: Trials) -> tuple[int, str]:
    memory = memory_of(c, host)
    if not memory:
        return 1, "how much memory a rank can use is not known"
    if c.mesh.tp > 1:
        return 1, "each tensor-parallel rank has a part of the vocabulary"
    whole = trials.step(changed(c, {_LOSS: 1})).nbytes
    if fits(whole, memory):
        return 1, f"{gib(whole)} of {gib(memory)} are needed without"
    steps = {count: trials.step(changed(c, {_LOSS: count})).nbytes for count in PIECES}
    fitting = [count for count in PIECES if fits(steps[count], memory)]
    least = min(steps.values())
    if not fitting and least > _WORTH * whole:
        return 1, f"{gib(whole)} of {gib(memory)} are needed, of which logits are little"
    best = fitting[0] if fitting else next(n for n in PIECES if steps[n] <= least + (1 - _WORTH) * whole)
    short = "" if fitting else ", which does not suffice alone"
    return best, f"{gib(steps[best])} instead of {gib(whole)}, of {gib(memory)}{short}"

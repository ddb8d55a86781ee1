"""Chooses `plan.loss_pieces` and `plan.mlp_pieces` where they are `auto`: no more than let a step fit into memory.

Pieces of the head cost one product of it, whatever their number. That is less than what most recomputation costs. So
they come first, and what does not fit with them is left to `plan.recompute`. Pieces of dense MLPs cost as much as MLPs
that are recomputed, and each of them a pass over weight gradients in fp32 beside. They take less memory, so something
else need not be recomputed: the shortest step that fits wins, with what `plan.recompute` would choose for it.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.memory_choice import choose_recompute
from hocket.tune.trials import Predicted, Trials, fits, gib, memory_of

PIECES = (2, 4, 8, 16, 32, 64)
_WORTH = 0.98
"""Share of the bytes of a step below which pieces are worth taking where they do not make it fit."""
_FEW = 4
"""How many of these are tried for dense MLPs: more save little beside what a layer keeps."""
_LOSS, _MLP = "plan.loss_pieces", "plan.mlp_pieces"


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


def choose_mlp_pieces(c: Config, host: Host, trials: Trials) -> tuple[int, str]:
    memory, c = memory_of(c, host), changed(c, {_MLP: 1})
    if not memory:
        return 1, "how much memory a rank can use is not known"
    if "dense" not in c.model.kinds():
        return 1, "no layer has a dense MLP"
    if c.mesh.tp > 1 or c.precision.compute == "fp8":
        return 1, "MLPs in pieces have whole weights, and no products in fp8"
    if any(part.startswith("mlp") for part in (*c.plan.recompute, *c.plan.offload)):
        return 1, "dense MLPs are recomputed or offloaded"
    steps = {1: _with_recomputation(c, host, trials)}
    need = f"{gib(steps[1].nbytes)} of {gib(memory)} are needed without"
    if c.plan.recompute != ("auto",) and fits(steps[1].nbytes, memory):
        return 1, need
    if fits(trials.step(changed(c, {"plan.recompute": ()})).nbytes, memory):
        return 1, need
    steps |= {count: _with_recomputation(changed(c, {_MLP: count}), host, trials) for count in PIECES[:_FEW]}
    return _shortest(steps, memory, need)


def _with_recomputation(c: Config, host: Host, trials: Trials) -> Predicted:
    """A step with what `plan.recompute` does, or will do if it is open."""
    if c.plan.recompute == ("auto",):
        c = changed(c, {"plan.recompute": choose_recompute(c, host, trials)[0]})
    return trials.step(c)


def _shortest(steps: dict[int, Predicted], memory: int, need: str) -> tuple[int, str]:
    """The count with the shortest step that fits; if none does, one that needs least, where that is worth it."""
    fitting = [count for count, step in steps.items() if fits(step.nbytes, memory)]
    if fitting:
        best, short = min(fitting, key=lambda count: steps[count].seconds), ""
    else:
        least, short = min(step.nbytes for step in steps.values()), ", which does not suffice alone"
        best = next(n for n, step in steps.items() if step.nbytes <= least + (1 - _WORTH) * steps[1].nbytes)
    if best == 1:
        return 1, need + (", and pieces take more time" if fitting else ", of which what dense MLPs make is little")
    return best, f"{gib(steps[best].nbytes)} instead of {gib(steps[1].nbytes)}, of {gib(memory)}{short}"

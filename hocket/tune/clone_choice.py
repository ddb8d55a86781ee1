"""Chooses `overlap.ep.clones` if it is `auto`: by how uneven ranks' rows are expected to be, and what clones cost.

Note: [How uneven rows are]
No cost model knows how a router will choose. Rows of experts are assumed to be spread as a lognormal number is, by
`SPREAD`, and to change by `DRIFT` from step to step. With that spread 16 ranks that own 128 experts lose a fifth of a
step to their fullest rank, about what Megatron-LM's published steps of Qwen3-30B-A3B on 16 H100 lose to natural
routing (199 instead of 244 TFLOP/s). Clones are then chosen and rows divided as in a run (`program/cloning.py`).

Note: [What clones must gain]
Experts compute as long as the fullest rank needs. What clones take off that is their gain. Their exchanges count in
full against it, though most of them are hidden. Room for clones takes memory, so fewer clones win where more gain
little.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

from hocket.config import Config
from hocket.program.clone_ops import CLONED
from hocket.program.cloning import choose, fullest, loads_with
from hocket.program.ops import Op
from hocket.program.schedule import cost_key
from hocket.program.stages import layout_of
from hocket.settings.clone_rules import CLONE_RULES, CLONES, others
from hocket.settings.rule import Host
from hocket.settings.rules import has_experts, rule_text
from hocket.settings.schema import changed
from hocket.tune.trials import Trials, gib, memory_of
from hocket_trace.columns import duration

SPREAD, DRIFT = 0.5, 0.2
"""Standard deviations of the logarithm of an expert's rows: between experts, and from a step to the next."""
_DRAWS = 16
"""Layers that are drawn to know how uneven rows are."""
_ROWS = 100_000
"""Rows of a usual expert in a draw."""
_WORTH = 0.01
"""Share of a step that clones must save, and that more of them must save beside fewer."""


@lru_cache
def unevenness(experts: int, ranks: int, room: int) -> float:
    """Rows of the fullest rank over the mean, as expected with room for so many clones on each rank."""
    chance, found = random.Random(0), 0.0
    for _ in range(_DRAWS):
        before = [int(_ROWS * chance.lognormvariate(0, SPREAD)) for _ in range(experts)]
        now = [int(rows * chance.lognormvariate(0, DRIFT)) for rows in before]
        found += fullest(loads_with(now, choose(before, ranks, room), ranks)) / _DRAWS
    return found


def choose_clones(c: Config, host: Host, trials: Trials) -> tuple[int, str]:
    """How many clones each rank has room for, and why."""
    if not has_experts(c) or c.mesh.ep == 1:
        return 0, "all experts are on every rank"
    wanted = changed(c, {CLONES: 1})
    if broken := next((rule for rule in CLONE_RULES if rule.broken(wanted, host)), None):
        return 0, rule_text(broken.reason, wanted, host)
    plain = trials.step(c)
    experts, memory = _experts(c, trials, plain.microbatches), memory_of(c, host)
    uneven = unevenness(c.model.experts, c.mesh.ep, 0)
    best, saved, reason = 0, 0.0, ""
    for room in (n for n in (1, 2, 4) if n <= others(c)):
        step = trials.step(changed(c, {CLONES: room}))
        even = unevenness(c.model.experts, c.mesh.ep, room)
        cost = _exchanges(changed(c, {CLONES: room}), trials, plain.microbatches)
        gain = (uneven - even) * experts - cost
        words = (
            f"the fullest rank is expected to have {uneven:.2f} times the mean of rows, with {room} "
            f"clone{'s' * (room > 1)} on each rank {even:.2f}: that takes {duration((uneven - even) * experts)} off "
            f"{duration(float(plain.seconds))} of {plain.microbatches} microbatch{'es' * (plain.microbatches > 1)}, "
            f"for {duration(cost)} of exchanges"
        )
        if memory and plain.fits(memory) and not step.fits(memory):  # else recomputation makes room, chosen later
            reason = reason or f"{words}; it would need {gib(step.nbytes)} of {gib(memory)}"
            break
        if gain < saved + _WORTH * float(plain.seconds):
            reason = reason or f"{words}; that is little"
            break
        best, saved, reason = room, gain, words
    return best, reason


def _experts(c: Config, trials: Trials, microbatches: int) -> float:
    """Seconds in which experts compute, on the rank with most of them."""
    unit = layout_of(c).unit
    return _seconds(c, trials, microbatches, lambda op: op.lane == "compute" and unit(op.part) == CLONED)


def _exchanges(c: Config, trials: Trials, microbatches: int) -> float:
    """Seconds of the exchanges of clones."""
    return _seconds(c, trials, microbatches, lambda op: op.verb in ("clone", "home"))


def _seconds(c: Config, trials: Trials, microbatches: int, counts: Callable[[Op], bool]) -> float:
    """Seconds of a step's ops that count, on the rank with most."""
    program, table = trials.program(c, microbatches), trials.costs(c).table
    kinds = program.layout.kinds
    return max(
        sum(float(table[key].seconds) for op in ops if counts(op) and (key := cost_key(op, kinds)) in table)
        for ops in program.ranks
    )

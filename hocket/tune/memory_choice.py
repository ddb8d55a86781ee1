"""Chooses `plan.offload` and `plan.recompute` where they are `auto`.

Note: [As little recomputed as fits]
A forward that runs again costs time, and hides only all-to-alls that would be exposed. So nothing is recomputed if
everything fits. Otherwise hocket simulates sets of parts, and the shortest step that fits wins. If a set fits, adding
parts to it only takes more time. Recomputing all parts needs the least memory. Of each stage the first layers run
forward again, as few as fit: their backwards come last, when all other layers have given their memory back.

Note: [Offloaded where that is shorter]
What is offloaded takes no time of the compute lane as long as copies are hidden. So where both settings are open,
hocket simulates each part kept, offloaded or recomputed, and the shortest step that fits wins. A part that is offloaded
in that step is then offloaded in as few layers as fit, and what is recomputed beside it is chosen anew.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.program.hardware import hardware_of
from hocket.settings.derived import made_again, most_layers, named_parts
from hocket.settings.rule import Host
from hocket.settings.schema import changed, leaf
from hocket.tune.candidates import offloaded, recomputed
from hocket.tune.trials import Predicted, Trials, fits, gib, memory_of

Parts = tuple[str, ...]
"""A value of `plan.recompute` or `plan.offload`."""
_OFFLOAD, _RECOMPUTE = "plan.offload", "plan.recompute"


def choose_offload(c: Config, host: Host, trials: Trials) -> tuple[Parts, str]:
    memory = memory_of(c, host)
    if not memory:
        return (), f"how much memory a {hardware_of(c).name} rank can use is not known"
    if len(offloaded(c)) == 1:
        return (), "ranks compute in the host's memory"
    open_ = c.plan.recompute == ("auto",)
    c = changed(c, {_OFFLOAD: (), **({_RECOMPUTE: ()} if open_ else {})})
    without = trials.step(c)
    if fits(without.nbytes, memory):
        return (), f"{gib(without.nbytes)} of {gib(memory)} are needed without"
    ways = [
        way
        for again in (recomputed(c) if open_ else (c.plan.recompute,))
        for away in offloaded(c)
        if not made_again(way := changed(c, {_OFFLOAD: away, _RECOMPUTE: again}))
    ]
    best, step, fitting = _shortest(c, ways, memory, trials)
    away = best.plan.offload
    if not away:
        return (), "to recompute takes less time" if fitting else "nothing that is offloaded lets a step fit"
    if fitting:
        away, step = _in_fewest_layers(best, _OFFLOAD, step, memory, trials)
    beside = f", with {' '.join(best.plan.recompute)} recomputed" if open_ and best.plan.recompute else ""
    return away, _told(step, without, memory, fitting) + beside


def choose_recompute(c: Config, host: Host, trials: Trials) -> tuple[Parts, str]:
    memory = memory_of(c, host)
    if not memory:
        return (), f"how much memory a {hardware_of(c).name} rank can use is not known"
    c = changed(c, {_RECOMPUTE: ()})
    without = trials.step(c)
    if fits(without.nbytes, memory):
        return (), f"{gib(without.nbytes)} of {gib(memory)} are needed without"
    ways = [way for parts in recomputed(c)[1:] if not made_again(way := changed(c, {_RECOMPUTE: parts}))]
    if not ways:
        return (), "all parts that could be are offloaded"
    best, step, fitting = _shortest(c, ways, memory, trials)
    parts = best.plan.recompute
    if fitting:
        parts, step = _in_fewest_layers(best, _RECOMPUTE, step, memory, trials)
    return parts, _told(step, without, memory, fitting)


def _shortest(c: Config, ways: list[Config], memory: int, trials: Trials) -> tuple[Config, Predicted, bool]:
    """Of configurations, smaller sets of parts first: the shortest step that fits, and whether any does.

    If none fits, it is the one that needs least, of those that do most. What fits with fewer parts is not tried with
    more.
    """
    steps = {way: trials.step(way) for way in ways}
    fitting: list[Config] = []
    for way, step in steps.items():
        if not any(_does(fewer) < _does(way) for fewer in fitting) and step.fits(memory):
            fitting.append(way)
    if fitting:
        best = min(fitting, key=lambda way: steps[way].seconds)
    else:
        most = max(len(_does(way)) for way in ways)
        best = min((way for way in ways if len(_does(way)) == most), key=lambda way: steps[way].nbytes)
    return best, steps[best], bool(fitting)


def _does(way: Config) -> set[tuple[str, str]]:
    """(setting, part) of what is not kept."""
    return {(setting, part) for setting in (_OFFLOAD, _RECOMPUTE) for part in named_parts(leaf(way, setting))}


def _told(step: Predicted, without: Predicted, memory: int, fitting: bool) -> str:
    longer = step.seconds / without.seconds - 1
    short = "" if fitting else "; that is the least, and does not fit either"
    need = f"{gib(step.nbytes)} instead of {gib(without.nbytes)}, of {gib(memory)}"
    return f"{need}, for {longer:.1%} more time{short}"


def _in_fewest_layers(c: Config, setting: str, step: Predicted, memory: int, trials: Trials) -> tuple[Parts, Predicted]:
    """The setting's parts in as few layers of each stage as fit, and that step. Fewer layers need more memory."""
    parts: Parts = leaf(c, setting)
    too_few, enough, found = 0, most_layers(c), parts
    while enough - too_few > 1:
        count = (too_few + enough) // 2
        fewer = tuple(f"{part}:{count}" for part in parts)
        tried = trials.step(changed(c, {setting: fewer}))
        if tried.fits(memory):
            enough, found, step = count, fewer, tried
        else:
            too_few = count
    return found, step

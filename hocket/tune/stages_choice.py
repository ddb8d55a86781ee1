"""How `plan.layers_per_stage` is chosen where it is `auto`: by what layers, embedding and head cost, if that pays.

Note: [The rank with the head]
A head over a large vocabulary takes as long as several layers. With even stages the rank that has it takes longest for
every microbatch, and all others wait. So layers go from there to ranks that have time, one by one: `balance.py`.
Ranks that take more layers hold more weights and activations, also the first rank, which holds most. Where the
last split of that way does not fit into memory, the one before it is tried, and so on; even stages are its first.
In merged steps uneven stages leave layers without a partner, whose all-to-alls nothing hides. So a small gain is asked
of the simulator.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed, show
from hocket.settings.rule import Host
from hocket.tune.balance import longest_rank, towards_balance
from hocket.tune.trials import Predicted, Trials, gib, memory_of

Split = tuple[int, ...]
"""Layers of every virtual stage."""

_WORTH, _PLAIN = 0.01, 0.05
"""Share of the longest rank's time that uneven stages must save, and that which needs no simulation."""


def choose_stages(c: Config, host: Host, trials: Trials) -> tuple[Split, str]:
    """The split that is nearest to balance and fits, and what it brings."""
    if c.mesh.pp == 1:
        return (), ""  # whoever asks for no pipeline asks for no stages
    memory, layout, costs, too_large = memory_of(c, host), layout_of(c), trials.costs(c), ""
    splits = towards_balance(layout, costs)
    if len(splits) == 1:
        return (), "moving a layer would make no rank's work shorter"
    before = longest_rank(layout, costs, splits[0])
    for split in reversed(splits[1:]):
        after = longest_rank(layout, costs, split)
        times = f"the longest rank computes {duration(after)} a microbatch instead of {duration(before)}"
        if after > (1 - _WORTH) * before:
            return (), f"uneven stages bring little: {times}{too_large}"
        step = _step(c, split, trials)
        count = step.microbatches
        if after > (1 - _PLAIN) * before:
            usual = trials.seconds(c, count)
            times += f", and {count} microbatches take {duration(step.seconds)} instead of {duration(usual)}"
            if step.seconds > (1 - _WORTH) * usual:
                return (), f"uneven stages bring nothing: {times}{too_large}"
        if not memory or step.fits(memory) or step.nbytes <= _step(c, (), trials).nbytes:
            return split, f"embedding and head take as long as layers; so {times}{too_large}"
        too_large = too_large or f"; {show(split)} would need {gib(step.nbytes)} of {gib(memory)}"
    return (), f"no uneven stages fit into memory{too_large}"


def _step(c: Config, split: Split, trials: Trials) -> Predicted:
    return trials.step(changed(c, {"plan.layers_per_stage": split}))

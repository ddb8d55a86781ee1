"""How `overlap.ep.merge_ends` is chosen where it is `auto`: by a rule if that will do, else by two simulated steps.

Note: [One microbatch is not halved]
A single microbatch has nothing to merge with. Its two halves along the batch would do, but they are two microbatches:
the auxiliary loss is a product of two averages over a microbatch, so that of halves is another loss, and what the
sum of gradients rounds to changes too. Behind the user's back a plan changes neither. So it is said, where nothing is
merged for that reason, that twice as many microbatches of half as many sequences are the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.config import Config, Switch
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import group_of, has_pairs
from hocket.settings.predicted import Trials, enough_microbatches, gib, memory_of
from hocket.settings.rule import Host
from hocket.settings.rules import has_experts

_BOTH: tuple[Switch, ...] = ("off", "on")


def choose_ends(c: Config, host: Host, trials: Trials) -> Iterator[tuple[str, str, str]]:
    """Setting, value and reason, if it is open in a configuration that is sound otherwise."""
    if c.overlap.ep.merge_ends == "auto":
        idle = _nothing_to_gain(c)
        value, reason = ("off", idle) if idle else _simulated(c, host, trials)
        yield "overlap.ep.merge_ends", value, reason


def _nothing_to_gain(c: Config) -> str:
    """Why pairs at the ends cannot help, without a simulation; empty if they may."""
    if c.overlap.ep.merge == "off":
        return "nothing is merged"
    if not has_experts(c) or c.mesh.ep == 1:
        return "there is no expert all-to-all to hide"
    if c.plan.order == "merged_v":
        return "the order merged_v has none"
    if not has_pairs(c):
        return "no two microbatches follow each other on one chunk"
    enough = 2 * c.mesh.pp  # see Note: [Pairs at the ends]
    if c.mesh.pp > 1 and (c.plan.chunks == 1 or group_of(c) < enough):
        possible = c.plan.chunks > 1 and c.train.microbatches >= enough
        bearable = f"; plan.group = {enough} or more would leave time for that" if possible else ""
        return f"two forwards at once come to the next rank a step later{bearable}"
    return ""


def _simulated(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    off, on = (changed(c, {"overlap.ep.merge_ends": ends}) for ends in _BOTH)
    count = enough_microbatches(c)
    usual, merged = (trials.seconds(each, count) for each in (off, on))
    before, after = duration(usual), duration(merged)
    if merged >= usual:
        return "off", f"{count} microbatches would take {after} instead of {before}"
    memory = memory_of(c, host)
    if memory and not (step := trials.step(on)).fits(memory):
        return "off", f"one more activation in flight, {gib(step.nbytes)} of {gib(memory)} in all, does not fit"
    return (
        "on",
        f"hides the all-to-alls at the start and the end: {count} microbatches take {after} instead of {before}",
    )

"""How `plan.layer_order` is chosen where it is `auto`: by a model of one merged layer step, then by simulation.

The literature's order hides all-to-alls that are shorter than the compute beside each of them. Where some are longer,
all orders are compared on the model of `layer_orders.py`, and whole steps of a few microbatches with those that it
finds fastest.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.plan.layer import MERGED, spelt
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import few_microbatches, separate_wgrads
from hocket.settings.rule import Host
from hocket.tune.layer_orders import all_orders, layer_seconds, step_seconds
from hocket.tune.trials import Trials

USUAL = "literature"
_SETTING = "plan.layer_order"
_WORTH = 0.99
"""Share of a step's time to which another order must bring it."""
_TRIED = 3
"""Orders of which whole steps are simulated."""


def choose_layer_order(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    """The order, and why. There is nothing to say where nothing is merged."""
    if c.overlap.ep.merge != "on" or separate_wgrads(c):
        return USUAL, ""
    layout = layout_of(c)
    seconds = layer_seconds(trials.costs(c), layout)
    if not seconds or c.overlap.defer_wgrad == "off":
        return USUAL, ""
    layers = max(len(layout.layers(rank, chunk)) for rank in range(layout.pp) for chunk in range(layout.chunks))
    usual = step_seconds(spelt(MERGED[USUAL]).split(), seconds, layers)
    compute = layers * sum(value for word, value in seconds.items() if word[0] not in "dc")
    if usual <= compute / _WORTH:
        return USUAL, "all-to-alls have compute beside them that is long enough"
    fastest = sorted(all_orders(), key=lambda order: (step_seconds(order, seconds, layers), order))[:_TRIED]
    named = sorted(MERGED, key=lambda name: step_seconds(spelt(MERGED[name]).split(), seconds, layers))
    count = few_microbatches(c)
    texts = dict.fromkeys((USUAL, named[0], *map(" ".join, fastest)))
    steps = {text: trials.seconds(changed(c, {_SETTING: text}), count) for text in texts}
    best, before = min(steps, key=lambda text: steps[text]), steps[USUAL]
    if steps[best] > _WORTH * before:
        return USUAL, f"all-to-alls are long, but no other order makes {count} microbatches shorter by 1% or more"
    times = f"{count} microbatches take {duration(steps[best])} instead of {duration(before)}"
    return best, f"all-to-alls are long: {times}"

"""What waits for a gradient from the next pipeline rank, where that is `auto`; and what a longer stride would buy."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.config import Config
from hocket.plan.hops import smallest_cover, stride_price
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.decision import Choice
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import few_microbatches, group_of, lane_matters, nothing_to_put_behind
from hocket.settings.rule import Host
from hocket.tune.trials import Trials, memory_of


def choose_lane(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    if c.mesh.pp == 1:
        return "off", "with one pipeline rank nothing is sent"
    if lane_matters(c):
        return "on", "the forward half of a merged step starts before the gradient for its backward half is there"
    return "on", "it makes no difference here: every step begins with the op that reads its gradient"


def stride_remark(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """What a stride of 3 would buy, and its price, where weight gradients hide less than half of the hop.

    `c` has nothing open.
    """
    if c.mesh.pp == 1 or c.overlap.ep.merge != "on" or c.plan.stride != 2 or c.plan.turning:
        return
    costs, layers, parts = trials.costs(c), c.overlap.pp.defer_layers, c.overlap.pp.defer_parts
    assert layers != "auto", "chosen before"
    assert parts != "auto", "chosen before"
    cover = smallest_cover(layout_of(c), costs, (0 if nothing_to_put_behind(c) else layers,), (parts,))
    price = stride_price(layout_of(c), c.train.microbatches, group_of(c), costs)
    if 2 * cover.exposed <= cover.hop or price is None:
        return
    wide, memory = changed(c, {"plan.stride": 3, "plan.group": price.group}), memory_of(c, host)
    if memory and not trials.step(wide).may_fit(memory):
        return
    count = max(few_microbatches(c), price.group)
    before, after = (trials.seconds(each, count) for each in (c, wide))
    if after < before:
        reason = (
            f"{duration(cover.exposed)} of each hop stay exposed; with plan.stride = 3 and plan.group = {price.group}, "
            f"{count} microbatches would take {duration(after)} instead of {duration(before)}, for {price.chunks} more "
            f"chunk activations in flight, {price.nbytes / 2**30:.2f} GiB"
        )
        yield "plan.stride", 2, reason

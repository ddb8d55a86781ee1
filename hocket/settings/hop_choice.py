"""How the three settings of pipeline sends are chosen where they are `auto`, and what else could be had for memory.

Note: [What hides a hop may uncover something else]
A weight gradient behind the send no longer runs beside the all-to-all that it stood beside. On the other hand, what
stands behind the send delays nobody: the more of it, the sooner a gradient comes through the pipeline, and the shorter
is the bubble. So the fewest weight gradients that cover the hop are only one proposal; none, as few as possible and all
are the others. All four are simulated, and the shortest step wins; of equal ones that which moves least. A few
microbatches show it: the steady state repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.config import Config
from hocket.plan.cost import CostTable
from hocket.plan.hops import Cover, Parts, smallest_cover, stride_price
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.plan_rules import few_microbatches, group_of, lane_matters, separate_wgrads
from hocket.settings.predicted import Trials

Choice = tuple[str, object, str]
"""Setting, value, reason."""

_LAYERS, _PARTS, _LANE = "overlap.pp.defer_layers", "overlap.pp.defer_parts", "overlap.pp.backward_lane"
_WORTH = 0.998
"""Share of a step's time that more weight gradients behind the send must bring it to."""


def choose_hops(c: Config, trials: Trials) -> Iterator[Choice]:
    """The settings of pipeline sends that are open in a configuration that is sound otherwise."""
    if c.overlap.pp.backward_lane == "auto":
        yield _LANE, *_lane(c)
    layers_open, parts_open = c.overlap.pp.defer_layers == "auto", c.overlap.pp.defer_parts == "auto"
    if not (layers_open or parts_open):
        return
    idle = nothing_to_put_behind(c)
    if idle:
        yield from ((_LAYERS, 0, idle),) if layers_open else ()
        yield from ((_PARTS, "attn", idle),) if parts_open else ()
        return
    cover, reason = _best(c, trials)
    if layers_open:
        yield _LAYERS, cover.layers, reason
    if parts_open:
        yield _PARTS, cover.parts, f"goes with {_LAYERS}" if layers_open else reason


def stride_remark(c: Config, trials: Trials) -> Iterator[Choice]:
    """What a stride of 3 would buy, and its price, where weight gradients hide less than half of the hop.

    `c` has nothing open.
    """
    if c.mesh.pp == 1 or c.overlap.ep.merge != "on" or c.plan.stride != 2 or c.plan.turning:
        return
    costs = trials.costs(c)
    cover = smallest_cover(layout_of(c), costs, *_set(c))
    price = stride_price(layout_of(c), c.train.microbatches, group_of(c), costs)
    if 2 * cover.exposed <= cover.hop or price is None:
        return
    count = few_microbatches(changed(c, {"plan.group": price.group}))
    wide = changed(c, {"plan.stride": 3, "plan.group": price.group})
    before, after = (trials.seconds(each, count) for each in (c, wide))
    if after < before:
        reason = (
            f"{duration(cover.exposed)} of each hop stay exposed; with plan.stride = 3 and plan.group = {price.group}, "
            f"{count} microbatches would take {duration(after)} instead of {duration(before)}, for {price.chunks} more "
            f"chunk activations in flight, {price.nbytes / 2**30:.2f} GiB"
        )
        yield "plan.stride", 2, reason


def _set(c: Config) -> tuple[tuple[int], tuple[Parts]]:
    """The numbers of layers and the parts whose weight gradients are behind sends, where nothing is open."""
    layers, parts = c.overlap.pp.defer_layers, c.overlap.pp.defer_parts
    assert layers != "auto", "settings of sends are chosen before"
    assert parts != "auto", "settings of sends are chosen before"
    return (0 if nothing_to_put_behind(c) else layers,), (parts,)


def nothing_to_put_behind(c: Config) -> str:
    """Why no weight gradient runs behind a send for the send's sake; empty if some can."""
    if c.mesh.pp == 1:
        return "with one pipeline rank nothing is sent"
    if c.overlap.defer_wgrad == "off":
        return "weight gradients are not deferred (overlap.defer_wgrad = off)"
    if separate_wgrads(c):
        return f"in the order {c.plan.order} all weight gradients have steps of their own"
    if c.overlap.pp.defer_layers == 0:
        return "overlap.pp.defer_layers = 0 moves none"
    return ""


def _covers(c: Config, costs: CostTable) -> list[Cover]:
    """What may be put behind sends: nothing, little, as much as hides the hop, and all. Equal ones once."""
    layers, parts = c.overlap.pp.defer_layers, c.overlap.pp.defer_parts
    kinds: tuple[Parts, ...] = ("attn", "all") if parts == "auto" else (parts,)
    if nothing_to_put_behind(c):
        layers = 0
    layout = layout_of(c)
    uncovers = c.overlap.ep.merge == "on" and parts == "auto"  # who asks for parts asks for some
    least = 0 if uncovers else 1
    counts = ((least,), (1,), (), (-1,)) if layers == "auto" else ((layers,),) * 4
    choices = zip(counts, (kinds[:1], kinds[:1], kinds, kinds[-1:]), strict=True)
    *few, enough, everything = (smallest_cover(layout, costs, numbers, some) for numbers, some in choices)
    found = list(dict.fromkeys((*few, enough)))
    return found + ([everything] if everything.seconds > enough.seconds else [])


def _best(c: Config, trials: Trials) -> tuple[Cover, str]:
    """See Note: [What hides a hop may uncover something else]."""
    covers = _covers(c, trials.costs(c))
    if len(covers) == 1:
        return covers[0], _describe(covers[0])
    times = [_step(c, trials, cover) for cover in covers]
    best = 0
    for i, seconds in enumerate(times):
        best = i if seconds < _WORTH * times[best] else best
    count = few_microbatches(c)
    others = ", ".join(f"with {_name(covers[i])} {duration(times[i])}" for i in range(len(covers)) if i != best)
    return covers[best], f"{_describe(covers[best])}; {count} microbatches take {duration(times[best])}, {others}"


def _step(c: Config, trials: Trials, cover: Cover) -> float:
    """Predicted seconds of a step of a few microbatches."""
    covered = changed(c, {_LAYERS: cover.layers, _PARTS: cover.parts})
    return trials.seconds(covered, few_microbatches(c))


def _lane(c: Config) -> tuple[str, str]:
    if c.mesh.pp == 1:
        return "off", "with one pipeline rank nothing is sent"
    if lane_matters(c):
        return "on", "the forward half of a merged step starts before the gradient for its backward half is there"
    return "on", "it makes no difference here: every step begins with the op that reads its gradient"


def _describe(cover: Cover) -> str:
    if cover.layers == 0:
        return f"nothing behind a send; a gradient's hop takes {duration(cover.hop)}"
    return f"{_name(cover)} take {duration(cover.seconds)}, a gradient's hop {duration(cover.hop)}"


def _name(cover: Cover) -> str:
    if cover.layers == 0:
        return "no weight gradients"
    what = "weight gradients" if cover.parts == "all" else "attention's weight gradients"
    count = "all layers" if cover.layers < 0 else f"{cover.layers} layer{'s' if cover.layers > 1 else ''}"
    return f"{what} of {count}"

"""Chooses which weight gradients wait, and whether the ends of a merged order are merged, if that is `auto`.

Both are one choice. Weight gradients can wait until after sends (`overlap.pp.defer_layers`). Those of
the head can wait until the end of a step (`overlap.pp.defer_head`). `overlap.ep.merge_ends` makes pairs of the passes
that run alone at both ends.

Note: [What hides a p2p transfer may uncover something else]
A weight gradient that runs after the send no longer runs beside the all-to-all that it hid before. On the other hand,
ops after the send delay no other rank. The more weight gradients are there, the sooner a gradient comes through the
pipeline, and the shorter is the bubble. So the fewest weight gradients that cover the p2p transfer are only one
proposal. The others are none, as few as possible, and all.

Note: [The end of a step]
The rank of the head computes one product more than the others, and is done before them: it sends its last gradient, and
they still have to pass it on. If weight gradients of the head wait until then, the work that all ranks wait for gets
shorter, until the other ranks are done as early as that rank. More late weight gradients lengthen the step again. So
the search looks for the number that leaves that rank no time of waiting. Each late weight gradient keeps the logits'
gradients of a microbatch, so memory may allow fewer.

Note: [Each is worth what the others leave]
Pairs pass their results on one step later. This costs least if all weight gradients run after sends. The number of the
head's weight gradients that fit at the end depends on both. Choosing one after the other has cost up to 3 % of a step.
So the proposals are compared again, each with the number of late weight gradients of the head that suits the best of
them, until no proposal is better. Then the best proposal, and the one with all weight gradients after sends, are
compared with pairs. Of equal steps the one that moves least wins. A few microbatches are enough for these comparisons,
because the steady state repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hocket.config import Config, Switch
from hocket.program.cost import CostTable
from hocket.program.hardware import hardware_of
from hocket.program.ops import Op
from hocket.program.p2p import Cover, Parts, smallest_cover
from hocket.program.simulate import quiet_end
from hocket.program.stages import layout_of
from hocket.settings.decision import Choice
from hocket.settings.derived import (
    few_microbatches,
    group_of,
    has_experts,
    has_pairs,
    nothing_to_put_behind,
    separate_wgrads,
)
from hocket.settings.rule import Host
from hocket.settings.schema import changed, leaf
from hocket.sizes import duration
from hocket.tune.held import at_most
from hocket.tune.trials import Predicted, Trials, gib, memory_of, room

DEFERRAL = "overlap.ep.merge_ends", "overlap.pp.defer_layers", "overlap.pp.defer_head"
_ENDS, _LAYERS, _HEADS = DEFERRAL
_WORTH = 0.998
"""Share of a step's time to which more weight gradients behind the send, or pairs, must bring it."""
_WORTH_LATE = 0.995
"""The same of the head's weight gradients, which take memory."""
_EQUAL = 1.0005
"""By how much longer a step is that lasts as long."""


@dataclass(frozen=True)
class _Way:
    """One combination. What the user set is the same in all of them."""

    ends: Switch
    cover: Cover
    heads: int = 0


def choose_deferral(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """The three settings, of which at least one is open."""
    search = _Search(c, trials)
    best, ends_reason = _with_room(c, host, search)
    heads, heads_reason = _late_heads(c, host, search, best)
    if heads != best.heads:
        best = search.beside(best, heads)
    yield _ENDS, best.ends, _no_pairs(c) or ends_reason
    idle = nothing_to_put_behind(c)
    yield _LAYERS, 0 if idle else best.cover.setting, idle or search.cover_reason(best)
    yield _HEADS, heads, heads_reason


def _no_pairs(c: Config) -> str:
    """Why pairs at the ends cannot help, without a simulation; empty if they may."""
    if c.overlap.ep.merge == "off":
        return "nothing is merged"
    if not has_experts(c) or c.mesh.ep == 1:
        return "there is no expert all-to-all to hide"
    if c.mesh.cp > 1:
        return "they have no order for ranks that share sequences"
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


def _no_late_heads(c: Config) -> str:
    if c.mesh.pp == 1:
        return "the only pipeline rank waits for no other at the end"
    if c.overlap.defer_wgrad == "off":
        return "weight gradients are not deferred (overlap.defer_wgrad = off)"
    if c.model.tied and c.plan.turning:
        return "a gradient of the tied head would wait for that of the embedding, on the same rank"
    return ""


def _covers(c: Config, costs: CostTable) -> list[Cover]:
    """What may be put behind sends: nothing, little, as much as hides the p2p transfer, and all. Equal ones once."""
    if nothing_to_put_behind(c):
        return [Cover(0, "attn", 0.0, 0.0)]
    layout = layout_of(c)
    if c.overlap.pp.defer_layers != "auto":
        layers, parts = c.overlap.pp.late
        return [smallest_cover(layout, costs, (layers,), (parts,))]
    kinds: tuple[Parts, ...] = ("attn", "all")
    least = 0 if c.overlap.ep.merge == "on" else 1
    choices = zip(((least,), (1,), (), (-1,)), (kinds[:1], kinds[:1], kinds, kinds[-1:]), strict=True)
    *few, enough, everything = (smallest_cover(layout, costs, numbers, some) for numbers, some in choices)
    found = list(dict.fromkeys((*few, enough)))
    return found + ([everything] if everything.seconds > enough.seconds else [])


class _Search:
    """The ways that are compared, by their times. See Note: [Each is worth what the others leave]."""

    def __init__(self, c: Config, trials: Trials) -> None:
        self.count = few_microbatches(c)
        self._config, self._trials, self._costs = c, trials, trials.costs(c)
        self._rank, _ = layout_of(c).owner(layout_of(c).stages - 1)
        self._covers = _covers(c, self._costs)
        given = c.overlap.ep.merge_ends
        self.ends: tuple[Switch, ...] = (given,) if given != "auto" else ("off",) if _no_pairs(c) else ("off", "on")
        self._open_heads = c.overlap.pp.defer_head == "auto" and not _no_late_heads(c)
        self._tried: dict[_Way, dict[int, float]] = {}
        self._seconds: dict[_Way, float] = {}

    def config(self, way: _Way) -> Config:
        """The configuration that a way stands for."""
        values = {_ENDS: way.ends, _LAYERS: way.cover.setting, _HEADS: way.heads}
        return changed(self._config, {name: v for name, v in values.items() if leaf(self._config, name) == "auto"})

    def seconds(self, way: _Way) -> float:
        """Predicted seconds of a step of a few microbatches."""
        if way not in self._seconds:
            self._seconds[way] = self._trials.seconds(self.config(way), self.count)
        return self._seconds[way]

    def quiet(self, way: _Way) -> float:
        """For how long the rank of the head has nothing to compute at the end, while others have."""
        config = self.config(way)
        program, ends = self._trials.program(config, self.count), self._trials.times(config, self.count)[1]
        return float(quiet_end(program, ends, self._rank))

    def step(self, way: _Way) -> Predicted:
        """The step of a way, with its memory."""
        return self._trials.step(self.config(way))

    def best(self, ends: Switch, covers: Sequence[Cover] = ()) -> _Way:
        """The shortest step with or without pairs, by descent; `covers` are those to choose from, by default all."""
        covers = covers or self._covers
        if len(covers) == 1 and not self._open_heads:
            return _Way(ends, covers[0])
        found: list[_Way] = []
        heads = 0
        for _ in covers:
            cover = self._best_cover(ends, covers, heads)
            if found and cover == found[-1].cover:
                break
            heads = self._suiting(_Way(ends, cover)) if self._open_heads else 0
            found.append(_Way(ends, cover, heads))
        return min(found, key=self.seconds)

    def _best_cover(self, ends: Switch, covers: Sequence[Cover], heads: int) -> Cover:
        """That of the shortest step; of about equal ones that which moves least."""
        best, *others = (_Way(ends, cover, heads) for cover in covers)
        for way in others:
            best = way if self.seconds(way) < _WORTH * self.seconds(best) else best
        return best.cover

    def beside(self, way: _Way, heads: int) -> _Way:
        """The best for another number of the head's, which memory asks for."""
        return replace(way, heads=heads, cover=self._best_cover(way.ends, self._covers, heads))

    def covers_of_pairs(self, plain: _Way) -> list[Cover]:
        """What to try with pairs: what is best without, and all."""
        return list(dict.fromkeys((plain.cover, self._covers[-1])))

    def tried(self, way: _Way) -> dict[int, float]:
        """Numbers of the head's weight gradients that were tried, 0 first, and what a step would take with them."""
        return self._tried[replace(way, heads=0)]

    def _suiting(self, way: _Way) -> int:
        """How many of the head's make the step shortest. See Note: [The end of a step]."""
        tried, quiet = {0: self.seconds(way)}, {0: self.quiet(way)}
        one = float(self._costs.seconds(self._rank, Op("wgrad", "head")))
        least, most = 0, min(self.count, math.ceil(quiet[0] / one)) + 1 if one and quiet[0] > 0 else 1
        heads = most - 1
        while least < heads < most:
            some = replace(way, heads=heads)
            tried[heads], quiet[heads] = self.seconds(some), self.quiet(some)
            least, most = (heads, most) if quiet[heads] > 0 else (least, heads)
            early, late = quiet[least], quiet.get(most, 0.0)
            heads = least + max(1, int((most - least) * early / (early - late)))
        self._tried[way] = tried
        best = _fewest(tried)
        while len(tried) > 1 and best < self.count and best + 1 not in tried:
            tried[best + 1] = self.seconds(replace(way, heads=best + 1))
            best = _fewest(tried)
        return best if tried[best] <= _WORTH_LATE * tried[0] else 0

    def fitting(self, way: _Way, memory: int) -> int:
        """How many of its late weight gradients leave a step that fits into so many bytes, 0 for any; 0: none does."""
        each = self._costs.saved_bytes(self._rank, Op("bwd", "head"))
        if not memory or not each:
            return way.heads
        config = self.config(way)
        program, beside = self._trials.program(config, self.count), self._trials.beside(config, self.count)
        bounded = not separate_wgrads(config)
        if bounded and at_most(program, self._costs, self._rank, way.heads) + beside <= memory:
            return way.heads
        missing = self._trials.peak(config, self.count, self._rank) + beside - memory
        return way.heads if missing <= 0 else max(0, way.heads - math.ceil(missing / each))

    def cover_reason(self, way: _Way) -> str:
        """Why so much is behind sends."""
        described = _describe(way.cover)
        if len(self._covers) == 1:
            return described
        compared = [other for cover in self._covers if (other := replace(way, cover=cover)) in self._seconds]
        others = [f"with {_name(other.cover)} {duration(self._seconds[other])}" for other in compared if other != way]
        return f"{described}; {self.count} microbatches take {', '.join([duration(self.seconds(way)), *others])}"


def _with_room(c: Config, host: Host, search: _Search) -> tuple[_Way, str]:
    """The best way, with pairs if they fit into memory; and why with or without them."""
    plain = search.best(search.ends[0])
    if len(search.ends) == 1:
        return plain, ""
    paired = search.best(search.ends[1], search.covers_of_pairs(plain))
    before, after = search.seconds(plain), search.seconds(paired)
    times = f"{duration(after)} instead of {duration(before)}"
    if after >= _WORTH * before:
        return plain, f"{search.count} microbatches would take {times}"
    memory, step = memory_of(c, host), search.step(replace(paired, heads=0))
    if memory and not step.fits(memory):
        return plain, f"one more activation in flight, {gib(step.nbytes)} of {gib(memory)} in all, does not fit"
    return paired, f"hides the all-to-alls at the start and the end: {search.count} microbatches take {times}"


def _late_heads(c: Config, host: Host, search: _Search, way: _Way) -> tuple[int, str]:
    """How many of the head's weight gradients run at the end of a step that is settled otherwise, and why."""
    idle = _no_late_heads(c)
    if idle or leaf(c, _HEADS) != "auto":
        return 0, idle
    count, (before, *others) = search.count, search.tried(way).values()
    if not others:
        return 0, "the rank of the head computes until the end"
    if not way.heads:
        less = f": less than {1 - _WORTH_LATE:.1%} is not worth it" if min(others) <= before else ""
        return 0, f"{count} microbatches would take {duration(min(others))} instead of {duration(before)}{less}"
    fitting = search.fitting(way, room(memory_of(c, host)))
    if not fitting:
        return 0, f"what it keeps of a microbatch until the end does not fit into {hardware_of(c).name}"
    after = search.seconds(replace(way, heads=fitting))
    less = "" if fitting == way.heads else f"; for {way.heads}, for which there is time, there is no memory"
    return fitting, (
        f"its rank is done {duration(search.quiet(replace(way, heads=0)))} before the last: {count} microbatches take "
        f"{duration(after)} instead of {duration(before)}{less}"
    )


def _fewest(tried: dict[int, float]) -> int:
    """The number whose step is the shortest, the least of about equal ones."""
    return min(number for number, seconds in tried.items() if seconds <= _EQUAL * min(tried.values()))


def _describe(cover: Cover) -> str:
    if cover.layers == 0:
        return f"nothing behind a send; a gradient's p2p transfer takes {duration(cover.p2p)}"
    return f"{_name(cover)} take {duration(cover.seconds)}, a gradient's p2p transfer {duration(cover.p2p)}"


def _name(cover: Cover) -> str:
    if cover.layers == 0:
        return "no weight gradients"
    what = "weight gradients" if cover.parts == "all" else "attention's weight gradients"
    count = "all layers" if cover.layers < 0 else f"{cover.layers} layer{'s' if cover.layers > 1 else ''}"
    return f"{what} of {count}"

"""Chooses what is `auto` by the cost of steps: candidates, simulated under the memory of a rank, by one function.

Note: [The usual value wins ties]
`weigh` takes the shortest step that fits. Of steps of about the same time it takes the candidate that comes first,
which is the usual one, or the one that a key prefers. The simulation leaves out most of what hidden communication and
more kernels cost. So a gain below `WORTH` is no reason to do something unusual.

Note: [The strategy that moves least]
A rank that keeps weights and gradients whole gathers and reduces less: once a step, instead of in every microbatch.
Most of this communication is hidden in both cases. Steps then take the same time except for contention, which the
simulation leaves out. But hidden communication still takes SMs, power and memory bandwidth. So of steps of about the
same time the one that moves the fewest bytes wins. Of these the one that needs the least memory wins.

Note: [Updates that hide]
Updates in the next step run beside its first gathers, in the bubble at its start, and beside forwards. The simulator
does not slow these forwards down, but updates and forwards need the same SMs and the same memory bandwidth. So all time
in which a rank does both counts as lost. A step with about 2 % to hide by that count became 2.1 % shorter on copy
engines. On NCCL's kernels it became 0.8 % shorter, which is no more than noise there (two H200,
`benchmarks/results/updates.json`).

Note: [As little recomputed as fits]
A forward that runs again costs time, and hides only all-to-alls that would be exposed. So nothing is recomputed if
everything fits. Otherwise the shortest step that fits wins; if a set of parts fits, sets with more parts are not tried.
Of each stage the first layers run forward again, as few as fit: their backwards come last, when all other layers have
given their memory back. What is offloaded takes no time of the compute lane as long as copies are hidden. Where both
settings are open, each part is kept, offloaded or recomputed, and what is recomputed is then chosen anew. Pieces of the
head cost one product of it, whatever their number, which is less than what most recomputation costs: they come first.

Note: [What hides a p2p transfer may uncover something else]
A weight gradient that runs after the send no longer runs beside the all-to-all that it hid before. On the other hand,
ops after the send delay no other rank. The more weight gradients are there, the sooner a gradient comes through the
pipeline, and the shorter is the bubble. So the fewest weight gradients that cover the p2p transfer are only one
candidate. The others are none, as few as possible, and all.

Note: [The end of a step]
The rank of the head computes one product more than the others, and is done before them: it sends its last gradient, and
they still have to pass it on. If weight gradients of the head wait until then, the work that all ranks wait for gets
shorter, until the other ranks are done as early as that rank. More late weight gradients lengthen the step again. So
the search looks for the number that leaves that rank no time of waiting. Each late weight gradient keeps the logits'
gradients of a microbatch, so memory may allow fewer.

Note: [Each is worth what the others leave]
Pairs pass their results on one step later. This costs least if all weight gradients run after sends. The number of the
head's weight gradients that fit at the end depends on both. Choosing one after the other has cost up to 3 % of a step.
So covers are compared again with the number of late weight gradients that suits the best of them, until none is better.
Then the best cover, and the one with all weight gradients after sends, are compared with pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, get_args

from hocket.config import COPIED, Config, Strategy, Switch
from hocket.program.cost import CostTable
from hocket.program.hardware import LAPTOP, hardware_of
from hocket.program.ops import COMPUTING, Lane, Layout, Op, offloadable, recomputable
from hocket.program.p2p import Parts, smallest_cover
from hocket.program.part_sizes import copies_of, elements_sent
from hocket.program.simulate import quiet_end
from hocket.program.stages import gathered_units, layout_of
from hocket.program.transformer import GATHERED
from hocket.settings.decision import AUTOMATIC, Choice
from hocket.settings.derived import (
    group_of,
    has_experts,
    has_pairs,
    made_again,
    most_layers,
    named_parts,
    nothing_to_put_behind,
    recomputed_parts,
    separate_wgrads,
    shares_units,
)
from hocket.settings.overlap_rules import CONTEXT as METHOD
from hocket.settings.overlap_rules import HEADS_RULES
from hocket.settings.rule import Host
from hocket.settings.rules import rule_text
from hocket.settings.schema import changed, leaf, show
from hocket.sizes import duration
from hocket.tune.candidates import longest_rank, orders, towards_balance
from hocket.tune.trials import Predicted, Trials, gib, memory_of, room

WORTH = 0.01
"""Share of a step that a value must save to be chosen instead of one that comes before it."""
_FREE = 0.001
"""The same of what takes no memory and moves nothing: where weight gradients run."""
_LATE = 0.005
"""The same of the head's weight gradients, which take memory."""
_EQUAL = 1.0005
"""By how much longer a step is that lasts as long."""
_HIDDEN = 0.02
"""Share of a step that updates in the next one must hide. See Note: [Updates that hide]."""
_FEWER = 0.97
"""Largest share of the bytes left by one copy per rank at which it is worth its kernels."""
_COVERED = 0.6
"""Share of the compute of a merged layer step that its all-to-alls may take and still be hidden."""
_PLAIN = 0.05
"""A gain of this share of the longest rank's time is worth uneven stages without a simulation."""
_NEAR = 1.02
"""Of steps that do not fit, those within this factor of the least bytes count as needing the least."""

Changes = Mapping[str, Any]
"""Values of settings by dotted name."""
OPEN = (AUTOMATIC, "", (AUTOMATIC,))
"""Values that leave the choice of a setting to hocket."""


@dataclass(frozen=True)
class Weighed:
    """The candidate that was chosen, its step, and why."""

    way: Changes
    step: Predicted
    reason: str
    fits: bool


def weigh(
    c: Config,
    ways: Sequence[Changes],
    trials: Trials,
    memory: int = 0,
    worth: float = WORTH,
    lost: Callable[[Config], float] = lambda c: 0.0,
    prefer: Callable[[Predicted], float] = lambda step: 0.0,
) -> Weighed:
    """The best of the candidates, the usual one first: see Note: [The usual value wins ties].

    With `memory` those that fit come first; if none does, those that need no more than the usual one. `lost` are
    seconds to add to a step.
    """
    configs = [changed(c, way) for way in ways]
    steps = [trials.step(config) for config in configs]
    seconds = [step.seconds + lost(config) for step, config in zip(steps, configs, strict=True)]
    left, large, found = list(range(len(ways))), list[int](), -1

    def best(of: Sequence[int]) -> int:
        longest = min(seconds[n] for n in of) / (1 - worth)
        return min((n for n in of if seconds[n] <= longest), key=lambda n: (prefer(steps[n]), n))

    while left:
        found = best(left)
        if not memory or steps[found].fits(memory):
            break
        large.append(found)
        left.remove(found)
    else:
        found = best([n for n, step in enumerate(steps) if step.nbytes <= steps[0].nbytes])
    other = 0 if found else min(range(1, len(ways)), key=seconds.__getitem__, default=0)
    return Weighed(ways[found], steps[found], _told(ways, steps, seconds, found, other, large, memory), bool(left))


def _told(
    ways: Sequence[Changes],
    steps: Sequence[Predicted],
    seconds: Sequence[float],
    found: int,
    other: int,
    large: Sequence[int],
    memory: int,
) -> str:
    """The reason of a choice, of simulated times and bytes: beside the usual value, or the best of the others."""
    mine, usual, name = steps[found], steps[other], _name(ways[other], ways[found])
    text = f"{_microbatches(mine)} {duration(seconds[found])}"
    if found == other:
        return text
    if found:
        more = mine.nbytes - usual.nbytes if memory else 0
        told = f", {gib(abs(more))} {'more' if more > 0 else 'less'}" if abs(more) >= 2**30 else ""
        text += f" instead of {duration(seconds[other])} with {name}{told}"
    else:
        text += f", with {name} {duration(seconds[other])}"
    if found in large:
        return f"{text}; nothing fits, and this needs {gib(mine.nbytes)} of {gib(room(memory))}"
    return text + (_too_large(_name(ways[large[0]], ways[found]), steps[large[0]], memory) if large else "")


def _too_large(what: str, step: Predicted, memory: int) -> str:
    return f"; {what} does not fit: {gib(step.nbytes)} of {gib(room(memory))}"


def _microbatches(step: Predicted) -> str:
    return f"{step.microbatches} microbatches take" if step.microbatches > 1 else "1 microbatch takes"


def _name(way: Changes, beside: Changes) -> str:
    """What a candidate has that another one has not, in words."""
    return ", ".join(f"{name.split('.')[-1]} = {show(value)}" for name, value in way.items() if beside[name] != value)


Ways = tuple[Sequence[Any], str]
"""Values to try, the usual one first, and the reason if there is one alone."""


def _contexts(c: Config, h: Host, trials: Trials) -> Ways:
    if c.mesh.cp == 1:
        return ["gather"], ""
    if GATHERED in recomputed_parts(c):
        return ["gather"], f"plan.recompute = {show(c.plan.recompute)} means that keys and values are gathered"
    way = changed(c, {METHOD: "heads"})
    if broken := next((rule for rule in HEADS_RULES if rule.broken(way, h)), None):
        return ["gather"], f"heads cannot be exchanged: {rule_text(broken.reason, way, h)}"
    return ["gather", "heads"], ""


def _copies(c: Config, h: Host, trials: Trials) -> Ways:
    """One copy for each rank moves fewer bytes, but needs more kernels, whose launches the simulation leaves out.

    So it is for all-to-alls that compute does not cover: where nothing is merged, or where they take nearly as long.
    """
    if not has_experts(c) or c.mesh.ep == 1:
        return ["per_expert"], "all experts are on every rank, so nothing is sent"
    if c.overlap.ep.splits == "device":
        return ["per_expert"], "overlap.ep.splits = device places every choice's row"
    each, some = (copies_of(c.model, c.mesh.ep, way, c.element_bytes) for way in (False, True))
    share = elements_sent(c.model, some) / elements_sent(c.model, each)
    where = f"a token's {c.model.top_k} experts are on {some.count:.1f} of {c.mesh.ep} ranks on average"
    if share > _FEWER:
        return ["per_expert"], f"{where}, and what rows must say about them eats up what is saved"
    where = f"{where}: one copy for each is {1 - share:.0%} fewer bytes"
    if c.overlap.ep.merge != "on":
        return ["per_rank"], where
    exchanges, compute = seconds_of_experts(trials.costs(changed(c, {_COPIES: "per_expert"})), layout_of(c))
    beside = f"all-to-alls of a merged layer take {duration(exchanges)} beside {duration(compute)} of compute"
    return ["per_expert" if exchanges <= _COVERED * compute else "per_rank"], f"{where}; {beside}"


def seconds_of_experts(costs: CostTable, layout: Layout) -> tuple[float, float]:
    """(seconds of communication, seconds of compute) of a forward and backward of layers that exchange rows.

    One of each kind of these layers; of what only some of them recompute, the mean.
    """
    parts = [(kind.name, part) for kind in layout.layer_types if any(p.way for p in kind.parts) for part in kind.parts]
    seconds = {False: 0.0, True: 0.0}
    for kind, part in parts:
        for verb in ("fwd", "bwd", "wgrad", "recompute"):
            if cost := costs.table.get((verb, part.name, kind)):
                share = layout.recomputing(part.name, kind) / layout.kinds.count(kind) if verb == "recompute" else 1.0
                seconds[part.communicates] += share * float(cost.seconds)
    return seconds[True], seconds[False]


def _strategies(c: Config, h: Host, trials: Trials) -> Ways:
    """That which needs the least memory first."""
    least, *others = reversed(get_args(Strategy))
    if not shares_units(c):
        return [least], "with one data-parallel rank nothing is shared out"
    if not memory_of(c, h):
        return [least], f"how much memory a {hardware_of(c).name} rank can use is not known, and this needs the least"
    return [least, *others], ""


def _gathers(c: Config, h: Host, trials: Trials) -> Ways:
    if c.precision.compute != "fp8":
        return ["bf16"], ""
    if not gathered_units(c):
        return ["bf16"], "no weights are gathered"
    if not {"forward", "dgrad"} <= set(c.precision.fp8_products):
        return ["bf16"], "products that run in bf16 read the same weights"
    if c.overlap.dp.update == "next_step":
        return ["bf16"], "ranks agree on scales of rows behind the whole update (overlap.dp.update = next_step)"
    return ["fp8", "bf16"], ""


def _updates(c: Config, h: Host, trials: Trials) -> Ways:
    """See Note: [Updates that hide]."""
    reasons = {
        "on CPUs nothing runs beside an update": c.train.device != "cuda",
        "Muon beside forwards is not measured on GPUs yet; overlap.dp.update = next_step asks for it": (
            c.optimizer.name == "muon"
        ),
        "what is gathered in fp8 is cast behind the whole update": c.precision.gather == "fp8",
        "recorded steps with experts became at most 0.5% shorter by next_step (plan.graphs = on)": (
            c.plan.graphs == "on"
        ),
        "beside NCCL's kernels no more than noise was gained, unlike beside copies": c.train.transport not in COPIED,
    }
    reason = next((reason for reason, there in reasons.items() if there), "")
    return (["end"], reason) if reason else (["end", "next_step"], "")


def _beside(c: Config, trials: Trials) -> float:
    """Seconds in which a rank updates some weights while it computes with others, on the rank with the most of them."""
    if c.overlap.dp.update != "next_step":
        return 0.0
    count = trials.step(c).microbatches
    program, (starts, ends) = trials.program(c, count), trials.times(c, count)
    spans: list[dict[Lane, list[tuple[float, float]]]] = [{lane: [] for lane in COMPUTING} for _ in program.ranks]
    for number, (rank, _, op) in enumerate(program):
        if op.lane in COMPUTING:
            spans[rank][op.lane].append((float(starts[number]), float(ends[number])))
    most = 0.0
    for mine in spans:
        last = max((end for _, end in mine["update"]), default=0.0)
        compute = [span for span in mine["compute"] if span[0] < last]
        both = (min(b, d) - max(a, c) for a, b in mine["update"] for c, d in compute)
        most = max(most, sum(length for length in both if length > 0))
    return most


def _splits(c: Config, h: Host, trials: Trials) -> Ways:
    """Even stages, and the most balanced ones that fit, if the rank of a heavy head computes for a shorter time."""
    if c.mesh.pp == 1:
        return [()], ""  # without a pipeline there are no stages to choose
    memory, layout, costs, large = memory_of(c, h), layout_of(c), trials.costs(c), ""
    even, *splits = towards_balance(layout, costs)
    before = longest_rank(layout, costs, even)
    for split in reversed(splits):
        after = longest_rank(layout, costs, split)
        times = f"the longest rank computes {duration(after)} a microbatch instead of {duration(before)}{large}"
        if after > (1 - WORTH) * before:
            return [()], f"uneven stages bring little: {times}"
        step, plain = (trials.step(changed(c, {_STAGES: sizes})) for sizes in (split, ()))
        if not memory or step.fits(memory) or step.nbytes <= plain.nbytes:
            return [split] if after <= (1 - _PLAIN) * before else [(), split], times
        large = large or _too_large(show(split), step, memory)
    return [
        ()
    ], "no uneven stages fit into memory" + large if splits else "moving a layer would make no rank's work shorter"


def _orders(c: Config, h: Host, trials: Trials) -> Ways:
    """The literature's order hides every all-to-all that is shorter than the compute beside it; if some are longer,
    others may be better.
    """
    merged = c.overlap.ep.merge == "on" and not separate_wgrads(c) and c.overlap.defer_wgrad != "off"
    found = orders(trials.costs(c), layout_of(c), WORTH) if merged else []
    return found or [
        "literature"
    ], "all-to-alls have compute beside them that is long enough" if merged and not found else ""


class Knob(NamedTuple):
    """How a setting is chosen: its candidates, and what is special about weighing them."""

    setting: str
    ways: Callable[[Config, Host, Trials], Ways]
    worth: float = WORTH
    prefer: Callable[[Predicted], float] = lambda step: 0.0


_UPDATE, _STAGES, _COPIES = "overlap.dp.update", "plan.layers_per_stage", "overlap.ep.copies"
_OFFLOAD, _RECOMPUTE, _LOSS = "plan.offload", "plan.recompute", "plan.loss_pieces"
BEFORE: tuple[Knob, ...] = (
    Knob("overlap.cp.method", _contexts),
    Knob(_COPIES, _copies),
    Knob("overlap.dp.strategy", _strategies, prefer=lambda step: step.moved),
    Knob("precision.gather", _gathers, worth=0.0),
    Knob(_UPDATE, _updates),
    Knob(_STAGES, _splits),
)
BEHIND: tuple[Knob, ...] = (Knob("plan.layer_order", _orders),)
"""Knobs that are turned before memory is made room for, and those after that."""


def choices(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Every choice by cost that a sound configuration leaves open. Each finds what it builds on chosen before it."""
    for knobs, then in ((BEFORE, choose_room), (BEHIND, choose_deferral)):
        for knob in knobs:
            if leaf(c, knob.setting) in OPEN:
                value, reason = _turned(c, host, trials, knob)
                c = changed(c, {knob.setting: value})
                yield knob.setting, value, reason
        for choice in then(c, host, trials):
            setting, value, _ = choice
            c = changed(c, {setting: value})
            yield choice


def _turned(c: Config, host: Host, trials: Trials, knob: Knob) -> tuple[Any, str]:
    """The value of one setting, and why."""
    values, reason = knob.ways(c, host, trials)
    if len(values) == 1:
        return values[0], reason
    ways, memory, worth = [{knob.setting: value} for value in values], memory_of(c, host), knob.worth
    if knob.setting == _UPDATE:  # what is hidden is the same in a longer step
        step = trials.step(c)
        worth = _HIDDEN * c.train.microbatches / step.microbatches
        found = weigh(c, ways, trials, 0, min(worth, 0.99), lambda way: _beside(way, trials))
        return found.way[knob.setting], found.reason
    found = weigh(c, ways, trials, memory, worth, prefer=knob.prefer)
    return found.way[knob.setting], "; ".join(filter(None, [found.reason, reason]))


def recomputed(c: Config) -> list[tuple[str, ...]]:
    """Every set of parts, the smaller ones first."""
    return _sets(recomputable(c.model.kinds(), 1 if c.overlap.cp.method == "heads" else c.mesh.cp))


def offloaded(c: Config) -> list[tuple[str, ...]]:
    """The same for parts that the host's memory may keep: none where ranks compute in it."""
    return _sets(() if hardware_of(c).name == LAPTOP.name else offloadable(c.model.kinds()))


def _sets(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for count in range(len(parts) + 1) for some in combinations(parts, count)]


def choose_room(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Pieces of the loss, offloaded and recomputed parts: see Note: [As little recomputed as fits]."""
    for setting, values in ((_LOSS, _pieces), (_OFFLOAD, _away), (_RECOMPUTE, _again)):
        if leaf(c, setting) in OPEN:
            value, reason = _relieved(c, host, trials, setting, *values(c))
            c = changed(c, {setting: value})
            yield setting, value, reason


def _pieces(c: Config) -> tuple[list[Changes], str]:
    if c.mesh.tp > 1:
        return [{_LOSS: 1}], "each tensor-parallel rank has a part of the vocabulary"
    return [{_LOSS: count} for count in (1, 2, 4, 8, 16, 32, 64)], ""


def _away(c: Config) -> tuple[list[Changes], str]:
    again = recomputed(c) if c.plan.recompute in OPEN else [c.plan.recompute]
    ways = [{_OFFLOAD: away, _RECOMPUTE: some} for some in again for away in offloaded(c)]
    fewest = {_OFFLOAD: (), _RECOMPUTE: again[0]}
    if len(offloaded(c)) == 1:
        return [fewest], "ranks compute in the host's memory"
    return sorted((way for way in ways if not made_again(changed(c, way))), key=lambda way: len(_does(way))), ""


def _again(c: Config) -> tuple[list[Changes], str]:
    ways = [{_RECOMPUTE: parts} for parts in recomputed(c)]
    return [way for way in ways if not made_again(changed(c, way))], "all parts that could be are offloaded"


def _relieved(
    c: Config, host: Host, trials: Trials, setting: str, ways: Sequence[Changes], reason: str
) -> tuple[Any, str]:
    """The value of a setting that gives time for memory: none of it if a step fits without, else as little as fits."""
    memory, plain = memory_of(c, host), trials.step(changed(c, ways[0]))
    if not memory or len(ways) == 1:
        unknown = f"how much memory a {hardware_of(c).name} rank can use is not known"
        return ways[0][setting], reason if memory else unknown
    if plain.fits(memory):
        return ways[0][setting], f"{gib(plain.nbytes)} of {gib(room(memory))} are needed without"
    fitting = list[Changes]()
    for way in ways[1:]:
        within = any(_does(fewer) < _does(way) for fewer in fitting)
        if not within and trials.step(changed(c, way)).fits(memory):
            fitting.append(way)
    most = max(len(_does(way)) for way in ways)
    left = fitting or [way for way in ways if len(_does(way)) == most]
    if not fitting:
        held = [trials.step(changed(c, way)).nbytes for way in left]
        left = [way for way, nbytes in zip(left, held, strict=True) if nbytes <= _NEAR * min(held)]
    found = weigh(c, left, trials, worth=0.0)
    value, step = found.way[setting], found.step
    if fitting and isinstance(value, tuple) and value:
        count = _least(
            most_layers(c), lambda n: trials.step(changed(c, {**found.way, setting: _in(value, n)})).fits(memory)
        )
        value = _in(value, count) if count < most_layers(c) else value
        step = trials.step(changed(c, {**found.way, setting: value}))
    both = [plain, step]
    large = [0] if fitting else [0, 1]
    text = _told([ways[0], {**found.way, setting: value}], both, [s.seconds for s in both], 1, 0, large, memory)
    return value, text


def _in(parts: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Parts in so many layers of each stage."""
    return tuple(f"{part}:{count}" for part in parts)


def _does(way: Changes) -> set[tuple[str, Any]]:
    """(setting, part) of what is not kept."""
    return {(name, part) for name, parts in way.items() if isinstance(parts, tuple) for part in named_parts(parts)}


def _least(most: int, good: Callable[[int], bool]) -> int:
    """The least number from 1 that is good, where all larger ones are, and `most` is."""
    bad = 0
    while most - bad > 1:
        middle = (bad + most) // 2
        bad, most = (bad, middle) if good(middle) else (middle, most)
    return most


DEFERRAL = "overlap.ep.merge_ends", "overlap.pp.defer_layers", "overlap.pp.defer_head"
_ENDS, _LAYERS, _HEADS = DEFERRAL


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


def _covers(c: Config, trials: Trials) -> list[Changes]:
    """What may run after sends: nothing, little, as much as hides the p2p transfer, and all. Equal ones once."""
    if nothing_to_put_behind(c) or c.overlap.pp.defer_layers != AUTOMATIC:
        return [{_LAYERS: 0 if nothing_to_put_behind(c) else c.overlap.pp.defer_layers}]
    kinds: tuple[Parts, ...] = ("attn", "all")
    counts = ((0 if c.overlap.ep.merge == "on" else 1,), (1,), (), (-1,))
    some = zip(counts, (kinds[:1], kinds[:1], kinds, kinds[-1:]), strict=True)
    *few, every = (smallest_cover(layout_of(c), trials.costs(c), numbers, which) for numbers, which in some)
    found = dict.fromkeys((*few, *([every] if every.seconds > few[-1].seconds else [])))
    return [{_LAYERS: cover.setting} for cover in found]


def choose_deferral(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Which weight gradients wait, and whether the ends of a merged order are merged: one choice of three settings.

    See Note: [Each is worth what the others leave].
    """
    given = {name: leaf(c, name) for name in DEFERRAL if leaf(c, name) not in OPEN}
    if len(given) == len(DEFERRAL):
        return
    memory, covers, no_pairs, no_heads = memory_of(c, host), _covers(c, trials), _no_pairs(c), _no_late_heads(c)
    behind: dict[Switch, str] = {}
    ends_reason, fixed_heads = no_pairs, bool(no_heads) or _HEADS in given

    def best(ends: Switch, covers: Sequence[Changes], heads: int = given.get(_HEADS, 0)) -> Changes:
        """The shortest step with or without pairs, by descent."""
        found: list[Changes] = []
        for _ in covers:
            weighed = weigh(c, [{_ENDS: ends, **cover, _HEADS: heads} for cover in covers], trials, worth=_FREE)
            behind[ends] = weighed.reason
            if found and weighed.way[_LAYERS] == found[-1][_LAYERS]:
                break
            heads = heads if fixed_heads else _suiting(_late(c, trials, weighed.way))
            found.append({**weighed.way, _HEADS: heads})
        return min(found, key=lambda way: trials.step(changed(c, way)).seconds)

    way = best(given.get(_ENDS, "off"), covers)
    if not no_pairs and _ENDS not in given:
        paired = best("on", [cover for cover in covers if cover is covers[-1] or cover.items() <= way.items()])
        weighed = weigh(c, [way, paired], trials, worth=_FREE)
        ends_reason, step = weighed.reason, trials.step(changed(c, {**paired, _HEADS: given.get(_HEADS, 0)}))
        if weighed.way[_ENDS] == "on" and memory and not step.fits(memory):
            ends_reason += _too_large("one more activation in flight", step, memory)
        else:
            way = weighed.way
    heads_reason = no_heads
    if not fixed_heads:
        tried = _late(c, trials, {**way, _HEADS: 0})
        heads, heads_reason = _fitting(c, trials, way, room(memory)), "the rank of the head computes until the end"
        if heads < way[_HEADS]:
            heads_reason = f"; for {way[_HEADS]} late ones, for which there is time, there is no memory"
            way = weigh(c, [{**way, **cover, _HEADS: heads} for cover in covers], trials, worth=_FREE).way
        if len(tried) > 1:
            ways = [{**way, _HEADS: n} for n in (0, heads or min(sorted(tried)[1:], key=tried.__getitem__))]
            steps = [trials.step(changed(c, each)) for each in ways]
            text = _told(ways, steps, [s.seconds for s in steps], int(heads > 0), int(heads == 0), (), 0)
            heads_reason = text + (heads_reason if heads_reason.startswith(";") else "")
    idle = nothing_to_put_behind(c)
    yield _ENDS, way[_ENDS], ends_reason
    yield _LAYERS, way[_LAYERS], idle or behind[way[_ENDS]]
    yield _HEADS, way[_HEADS], heads_reason


def _fitting(c: Config, trials: Trials, way: Changes, space: int) -> int:
    """How many of a way's late weight gradients leave the rank of the head in so many bytes; 0 bytes: all."""
    heads, rank = way[_HEADS], layout_of(c).owner(layout_of(c).stages - 1)[0]

    def good(fewer: int) -> bool:
        config = changed(c, {**way, _HEADS: heads - fewer})
        count = trials.step(config).microbatches
        return trials.peak(config, count, rank) + trials.beside(config, count) <= space

    return heads if not heads or not space or good(0) else heads - _least(heads, good)


def _late(c: Config, trials: Trials, way: Changes) -> dict[int, float]:
    """Numbers of the head's weight gradients, and what a step takes with them: see Note: [The end of a step]."""
    rank, costs = layout_of(c).owner(layout_of(c).stages - 1)[0], trials.costs(c)
    tried, quiet = dict[int, float](), dict[int, float]()
    count = trials.step(changed(c, way)).microbatches

    def look(heads: int) -> None:
        config = changed(c, {**way, _HEADS: heads})
        ends = trials.times(config, count)[1]
        tried[heads], quiet[heads] = float(max(ends)), float(quiet_end(trials.program(config, count), ends, rank))

    look(0)
    one = float(costs.seconds(rank, Op("wgrad", "head")))
    least, most = 0, min(count, math.ceil(quiet[0] / one)) + 1 if one and quiet[0] > 0 else 1
    heads = most - 1
    while least < heads < most:
        look(heads)
        least, most = (heads, most) if quiet[heads] > 0 else (least, heads)
        early, late = quiet[least], quiet.get(most, 0.0)
        heads = least + max(1, int((most - least) * early / (early - late)))
    while len(tried) > 1 and (more := _fewest(tried) + 1) <= count and more not in tried:
        look(more)
    return tried


def _suiting(tried: Mapping[int, float]) -> int:
    """The number to take of those that were tried."""
    return best if tried[best := _fewest(tried)] <= (1 - _LATE) * tried[0] else 0


def _fewest(tried: Mapping[int, float]) -> int:
    """The number whose step is the shortest, the least of about equal ones."""
    return min(number for number, seconds in tried.items() if seconds <= _EQUAL * min(tried.values()))

"""Chooses `auto` settings by the cost of steps: candidates for each setting, all weighed by one function.

Costs outside of the simulation are rules of thumb with the candidates. Choices without simulation are in `rules.py`.

Note: [The strategy that moves least]
A rank that keeps weights and gradients whole gathers and reduces less: once a step, instead of in every microbatch.
Most of this communication is hidden in both cases. Steps then take the same time except for contention, which the
simulation leaves out. But hidden communication still takes SMs, power and memory bandwidth. So of steps of about the
same time the one that moves the fewest bytes wins. Of these the one that needs the least memory wins.

Note: [The rank with the head]
A head over a large vocabulary takes as long as several layers. With even stages the rank with the head takes longest
for every microbatch, and all other ranks wait. So `splits` moves layers one by one from that rank to ranks with less
work. Ranks that take more layers hold more weights and activations. This includes the first rank, which holds most. So
all splits on the way are candidates. In merged steps uneven stages leave layers without a partner, whose all-to-alls
nothing hides. So the simulator decides whether a gain is real.

Note: [Updates that hide]
Updates in the next step overlap its first gathers, the bubble at its start, and forwards. The simulator does not slow
these forwards down, but updates and forwards share SMs and memory bandwidth. So all time in which a rank does both
counts as lost. A step with about 2 % to hide by that count became 2.1 % shorter on copy engines. On NCCL's kernels it
became 0.8 % shorter, which is no more than noise there (two H200, `benchmarks/results/updates.json`).

Note: [As little recomputed as fits]
A forward that runs again costs time, and hides only all-to-alls that would be exposed. So nothing is recomputed if
everything fits. Otherwise the shortest step that fits wins; if a set of parts fits, sets with more parts are not tried.
Recomputation applies to the first layers of each stage, as few as fit: their backwards run last, when all other layers
have freed their memory. Offloading takes no time on the compute lane while its copies are hidden. If both settings are
open, each part is kept, offloaded or recomputed, and the recomputed parts are then chosen again. Pieces of the loss
cost one product of the head, for any number of pieces, less than most recomputation. So they are chosen first.

Note: [What a merged step waits for]
A rank sends the gradient of a chunk and, in the next step, needs one from its neighbour, which sent it at about the
same time. So each merged step is as long as its compute up to the send, plus the p2p transfer, unless compute is left
to do after the send: `exposed = max(0, p2p transfer - weight gradients after the send)`. Such weight gradients also
delay no other rank: a gradient passes through the pipeline sooner, and the bubble is shorter. On the other hand, they
keep their inputs for longer, and no longer overlap the all-to-all that they hid before. So simulations compare none, a
few, and all.

Note: [The end of a step]
The rank with the head computes one product more than the others, but finishes before them: it sends its last gradient,
and they still have to pass it on. If weight gradients of the head wait until then, the critical path gets shorter,
until the other ranks finish as early as that rank. More late weight gradients lengthen the step again. So all numbers
are simulated. Each late weight gradient keeps the logits' gradients of a microbatch, so memory may allow fewer.

Note: [Each is worth what the others leave]
Pairs pass their results on one step later. This costs least if all weight gradients run after sends. The number of the
head's weight gradients that fit at the end depends on both. Choosing one after the other has cost up to 3 % of a step.
So covers are compared again with the number of late weight gradients that suits the best of them, until none is better.
Then the best cover, and the one with all weight gradients after sends, are compared with pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, combinations, pairwise
from typing import Any, NamedTuple, get_args

from hocket.config import COPIED, Config, Strategy, Switch
from hocket.config.overlap import CONTEXT as CP_METHOD
from hocket.config.rule import Host, leaf, show
from hocket.config.schema import changed
from hocket.decision import AUTOMATIC, Choice
from hocket.predict.cost import CostTable
from hocket.predict.hardware import LAPTOP, hardware_of
from hocket.predict.part_sizes import copies_of, elements_sent
from hocket.predict.simulate import Costs
from hocket.program.ops import COMPUTING, Lane, Layout, Op, Verb, offloadable, recomputable
from hocket.program.stages import layout_of
from hocket.program.transformer import GATHERED
from hocket.rules import (
    group_of,
    most_layers,
    named_parts,
    refusal,
)
from hocket.sizes import duration
from hocket.tune.rules import graphs_that_pay, transport_that_fits
from hocket.tune.trials import WORTH, Changes, Predicted, Trials, explain, fits, gib, memory_of, room, too_large, weigh

_FREE = 0.001
"""Share of a step that a choice without memory or traffic must save: when weight gradients run."""
_LATE = 0.005
"""The same for late weight gradients of the head, which take memory."""
_EQUAL = 1.0005
"""Steps within this factor count as equally long."""
_HIDDEN = 0.02
"""Share of a step that updates in the next one must hide. See Note: [Updates that hide]."""
_FEWER = 0.97
"""Largest ratio of bytes at which one copy per rank pays for its additional kernels."""
_COVERED = 0.6
"""Share of a merged layer's compute up to which its all-to-alls are hidden."""
_CLEAR = 0.05
"""A gain of this share of the longest rank's time justifies uneven stages, whatever short steps show."""

OPEN = (AUTOMATIC, "", (AUTOMATIC,))
"""Values that leave the choice of a setting to hocket."""

Candidates = tuple[Sequence[Any], str]
"""Values to try, the usual one first, and a reason if only one is left. Values that a rule refuses are dropped."""


def _contexts(c: Config, h: Host, trials: Trials) -> Candidates:
    if GATHERED in named_parts(c.plan.recompute):
        return ["gather"], f"plan.recompute = {show(c.plan.recompute)} means that keys and values are gathered"
    return ["gather", "heads"], ""


def _copies(c: Config, h: Host, trials: Trials) -> Candidates:
    """One copy per rank moves fewer bytes, but needs more kernels, whose launches the simulation leaves out.

    So it is chosen for all-to-alls that compute does not cover: nothing is merged, or they take nearly as long.
    """
    if refusal(c, h, {_COPIES: "per_rank"}) is not None:
        return ["per_expert", "per_rank"], ""
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
    """(seconds of communication, seconds of compute) of a forward and backward of MoE layers.

    One layer of each kind is counted; parts that only some of them recompute count by their share.
    """
    parts = [(kind.name, part) for kind in layout.layer_types if any(p.way for p in kind.parts) for part in kind.parts]
    seconds = {False: 0.0, True: 0.0}
    for kind, part in parts:
        for verb in ("fwd", "bwd", "wgrad", "recompute"):
            if cost := costs.table.get((verb, part.name, kind)):
                share = layout.recomputing(part.name, kind) / layout.kinds.count(kind) if verb == "recompute" else 1.0
                seconds[part.communicates] += share * float(cost.seconds)
    return seconds[True], seconds[False]


def _strategies(c: Config, h: Host, trials: Trials) -> Candidates:
    """The strategy that needs the least memory comes first."""
    least, *others = reversed(get_args(Strategy))
    if not memory_of(c, h):
        return [least], f"how much memory a {hardware_of(c).name} rank can use is not known, and this needs the least"
    return [least, *others], ""


def _updates(c: Config, h: Host, trials: Trials) -> Candidates:
    """See Note: [Updates that hide]."""
    reasons = {
        "on CPUs nothing runs beside an update": c.train.device != "cuda",
        "Muon beside forwards is not measured on GPUs yet; overlap.dp.update = next_step asks for it": (
            c.optimizer.name == "muon"
        ),
        "what is gathered in fp8 is cast after the whole update": c.precision.gather == "fp8",
        "recorded steps with experts became at most 0.5% shorter by next_step (plan.graphs = on)": (
            c.plan.graphs == "on"
        ),
        "beside NCCL's kernels no more than noise was gained, unlike beside copies": c.train.transport not in COPIED,
    }
    if reason := next((reason for reason, there in reasons.items() if there), ""):
        return ["end"], reason
    later, step = changed(c, {_UPDATE: "next_step"}), trials.step(c)
    hidden = step.seconds - trials.step(later).seconds - contended_seconds(later, trials)
    whole = step.seconds * c.train.microbatches / step.microbatches
    value = "next_step" if hidden >= _HIDDEN * whole else "end"
    return [value], f"updates in the next step hide {duration(max(0.0, hidden))} of {duration(whole)}"


def contended_seconds(c: Config, trials: Trials) -> float:
    """Seconds in which a rank updates some weights while it computes with others; the largest of all ranks."""
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


Sizes = tuple[int, ...]
"""Number of layers per virtual stage."""


def splits(layout: Layout, costs: Costs) -> list[tuple[Sizes, float]]:
    """Splits of layers over virtual stages, each with the compute time per microbatch of its longest rank.

    The layout's own split is first, then the split after each layer that moves. A layer moves from the longest stage
    of the longest rank, mostly the stage with the head, to the first stage of the shortest rank, while this makes
    the longest rank shorter. In an interleaved order the backward of the last stage and the forward of the first stage
    overlap, so together they may take as long as two other stages.
    """
    owners = [layout.owner(stage)[0] for stage in range(layout.stages)]
    fewest = [0, *[1] * (layout.stages - 2), 0] if layout.stages > 1 else [1]
    sizes = tuple(hi - lo for lo, hi in pairwise(layout.bounds))
    stages, ranks = stage_seconds(layout, costs, sizes)
    found = [(sizes, max(ranks))]
    while True:
        longest, taker = ranks.index(max(ranks)), owners.index(ranks.index(min(ranks)))
        donors = [s for s, owner in enumerate(owners) if owner == longest and sizes[s] > fewest[s]]
        if not donors:
            return found
        donor = max(donors, key=stages.__getitem__)
        sizes = tuple(size + (stage == taker) - (stage == donor) for stage, size in enumerate(sizes))
        stages, ranks = stage_seconds(layout, costs, sizes)
        if max(ranks) >= found[-1][1]:
            return found
        found.append((sizes, max(ranks)))


def balanced(layout: Layout, costs: Costs) -> Sizes:
    """The split that balances the compute time of all ranks best."""
    return splits(layout, costs)[-1][0]


def stage_seconds(layout: Layout, costs: Costs, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Compute time per microbatch of stages and of ranks, for the given layers per stage."""
    layout = replace(layout, bounds=tuple(accumulate(sizes, initial=0)))

    @cache
    def seconds(part: str, kind: int, *verbs: Verb) -> float:
        return sum(float(costs.of(Op(verb, part, 0, 0, kind)).seconds) for verb in verbs)

    alike = {kind: layout.kinds.index(kind) for kind in layout.kinds}  # all layers of a kind cost the same
    stages, ranks = list[float](), [0.0] * layout.pp
    for stage, (start, stop) in enumerate(pairwise(layout.bounds)):
        took = seconds("embed", -1, "fwd", "bwd", "wgrad") if stage == 0 else 0.0
        for layer in range(start, stop):
            for part in layout.type_of(layer).parts:
                if not part.communicates:
                    took += seconds(part.name, alike[layout.kinds[layer]], "fwd", "bwd", "wgrad")
            for name in layout.forward_parts(layer):
                took += seconds(name, alike[layout.kinds[layer]], "recompute") if layout.recomputes(name, layer) else 0
        took += seconds("head", -1, "fwd", "bwd", "wgrad") if stage == layout.stages - 1 else 0.0
        stages.append(took)
        ranks[layout.owner(stage)[0]] += took
    return stages, ranks


def _splits(c: Config, h: Host, trials: Trials) -> Candidates:
    """Even stages, and the most balanced split that fits, if it shortens the compute of the longest rank.

    Short steps show less of a gain than whole ones, so a large gain excludes even stages.
    """
    if c.mesh.pp == 1:
        return [()], ""  # without a pipeline there are no stages to choose
    memory, plain, large = memory_of(c, h), trials.step(changed(c, {_STAGES: ()})), ""
    (_, before), *others = splits(layout_of(c), trials.costs(c))
    for sizes, after in reversed(others):
        times = f"the longest rank computes {duration(after)} a microbatch instead of {duration(before)}{large}"
        if after > (1 - WORTH) * before:
            return [()], f"uneven stages bring little: {times}"
        step = trials.step(changed(c, {_STAGES: sizes}))
        if not memory or step.fits(memory) or step.nbytes <= plain.nbytes:
            return [sizes] if after <= (1 - _CLEAR) * before else [(), sizes], times
        large = large or too_large(show(sizes), step, memory)
    reason = (
        f"no uneven stages fit into memory{large}" if others else "moving a layer would make no rank's work shorter"
    )
    return [()], reason


class Knob(NamedTuple):
    """How a setting is chosen: its candidates, and how they are weighed."""

    setting: str
    ways: Callable[[Config, Host, Trials], Candidates]
    worth: float = WORTH
    prefer: Callable[[Predicted], float] = lambda step: 0.0

    def choose(self, c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
        """The choice, if it is open."""
        if leaf(c, self.setting) not in OPEN:
            return
        values, reason = self.ways(c, host, trials)
        refusals = [refusal(c, host, {self.setting: value}) for value in values]
        values = [value for value, why in zip(values, refusals, strict=True) if why is None]
        reason = reason or "; ".join(filter(None, refusals))
        if len(values) > 1:
            ways = [{self.setting: value} for value in values]
            way, why = weigh(c, ways, trials, memory_of(c, host), self.worth, self.prefer)
            values, reason = [way[self.setting]], "; ".join(filter(None, [why, reason]))
        yield self.setting, values[0], reason


_UPDATE, _COPIES, _STAGES = "overlap.dp.update", "overlap.ep.copies", "plan.layers_per_stage"
_OFFLOAD, _RECOMPUTE, _LOSS = "plan.offload", "plan.recompute", "plan.loss_pieces"
KNOBS: tuple[Knob, ...] = (
    Knob(CP_METHOD, _contexts),
    Knob(_COPIES, _copies),
    Knob("overlap.dp.strategy", _strategies, prefer=lambda step: step.moved),
    Knob("precision.gather", lambda c, h, trials: (["fp8", "bf16"], ""), worth=0.0),
    Knob(_UPDATE, _updates),
    Knob(_STAGES, _splits),
)
"""Settings that are chosen before `choose_room` makes room in memory."""


def choices(c: Config, host: Host, trials: Trials, made: Collection[str]) -> Iterator[Choice]:
    """Every choice by cost that a valid configuration leaves open. Later choices build on earlier ones.

    `made` are the open settings that rules have already chosen; choices by cost override them.
    """
    by_rules = (partial(transport_that_fits, open_=made), partial(graphs_that_pay, open_=made))
    by_cost = (*(knob.choose for knob in KNOBS), choose_room, choose_deferral)
    for choose in (*by_rules, *by_cost):
        for choice in choose(c, host, trials):
            if choice[0] in made or leaf(c, choice[0]) in OPEN:
                c = changed(c, {choice[0]: choice[1]})
            yield choice


def part_sets(c: Config, setting: str) -> list[tuple[str, ...]]:
    """Every set of parts that may be recomputed, or offloaded, the smaller ones first."""
    if setting == _RECOMPUTE:
        parts = recomputable(c.model.kinds(), 1 if c.overlap.cp.method == "heads" else c.mesh.cp)
    else:  # CPU ranks compute in host memory, so offloading frees none
        parts = () if hardware_of(c).name == LAPTOP.name else offloadable(c.model.kinds())
    return list(chain.from_iterable(combinations(parts, count) for count in range(len(parts) + 1)))


def choose_room(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Pieces of the loss, offloaded and recomputed parts: see Note: [As little recomputed as fits]."""
    for setting in (_LOSS, _OFFLOAD, _RECOMPUTE):
        if leaf(c, setting) in OPEN:
            value, reason = _choose_relief(c, host, trials, setting, _reliefs(c, setting))
            c = changed(c, {setting: value})
            yield setting, value, reason


def _reliefs(c: Config, setting: str) -> list[Changes]:
    """Candidates that trade time for memory, the one without any first. Recomputed parts that are open are included."""
    if setting == _LOSS:
        return [{_LOSS: count} for count in (1, 2, 4, 8, 16, 32, 64)]
    if setting == _RECOMPUTE:
        return [{_RECOMPUTE: parts} for parts in part_sets(c, _RECOMPUTE)]
    again = part_sets(c, _RECOMPUTE) if c.plan.recompute in OPEN else [c.plan.recompute]
    ways: list[Changes] = [{_OFFLOAD: some, _RECOMPUTE: parts} for parts in again for some in part_sets(c, _OFFLOAD)]
    return sorted(ways, key=lambda way: len(_freed(way)))


def _choose_relief(c: Config, host: Host, trials: Trials, setting: str, ways: list[Changes]) -> tuple[Any, str]:
    """The value of a setting that trades time for memory: none if the step fits without, else as little as fits."""
    memory, plain = memory_of(c, host), trials.step(changed(c, ways[0]))
    if not memory:
        return ways[0][setting], f"how much memory a {hardware_of(c).name} rank can use is not known"
    if plain.fits(memory):
        return ways[0][setting], f"{gib(plain.nbytes)} of {gib(room(memory))} are needed without"
    refusals = [refusal(c, host, way) for way in ways[1:]]
    ways = [ways[0], *(way for way, why in zip(ways[1:], refusals, strict=True) if why is None)]
    if len(ways) == 1:
        return ways[0][setting], next(filter(None, refusals), "nothing can be kept elsewhere")
    fitting = list[Changes]()
    for way in ways[1:]:
        more = any(_freed(fewer) < _freed(way) for fewer in fitting)
        if not more and trials.step(changed(c, way)).fits(memory):
            fitting.append(way)
    most = max(len(_freed(way)) for way in ways)
    way, why = weigh(c, [ways[0], *(fitting or (w for w in ways[1:] if len(_freed(w)) == most))], trials, memory, 0.0)
    value, layers = way[setting], most_layers(c)
    if way is ways[0]:
        return value, why

    def some(count: int) -> Changes:
        """The parts in `count` layers of each stage."""
        return {**way, setting: tuple(f"{part}:{count}" for part in value)}

    if fitting and isinstance(value, tuple) and value:
        count = _least(layers, lambda n: trials.step(changed(c, some(n))).fits(memory))
        value = some(count)[setting] if count < layers else value
    ways = [ways[0], {**way, setting: value}]
    steps = [plain, trials.step(changed(c, ways[1]))]
    return value, explain(ways, steps, 1, [0] if fitting else [0, 1], memory)


def _freed(way: Changes) -> set[tuple[str, Any]]:
    """(setting, part) of parts that are recomputed or offloaded."""
    return {(name, part) for name, parts in way.items() if isinstance(parts, tuple) for part in named_parts(parts)}


def _least(most: int, good: Callable[[int], bool]) -> int:
    """The smallest good number from 1 to `most`, if goodness is monotonic and `most` is good."""
    bad = 0
    while most - bad > 1:
        middle = (bad + most) // 2
        bad, most = (bad, middle) if good(middle) else (middle, most)
    return most


_ENDS, _LAYERS, _HEADS = "overlap.ep.merge_ends", "overlap.pp.defer_layers", "overlap.pp.defer_head"
DEFERRAL: dict[str, tuple[Any, Any]] = {_ENDS: ("off", "on"), _LAYERS: (0, -1), _HEADS: (0, -1)}
"""Settings of deferral -> their smallest and largest value."""


def _no_pairs(c: Config) -> str | None:
    """Why pairs at the ends cannot help, found without a simulation; None if they may."""
    if not c.rows_travel:
        return "there is no expert all-to-all to hide"
    enough = 2 * c.mesh.pp  # see Note: [Pairs at the ends]
    if c.mesh.pp > 1 and (c.plan.chunks == 1 or group_of(c) < enough):
        possible = c.plan.chunks > 1 and c.train.microbatches >= enough
        bearable = f"; plan.group = {enough} or more would leave time for that" if possible else ""
        return f"two forwards at once come to the next rank a step later{bearable}"
    return None


def choose_deferral(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Which weight gradients are deferred, and whether the ends of a merged order are merged: three settings at once.

    See Note: [Each is worth what the others leave].
    """
    given = {name: leaf(c, name) for name in DEFERRAL if leaf(c, name) not in OPEN}
    if len(given) == len(DEFERRAL):
        return
    refused = {name: refusal(c, host, {name: most}) for name, (_, most) in DEFERRAL.items() if name not in given}
    if refused.get(_ENDS, "") is None:
        refused[_ENDS] = _no_pairs(c)
    refused = {name: why for name, why in refused.items() if why is not None}
    given |= {name: DEFERRAL[name][0] for name in refused}
    # A backward alone always runs its first part after the send. As many layers as a stage has are the same as all.
    whole = (layers for layers in (1, 2) if layers < most_layers(c))
    late = (*((0,) if c.overlap.ep.merge == "on" else ()), "attn:1", "attn:2", -1, *whole)
    covers = [{_LAYERS: layers} for layers in ((given[_LAYERS],) if _LAYERS in given else late)]
    memory, reasons = memory_of(c, host), {_ENDS: "", _HEADS: "the rank of the head computes until the end"}

    def deferred(ends: Switch, covers: Sequence[Changes]) -> tuple[Changes, str]:
        """The shortest step with or without pairs, by coordinate descent, and the reason for its cover."""
        heads, found = given.get(_HEADS, 0), list[tuple[Changes, str]]()
        for _ in covers:
            way, why = weigh(c, [{_ENDS: ends, **cover, _HEADS: heads} for cover in covers], trials, worth=_FREE)
            if found and way[_LAYERS] == found[-1][0][_LAYERS]:
                break
            heads = given[_HEADS] if _HEADS in given else fewest_late(_late(c, trials, way))
            found.append(({**way, _HEADS: heads}, why))
        return min(found, key=lambda each: trials.step(changed(c, each[0])).seconds)

    way, reasons[_LAYERS] = deferred(given.get(_ENDS, "off"), covers)
    if _ENDS not in given:
        paired, why = deferred(
            "on", [cover for cover in covers if cover[_LAYERS] == -1 or cover.items() <= way.items()]
        )
        better, reasons[_ENDS] = weigh(c, [way, paired], trials, worth=_FREE)
        step = trials.step(changed(c, {**paired, _HEADS: given.get(_HEADS, 0)}))
        if better is paired and memory and not step.fits(memory):
            reasons[_ENDS] += too_large("one more activation in flight", step, memory)
        elif better is paired:
            way, reasons[_LAYERS] = paired, why
    if _HEADS not in given:
        tried, wanted = _late(c, trials, {**way, _HEADS: 0}), way[_HEADS]
        rank = layout_of(c).owner(layout_of(c).stages - 1)[0]

        def fit(heads: int) -> bool:
            """Whether so many leave enough memory on the rank with the head."""
            return not memory or fits(trials.step(changed(c, {**way, _HEADS: heads})).peak(rank), memory)

        heads = wanted if not wanted or fit(wanted) else _least(wanted, lambda n: not fit(n)) - 1
        if heads < wanted:
            way, _ = weigh(c, [{**way, **cover, _HEADS: heads} for cover in covers], trials, worth=_FREE)
        if len(tried) > 1:
            ways = [{**way, _HEADS: n} for n in (0, heads or min(sorted(tried)[1:], key=tried.__getitem__))]
            steps = [trials.step(changed(c, each)) for each in ways]
            reasons[_HEADS] = explain(ways, steps, int(heads > 0), (), 0)
        if heads < wanted:
            reasons[_HEADS] += f"; for {wanted} late ones, for which there is time, there is no memory"
    yield from ((name, way[name], refused.get(name, reasons[name])) for name in DEFERRAL)


def _late(c: Config, trials: Trials, way: Changes) -> dict[int, float]:
    """Numbers of late weight gradients of the head -> seconds of the step: see Note: [The end of a step]."""
    count, tried = trials.step(changed(c, way)).microbatches, dict[int, float]()

    def seconds(heads: int) -> float:
        return tried.setdefault(heads, trials.step(changed(c, {**way, _HEADS: heads})).seconds)

    best = min((0, *(2**n for n in range(count.bit_length())), count), key=seconds)
    while near := [heads for heads in (best - 1, best + 1) if 0 <= heads <= count and heads not in tried]:
        best = min((best, *near), key=seconds)
    return tried


def fewest_late(tried: Mapping[int, float]) -> int:
    """The smallest number with about the shortest step; 0 if the gain is small."""
    found = min(number for number, seconds in tried.items() if seconds <= _EQUAL * min(tried.values()))
    return found if tried[found] <= (1 - _LATE) * tried[0] else 0

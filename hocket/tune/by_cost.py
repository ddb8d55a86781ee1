"""Chooses settings that are `auto` by the cost of steps: by candidates, simulations of a few microbatches, and a
reason.

Note: [Copies for each rank]
One copy for each rank moves fewer bytes. It needs more kernels, and their launches cost the host time. So hocket
chooses it for all-to-alls that compute does not cover: if no layers are merged, or if the all-to-alls take nearly as
long as the compute beside them.

Note: [The strategy that moves least]
A rank that keeps weights and gradients whole gathers and reduces less: once a step, instead of in every microbatch.
Most of this communication is hidden in both cases. Steps then take the same time except for contention, which the
simulation leaves out. But hidden communication still takes SMs, power and memory bandwidth. So of steps of about the
same time the one that moves the fewest bytes wins. Of these the one that needs the least memory wins.

Note: [Updates that hide]
Both kinds of updates are simulated. Updates in the next step run beside its first gathers, in the bubble at its start,
and beside forwards. The simulator does not slow these forwards down, but updates and forwards need the same SMs and the
same memory bandwidth. So all time in which a rank does both counts as lost.

A step with about 2 % to hide by that count became 2.1 % shorter on copy engines. On NCCL's kernels it became 0.8 %
shorter, which is no more than noise there (two H200, `benchmarks/results/updates.json`).

Note: [The rank with the head]
A head over a large vocabulary takes as long as several layers. With even stages the rank of the head takes longest for
every microbatch, and all other ranks wait. So `balance.py` moves layers one by one from that rank to ranks with less
work. Ranks that take more layers hold more weights and activations. This includes the first rank, which holds most. If
the last split does not fit into memory, hocket tries the split before it, and so on down to even stages.
In merged steps uneven stages leave layers without a partner, and nothing hides the all-to-alls of such layers. So the
simulator decides whether a small gain is real.

Note: [Another order of parts]
The literature's order hides every all-to-all that is shorter than the compute beside it. If some are longer, hocket
compares all orders on the model of `layer_orders.py`. Then it simulates steps of a few microbatches with the orders
that the model finds fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from hocket.config import COPIED, Config, Strategy, Update
from hocket.program.cost import CostTable
from hocket.program.hardware import hardware_of
from hocket.program.layer import MERGED, spelt
from hocket.program.ops import COMPUTING, Lane, Layout, Program
from hocket.program.p2p import smallest_cover, stride_price
from hocket.program.part_sizes import copies_of, elements_sent
from hocket.program.simulate import Time
from hocket.program.stages import carried_by, gathered_units, layout_of
from hocket.program.transformer import GATHERED
from hocket.settings.decision import Choice
from hocket.settings.derived import (
    few_microbatches,
    group_of,
    has_experts,
    nothing_to_put_behind,
    recomputed_parts,
    separate_wgrads,
    shares_units,
)
from hocket.settings.overlap_rules import CONTEXT as METHOD
from hocket.settings.overlap_rules import HEADS_RULES
from hocket.settings.rule import Host
from hocket.settings.rules import rule_text
from hocket.settings.schema import changed, show
from hocket.sizes import duration
from hocket.tune.balance import longest_rank, towards_balance
from hocket.tune.layer_orders import all_orders, layer_seconds, step_seconds
from hocket.tune.trials import Predicted, Trials, enough_microbatches, gib, memory_of

STRATEGY, UPDATE, LAYER_ORDER = "overlap.dp.strategy", "overlap.dp.update", "plan.layer_order"
GATHER = "precision.gather"
WORTH = 0.01
"""Share of a step that a value must save for hocket to choose it instead of the usual value."""

_FEWER = 0.97
"""Largest share of the bytes left by one copy per rank at which it is worth its kernels."""
_COVERED = 0.6
"""Share of the compute of a merged layer step that its all-to-alls may take and still be hidden."""


def choose_copies(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    if not has_experts(c) or c.mesh.ep == 1:
        return "per_expert", "all experts are on every rank, so nothing is sent"
    if c.overlap.ep.splits == "device":
        return "per_expert", "overlap.ep.splits = device places every choice's row"
    per_expert, per_rank = (copies_of(c.model, c.mesh.ep, way, c.element_bytes) for way in (False, True))
    before, after = elements_sent(c.model, per_expert), elements_sent(c.model, per_rank)
    where = f"a token's {c.model.top_k} experts are on {per_rank.count:.1f} of {c.mesh.ep} ranks on average"
    if after > _FEWER * before:
        return "per_expert", f"{where}, and what rows must say about them eats up what is saved"
    fewer = f"{where}: one copy for each is {1 - after / before:.0%} fewer bytes"
    exchanges, compute = seconds_of_experts(trials.costs(changed(c, {"overlap.ep.copies": "per_expert"})), layout_of(c))
    if c.overlap.ep.merge != "on":
        return "per_rank", fewer
    beside = f"all-to-alls of a merged layer take {duration(exchanges)} beside {duration(compute)} of compute"
    if exchanges <= _COVERED * compute:
        return "per_expert", f"{beside}, so they are hidden; {fewer}, but more kernels"
    return "per_rank", f"{beside}; {fewer}"


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


def choose_context(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    if c.mesh.cp == 1:
        return "gather", ""
    if GATHERED in recomputed_parts(c):
        return "gather", f"plan.recompute = {show(c.plan.recompute)} means that keys and values are gathered"
    way = changed(c, {METHOD: "heads"})
    if broken := next((rule for rule in HEADS_RULES if rule.broken(way, host)), None):
        return "gather", f"heads cannot be exchanged: {rule_text(broken.reason, way, host)}"
    gather, heads, memory = trials.step(changed(c, {METHOD: "gather"})), trials.step(way), memory_of(c, host)
    count = f"{gather.microbatches} microbatches take" if gather.microbatches > 1 else "1 microbatch takes"
    times = f"{count} {duration(gather.seconds)} with gather and {duration(heads.seconds)} with heads"
    if heads.seconds > (1 - WORTH) * gather.seconds:
        return "gather", times
    if memory and not heads.fits(memory) and gather.fits(memory):
        return "gather", f"{times}; heads would need {gib(heads.nbytes)} of {gib(memory)}"
    return "heads", times


_LEAST: Strategy = "optim_grads_params"
"""The strategy that needs the least memory."""


def choose_strategy(c: Config, host: Host, trials: Trials) -> tuple[Strategy, str]:
    memory = memory_of(c, host)
    if not shares_units(c):
        return _LEAST, "with one data-parallel rank nothing is shared out"
    if not memory:
        return _LEAST, f"how much memory a {hardware_of(c).name} rank can use is not known, and this needs the least"
    steps: dict[Strategy, Predicted] = {s: trials.step(changed(c, {STRATEGY: s})) for s in reversed(get_args(Strategy))}
    least = steps[_LEAST]
    fitting: dict[Strategy, Predicted] = {}
    for name, step in steps.items():
        if not step.fits(memory):
            break  # the strategies after this one keep more
        fitting[name] = step
    if not fitting:
        return _LEAST, f"{gib(least.nbytes)} of {gib(memory)} are needed, and the others need more"
    shortest = min(step.seconds for step in fitting.values())
    short = {name: step for name, step in fitting.items() if step.seconds <= (1 + WORTH) * shortest}
    fewest = min(step.moved for step in short.values())
    best = next(name for name, step in short.items() if step.moved == fewest)
    return best, _reason_for_strategy(best, steps[best], least, memory)


def _reason_for_strategy(best: Strategy, step: Predicted, least: Predicted, memory: int) -> str:
    needs = f"{gib(step.nbytes)} of {gib(memory)}"
    if best == _LEAST:
        return f"it is the shortest step that fits, with {needs}"
    plural = "es" if step.microbatches > 1 else ""
    return (
        f"a step of {step.microbatches} microbatch{plural} is predicted to take {duration(step.seconds)} and move "
        f"{_moved(step)} per rank, instead of {duration(least.seconds)} and {_moved(least)} with {_LEAST}; it needs "
        f"{needs}"
    )


def _moved(step: Predicted) -> str:
    return f"{step.moved / 2**30:.1f} GiB"


def choose_gather(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    if c.precision.compute != "fp8":
        return "bf16", ""
    if not gathered_units(c):
        return "bf16", "no weights are gathered"
    if not {"forward", "dgrad"} <= set(c.precision.fp8_products):
        return "bf16", "products that run in bf16 read the same weights"
    if c.overlap.dp.update == "next_step":
        return "bf16", "ranks agree on scales of rows behind the whole update (overlap.dp.update = next_step)"
    wide, eight = (trials.step(changed(c, {GATHER: value, UPDATE: "end"})) for value in ("bf16", "fp8"))
    times = f"a step is predicted to take {duration(eight.seconds)}"
    times = f"{times} and move {_moved(eight)} per rank, with bf16 {duration(wide.seconds)} and {_moved(wide)}"
    memory = memory_of(c, host)
    if memory and not eight.fits(memory) and wide.fits(memory):
        return "bf16", f"{times}; it would need {gib(eight.nbytes)} of {gib(memory)}"
    return ("fp8" if eight.seconds <= wide.seconds else "bf16"), times


_WORTH_UPDATE = 0.02
"""Share of a step that must be hidden for hocket to choose next_step."""


def choose_update(c: Config, host: Host, trials: Trials) -> tuple[Update, str]:
    if c.train.device != "cuda":
        return "end", "on CPUs nothing runs beside an update"
    if c.optimizer.name == "muon":
        return (
            "end",
            "Muon beside forwards is not measured on GPUs yet; overlap.dp.update = next_step asks for it",
        )
    if c.precision.gather == "fp8":
        return "end", "what is gathered in fp8 is cast behind the whole update"
    if c.plan.graphs == "on":
        return "end", "recorded steps with experts became at most 0.5% shorter by next_step (plan.graphs = on)"
    updates, compute = _updates(trials.costs(c)), _compute(c, trials.costs(c))
    if updates < _WORTH_UPDATE * compute:  # no more can be hidden, and no step is shorter
        what = f"all updates take {duration(updates)}, {updates / compute:.1%} of other compute"
        return "end", f"{what}: that is little"
    count = enough_microbatches(c)
    end = trials.seconds(changed(c, {UPDATE: "end"}), count)
    hidden = _hidden(changed(c, {UPDATE: "next_step"}), count, end, trials)
    share = hidden * count / (end * c.train.microbatches)
    what = f"the next step hides {duration(hidden)} of updates beside first gathers and in its bubble"
    what = f"{what}, {share:.1%} of a step"
    if share < _WORTH_UPDATE:
        return "end", f"{what}; that is little, and forwards share SMs and bandwidth with the rest"
    if c.train.transport not in COPIED:
        return "end", f"{what}; beside NCCL's kernels no more than noise was gained, unlike beside copies"
    return "next_step", f"{what}, and more if forwards gain beside them"


def _updates(costs: CostTable) -> float:
    """Seconds of a step's updates, one after the other, on the rank with the longest ones."""
    return float(costs.table["step", "all", ""].seconds - costs.table["step", "norm", ""].seconds)


def _compute(c: Config, costs: CostTable) -> float:
    """Seconds of a step's other compute, as a mean over pipeline ranks."""
    layout, total = layout_of(c), 0.0
    for (verb, part, kind), cost in costs.table.items():
        if verb in ("fwd", "recompute", "bwd", "wgrad") and not carried_by((verb, part, kind), layout):
            again = verb == "recompute"
            times = layout.recomputing(part, kind) if again else layout.kinds.count(kind) if kind else 1
            total += times * float(cost.seconds)
    return total * c.train.microbatches / c.mesh.pp


def _hidden(later: Config, count: int, end: float, trials: Trials) -> float:
    """Seconds that are hidden even if forwards gain nothing. A step without hidden updates lasts `end`."""
    starts, ends = trials.times(later, count)
    hidden = end - float(max(ends)) - _beside(trials.program(later, count), starts, ends)
    return max(round(hidden, 9), 0.0)


def _beside(program: Program, starts: Sequence[Time], ends: Sequence[Time]) -> float:
    """Seconds in which a rank updates some weights while it computes with others, on the rank with the most of them."""
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


Split = tuple[int, ...]
"""Layers of every virtual stage."""

_PLAIN = 0.05
"""A gain of this share of the longest rank's time is worth uneven stages without a simulation."""


def choose_stages(c: Config, host: Host, trials: Trials) -> tuple[Split, str]:
    """The most balanced split that fits, and its gain."""
    if c.mesh.pp == 1:
        return (), ""  # without a pipeline there are no stages to choose
    memory, layout, costs, too_large = memory_of(c, host), layout_of(c), trials.costs(c), ""
    splits = towards_balance(layout, costs)
    if len(splits) == 1:
        return (), "moving a layer would make no rank's work shorter"
    before = longest_rank(layout, costs, splits[0])
    for split in reversed(splits[1:]):
        after = longest_rank(layout, costs, split)
        times = f"the longest rank computes {duration(after)} a microbatch instead of {duration(before)}"
        if after > (1 - WORTH) * before:
            return (), f"uneven stages bring little: {times}{too_large}"
        step = _split_so(c, split, trials)
        count = step.microbatches
        if after > (1 - _PLAIN) * before:
            usual = trials.seconds(c, count)
            times += f", and {count} microbatches take {duration(step.seconds)} instead of {duration(usual)}"
            if step.seconds > (1 - WORTH) * usual:
                return (), f"uneven stages bring nothing: {times}{too_large}"
        if not memory or step.fits(memory) or step.nbytes <= _split_so(c, (), trials).nbytes:
            return split, f"embedding and head take as long as layers; so {times}{too_large}"
        too_large = too_large or f"; {show(split)} would need {gib(step.nbytes)} of {gib(memory)}"
    return (), f"no uneven stages fit into memory{too_large}"


def _split_so(c: Config, split: Split, trials: Trials) -> Predicted:
    return trials.step(changed(c, {"plan.layers_per_stage": split}))


USUAL = "literature"
_SIMULATED = 3
"""Number of orders for which whole steps are simulated."""


def choose_layer_order(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    """The order and its reason. The reason is empty if no layers are merged."""
    if c.overlap.ep.merge != "on" or separate_wgrads(c):
        return USUAL, ""
    layout = layout_of(c)
    seconds = layer_seconds(trials.costs(c), layout)
    if not seconds or c.overlap.defer_wgrad == "off":
        return USUAL, ""
    layers = max(len(layout.layers(rank, chunk)) for rank in range(layout.pp) for chunk in range(layout.chunks))
    usual = step_seconds(spelt(MERGED[USUAL]).split(), seconds, layers)
    compute = layers * sum(value for word, value in seconds.items() if word[0] not in "dc")
    if usual <= (1 + WORTH) * compute:
        return USUAL, "all-to-alls have compute beside them that is long enough"
    fastest = sorted(all_orders(), key=lambda order: (step_seconds(order, seconds, layers), order))[:_SIMULATED]
    named = sorted(MERGED, key=lambda name: step_seconds(spelt(MERGED[name]).split(), seconds, layers))
    count = few_microbatches(c)
    texts = dict.fromkeys((USUAL, named[0], *map(" ".join, fastest)))
    steps = {text: trials.seconds(changed(c, {LAYER_ORDER: text}), count) for text in texts}
    best, before = min(steps, key=lambda text: steps[text]), steps[USUAL]
    if steps[best] > (1 - WORTH) * before:
        return USUAL, f"all-to-alls are long, but no other order makes {count} microbatches shorter by 1% or more"
    times = f"{count} microbatches take {duration(steps[best])} instead of {duration(before)}"
    return best, f"all-to-alls are long: {times}"


def stride_remark(c: Config, host: Host, trials: Trials) -> Iterator[Choice]:
    """Gain and price of a stride of 3, if weight gradients hide less than half of the p2p transfer.

    All settings of `c` must be decided.
    """
    if c.mesh.pp == 1 or c.overlap.ep.merge != "on" or c.plan.stride != 2 or c.plan.turning:
        return
    costs, (layers, parts) = trials.costs(c), c.overlap.pp.late
    assert c.overlap.pp.defer_layers != "auto", "chosen before"
    cover = smallest_cover(layout_of(c), costs, (0 if nothing_to_put_behind(c) else layers,), (parts,))
    price = stride_price(layout_of(c), c.train.microbatches, group_of(c), costs)
    if 2 * cover.exposed <= cover.p2p or price is None:
        return
    wide, memory = changed(c, {"plan.stride": 3, "plan.group": price.group}), memory_of(c, host)
    if memory and not trials.step(wide).may_fit(memory):
        return
    count = max(few_microbatches(c), price.group)
    before, after = (trials.seconds(each, count) for each in (c, wide))
    if after < before:
        reason = (
            f"{duration(cover.exposed)} of each p2p transfer stay exposed; with plan.stride = 3 and "
            f"plan.group = {price.group}, {count} microbatches would take {duration(after)} instead of "
            f"{duration(before)}, for {price.chunks} more chunk activations in flight, {price.nbytes / 2**30:.2f} GiB"
        )
        yield "plan.stride", 2, reason

"""Rules about the order of a step: part of the table in `rules.py`."""

from __future__ import annotations

from itertools import pairwise

from hocket.config import Config
from hocket.parallel.stages import layout_of
from hocket.plan.layer import MERGED, at_once, merged_order, order_problem
from hocket.plan.pipeline import groups, smallest_group, warmup
from hocket.plan.zero_bubble import ZERO_BUBBLE
from hocket.settings.rule import Rule

MOST_PASSES = 200_000
"""Microbatches times layers of a step: above two million operations, or half a minute of planning."""


def stages(c: Config) -> int:
    return c.mesh.pp * c.plan.chunks


def merges(c: Config, rank: int) -> bool:
    """Whether a pipeline rank has forwards left to merge after its warm-up."""
    if c.plan.order == "merged_v":
        return c.train.microbatches >= 2 * c.mesh.pp
    total = c.train.microbatches * c.plan.chunks
    return warmup(c.mesh.pp, c.plan.chunks, c.train.microbatches, group_of(c), rank, True, c.plan.stride) < total


def group_of(c: Config) -> int:
    """Microbatches that pass through a chunk before the next chunk starts."""
    fewest = 2 * c.mesh.pp if c.plan.order == "merged_v" else smallest_group(c.mesh.pp, c.plan.stride)
    return c.plan.group or fewest


_MOST = 128
"""Microbatches times pipeline ranks of a simulated step, unless one group has more already."""


def few_microbatches(c: Config) -> int:
    """Microbatches of a step that is simulated to choose by its time: three groups, or fewer of a long pipeline."""
    group = group_of(c)
    groups = min(3, max(1, _MOST // (group * c.mesh.pp)))
    return min(c.train.microbatches, groups * group)


def has_pairs(c: Config) -> bool:
    """Whether two microbatches follow each other on one chunk, so that the ends can be merged."""
    return c.train.microbatches > 1 and (c.plan.chunks == 1 or groups(c.train.microbatches, group_of(c))[0] > 1)


def shares_units(c: Config) -> bool:
    """Whether ranks share weights and gradients: data-parallel ones all, tensor-parallel ones those of experts."""
    return c.mesh.dp > 1 or (c.mesh.tp > 1 and "moe" in c.model.kinds())


def separate_wgrads(c: Config) -> bool:
    """Whether the order gives all weight gradients steps of their own."""
    return c.plan.order in ZERO_BUBBLE


def fills_bubble(c: Config) -> bool:
    """Whether the order gives some weight gradients steps of their own, where a rank would rest."""
    return separate_wgrads(c) or c.plan.order == "merged_v"


def most_layers(c: Config) -> int:
    """Layers of the longest stage; 0 if the stages cannot be, for which rules of their own say why."""
    try:
        bounds = layout_of(c).bounds
    except ValueError:
        return 0
    return max(stop - start for start, stop in pairwise(bounds))


def lane_matters(c: Config) -> bool:
    """Whether some step that reads a received gradient begins with another op than its reader.

    That is a merged one, whose backward begins with a dense layer: a MoE layer's first op heads the step.
    """
    if c.mesh.pp == 1 or c.overlap.ep.merge != "on":
        return False
    try:
        layout = layout_of(c)
    except ValueError:  # stages that cannot be: rules of their own say why
        return True
    return any(layout.kinds[stop - 1] == "dense" for stop in layout.bounds[1:-1])


def order_matters(text: str) -> bool:
    """Whether a layer order differs from the literature's where no weight gradient is deferred."""
    return bool(order_problem(text)) or at_once(merged_order(text)) != at_once(MERGED["literature"])


PLAN_RULES: tuple[Rule, ...] = (
    Rule(
        ("overlap.ep.merge", "mesh.ep", "model.experts"),
        lambda c, h: c.overlap.ep.merge == "on" and (c.mesh.ep == 1 or "moe" not in c.model.kinds()),
        "no expert all-to-all is hidden, since there is none (mesh.ep = {mesh.ep}); steps are merged all the same",
        "mesh.ep = 2 or more in a model with experts, or overlap.ep.merge = auto",
        remark=True,
    ),
    Rule(
        ("plan.chunks", "mesh.pp", "model.layers"),
        lambda c, h: stages(c) > c.model.layers,
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} is {stages} virtual stages, more than {model.layers} layers",
        "lower plan.chunks or mesh.pp, or raise model.layers",
    ),
    Rule(
        ("plan.layers_per_stage", "mesh.pp", "plan.chunks"),
        lambda c, h: len(c.plan.split) not in (0, stages(c)),
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} needs {stages} numbers",
        "give {stages} numbers, or none to split evenly",
    ),
    Rule(
        ("plan.layers_per_stage", "model.layers"),
        lambda c, h: sum(c.plan.split) not in (0, c.model.layers),
        "the stages' layers do not add up to model.layers = {model.layers}",
        "make them add up, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage",),
        lambda c, h: "auto" in c.plan.layers_per_stage and len(c.plan.layers_per_stage) > 1,
        "auto stands alone",
        "a number for each stage, or auto",
    ),
    Rule(
        ("plan.order", "plan.chunks"),
        lambda c, h: c.plan.order == "1f1b" and c.plan.chunks > 1,
        "1f1b runs one chunk per rank, and plan.chunks = {plan.chunks}",
        "plan.chunks = 1, or plan.order = interleaved",
    ),
    Rule(
        ("plan.order", "plan.chunks"),
        lambda c, h: c.plan.order == "interleaved" and c.plan.chunks == 1,
        "there is only one chunk per rank to interleave",
        "plan.chunks = 2 or more, or plan.order = 1f1b",
    ),
    *(
        Rule(
            ("plan.order", "plan.chunks"),
            lambda c, h, order=order, chunks=chunks: c.plan.order == order and c.plan.chunks != chunks,
            f"{order} runs {words} per rank, and plan.chunks = {{plan.chunks}}",
            f"plan.chunks = {chunks}, or another plan.order",
        )
        for order, chunks, words in (
            ("zb_h1", 1, "one chunk"),
            ("zb_v", 2, "two chunks"),
            ("merged_v", 2, "two chunks"),
        )
    ),
    Rule(
        ("plan.order", "mesh.pp"),
        lambda c, h: fills_bubble(c) and c.mesh.pp == 1,
        "no effect: with one pipeline rank there is no bubble to fill",
        "mesh.pp = 2 or more, or plan.order = auto",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: separate_wgrads(c) and c.overlap.ep.merge == "on",
        "in the order {plan.order} forwards and backwards run apart, so that weight gradients can fill the bubble",
        "overlap.ep.merge = off, or plan.order = auto",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge == "off",
        "in the order merged_v forwards and backwards run merged",
        "overlap.ep.merge = on, or plan.order = zb_v, where they run apart",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge_ends == "on",
        "in the order merged_v no two microbatches follow each other on one chunk where it ends",
        "overlap.ep.merge_ends = off, or plan.order = interleaved",
    ),
    Rule(
        ("plan.stride", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.plan.stride == 3,
        "the warm-up of merged_v is as long as the V: neighbours are two forwards apart",
        "plan.stride = 2, or plan.order = interleaved",
    ),
    Rule(
        ("overlap.defer_wgrad", "plan.order"),
        lambda c, h: fills_bubble(c) and c.overlap.defer_wgrad == "off",
        "the order {plan.order} fills the bubble with weight gradients, so they must be able to wait",
        "overlap.defer_wgrad = on, or plan.order = auto",
    ),
    Rule(
        ("train.microbatches", "mesh.pp"),
        lambda c, h: separate_wgrads(c) and c.train.microbatches < c.mesh.pp,
        "fewer than mesh.pp = {mesh.pp} microbatches leave most of the bubble, whatever the order",
        "train.microbatches = {mesh.pp} or more, or plan.order = auto",
    ),
    Rule(
        ("train.microbatches", "mesh.pp"),
        lambda c, h: c.plan.order == "merged_v" and c.train.microbatches < 2 * c.mesh.pp,
        "the order merged_v needs two for each of mesh.pp = {mesh.pp} ranks, or what it merges does not meet",
        "more microbatches, or plan.order = zb_v",
    ),
    Rule(
        ("train.microbatches", "mesh.pp", "plan.chunks"),
        lambda c, h: c.plan.order == "interleaved" and c.train.microbatches < c.mesh.pp,
        "the interleaved order passes groups of at least mesh.pp = {mesh.pp} microbatches from chunk to chunk",
        "train.microbatches = {mesh.pp} or more, or plan.chunks = 1",
    ),
    Rule(
        ("train.microbatches", "model.layers"),
        lambda c, h: c.train.microbatches * c.model.layers > MOST_PASSES,
        "{train.microbatches} microbatches through {model.layers} layers are a plan of millions of operations, which "
        "takes minutes to make and to check",
        f"fewer microbatches of more train.sequences: at most {MOST_PASSES} / model.layers",
    ),
    Rule(
        ("plan.group", "mesh.pp", "train.microbatches"),
        lambda c, h: c.plan.group > 0 and not c.mesh.pp <= c.plan.group <= c.train.microbatches,
        "a group has at least mesh.pp = {mesh.pp} and at most train.microbatches = {train.microbatches} microbatches",
        "plan.group = 0, which means the smallest that works",
    ),
    Rule(
        ("plan.group", "plan.chunks"),
        lambda c, h: c.plan.group > 0 and c.plan.order != "interleaved",
        "no effect: only the interleaved order has groups",
        "plan.chunks = 2 or more, or leave plan.group out",
        only_if_set=True,
    ),
    Rule(
        ("plan.stride", "overlap.ep.merge"),
        lambda c, h: c.plan.stride == 3 and c.overlap.ep.merge == "off",
        "a stride of 3 belongs to merged orders, and merging is off",
        "overlap.ep.merge = on, or plan.stride = 2",
    ),
    Rule(
        ("plan.stride", "mesh.pp"),
        lambda c, h: c.plan.stride == 3 and c.mesh.pp == 1,
        "no effect: there are no neighbouring pipeline ranks",
        "mesh.pp = 2 or more, or plan.stride = 2",
        only_if_set=True,
    ),
    Rule(
        ("plan.group", "plan.stride"),
        lambda c, h: c.plan.stride == 3 and 0 < 2 * c.plan.group < 3 * c.mesh.pp,
        "plan.stride = 3 needs groups of at least 1.5 * mesh.pp microbatches",
        "plan.group = 0, which means the smallest that works",
    ),
    Rule(
        ("train.microbatches", "plan.stride"),
        lambda c, h: c.plan.stride == 3 and 2 * c.train.microbatches < 3 * c.mesh.pp,
        "plan.stride = 3 needs groups of at least 1.5 * mesh.pp microbatches",
        "more microbatches, or plan.stride = 2",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.overlap.ep.merge == "on" and c.plan.order == "sequential" and stages(c) > 1,
        "in the sequential order each microbatch ends before the next one starts, so there is nothing to merge",
        "plan.order = auto, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge", "train.microbatches", "plan.chunks"),
        lambda c, h: c.overlap.ep.merge == "on" and not any(merges(c, rank) for rank in range(c.mesh.pp)),
        "all forwards of {train.microbatches} microbatches are warm-up, so nothing would be merged",
        "more train.microbatches, fewer plan.chunks, a smaller plan.group, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "overlap.ep.merge"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "off",
        "there are no ends of a merged order where nothing is merged",
        "overlap.ep.merge = on, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.group", "train.microbatches"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "on" and not has_pairs(c),
        "no two microbatches follow each other on one chunk, so nothing at the ends would be merged",
        "plan.group = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("plan.recompute",),
        lambda c, h: len(set(c.plan.recompute)) < len(c.plan.recompute) or {"auto"} < set(c.plan.recompute),
        "each part is named once, and auto stands alone",
        "parts out of attn, experts and mlp, or auto",
    ),
    *(
        Rule(
            ("plan.recompute",),
            lambda c, h, part=part, kind=kind: part in c.plan.recompute and kind not in c.model.kinds(),
            f"no effect: no layer of the model has the part {part}",
            f"leave {part} out",
            only_if_set=True,
        )
        for part, kind in (("experts", "moe"), ("mlp", "dense"))
    ),
    Rule(
        ("plan.layer_order",),
        lambda c, h: bool(order_problem(c.plan.layer_order)),
        "{order}",
        "a name, or an order such as 'cB aF eB dF eW dB eF cF aB uB aW uF'",
    ),
    Rule(
        ("plan.layer_order", "overlap.ep.merge"),
        lambda c, h: c.plan.layer_order != "literature" and c.overlap.ep.merge == "off",
        "no effect: it orders merged layer steps, and merging is off",
        "overlap.ep.merge = on, or leave plan.layer_order out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.ep.copies", "overlap.ep.splits"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.overlap.ep.splits == "device",
        "where the device alone knows splits, every choice's row is stored at its place, so there is one for each",
        "overlap.ep.copies = per_expert, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.copies", "mesh.ep"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.mesh.ep == 1,
        "no effect: all experts are on every rank, so nothing is sent",
        "mesh.ep = 2 or more, or leave overlap.ep.copies out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.backward_lane", "mesh.pp"),
        lambda c, h: c.overlap.pp.backward_lane != "auto" and c.mesh.pp == 1,
        "no effect: with one pipeline rank nothing is sent",
        "mesh.pp = 2 or more, or leave overlap.pp.backward_lane out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.backward_lane", "overlap.ep.merge"),
        lambda c, h: c.overlap.pp.backward_lane == "off" and c.mesh.pp > 1 and c.overlap.ep.merge == "off",
        "no effect: a step that is not merged begins with the op that reads its gradient",
        "overlap.ep.merge = on, or leave overlap.pp.backward_lane out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.backward_lane", "model.dense_layers"),
        lambda c, h: (
            c.overlap.pp.backward_lane == "off" and c.overlap.ep.merge == "on" and c.mesh.pp > 1 and not lane_matters(c)
        ),
        "no effect: every stage that receives a gradient ends with a MoE layer, whose backward heads the merged step",
        "leave overlap.pp.backward_lane out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "mesh.pp"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp == 1,
        "no effect: with one pipeline rank nothing is sent",
        "mesh.pp = 2 or more, or leave overlap.pp.defer_layers out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "overlap.defer_wgrad"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp > 1 and c.overlap.defer_wgrad == "off",
        "no effect: only deferred weight gradients can run after the send",
        "overlap.defer_wgrad = on, or overlap.pp.defer_layers = 0",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "plan.order"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp > 1 and separate_wgrads(c),
        "no effect: in the order {plan.order} all weight gradients have steps of their own, behind the send",
        "leave overlap.pp.defer_layers out, or another plan.order",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "model.layers", "mesh.pp", "plan.chunks"),
        lambda c, h: c.overlap.pp.defer_layers != "auto" and c.overlap.pp.defer_layers > most_layers(c) > 0,
        "no stage has as many layers",
        "-1 for all layers of a stage",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_parts", "overlap.pp.defer_layers", "overlap.defer_wgrad"),
        lambda c, h: (
            c.overlap.pp.defer_parts != "auto"
            and (
                c.mesh.pp == 1 or c.overlap.pp.defer_layers == 0 or c.overlap.defer_wgrad == "off" or separate_wgrads(c)
            )
        ),
        "no effect: no weight gradient runs after a send",
        "mesh.pp = 2 or more, overlap.defer_wgrad = on and overlap.pp.defer_layers not 0, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "mesh.pp"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.mesh.pp == 1,
        "no effect: the only pipeline rank waits for no other at the end",
        "mesh.pp = 2 or more, or leave overlap.pp.defer_head out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "overlap.defer_wgrad"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.mesh.pp > 1 and c.overlap.defer_wgrad == "off",
        "no effect: only deferred weight gradients can run at the end",
        "overlap.defer_wgrad = on, or overlap.pp.defer_head = 0",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "train.microbatches"),
        lambda c, h: c.overlap.pp.defer_head != "auto" and c.overlap.pp.defer_head > c.train.microbatches,
        "a step has {train.microbatches} microbatches",
        "-1 for all of them",
        only_if_set=True,
    ),
    Rule(
        ("plan.layer_order", "overlap.defer_wgrad"),
        lambda c, h: (
            c.plan.layer_order != "literature"
            and c.overlap.ep.merge == "on"
            and c.overlap.defer_wgrad == "off"
            and not order_matters(c.plan.layer_order)
        ),
        "no effect: it differs from literature in weight gradients only, and these are not deferred",
        "overlap.defer_wgrad = on, or leave plan.layer_order out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.dp.strategy", "mesh.dp"),
        lambda c, h: not shares_units(c) and c.overlap.dp.strategy != "optim_grads_params",
        "no effect: with one data-parallel rank nothing is sharded",
        "mesh.dp = 2 or more, or leave overlap.dp.strategy out",
        only_if_set=True,
    ),
    Rule(
        ("precision.wire", "mesh.dp"),
        lambda c, h: not shares_units(c),
        "no effect: no gradient travels, since no two ranks share weights",
        "mesh.dp = 2 or more, or leave precision.wire out",
        remark=True,
    ),
    Rule(
        ("overlap.dp.prefetch", "overlap.dp.strategy"),
        lambda c, h: shares_units(c) and c.overlap.dp.strategy == "no_shard",
        "no effect: every rank has all weights, and nothing is gathered",
        "another overlap.dp.strategy, or leave overlap.dp.prefetch out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.dp.gather_in_update", "overlap.dp.strategy", "mesh.dp"),
        lambda c, h: (
            c.overlap.dp.gather_in_update == "on" and (not shares_units(c) or c.overlap.dp.strategy == "no_shard")
        ),
        "no effect: every rank has all weights, and nothing is gathered",
        "leave overlap.dp.gather_in_update out, or mesh.dp = 2 or more with another overlap.dp.strategy",
        only_if_set=True,
    ),
    Rule(
        ("overlap.dp.prefetch", "mesh.dp"),
        lambda c, h: not shares_units(c),
        "no effect: with one data-parallel rank nothing is gathered",
        "mesh.dp = 2 or more, or leave overlap.dp.prefetch out",
        only_if_set=True,
    ),
)

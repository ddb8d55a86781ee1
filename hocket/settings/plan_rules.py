"""What a configuration says of the order of a step, and rules about that: part of the table in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hocket.config import Config
from hocket.config.layout import part_and_layers
from hocket.program.layer import MERGED, at_once, merged_order, order_problem
from hocket.program.pipeline import ZERO_BUBBLE, groups, smallest_group, warmup
from hocket.program.stages import layout_of
from hocket.program.values import lent_to
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
    return c.mesh.data > 1 or (c.mesh.members("gather_experts") > 1 and "moe" in c.model.kinds())


def separate_wgrads(c: Config) -> bool:
    """Whether the order gives all weight gradients steps of their own."""
    return c.plan.order in ZERO_BUBBLE


def fills_bubble(c: Config) -> bool:
    """Whether the order gives some weight gradients steps of their own, where a rank would rest."""
    return separate_wgrads(c) or c.plan.order == "merged_v"


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


def most_layers(c: Config) -> int:
    """Layers of the longest stage; 0 if the stages cannot be, for which rules of their own say why."""
    try:
        bounds = layout_of(c).bounds
    except ValueError:
        return 0
    return max(stop - start for start, stop in pairwise(bounds))


def named_parts(items: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that items such as `attn:2` name."""
    return tuple(text.partition(":")[0] for text in items)


def recomputed_parts(c: Config) -> tuple[str, ...]:
    """The parts that `plan.recompute` names."""
    return named_parts(c.plan.recompute)


def longest_stage(c: Config) -> int:
    """Layers that the longest stage may have: of given stages, of even ones, or of any that costs may choose later."""
    chosen_later = c.plan.layers_per_stage == ("auto",) and c.mesh.pp > 1
    return max(most_layers(c), c.model.layers + 2 - stages(c)) if chosen_later else most_layers(c)


def _most_named(items: tuple[str, ...]) -> int:
    """The largest number of layers that an item such as `attn:2` names; 0 if none names one."""
    return max((part_and_layers(text)[1] or 0 for text in items), default=0)


def _twice(items: tuple[str, ...]) -> bool:
    """Whether items name a part twice, or anything beside auto."""
    parts = named_parts(items)
    return len(set(parts)) < len(parts) or {"auto"} < set(parts)


def offloads(c: Config, part: str) -> bool:
    """Whether some layer offloads a part; True where the stages cannot be, for which rules of their own say why."""
    try:
        return any(name == part for name, _ in layout_of(c).offloaded)
    except ValueError:
        return True


def made_again(c: Config) -> list[tuple[str, str]]:
    """Parts that are offloaded and keep nothing, or not all, and the recomputed parts that make it again."""
    if not c.plan.offload or "auto" in (*c.plan.offload, *c.plan.recompute):
        return []
    try:
        layout = layout_of(c)
    except ValueError:
        return []
    found = (
        (part, part if layout.recomputes(part, at) else lent_to(layout, part, at)) for part, at in layout.offloaded
    )
    return sorted({(part, again) for part, again in found if again})


def recomputes(c: Config, part: str) -> bool:
    """Whether some layer recomputes a part; True where the stages cannot be, for which rules of their own say why."""
    try:
        return any(name == part for name, _ in layout_of(c).recomputed)
    except ValueError:
        return True


def missing(c: Config, setting: str) -> list[str]:
    """The parts that a setting names and no layer has; `kv`, which goes by the mesh, has a rule of its own."""
    there = recomputes if setting == "plan.recompute" else offloads
    parts = named_parts(_OF_PARTS[setting](c))
    return [part for part in ("dispatch", "experts", "mlp") if part in parts and not there(c, part)]


def named(c: Config) -> dict[str, object]:
    """What reasons and fixes of the rules below name."""
    again = made_again(c)
    parts = {
        "missing_recompute": missing(c, "plan.recompute"), "missing_offload": missing(c, "plan.offload"),
        "offloaded": [part for part, _ in again], "again": [part for _, part in again],
    }  # fmt: skip
    found = {name: " and ".join(dict.fromkeys(some)) for name, some in parts.items()}
    return {**found, "most_microbatches": MOST_PASSES // c.model.layers}


def order_matters(text: str) -> bool:
    """Whether a layer order differs from the literature's where no weight gradient is deferred."""
    return bool(order_problem(text)) or at_once(merged_order(text)) != at_once(MERGED["literature"])


_USUAL = ("auto", "literature")

_OF_PARTS: dict[str, Callable[[Config], tuple[str, ...]]] = {
    "plan.recompute": lambda c: c.plan.recompute,
    "plan.offload": lambda c: c.plan.offload,
}
"""Settings that name parts of layers -> what they name."""

PLAN_RULES: tuple[Rule, ...] = (
    Rule(
        ("plan.chunks", "mesh.pp", "model.layers"),
        lambda c, h: stages(c) > c.model.layers + 2,
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} is {stages} virtual stages, too many for model.layers = "
        "{model.layers}: only the first and the last may be without layers",
        "make mesh.pp x plan.chunks at most model.layers + 2",
    ),
    Rule(
        ("plan.layers_per_stage", "mesh.pp", "plan.chunks"),
        lambda c, h: len(c.plan.split) not in (0, stages(c)),
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} needs {stages} numbers",
        "give {stages} numbers, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage", "model.layers"),
        lambda c, h: bool(c.plan.split) and sum(c.plan.split) != c.model.layers,
        "the stages' layers do not add up to model.layers = {model.layers}",
        "numbers that add up to {model.layers}, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage",),
        lambda c, h: 0 in c.plan.split[1:-1] or c.plan.split == (0,),
        "only the first stage, with the embedding, and the last, with the head, may be without layers",
        "1 or more layers for all other stages, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage",),
        lambda c, h: "auto" in c.plan.layers_per_stage and len(c.plan.layers_per_stage) > 1,
        "auto stands alone",
        "plan.layers_per_stage = auto, or a number for each stage",
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
        ("plan.stride", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.plan.stride == 3,
        "the warm-up of merged_v is as long as the V: neighbours are two forwards apart",
        "plan.stride = 2, or plan.order = interleaved",
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
        "more train.microbatches, or plan.order = zb_v",
    ),
    Rule(
        ("train.microbatches", "mesh.pp", "plan.chunks"),
        lambda c, h: c.plan.order == "interleaved" and c.train.microbatches < c.mesh.pp,
        "the interleaved order passes groups of at least mesh.pp = {mesh.pp} microbatches from chunk to chunk",
        "train.microbatches = {mesh.pp} or more, or plan.order = auto and plan.chunks = 1",
    ),
    Rule(
        ("train.microbatches", "model.layers"),
        lambda c, h: c.train.microbatches * c.model.layers > MOST_PASSES,
        "{train.microbatches} microbatches through {model.layers} layers are a plan of millions of operations, which "
        "takes minutes to make and to check",
        "train.microbatches = {most_microbatches} or fewer (of more train.sequences)",
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
        "plan.order = interleaved and plan.chunks = 2 or more, or leave plan.group out",
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
        "more train.microbatches, or plan.stride = 2",
    ),
    Rule(
        ("plan.loss_pieces", "mesh.tp"),
        lambda c, h: c.plan.pieces > 1 and c.mesh.tp > 1,
        "each tensor-parallel rank has a part of the vocabulary, and logits of all tokens in it",
        "plan.loss_pieces = 1, or mesh.tp = 1",
    ),
    Rule(
        ("plan.loss_pieces", "data.sequence_length"),
        lambda c, h: c.plan.pieces > c.tokens > 0,
        "a rank has {tokens} tokens of a microbatch, and a piece has at least one",
        "plan.loss_pieces = {tokens} or fewer",
    ),
    *(
        Rule(
            (setting, "plan.layers_per_stage"),
            lambda c, h, items=items: 0 < longest_stage(c) < _most_named(items(c)),
            "no stage can have as many layers: the longest has {longest} at most",
            f"at most {{longest}} layers in {setting}, or no number in {setting}, which means all layers",
            only_if_set=True,
        )
        for setting, items in _OF_PARTS.items()
    ),
    Rule(
        ("plan.recompute",),
        lambda c, h: _twice(c.plan.recompute),
        "each part is named once, and auto stands alone",
        "each part once in plan.recompute, or plan.recompute = auto",
    ),
    Rule(
        ("plan.offload",),
        lambda c, h: _twice(c.plan.offload),
        "each part is named once, and auto stands alone",
        "each part once in plan.offload, or plan.offload = auto",
    ),
    *(
        Rule(
            (setting,),
            lambda c, h, setting=setting: bool(missing(c, setting)),
            f"no effect: no layer that it means has the part {{missing_{setting[5:]}}}",
            f"leave {{missing_{setting[5:]}}} out of {setting}",
            only_if_set=True,
        )
        for setting in _OF_PARTS
    ),
    Rule(
        ("plan.offload", "plan.recompute"),
        lambda c, h: bool(made_again(c)),
        "saved tensors are kept in one way, on the host, or made again: {again} of plan.recompute makes again what "
        "{offloaded} of plan.offload would keep",
        "leave {offloaded} out of plan.offload",
    ),
    Rule(
        ("plan.layer_order",),
        lambda c, h: bool(order_problem(c.plan.layer_order)),
        "{order}",
        "plan.layer_order = literature, or plan.layer_order = 'cB aF eB dF eW dB eF cF aB uB aW uF'",
    ),
    Rule(
        ("plan.layer_order", "overlap.ep.merge"),
        lambda c, h: c.plan.layer_order not in _USUAL and c.overlap.ep.merge == "off",
        "no effect: it orders merged layer steps, and merging is off",
        "overlap.ep.merge = on, or leave plan.layer_order out",
        only_if_set=True,
    ),
    Rule(
        ("plan.layer_order", "overlap.defer_wgrad"),
        lambda c, h: (
            c.plan.layer_order not in _USUAL
            and c.overlap.ep.merge == "on"
            and c.overlap.defer_wgrad == "off"
            and not order_matters(c.plan.layer_order)
        ),
        "no effect: it differs from literature in weight gradients only, and these are not deferred",
        "overlap.defer_wgrad = on, or leave plan.layer_order out",
        only_if_set=True,
    ),
)

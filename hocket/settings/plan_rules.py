"""Rules of section `plan`: stages, the order of microbatches, parts that are kept elsewhere, recorded steps."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.config import Config
from hocket.program.layer import order_problem
from hocket.settings.derived import (
    CHUNKS,
    fills_bubble,
    longest_stage,
    made_again,
    missing,
    most_named,
    named_twice,
    separate_wgrads,
    smallest_group,
    stages,
    waits_for_counts,
)
from hocket.settings.rule import Each, Rule, Words
from hocket.settings.schema import leaf

MOST_PASSES = 200_000
"""Microbatches times layers of a step: above two million operations, or half a minute of planning."""
_PARTS = {"plan.recompute": "missing_recompute", "plan.offload": "missing_offload"}
"""Settings that name parts of layers -> the word for those that no layer has."""


def fewest_microbatches(c: Config) -> int:
    """The fewest microbatches that an order is made for."""
    if c.plan.order == "merged_v":
        return 2 * c.mesh.pp
    return c.mesh.pp if separate_wgrads(c) or c.plan.order == "interleaved" else 1


def _graphed(c: Config) -> bool:
    return c.plan.graphs == "on"


PLAN_RULES: tuple[Rule | Each, ...] = (
    # Stages
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
    # Order of microbatches
    Rule(
        ("plan.order", "plan.chunks"),
        lambda c, h: c.plan.order in CHUNKS and c.plan.chunks not in CHUNKS[c.plan.order],
        "in the order {plan.order} plan.chunks is {chunks}, not {plan.chunks}",
        "plan.chunks = {chunks}, or another plan.order",
    ),
    Rule(
        ("plan.order", "mesh.pp"),
        lambda c, h: fills_bubble(c) and c.mesh.pp == 1,
        "with one pipeline rank there is no bubble to fill",
        "mesh.pp = 2 or more, or plan.order = auto",
    ),
    Rule(
        ("train.microbatches", "mesh.pp", "plan.chunks"),
        lambda c, h: c.train.microbatches < fewest_microbatches(c),
        "the order {plan.order} is made for {fewest} microbatches or more on mesh.pp = {mesh.pp} ranks",
        "train.microbatches = {fewest} or more, or another plan.order",
    ),
    Rule(
        ("train.microbatches", "model.layers"),
        lambda c, h: c.train.microbatches * c.model.layers > MOST_PASSES,
        "{train.microbatches} microbatches through {model.layers} layers are a plan of millions of operations, which "
        "takes minutes to make and to check",
        "train.microbatches = {most_microbatches} or fewer (of more train.sequences)",
    ),
    Rule(
        ("plan.group", "mesh.pp", "train.microbatches", "plan.stride"),
        lambda c, h: (
            c.plan.group > 0 and not smallest_group(c.mesh.pp, c.plan.stride) <= c.plan.group <= c.train.microbatches
        ),
        "on mesh.pp = {mesh.pp} ranks with plan.stride = {plan.stride} a group has at least {smallest_group} "
        "microbatches, and at most train.microbatches = {train.microbatches}",
        "plan.group = 0, which means the smallest that works",
    ),
    Rule(
        ("plan.stride", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.plan.stride == 3,
        "the warm-up of merged_v is as long as the V: neighbours are two forwards apart",
        "plan.stride = 2, or plan.order = interleaved",
    ),
    Rule(
        ("plan.stride", "overlap.ep.merge"),
        lambda c, h: c.plan.stride == 3 and c.overlap.ep.merge == "off",
        "a stride of 3 belongs to merged orders, and merging is off",
        "overlap.ep.merge = on, or plan.stride = 2",
    ),
    Rule(
        ("train.microbatches", "plan.stride"),
        lambda c, h: c.plan.stride == 3 and c.train.microbatches < smallest_group(c.mesh.pp, 3),
        "plan.stride = 3 needs groups of at least 1.5 * mesh.pp microbatches",
        "more train.microbatches, or plan.stride = 2",
    ),
    Rule(
        ("plan.layer_order",),
        lambda c, h: bool(order_problem(c.plan.layer_order)),
        "{order}",
        "plan.layer_order = literature, or plan.layer_order = 'cB aF eB dF eW dB eF cF aB uB aW uF'",
    ),
    Rule(
        ("plan.layer_order", "mesh.cp"),
        lambda c, h: (
            c.mesh.cp > 1 and c.plan.layer_order not in ("auto", "literature") and not order_problem(c.plan.layer_order)
        ),
        "it orders parts of layers that have their sequences whole; others gather keys and values in between",
        "leave plan.layer_order out, or mesh.cp = 1",
    ),
    # Parts of layers
    Each(
        dict.fromkeys(_PARTS, ""),
        ("{it}", "plan.layers_per_stage"),
        lambda c, h, it: 0 < longest_stage(c) < most_named(leaf(c, it)),
        "no stage can have as many layers: the longest has {longest} at most",
        "at most {longest} layers in {it}, or no number in {it}, which means all layers",
        only_if_set=True,
    ),
    Each(
        dict.fromkeys(_PARTS, ""),
        ("{it}",),
        lambda c, h, it: named_twice(leaf(c, it)),
        "each part is named once, and auto stands alone",
        "each part once in {it}, or {it} = auto",
    ),
    Each(
        _PARTS,
        ("{it}",),
        lambda c, h, it: bool(missing(c, it)),
        "no layer that it means has the part {{what}}",
        "leave {{what}} out of {it}",
        only_if_set=True,
    ),
    Rule(
        ("plan.offload", "plan.recompute"),
        lambda c, h: bool(made_again(c)),
        "saved tensors are kept in one way, on the host, or made again: {again} of plan.recompute makes again what "
        "{offloaded} of plan.offload would keep",
        "leave {offloaded} out of plan.offload",
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
    # Recorded steps
    Rule(
        ("plan.graphs", "train.device"),
        lambda c, h: _graphed(c) and c.train.device != "cuda",
        "a graph is of calls to a GPU, and the ranks compute on CPUs",
        "train.device = cuda, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.ep.splits"),
        lambda c, h: _graphed(c) and waits_for_counts(c),
        "a step cannot be recorded in which the host waits for the counts of experts' rows",
        "overlap.ep.splits = device, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "model.delta_heads"),
        lambda c, h: _graphed(c) and any(c.model.deltas()),
        "no step with gated delta nets is recorded: their kernels are chosen while they run",
        "plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.dp.update"),
        lambda c, h: _graphed(c) and c.overlap.dp.update == "next_step" and c.optimizer.name == "muon",
        "a recorded step cannot have Muon's updates in it, whose learning rate the host tells",
        "overlap.dp.update = end, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "mesh.cp", "data.packing"),
        lambda c, h: c.mesh.cp > 1 and _graphed(c) and c.data.packing != "off",
        "documents decide which keys a chunk attends to, so no recorded step serves another batch",
        "plan.graphs = off, or data.packing = off",
    ),
)


def _joined(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


PLAN_WORDS: Words = {
    "stages": lambda c, h: stages(c),
    "longest": lambda c, h: longest_stage(c),
    "chunks": lambda c, h: f"{(n := CHUNKS[c.plan.order]).start}{' or more' * (len(n) > 1)}",
    "fewest": lambda c, h: fewest_microbatches(c),
    "smallest_group": lambda c, h: smallest_group(c.mesh.pp, c.plan.stride),
    "most_microbatches": lambda c, h: MOST_PASSES // c.model.layers,
    "order": lambda c, h: order_problem(c.plan.layer_order),
    "tokens": lambda c, h: c.tokens,
    "missing_recompute": lambda c, h: _joined(missing(c, "plan.recompute")),
    "missing_offload": lambda c, h: _joined(missing(c, "plan.offload")),
    "offloaded": lambda c, h: _joined(part for part, _ in made_again(c)),
    "again": lambda c, h: _joined(part for _, part in made_again(c)),
}

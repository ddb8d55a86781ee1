"""Rules of section `overlap`: what hides communication, and what that needs."""

from __future__ import annotations

from hocket.config import Config
from hocket.program.arrivals import by_pieces
from hocket.settings.derived import (
    fills_bubble,
    has_experts,
    has_pairs,
    leaves_host,
    merges,
    most_layers,
    no_pieces,
    separate_wgrads,
    stages,
)
from hocket.settings.rule import Each, Rule

TENSOR, CONTEXT = "overlap.tp.method", "overlap.cp.method"


def _on_device(c: Config) -> bool:
    """Whether rows are stored into the memory of other GPUs."""
    return c.overlap.ep.splits == "device" and c.train.device == "cuda"


def _heads(c: Config) -> bool:
    """Whether ranks share sequences by an exchange of heads."""
    return c.mesh.cp > 1 and c.overlap.cp.method == "heads"


def _own(c: Config, heads: int) -> int:
    """How many heads a tensor-parallel rank has."""
    return max(1, heads // c.mesh.tp)


HEADS_RULES: tuple[Rule, ...] = (
    Rule(
        (CONTEXT, "model.kv_lora_rank"),
        lambda c, h: _heads(c) and c.model.latent,
        "the latents of latent attention belong to no head, and are less than keys and values of all heads",
        "overlap.cp.method = gather",
    ),
    Rule(
        (CONTEXT, "model.sinks"),
        lambda c, h: _heads(c) and c.model.sinks,
        "sinks are weights of all heads, and a rank computes attention of some",
        "overlap.cp.method = gather",
    ),
    Rule(
        (CONTEXT, "mesh.cp", "model.heads"),
        lambda c, h: _heads(c) and _own(c, c.model.heads) % c.mesh.cp != 0,
        "{mesh.cp} ranks cannot have as many of {model.heads}{shares_of_heads} heads each",
        "overlap.cp.method = gather, or a mesh.cp that divides model.heads{shares_of_heads}",
    ),
    Rule(
        (CONTEXT, "mesh.cp", "model.kv_heads"),
        lambda c, h: (
            _heads(c) and bool(_own(c, c.model.kv_heads) % c.mesh.cp and c.mesh.cp % _own(c, c.model.kv_heads))
        ),
        "{mesh.cp} ranks can neither share {model.kv_heads}{shares_of_heads} heads of keys and values evenly nor have "
        "each of them as often",
        "overlap.cp.method = gather, a mesh.cp that divides model.kv_heads{shares_of_heads}, or a mesh.cp that is a "
        "multiple of model.kv_heads{shares_of_heads}",
    ),
)
"""What an exchange of heads needs. A choice by cost asks them too."""

OVERLAP_RULES: tuple[Rule | Each, ...] = (
    # Merged steps
    Rule(
        ("overlap.ep.merge", "mesh.ep", "model.experts"),
        lambda c, h: c.overlap.ep.merge == "on" and (c.mesh.ep == 1 or not has_experts(c)),
        "no expert all-to-all is hidden, since there is none (mesh.ep = {mesh.ep}); steps are merged all the same",
        "mesh.ep = 2 or more in a model with experts, or overlap.ep.merge = auto",
        remark=True,
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
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.overlap.ep.merge == "on" and c.plan.order == "sequential" and stages(c) > 1,
        "in the sequential order each microbatch ends before the next one starts, so there is nothing to merge",
        "plan.order = auto, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge", "train.microbatches", "plan.chunks"),
        lambda c, h: c.overlap.ep.merge == "on" and not any(merges(c, rank) for rank in range(c.mesh.pp)),
        "all forwards of {train.microbatches} microbatches are warm-up, so nothing would be merged",
        "more train.microbatches, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "overlap.ep.merge"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "off",
        "there are no ends of a merged order where nothing is merged",
        "overlap.ep.merge = on, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge_ends == "on",
        "in the order merged_v no two microbatches follow each other on one chunk where it ends",
        "overlap.ep.merge_ends = off, or plan.order = interleaved",
    ),
    Rule(
        ("overlap.ep.merge_ends", "train.microbatches"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "on" and c.train.microbatches == 1,
        "one microbatch has no other one to merge with at the ends",
        "train.microbatches = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.group", "train.microbatches"),
        lambda c, h: (
            c.overlap.ep.merge_ends == "on"
            and c.overlap.ep.merge == "on"
            and c.train.microbatches > 1
            and not has_pairs(c)
        ),
        "no two microbatches follow each other on one chunk, so nothing at the ends would be merged",
        "plan.group = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "mesh.cp"),
        lambda c, h: c.mesh.cp > 1 and c.overlap.ep.merge_ends == "on",
        "pairs at the ends have an order for layers that have their sequences whole",
        "overlap.ep.merge_ends = off, or mesh.cp = 1",
    ),
    # Weight gradients that wait
    Rule(
        ("overlap.defer_wgrad", "plan.order"),
        lambda c, h: fills_bubble(c) and c.overlap.defer_wgrad == "off",
        "the order {plan.order} fills the bubble with weight gradients, so they must be able to wait",
        "overlap.defer_wgrad = on, or plan.order = auto",
    ),
    Rule(
        ("overlap.pp.defer_layers", "model.layers", "mesh.pp", "plan.chunks"),
        lambda c, h: c.overlap.pp.late[0] > most_layers(c) > 0,
        "no stage has as many layers",
        "overlap.pp.defer_layers = -1, which means all layers of a stage",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "model.tied", "plan.order"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.model.tied and c.plan.turning,
        "one rank has the embedding and the head, which are tied: a gradient would wait for its other half",
        "overlap.pp.defer_head = 0, or model.tied = False",
    ),
    Rule(
        ("overlap.pp.defer_head", "train.microbatches"),
        lambda c, h: c.overlap.pp.defer_head != "auto" and c.overlap.pp.defer_head > c.train.microbatches,
        "a step has {train.microbatches} microbatches",
        "overlap.pp.defer_head = -1, which means all of them",
        only_if_set=True,
    ),
    # Rows of experts
    Rule(
        ("overlap.ep.copies", "overlap.ep.splits"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.overlap.ep.splits == "device",
        "where the device alone knows splits, every choice's row is stored at its place, so there is one for each",
        "overlap.ep.copies = per_expert, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.splits", "precision.compute"),
        lambda c, h: _on_device(c) and c.precision.dtype != "bf16",
        "on GPUs products of experts in {precision.compute} need a host that knows where each expert's rows end",
        "precision.compute = bf16, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.splits", "mesh.ep"),
        lambda c, h: _on_device(c) and leaves_host(c, h, "a2a"),
        "rows are stored into the memory of GPUs of one host, and mesh.ep = {mesh.ep} ranks are not all on one",
        "overlap.ep.splits = host, or a smaller mesh.ep",
    ),
    Rule(
        ("overlap.ep.splits",),
        lambda c, h: _on_device(c) and bool(h.no_peer_memory),
        "{host.no_peer_memory}, and rows are stored there",
        "overlap.ep.splits = host",
    ),
    # Inside of layers
    Rule(
        (TENSOR, "mesh.tp"),
        lambda c, h: by_pieces(c) and bool(no_pieces(c, h)),
        "tokens cannot be moved piece by piece: {no_pieces}",
        "overlap.tp.method = off, or tensor-parallel ranks on GPUs of one host that reach each other, "
        "and no slow transport",
    ),
    *HEADS_RULES,
)

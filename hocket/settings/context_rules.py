"""Rules for context parallelism: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import Config
from hocket.program.layer import order_problem
from hocket.program.transformer import GATHERED
from hocket.settings.plan_rules import recomputed_parts, recomputes
from hocket.settings.rule import Rule


def _shared(c: Config) -> bool:
    """Whether ranks share sequences."""
    return c.mesh.cp > 1


METHOD = "overlap.cp.method"


def _heads(c: Config) -> bool:
    """Whether ranks share sequences by an exchange of heads."""
    return _shared(c) and c.overlap.cp.method == "heads"


def _own(c: Config, heads: int) -> int:
    """How many heads a tensor-parallel rank has."""
    return max(1, heads // c.mesh.tp)


HEADS_RULES: tuple[Rule, ...] = (
    Rule(
        (METHOD, "model.kv_lora_rank"),
        lambda c, h: _heads(c) and c.model.latent,
        "the latents of latent attention belong to no head, and are less than keys and values of all heads",
        "overlap.cp.method = gather",
    ),
    Rule(
        (METHOD, "model.sinks"),
        lambda c, h: _heads(c) and c.model.sinks,
        "sinks are weights of all heads, and a rank computes attention of some",
        "overlap.cp.method = gather",
    ),
    Rule(
        (METHOD, "mesh.cp", "model.heads"),
        lambda c, h: _heads(c) and _own(c, c.model.heads) % c.mesh.cp != 0,
        "{mesh.cp} ranks cannot have as many of {model.heads}{shares_of_heads} heads each",
        "overlap.cp.method = gather, or a mesh.cp that divides model.heads{shares_of_heads}",
    ),
    Rule(
        (METHOD, "mesh.cp", "model.kv_heads"),
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

CONTEXT_RULES: tuple[Rule, ...] = (
    *HEADS_RULES,
    Rule(
        (METHOD, "mesh.cp"),
        lambda c, h: not _shared(c) and c.overlap.cp.method == "heads",
        "no effect: mesh.cp = 1, so every rank has its sequences whole",
        "mesh.cp above 1, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("mesh.cp", "data.sequence_length"),
        lambda c, h: _shared(c) and c.data.sequence_length % (2 * c.mesh.cp) != 0,
        "each rank has 2 of 2 x mesh.cp chunks of a sequence, all as long, and {data.sequence_length} tokens cannot be "
        "cut so",
        "a data.sequence_length that is a multiple of 2 x mesh.cp",
    ),
    Rule(
        ("mesh.cp", "model.delta_heads"),
        lambda c, h: _shared(c) and any(c.model.deltas()),
        "a gated delta net goes through a sequence token by token, and no rank has all of one",
        "mesh.cp = 1",
    ),
    Rule(
        ("mesh.cp", "mesh.tp", "model.kv_lora_rank"),
        lambda c, h: _shared(c) and c.mesh.tp > 1 and c.model.latent,
        "of latent attention each tensor-parallel rank makes latents of tokens of its own, which context-parallel ones "
        "would have to put together in another order",
        "mesh.tp = 1, or mesh.cp = 1",
    ),
    Rule(
        ("mesh.cp", "model.aux_loss_over"),
        lambda c, h: _shared(c) and c.model.aux_loss_over == "sequence" and c.model.aux_loss > 0,
        "no rank has all tokens of a sequence, and none knows where all of them went",
        "mesh.cp = 1, or model.aux_loss_over = batch or microbatch",
    ),
    Rule(
        ("overlap.ep.merge_ends", "mesh.cp"),
        lambda c, h: _shared(c) and c.overlap.ep.merge_ends == "on",
        "pairs at the ends have an order for layers that have their sequences whole",
        "overlap.ep.merge_ends = off, or mesh.cp = 1",
    ),
    Rule(
        ("plan.recompute", "mesh.cp"),
        lambda c, h: GATHERED in recomputed_parts(c) and not recomputes(c, GATHERED),
        "no effect: no layer gathers keys and values (mesh.cp = {mesh.cp}, overlap.cp.method = {overlap.cp.method})",
        "mesh.cp above 1 and overlap.cp.method = gather, or leave kv out",
        only_if_set=True,
    ),
    Rule(
        ("plan.layer_order", "mesh.cp"),
        lambda c, h: (
            _shared(c) and c.plan.layer_order not in ("auto", "literature") and not order_problem(c.plan.layer_order)
        ),
        "it orders parts of layers that have their sequences whole; others gather keys and values in between",
        "leave plan.layer_order out, or mesh.cp = 1",
    ),
    Rule(
        ("plan.graphs", "mesh.cp", "data.packing"),
        lambda c, h: _shared(c) and c.plan.graphs == "on" and c.data.packing != "off",
        "documents decide which keys a chunk attends to, so no recorded step serves another batch",
        "plan.graphs = off, or data.packing = off",
    ),
)

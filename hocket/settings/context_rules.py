"""Rules for context parallelism: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import Config
from hocket.program.layer import order_problem
from hocket.settings.rule import Rule


def _shared(c: Config) -> bool:
    """Whether ranks share sequences."""
    return c.mesh.cp > 1


CONTEXT_RULES: tuple[Rule, ...] = (
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

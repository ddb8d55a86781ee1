"""Rules of products in fp8."""

from __future__ import annotations

from hocket.config import Config
from hocket.program.stages import gathered_units
from hocket.settings.rule import Rule
from hocket.settings.schema import leaf

UNIT = 16
"""Products in fp8 take widths and numbers of tokens that are multiples of this."""
FROM = (8, 9)
"""The first compute capability that has such products."""
WIDE = 1024
"""Width of experts from which fp8 was seen to be faster: 1,536 was, 768 was not (docs/fp8.md)."""
WITHOUT = {
    "kv_lora_rank": "latent attention",
    "delta_heads": "gated delta nets",
    "expert_bias": "biases of experts",
    "swiglu_limit": "SwiGLU with a limit",
}
"""Settings of models that do not compute in fp8, and what they are."""


def widths(c: Config) -> dict[str, int]:
    """Setting -> the width of a product in fp8 that it makes."""
    m = c.model
    found = {"model.hidden": m.hidden, "model.head_dim": m.kv_heads * m.head_dim}
    kinds = m.kinds()
    if "dense" in kinds:
        found["model.ffn"] = m.ffn
    if "moe" in kinds:
        found |= {"model.shared_ffn": m.shared_ffn, "model.expert_ffn": m.expert_ffn}
    return found


def _gathers(c: Config) -> bool:
    return c.precision.compute == "fp8" and c.precision.gather == "fp8"


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        ("precision.compute", "train.device"),
        lambda c, h: c.precision.compute == "fp8" and c.train.device == "cuda" and (0, 0) < h.capability < FROM,
        "{host.gpu} has no products in fp8, which begin at compute capability 8.9 (Ada, Hopper)",
        "precision.compute = bf16",
    ),
    Rule(
        ("precision.compute", "mesh.tp"),
        lambda c, h: c.precision.compute == "fp8" and c.mesh.tp > 1,
        "products of tensor-parallel ranks, which meet their operands piece by piece, do not run in fp8",
        "mesh.tp = 1, or precision.compute = bf16",
    ),
    *(
        Rule(
            (f"model.{name}", "precision.compute"),
            lambda c, h, name=name: c.precision.compute == "fp8" and bool(getattr(c.model, name)),
            f"products in fp8 are not there for {what}",
            "precision.compute = bf16",
        )
        for name, what in WITHOUT.items()
    ),
    *(
        Rule(
            (setting, "precision.compute"),
            lambda c, h, setting=setting: c.precision.compute == "fp8" and widths(c).get(setting, 0) % UNIT > 0,
            f"products in fp8 take widths of a multiple of {UNIT}{words}",
            f"make {product} a multiple of {UNIT}, or precision.compute = bf16",
        )
        for setting, words, product in (
            ("model.hidden", "", "model.hidden"),
            (
                "model.head_dim",
                ", and keys of all model.kv_heads = {model.kv_heads} heads are one",
                "model.kv_heads x model.head_dim",
            ),
            ("model.ffn", "", "model.ffn"),
            ("model.shared_ffn", "", "model.shared_ffn"),
            ("model.expert_ffn", "", "model.expert_ffn"),
        )
    ),
    Rule(
        ("data.sequence_length", "train.sequences", "precision.compute"),
        lambda c, h: c.precision.compute == "fp8" and c.tokens % UNIT != 0,
        f"weight gradients in fp8 sum over a multiple of {UNIT} tokens, and a microbatch has "
        "train.sequences x data.sequence_length = {train.sequences} x {data.sequence_length}{shares}",
        f"make train.sequences x data.sequence_length{{shares}} a multiple of {UNIT}, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8", "model.layers", "precision.compute"),
        lambda c, h: c.precision.compute == "fp8" and sum(c.precision.fp8_ends) >= c.model.layers,
        "none of the model.layers = {model.layers} layers is left to compute in fp8",
        "leave precision.fp8 out, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8",),
        lambda c, h: len({item.partition(":")[0] for item in c.precision.fp8}) < len(c.precision.fp8),
        "it names a product, or an end, twice",
        "each part once in precision.fp8",
    ),
    *(
        Rule(
            (setting, "precision.compute"),
            lambda c, h, setting=setting: c.precision.compute != "fp8" and leaf(c, setting) != "bf16",
            "no effect: nothing computes in fp8",
            "precision.compute = fp8, or leave it out",
            only_if_set=True,
        )
        for setting in ("precision.fp8", "precision.gather")
    ),
    Rule(
        ("precision.gather", "precision.fp8"),
        lambda c, h: _gathers(c) and not {"forward", "dgrad"} <= set(c.precision.fp8_products),
        "forward and input gradient read the weights that are gathered, and not both of them run in fp8",
        "precision.fp8 with forward and dgrad, or precision.gather = bf16",
    ),
    Rule(
        ("precision.gather", "overlap.dp.update"),
        lambda c, h: _gathers(c) and c.overlap.dp.update == "next_step",
        "ranks agree on scales of rows behind the whole update, which would be spread over the next step's forwards",
        "overlap.dp.update = end, or precision.gather = bf16",
    ),
    Rule(
        ("precision.gather", "mesh.dp"),
        lambda c, h: _gathers(c) and c.overlap.dp.strategy == "no_shard",
        "no effect: every rank has all weights, and nothing is gathered",
        "another overlap.dp.strategy, or leave precision.gather out",
        only_if_set=True,
    ),
    Rule(
        ("precision.gather", "mesh.dp"),
        lambda c, h: _gathers(c) and c.overlap.dp.strategy != "no_shard" and not gathered_units(c),
        "no effect: no weights are gathered",
        "mesh.dp = 2 or more, or leave precision.gather out",
        only_if_set=True,
    ),
    Rule(
        ("model.expert_ffn", "precision.compute"),
        lambda c, h: c.precision.compute == "fp8" and "moe" in c.model.kinds() and c.model.expert_ffn < WIDE,
        "narrow experts may be slower in fp8: on an H200 a layer with experts 768 wide took 1.12 times as long",
        "precision.compute = bf16, or measure it: hocket bench",
        remark=True,
    ),
)

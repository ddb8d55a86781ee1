"""Section `precision`: number formats, and the requirements of fp8 products."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hocket.config.rule import Each, Form, Host, OnlyWith, Rule, leaf

PRODUCTS = "forward", "dgrad", "wgrad"
"""Products of a linear layer."""


def fp8_part(item: str) -> tuple[str, int]:
    """(product, 0) or (but_first or but_last, layers) of an item of `precision.fp8`. Raises ValueError."""
    name, colon, number = item.partition(":")
    layers = bool(re.fullmatch(r"[1-9]\d{0,3}", number)) if name in ("but_first", "but_last") else not colon
    if name not in (*PRODUCTS, "but_first", "but_last") or not layers:
        raise ValueError(f"{item!r} is none of {', '.join(PRODUCTS)}, but_first:1, but_last:1")
    return name, int(number or 0)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Main weights, gradients at rest, the router and the loss are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Format of layers' compute, and of activations and gathered weights in communication. auto is bf16 on GPUs and
    fp32 on CPUs. With fp8, the linear layers of attention and MLPs multiply fp8 operands (e4m3, a scale per row), and
    all else is as with bf16: the head, the router, attention itself, communication. That needs a GPU with fp8 products
    (Ada, Hopper, or newer); on CPUs the same numbers are computed in fp32, slowly."""
    fp8: Annotated[
        tuple[str, ...],
        Form(fp8_part, "forward dgrad, or but_first:1 but_last:1", auto=False),
        OnlyWith("precision.compute = fp8"),
    ] = ()
    """With compute = fp8, what runs in fp8. forward, dgrad (input gradients) and wgrad (weight gradients) name
    products, and the others run in bf16; without a name all run in fp8. With but_first:2 the first two layers compute
    in bf16, with but_last:2 the last two."""
    gather: Annotated[
        Literal["auto", "bf16", "fp8"],
        OnlyWith("precision.compute = fp8", idle=("bf16",)),
        OnlyWith("overlap.dp.strategy other than no_shard", idle=("bf16",)),
        OnlyWith("shared weights", idle=("bf16",)),
    ] = "auto"
    """With compute = fp8, format of gathered weights of fp8 products. fp8 moves half the bytes and gives the same bits:
    each rank casts its shard after an update, by scales of whole rows on which ranks agree first. auto takes the one
    that is predicted to be faster."""
    wire: Annotated[Literal["auto", "fp32", "bf16"], OnlyWith("shared weights", remark=True)] = "auto"
    """Format of weight gradients in communication. auto is the format of compute: each rank rounds its gradient to it.
    fp32 with compute in bf16 rounds no gradient, and moves twice the bytes. Without communication of gradients,
    products add to the fp32 gradient. If one rank has a tied embedding and its head, the two gradients of a microbatch
    are added in this format."""
    averages: Literal["fp32", "bf16"] = "fp32"
    """Format of AdamW's two averages between steps. With bf16 a weight takes 8 bytes, not 12, apart from its copies. A
    step computes in fp32 and rounds the averages to nearest, so no decay rate of train.betas may be close to 1."""

    @property
    def dtype(self) -> str:
        """Format of activations and gathered weights."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def fp8_products(self) -> tuple[str, ...]:
        """Products that run in fp8."""
        return tuple(x for x in PRODUCTS if x in self.fp8) or PRODUCTS

    @property
    def fp8_ends(self) -> tuple[int, int]:
        """Number of first and of last layers that compute in bf16."""
        ends = dict(fp8_part(item) for item in self.fp8)
        return ends.get("but_first", 0), ends.get("but_last", 0)


UNIT = 16
"""Products in fp8 take widths and numbers of tokens that are multiples of this."""
FROM = (8, 9)
"""The first compute capability with fp8 products."""
WIDE = 1024
"""Width from which experts were measured to be faster in fp8: 1,536 was, 768 was not (docs/experts.md)."""
LARGEST_BETA = 1 - 2**-6
"""For averages in bf16. See Note: [Averages in bf16] in `fsdp/planned/optimizer.py`."""


def _fp8(c: Any) -> bool:
    return c.precision.compute == "fp8"


def _odd_width(c: Any, h: Host, it: str) -> bool:
    """Whether a setting gives an fp8 product an unsupported width."""
    kinds = {"model.ffn": "dense", "model.shared_ffn": "moe", "model.expert_ffn": "moe"}
    there = it not in kinds or kinds[it] in c.model.kinds()
    return _fp8(c) and there and leaf(c, it) * (c.model.kv_heads if it == "model.head_dim" else 1) % UNIT != 0


def _gathers(c: Any) -> bool:
    return _fp8(c) and c.precision.gather == "fp8"


PRECISION_RULES: tuple[Rule | Each, ...] = (
    Rule(
        ("precision.compute", "mesh.tp"),
        lambda c, h: _fp8(c) and c.mesh.tp > 1,
        "products of tensor-parallel ranks, which meet their operands piece by piece, do not run in fp8",
        "mesh.tp = 1, or precision.compute = bf16",
    ),
    Rule(
        ("precision.compute", "train.device"),
        lambda c, h: _fp8(c) and c.train.device == "cuda" and (0, 0) < h.capability < FROM,
        "{host.gpu} has no products in fp8, which begin at compute capability 8.9 (Ada, Hopper)",
        "precision.compute = bf16",
    ),
    Each(
        {
            "model.kv_lora_rank": "latent attention",
            "model.delta_heads": "gated delta nets",
            "model.expert_bias": "biases of experts",
            "model.swiglu_limit": "SwiGLU with a limit",
        },
        ("{it}", "precision.compute"),
        lambda c, h, it: _fp8(c) and bool(leaf(c, it)),
        "products in fp8 are not there for {what}",
        "precision.compute = bf16",
    ),
    Each(
        {
            "model.hidden": "{it}",
            "model.head_dim": "model.kv_heads x {it}",
            "model.ffn": "{it}",
            "model.shared_ffn": "{it}",
            "model.expert_ffn": "{it}",
        },
        ("{it}", "precision.compute"),
        _odd_width,
        f"products in fp8 take widths of a multiple of {UNIT}, and {{what}} is none",
        f"make {{what}} a multiple of {UNIT}, or precision.compute = bf16",
    ),
    Rule(
        ("data.sequence_length", "train.sequences", "precision.compute"),
        lambda c, h: _fp8(c) and c.tokens % UNIT != 0,
        f"weight gradients in fp8 sum over a multiple of {UNIT} tokens, and a microbatch has "
        "train.sequences x data.sequence_length = {train.sequences} x {data.sequence_length}{shares}",
        f"make train.sequences x data.sequence_length{{shares}} a multiple of {UNIT}, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8", "model.layers", "precision.compute"),
        lambda c, h: _fp8(c) and sum(c.precision.fp8_ends) >= c.model.layers,
        "none of the model.layers = {model.layers} layers is left to compute in fp8",
        "leave precision.fp8 out, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8",),
        lambda c, h: len({item.partition(":")[0] for item in c.precision.fp8}) < len(c.precision.fp8),
        "it names a product, or an end, twice",
        "each part once in precision.fp8",
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
        "ranks agree on scales of rows after the whole update, which would be spread over the next step's forwards",
        "overlap.dp.update = end, or precision.gather = bf16",
    ),
    Rule(
        ("model.expert_ffn", "precision.compute"),
        lambda c, h: _fp8(c) and c.model.has_experts and c.model.expert_ffn < WIDE,
        "narrow experts may be slower in fp8: on an H200 a layer with experts 768 wide took 1.12 times as long",
        "precision.compute = bf16, or measure it: hocket bench",
        remark=True,
    ),
    Rule(
        ("precision.averages", "train.betas"),
        lambda c, h: c.precision.averages == "bf16" and max(c.train.betas) > LARGEST_BETA,
        "an average in bf16 does not follow gradients at a decay rate above "
        f"{LARGEST_BETA:.3f}, and train.betas = {{train.betas}}: most steps would change less than its last digit",
        "precision.averages = fp32, or lower train.betas",
    ),
    Rule(
        ("precision.averages", "optimizer.name"),
        lambda c, h: c.optimizer.name == "muon" and c.precision.averages == "bf16",
        "Muon keeps its average in fp32",
        "precision.averages = fp32, or optimizer.name = adamw",
    ),
)

"""Rules of section `model`: sizes that go together, kinds of attention, experts, rotary positions."""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.derived import has_experts
from hocket.settings.rule import Each, Host, Rule, Words
from hocket.settings.schema import leaf

_SHARED = {
    "model.kv_heads": "model.heads",
    "model.delta_key_heads": "model.delta_heads",
    "model.route_groups": "model.experts",
    "mesh.ep": "model.experts",
}
"""Setting -> the number that it divides."""
_CHOSEN = {"model.top_k": "model.experts", "model.route_top_groups": "model.route_groups"}
"""Setting -> the number of those of which so many are chosen."""


def _uneven(c: Config, h: Host, it: str) -> bool:
    return not (c.model.latent and it == "model.kv_heads") and leaf(c, _SHARED[it]) % leaf(c, it) != 0


MODEL_RULES: tuple[Rule | Each, ...] = (
    Each(
        _SHARED,
        ("{what}", "{it}"),
        _uneven,
        "{what} = {{what}} cannot be spread evenly over {it} = {{it}}",
        "make {what} a multiple of {it}, or a {it} that divides {what}",
    ),
    Each(
        _CHOSEN,
        ("{it}", "{what}"),
        lambda c, h, it: leaf(c, it) > leaf(c, _CHOSEN[it]) > 0,
        "a token cannot choose {{it}} of {what} = {{what}}",
        "{it} at most {what}",
    ),
    Each(
        {"model.head_dim": "", "model.qk_rope_head_dim": ""},
        ("{it}", "model.kv_lora_rank"),
        lambda c, h, it: c.model.latent == (it == "model.qk_rope_head_dim") and leaf(c, it) % 2 != 0,
        "the rotary embedding turns pairs of elements",
        "an even {it}",
    ),
    Each(
        {"model.hidden": "", "model.expert_ffn": ""},
        ("{it}", "precision.compute"),
        lambda c, h, it: has_experts(c) and leaf(c, it) * c.element_bytes % 16 != 0,
        "products of experts need rows of a multiple of 16 bytes, and {precision.compute} has {width} per element",
        "make {it} a multiple of {unit}",
    ),
    Each(
        {"model.dense_layers": "", "model.full_layers": "", "model.rope.without": ""},
        ("{it}", "model.layers"),
        lambda c, h, it: any(layer >= c.model.layers for layer in leaf(c, it)),
        "it names layers that do not exist; they are numbered 0 to {last_layer}",
        "{it} with smaller numbers, or more model.layers",
    ),
    Each(
        {
            "model.qk_norm": "norms of its heads, but of its latents",
            "model.qkv_bias": "biases",
            "model.o_bias": "biases",
            "model.sinks": "sinks",
            "model.attn_gate": "gates",
            "model.norm_plus_one": "norms with one added to their weights",
            "model.window": "windows",
            "model.delta_heads": "delta nets in other layers",
            "model.rope.width": "width of its own that rotates: model.qk_rope_head_dim has",
        },
        ("{it}", "model.kv_lora_rank"),
        lambda c, h, it: c.model.latent and bool(leaf(c, it)),
        "latent attention has no {what}",
        "leave {it} out, or model.kv_lora_rank = 0",
    ),
    Rule(
        ("model.norms", "model.experts"),
        lambda c, h: c.model.norms == "after" and has_experts(c),
        "layers with experts have their norms before attention and experts",
        "model.norms = before, or model.experts = 0",
    ),
    Rule(
        ("model.window",),
        lambda c, h: c.model.window == 1,
        "a token that attends to itself alone needs no queries and keys, and flash attention has no such window",
        "model.window = 0, which means all tokens before it, or model.window = 2 or more",
    ),
    Rule(
        ("model.delta_heads", "model.window"),
        lambda c, h: c.model.delta_heads > 0 and c.model.window > 0,
        "layers that are not model.full_layers have either a window or a delta net",
        "model.window = 0, or model.delta_heads = 0",
    ),
    Rule(
        ("model.delta_heads", "train.device"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and bool(h.no_delta_kernels),
        "torch's operations compute gated delta nets, which is slow: {host.no_delta_kernels}",
        "pip install hocket[linear], and what it needs here",
        remark=True,
    ),
    Rule(
        ("model.delta_heads", "train.device", "precision.compute"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and c.precision.compute == "fp32",
        "torch's operations compute gated delta nets in fp32, which is slow: kernels take bf16",
        "precision.compute = bf16",
        remark=True,
    ),
    # Experts
    Rule(
        ("model.route_top_groups", "model.top_k", "model.route_groups"),
        lambda c, h: (
            has_experts(c)
            and c.model.top_k <= c.model.experts
            and c.model.top_k * c.model.route_groups > c.model.experts * c.model.route_top_groups
        ),
        "{model.route_top_groups} of {model.route_groups} groups have fewer than model.top_k = {model.top_k} of the "
        "{model.experts} experts",
        "more model.route_top_groups, or fewer model.route_groups",
    ),
    Rule(
        ("model.route_group_score", "model.route_groups"),
        lambda c, h: (
            c.model.route_group_score == "best_two"
            and c.model.route_top_groups < c.model.route_groups == c.model.experts
        ),
        "a group of one expert has no two scores",
        "model.route_group_score = best, or fewer model.route_groups",
    ),
    # Rotary positions
    Rule(
        ("model.rope.width", "model.head_dim"),
        lambda c, h: not c.model.latent and (c.model.rope.width % 2 != 0 or c.model.rope.width > c.model.head_dim),
        "pairs of elements rotate, and a head has {model.head_dim}",
        "an even model.rope.width up to model.head_dim, or model.rope.width = 0, which turns all of them",
    ),
    Rule(
        ("model.rope.original_positions", "model.rope.kind"),
        lambda c, h: c.model.rope.kind in ("llama3", "yarn") and c.model.rope.original_positions == 0,
        "{model.rope.kind} goes by how often a pair turns in the positions that the model was trained on first",
        "model.rope.original_positions above 0, or model.rope.kind = default",
    ),
    Rule(
        ("model.rope.high_frequency", "model.rope.low_frequency"),
        lambda c, h: c.model.rope.kind == "llama3" and c.model.rope.high_frequency <= c.model.rope.low_frequency,
        "pairs between the two are slowed down in part, and model.rope.low_frequency is {model.rope.low_frequency}",
        "model.rope.high_frequency above model.rope.low_frequency",
    ),
    Rule(
        ("model.rope.beta_fast", "model.rope.beta_slow"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope.beta_slow > c.model.rope.beta_fast,
        "pairs between the two are slowed down in part, and model.rope.beta_slow is {model.rope.beta_slow}",
        "model.rope.beta_fast at least model.rope.beta_slow",
    ),
    Rule(
        ("model.rope_theta", "model.rope.kind"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope_theta == 1,
        "all pairs turn alike, and yarn slows down those that turn less often than others",
        "another model.rope_theta, or model.rope.kind = default",
    ),
)

MODEL_WORDS: Words = {
    "last_layer": lambda c, h: c.model.layers - 1,
    "width": lambda c, h: c.element_bytes,
    "unit": lambda c, h: 16 // c.element_bytes,
}

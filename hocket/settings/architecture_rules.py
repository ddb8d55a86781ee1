"""Rules for latent attention and groups of experts: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.rule import Rule


def has_experts(c: Config) -> bool:
    return "moe" in c.model.kinds()


ARCHITECTURE_RULES: tuple[Rule, ...] = (
    Rule(
        ("model.qk_rope_head_dim",),
        lambda c, h: c.model.latent and c.model.qk_rope_head_dim % 2 != 0,
        "the rotary embedding turns pairs of elements",
        "an even model.qk_rope_head_dim",
    ),
    *(
        Rule(
            (f"model.{name}", "model.kv_lora_rank"),
            lambda c, h, name=name: c.model.latent and getattr(c.model, name),
            f"latent attention has no {what}",
            f"model.{name} = False, or model.kv_lora_rank = 0",
        )
        for name, what in (
            ("qk_norm", "norms of its heads, but of its latents"),
            ("qkv_bias", "biases"),
            ("o_bias", "biases"),
            ("sinks", "sinks"),
            ("attn_gate", "gates"),
            ("norm_plus_one", "norms with one added to their weights"),
        )
    ),
    Rule(
        ("model.window", "model.kv_lora_rank"),
        lambda c, h: c.model.latent and any(c.model.windows()),
        "latent attention has no windows",
        "model.window = 0, or model.kv_lora_rank = 0",
    ),
    Rule(
        ("model.delta_heads", "model.kv_lora_rank"),
        lambda c, h: c.model.latent and c.model.delta_heads > 0,
        "layers with latent attention are not there beside those with delta nets",
        "model.delta_heads = 0, or model.kv_lora_rank = 0",
    ),
    Rule(
        ("model.rope.width", "model.kv_lora_rank"),
        lambda c, h: c.model.latent and c.model.rope.width > 0,
        "of latent attention model.qk_rope_head_dim = {model.qk_rope_head_dim} elements of each head rotate",
        "leave model.rope.width out, or model.kv_lora_rank = 0",
    ),
    *(
        Rule(
            (f"model.{name}", "model.kv_lora_rank"),
            lambda c, h: not c.model.latent,
            "no effect: model.kv_lora_rank = 0, so attention is no latent one",
            "model.kv_lora_rank above 0, or leave it out",
            only_if_set=True,
        )
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ),
    *(
        Rule(
            (f"model.{name}", "model.kv_lora_rank"),
            lambda c, h: c.model.latent,
            f"no effect: latent attention has keys of its own for every head: model.{instead} says what they are",
            "leave it out, or model.kv_lora_rank = 0",
            only_if_set=True,
        )
        for name, instead in (("kv_heads", "heads"), ("head_dim", "qk_nope_head_dim"))
    ),
    Rule(
        ("model.route_groups", "model.experts"),
        lambda c, h: has_experts(c) and c.model.experts % c.model.route_groups != 0,
        "{model.experts} experts cannot be spread evenly over {model.route_groups} groups",
        "a model.route_groups that divides model.experts",
    ),
    Rule(
        ("model.route_top_groups", "model.route_groups"),
        lambda c, h: c.model.route_top_groups > c.model.route_groups,
        "a token cannot choose {model.route_top_groups} of {model.route_groups} groups",
        "model.route_top_groups at most model.route_groups",
    ),
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
    Rule(
        ("model.route_group_score", "model.route_groups"),
        lambda c, h: c.model.route_groups == c.model.route_top_groups and has_experts(c),
        "no effect: a token chooses among the experts of all groups",
        "model.route_groups above model.route_top_groups, or leave it out",
        only_if_set=True,
    ),
)

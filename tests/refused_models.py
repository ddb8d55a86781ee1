"""What is refused of a model's sizes and positions, for `test_config.py`: rows as in `refused_orders.py`."""

from __future__ import annotations

from typing import Any

YARN: dict[str, Any] = {"model__rope__kind": "yarn", "model__rope__original_positions": 64}
LATENT: dict[str, Any] = {"model__kv_lora_rank": 16}
DELTA: dict[str, Any] = {"model__delta_heads": 16}
DENSE: dict[str, Any] = {"model__experts": 0, "model__dense_layers": ()}
LLAMA: dict[str, Any] = {"model__rope__kind": "llama3", "model__rope__original_positions": 64}

REFUSED_MODELS: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({}, {"model__head_dim": 31}, "model.head_dim", "rotary"),
    ({}, {"model__top_k": 9}, "model.top_k", "cannot choose 9 of model.experts = 8"),
    ({}, {"model__dense_layers": (8,)}, "model.dense_layers", "numbered 0 to 7"),
    ({}, {"model__window": 4, "model__full_layers": (8,)}, "model.full_layers", "numbered 0 to 7"),
    ({}, {"model__full_layers": (1,)}, "model.full_layers", "no effect with model.window = 0, model.delta_heads = 0"),
    ({"model__full_layers": tuple(range(8))}, {"model__window": 4}, "model.window", "without other layers than"),
    ({}, {"model__window": 1}, "model.window", "attends to itself alone"),
    ({}, {"model__rope__plain_windows": True}, "model.rope.plain_windows", "no effect with model.rope.kind = default"),
    (YARN, {"model__rope__plain_windows": True}, "model.rope.plain_windows", "model.window = 0"),
    ({}, {"model__swiglu_alpha": 2.0}, "model.swiglu_alpha", "no effect with model.swiglu_limit = 0"),
    ({"model__experts": 0}, {"model__expert_bias": True}, "model.expert_bias", "without a model with experts"),
    ({"model__experts": 0}, {"model__router_bias": True}, "model.router_bias", "without a model with experts"),
    ({}, {"model__qk_norm_over": "whole"}, "model.qk_norm_over", "no effect with model.qk_norm = False"),
    ({}, {"model__norms": "after"}, "model.norms", "layers with experts have their norms before"),
    ({}, {"model__rope__width": 5}, "model.rope.width", "pairs of elements rotate"),
    ({}, {"model__rope__width": 34}, "model.rope.width", "fix: an even model.rope.width up to model.head_dim"),
    ({}, {"model__rope__without": (8,)}, "model.rope.without", "numbered 0 to 7"),
    ({}, {"model__rope__kind": "yarn"}, "model.rope.kind", "yarn goes by how often a pair turns"),
    (YARN, {"model__rope__original_positions": 0}, "model.rope.original_positions", "original_positions above 0"),
    (LLAMA, {"model__rope__high_frequency": 1.0}, "model.rope.high_frequency", "model.rope.low_frequency is 1.0"),
    (LLAMA, {"model__rope__low_frequency": 4.0}, "model.rope.low_frequency", "above model.rope.low_frequency"),
    (YARN, {"model__rope__beta_slow": 33.0}, "model.rope.beta_slow", "model.rope.beta_slow is 33.0"),
    (YARN, {"model__rope_theta": 1.0}, "model.rope_theta", "fix: another model.rope_theta"),
    ({}, {"model__rope__factor": 2.0}, "model.rope.factor", "fix: model.rope.kind = linear or llama3 or yarn"),
    *(
        (LLAMA, {f"model__rope__{name}": value}, f"model.rope.{name}", "fix: model.rope.kind = yarn")
        for name, value in {
            "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 2.0, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }.items()
    ),
    *(
        (YARN, {f"model__rope__{name}_frequency": 2.0}, f"model.rope.{name}_frequency", "fix: model.rope.kind = llama3")
        for name in ("low", "high")
    ),
    ({}, {"model__rope__original_positions": 64}, "model.rope.original_positions", "= llama3 or yarn"),
    ({}, {"model__route_groups": 3}, "model.route_groups", "8 cannot be spread evenly over model.route_groups = 3"),
    ({}, {"model__route_top_groups": 2}, "model.route_top_groups", "cannot choose 2 of model.route_groups = 1"),
    ({"model__top_k": 5}, {"model__route_groups": 2}, "model.route_groups", "have fewer than model.top_k = 5 of the 8"),
    ({"model__top_k": 1}, {"model__route_groups": 8}, "model.route_groups", "a group of one expert has no two scores"),
    ({}, {"model__route_group_score": "best"}, "model.route_group_score", "no effect with model.route_groups = 1"),
    (DENSE, {"model__route_groups": 2}, "model.route_groups", "no effect without a model with experts"),
    (DENSE, {"model__route_top_groups": 1}, "model.route_top_groups", "no effect without a model with experts"),
    (DENSE, {"model__route_group_score": "best"}, "model.route_group_score", "no effect without a model with experts"),
    (LATENT, {"model__qk_rope_head_dim": 5}, "model.qk_rope_head_dim", "rotary"),
    (LATENT, {"model__qk_norm": True}, "model.qk_norm", "no norms of its heads, but of its latents"),
    (LATENT, {"model__qkv_bias": True}, "model.qkv_bias", "latent attention has no biases"),
    (LATENT, {"model__o_bias": True}, "model.o_bias", "latent attention has no biases"),
    (LATENT, {"model__sinks": True}, "model.sinks", "latent attention has no sinks"),
    (LATENT, {"model__window": 4}, "model.window", "latent attention has no windows"),
    (LATENT, {"model__attn_gate": True}, "model.attn_gate", "latent attention has no gates"),
    (LATENT, {"model__norm_plus_one": True}, "model.norm_plus_one", "latent attention has no norms with one added"),
    (LATENT, DELTA, "model.delta_heads", "latent attention has no delta nets"),
    ({"model__window": 4}, DELTA, "model.delta_heads", "either a window or a delta net"),
    ({"model__full_layers": tuple(range(8))}, DELTA, "model.delta_heads", "no effect without other layers than"),
    (DELTA, {"model__delta_key_heads": 3}, "model.delta_key_heads", "over model.delta_key_heads = 3"),
    (DELTA, {"mesh__tp": 4, "model__delta_key_heads": 2}, "mesh.tp", "key heads of delta nets of its own"),
    (DELTA, {"plan__graphs": "on"}, "plan.graphs", "no step with gated delta nets is recorded"),
    (DELTA, {"precision__compute": "fp8"}, "precision.compute", "products in fp8 are not there for gated delta nets"),
    ({"model__shared_ffn": 0}, {"model__shared_gate": True}, "model.shared_gate", "with model.shared_ffn = 0"),
    *(
        ({}, {f"model__delta_{name}": 8}, f"model.delta_{name}", "no effect with model.delta_heads = 0")
        for name in ("key_heads", "key_dim", "value_dim", "conv")
    ),
    (LATENT, {"model__rope__width": 8}, "model.rope.width", "no width of its own that rotates"),
    (LATENT, {"model__kv_heads": 2}, "model.kv_heads", "no effect with model.kv_lora_rank = 16"),
    (LATENT, {"model__head_dim": 32}, "model.head_dim", "no effect with model.kv_lora_rank = 16"),
    *(
        ({}, {f"model__{name}": 8}, f"model.{name}", "no effect with model.kv_lora_rank = 0")
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ),
    (LATENT, {"precision__compute": "fp8"}, "precision.compute", "products in fp8 are not there for latent"),
    ({"model__expert_bias": True}, {"precision__compute": "fp8"}, "precision.compute", "not there for biases of"),
    ({"model__swiglu_limit": 7.0}, {"precision__compute": "fp8"}, "precision.compute", "not there for SwiGLU with"),
)  # fmt: skip

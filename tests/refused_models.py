"""What is refused of a model's sizes and positions, for `test_config.py`: rows as in `refused_orders.py`."""

from __future__ import annotations

from typing import Any

YARN: dict[str, Any] = {"model__rope__kind": "yarn", "model__rope__original_positions": 64}
LLAMA: dict[str, Any] = {"model__rope__kind": "llama3", "model__rope__original_positions": 64}

REFUSED_MODELS: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({}, {"model__head_dim": 31}, "model.head_dim", "rotary"),
    ({}, {"model__top_k": 9}, "model.top_k", "cannot choose 9 of 8"),
    ({}, {"model__dense_layers": (8,)}, "model.dense_layers", "numbered 0 to 7"),
    ({}, {"model__window": 4, "model__full_layers": (8,)}, "model.full_layers", "numbered 0 to 7"),
    ({}, {"model__full_layers": (1,)}, "model.full_layers", "no effect: no layer has a window"),
    ({"model__full_layers": tuple(range(8))}, {"model__window": 4}, "model.window", "names every layer"),
    (YARN, {"model__rope__plain_windows": True}, "model.rope.plain_windows", "model.window = 0"),
    ({}, {"model__swiglu_alpha": 2.0}, "model.swiglu_alpha", "model.swiglu_limit = 0 is silu"),
    ({"model__experts": 0}, {"model__expert_bias": True}, "model.expert_bias", "the model has no MoE layer"),
    ({"model__experts": 0}, {"model__router_bias": True}, "model.router_bias", "the model has no MoE layer"),
    ({}, {"model__qk_norm_over": "whole"}, "model.qk_norm_over", "no effect: queries and keys have no norm"),
    ({}, {"model__norms": "after"}, "model.norms", "layers with experts have their norms before"),
    ({}, {"model__rope__width": 5}, "model.rope.width", "pairs of elements rotate"),
    ({}, {"model__rope__width": 34}, "model.rope.width", "a head has 32; fix: an even number up to model.head_dim"),
    ({}, {"model__rope__without": (8,)}, "model.rope.without", "numbered 0 to 7"),
    ({}, {"model__rope__kind": "yarn"}, "model.rope.kind", "yarn goes by how often a pair turns"),
    (YARN, {"model__rope__original_positions": 0}, "model.rope.original_positions", "such as 8192"),
    (LLAMA, {"model__rope__high_frequency": 1.0}, "model.rope.high_frequency", "model.rope.low_frequency is 1.0"),
    (LLAMA, {"model__rope__low_frequency": 4.0}, "model.rope.low_frequency", "more than model.rope.low_frequency"),
    (YARN, {"model__rope__beta_slow": 33.0}, "model.rope.beta_slow", "model.rope.beta_slow is 33.0"),
    (YARN, {"model__rope_theta": 1.0}, "model.rope_theta", "another model.rope_theta than 1"),
    ({}, {"model__rope__factor": 2.0}, "model.rope.factor", "only linear, llama3, yarn reads it"),
    *(
        (LLAMA, {f"model__rope__{name}": value}, f"model.rope.{name}", "model.rope.kind = llama3, and only yarn reads")
        for name, value in {
            "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 2.0, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }.items()
    ),
    *(
        (YARN, {f"model__rope__{name}_frequency": 2.0}, f"model.rope.{name}_frequency", "and only llama3 reads it")
        for name in ("low", "high")
    ),
    ({}, {"model__rope__original_positions": 64}, "model.rope.original_positions", "and only llama3, yarn reads it"),
)  # fmt: skip

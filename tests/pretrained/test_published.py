"""config.json as published models have it, in the words of the time: sizes add up to the published counts."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.model.transformer import parameter_counts
from hocket.pretrained.configuration import differences, family_for, model_of
from hocket.settings import families

_LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=128000, eos_token_id=128001, hidden_act="silu", hidden_size=4096, initializer_range=0.02,
    intermediate_size=14336, max_position_embeddings=8192, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500000.0,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.40.0.dev0", use_cache=True,
    vocab_size=128256,
)  # fmt: skip
_MISTRAL = dict(
    model_type="mistral", architectures=["MistralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
    max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
    rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    transformers_version="4.42.0.dev0", use_cache=True, vocab_size=32768,
)  # fmt: skip
_QWEN = dict(
    attention_bias=False, attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, head_dim=128,
    hidden_act="silu", initializer_range=0.02, max_position_embeddings=40960, rms_norm_eps=1e-06, rope_scaling=None,
    rope_theta=1000000, sliding_window=None, torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
_MOE = dict(
    **_QWEN, model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts=128,
    num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001, tie_word_embeddings=False,
    num_key_value_heads=4,
)  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880,
        initial_context_length=4096, initializer_range=0.02, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=layers, num_key_value_heads=8,
        num_local_experts=experts, output_router_logits=False, pad_token_id=199999,
        quantization_config=dict(
            modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            quant_method="mxfp4",
        ),
        rms_norm_eps=1e-05, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
        tie_word_embeddings=False, transformers_version="4.55.0.dev0", use_cache=True, vocab_size=201088,
    )  # fmt: skip


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Llama-3-8B": (_LLAMA, 8.030e9, 8.030e9),
    "Mistral-7B-v0.1": (
        {**_MISTRAL, "sliding_window": 4096, "rope_theta": 10000.0, "vocab_size": 32000},
        7.242e9,
        7.242e9,
    ),
    "gpt-oss-20b": (_gpt_oss(24, 32), 20.91e9, 4.19e9),
    "gpt-oss-120b": (_gpt_oss(36, 128), 116.83e9, 5.71e9),
    "Mistral-7B-v0.3": (_MISTRAL, 7.248e9, 7.248e9),
    "Qwen3-0.6B": (
        dict(
            **_QWEN, model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
            num_hidden_layers=28, num_key_value_heads=8, max_window_layers=28, tie_word_embeddings=True,
        ),
        0.596e9,
        0.596e9,
    ),
    "Qwen3-8B": (
        dict(
            **_QWEN, model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_hidden_layers=36, num_key_value_heads=8, max_window_layers=36, tie_word_embeddings=False,
        ),
        8.19e9,
        8.19e9,
    ),
    "Qwen3-30B-A3B": (
        dict(
            **_MOE, hidden_size=2048, intermediate_size=6144, max_window_layers=48, moe_intermediate_size=768,
            num_attention_heads=32, num_hidden_layers=48,
        ),
        30.53e9,
        3.35e9,
    ),
    "Qwen3-235B-A22B": (
        dict(
            **_MOE, hidden_size=4096, intermediate_size=12288, max_window_layers=94, moe_intermediate_size=1536,
            num_attention_heads=64, num_hidden_layers=94,
        ),
        235.1e9,
        22.2e9,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            **_MISTRAL, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "vocab_size": 32000,
            "output_router_logits": False, "router_aux_loss_coef": 0.02,
        },
        46.70e9,
        12.88e9,
    ),
}  # fmt: skip
"""config.json, parameters, and those that one token meets."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name: str) -> None:
    config, total, active = PUBLISHED[name]
    model = model_of(config)
    assert parameter_counts(model) == (pytest.approx(total, rel=1e-3), pytest.approx(active, rel=4e-3))
    assert family_for(model) == {"Mistral-7B-v0.3": "llama"}.get(name, config["model_type"])


def test_recipes_have_the_published_sizes() -> None:
    for recipe, name in (("llama3_8b", "Llama-3-8B"), ("qwen3_30b_a3b", "Qwen3-30B-A3B")):
        assert not differences(getattr(families, recipe)(), model_of(PUBLISHED[name][0]))
    for size in ("20b", "120b"):
        assert not differences(getattr(families, f"gpt_oss_{size}")(), model_of(PUBLISHED[f"gpt-oss-{size}"][0]))
    assert not differences(families.mixtral_8x7b(), model_of(PUBLISHED["Mixtral-8x7B-v0.1"][0]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0}},
            "have no high_freq_factor",
        ),
        ({"model_type": "phi3"}, "model_type = phi3: needs queries, keys and values in one tensor"),
        ({"rope_theta": None}, "config.json has no rope_theta"),
    ],
)
def test_what_is_not_there_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_of({**_LLAMA, **changes})

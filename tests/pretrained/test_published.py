"""config.json as published models have it, in the words of the time: sizes add up to the published counts."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config import RopeConfig
from hocket.model.transformer import parameter_counts
from hocket.pretrained.families import differences, family_for, model_of
from hocket.recipes import RECIPES

_LLAMA: dict[str, Any] = dict(
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
_DEEPSEEK = dict(
    attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, auto_map={"AutoConfig": "configuration"},
    bos_token_id=0, eos_token_id=1, first_k_dense_replace=1, hidden_act="silu", initializer_range=0.02,
    kv_lora_rank=512, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=True,
    pretraining_tp=1, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000, rms_norm_eps=1e-06,
    scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
    torch_dtype="bfloat16", transformers_version="4.33.1", use_cache=True, v_head_dim=128,
)  # fmt: skip
_V2 = dict(
    model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], max_position_embeddings=163840,
    norm_topk_prob=False, num_experts_per_tok=6, scoring_func="softmax", vocab_size=102400,
    rope_scaling=dict(
        beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707, type="yarn",
        original_max_position_embeddings=4096,
    ),
)  # fmt: skip
_SMALL = dict(
    hidden_size=2048, moe_intermediate_size=1408, num_attention_heads=16, num_hidden_layers=27,
    num_key_value_heads=16, q_lora_rank=None,
)  # fmt: skip
_LARGE = dict(
    architectures=["DeepseekV3ForCausalLM"], ep_size=1, hidden_size=7168, intermediate_size=18432,
    moe_intermediate_size=2048, n_shared_experts=1, num_experts_per_tok=8, num_hidden_layers=61, q_lora_rank=1536,
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
)  # fmt: skip
_YARN = dict(
    beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096,
    type="yarn",
)  # fmt: skip
_LLAMA3_1: dict[str, Any] = {
    **_LLAMA, "mlp_bias": False, "max_position_embeddings": 131072, "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
_QWEN2 = dict(
    model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
    eos_token_id=151643, hidden_act="silu", hidden_size=3584, initializer_range=0.02, intermediate_size=18944,
    max_position_embeddings=131072, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28,
    num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False,
    torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True, use_mrope=False, use_sliding_window=False,
    vocab_size=152064,
)  # fmt: skip
_GLM = dict(
    model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], attention_bias=True, attention_dropout=0.0,
    pad_token_id=151329, eos_token_id=[151329, 151336, 151338], head_dim=128, hidden_act="silu",
    partial_rotary_factor=0.5, initializer_range=0.02, max_position_embeddings=131072, norm_topk_prob=True,
    num_attention_heads=96, n_group=1, topk_group=1, n_shared_experts=1, num_experts_per_tok=8, num_key_value_heads=8,
    rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, num_nextn_predict_layers=1, tie_word_embeddings=False,
    torch_dtype="bfloat16", transformers_version="4.54.0", use_cache=True, vocab_size=151552,
)  # fmt: skip
_OLMO = dict(
    attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02,
    max_position_embeddings=4096, rope_scaling=None, tie_word_embeddings=False, use_cache=True,
)  # fmt: skip
_MINIMAX = dict(
    model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], attention_dropout=0.0, attn_type_list=[1] * 62,
    bos_token_id=None, eos_token_id=None, head_dim=128, hidden_act="silu", hidden_size=3072, initializer_range=0.02,
    intermediate_size=1536, layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
    layernorm_mlp_beta=1.0, max_position_embeddings=196608, mlp_intermediate_size=8192, mtp_transformer_layers=1,
    num_attention_heads=48, num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256,
    num_mtp_modules=3, output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000,
    rotary_dim=64, router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid",
    shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, tie_word_embeddings=False,
    transformers_version="4.46.1", use_cache=True, use_mtp=True, use_qk_norm=True, use_routing_bias=True,
    vocab_size=200064,
)  # fmt: skip
_SMOLLM = dict(
    model_type="smollm3", architectures=["SmolLM3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=11008,
    layer_types=["full_attention"] * 36, max_position_embeddings=65536, max_window_layers=28, mlp_bias=False,
    no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16, num_hidden_layers=36,
    num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0,
    sliding_window=None, use_cache=False, use_sliding_window=False, vocab_size=128256,
)  # fmt: skip


_OLMO3_ROPE = dict(
    attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
    original_max_position_embeddings=8192, rope_type="yarn",
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


_NEXT = dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", attention_bias=False, attention_dropout=0.0,
    bos_token_id=151643, eos_token_id=151645, decoder_sparse_step=1, full_attention_interval=4, head_dim=256,
    hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=5120, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
    max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True,
    num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2,
    output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06, rope_scaling=None,
    rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
    tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Llama-3-8B": (_LLAMA, 8.030e9, 8.030e9),
    "Mistral-7B-v0.1": (
        {**_MISTRAL, "sliding_window": 4096, "rope_theta": 10000.0, "vocab_size": 32000},
        7.242e9,
        7.242e9,
    ),
    "Olmo-3-7B": (
        dict(
            **{**_OLMO, "max_position_embeddings": 65536, "rope_scaling": _OLMO3_ROPE}, model_type="olmo3",
            hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=32,
            num_key_value_heads=32, rms_norm_eps=1e-06, rope_theta=500000, sliding_window=4096, vocab_size=100278,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        ),
        7.298e9,
        7.298e9,
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
    "Qwen1.5-MoE-A2.7B": (
        dict(
            architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", attention_dropout=0.0, bos_token_id=151643,
            decoder_sparse_step=1, eos_token_id=151643, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
            intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408,
            norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
            num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-06, rope_theta=1000000.0,
            router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
            tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False,
            vocab_size=151936,
        ),
        14.32e9,
        2.69e9,
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
    "DeepSeek-V2-Lite": (
        {
            **_DEEPSEEK, **_V2, **_SMALL, "intermediate_size": 10944, "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        15.71e9,
        2.66e9,
    ),
    "DeepSeek-V2": (
        {
            **_DEEPSEEK, **_V2, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "n_group": 8, "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60,
            "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
        235.7e9,
        21.4e9,
    ),
    "DeepSeek-V3": (
        {
            **_DEEPSEEK, **_LARGE, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_group": 8,
            "max_position_embeddings": 163840, "n_routed_experts": 256, "num_attention_heads": 128,
            "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rope_scaling": _YARN,
            "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
        },
        671.0e9,
        37.6e9,
    ),
    "Kimi-K2": (
        {
            **_DEEPSEEK, **_LARGE, "model_type": "kimi_k2", "max_position_embeddings": 131072,
            "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840,
            "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        },
        1026e9,
        32.9e9,
    ),
    "Moonlight-16B-A3B": (
        {
            **_DEEPSEEK, **_SMALL, "model_type": "deepseek_v3", "intermediate_size": 11264, "num_experts_per_tok": 6,
            "max_position_embeddings": 8192, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-05,
            "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "vocab_size": 163840,
        },
        15.96e9,
        2.91e9,
    ),
    "GLM-4.7-Flash": (
        dict(
            architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", attention_bias=False,
            attention_dropout=0.0, dtype="bfloat16", eos_token_id=[154820, 154827], first_k_dense_replace=1,
            hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=10240, kv_lora_rank=512,
            max_position_embeddings=202752, moe_intermediate_size=1536, n_group=1, n_routed_experts=64,
            n_shared_experts=1, norm_topk_prob=True, num_attention_heads=20, num_experts_per_tok=4,
            num_hidden_layers=47, num_key_value_heads=20, num_nextn_predict_layers=1, pad_token_id=154820,
            partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, rms_norm_eps=1e-05,
            rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8, tie_word_embeddings=False, topk_group=1,
            topk_method="noaux_tc", transformers_version="5.0.0rc0", v_head_dim=256, vocab_size=154880,
        ),
        29.94e9,
        3.90e9,
    ),
    "Llama-3.1-8B": (_LLAMA3_1, 8.030e9, 8.030e9),
    "Llama-3.2-1B": (
        {
            **_LLAMA3_1, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "tie_word_embeddings": True, "rope_scaling": {**_LLAMA3_1["rope_scaling"], "factor": 32.0},
        },
        1.236e9,
        1.236e9,
    ),
    "Llama-3.2-3B": (
        {
            **_LLAMA3_1, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "tie_word_embeddings": True,
            "rope_scaling": {**_LLAMA3_1["rope_scaling"], "factor": 32.0},
        },
        3.213e9,
        3.213e9,
    ),
    "Llama-3.1-70B": (
        {
            **_LLAMA3_1, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        70.55e9,
        70.55e9,
    ),
    "Qwen2.5-7B": (_QWEN2, 7.616e9, 7.616e9),
    "GLM-4.5-Air": (
        dict(
            **_GLM, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=128,
            routed_scaling_factor=1.0, first_k_dense_replace=1, num_hidden_layers=46, use_qk_norm=False,
        ),
        106.9e9,
        13.4e9,
    ),
    "GLM-4.5": (
        dict(
            **_GLM, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_routed_experts=160,
            routed_scaling_factor=2.5, first_k_dense_replace=3, num_hidden_layers=92, use_qk_norm=True,
        ),
        352.8e9,
        33.6e9,
    ),
    "OLMo-2-1124-7B": (
        dict(
            **_OLMO, model_type="olmo2", hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-06, rope_theta=500000, vocab_size=100352,
        ),
        7.299e9,
        7.299e9,
    ),
    "OLMoE-1B-7B-0924": (
        dict(
            **_OLMO, model_type="olmoe", clip_qkv=None, hidden_size=2048, intermediate_size=1024, norm_topk_prob=False,
            num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_hidden_layers=16,
            num_key_value_heads=16, output_router_logits=False, rope_theta=10000.0, router_aux_loss_coef=0.01,
            vocab_size=50304,
        ),
        6.92e9,
        1.28e9,
    ),
    "MiniMax-M2": (_MINIMAX, 228.7e9, 11.0e9),
    "SmolLM3-3B": (_SMOLLM, 3.075e9, 3.075e9),
    "Qwen3-Next-80B-A3B": (_NEXT, 79.67e9, 3.87e9),
}  # fmt: skip
"""config.json, parameters, and those that one token meets."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name: str) -> None:
    config, total, active = PUBLISHED[name]
    model = model_of(config)
    assert parameter_counts(model) == (pytest.approx(total, rel=1e-3), pytest.approx(active, rel=4e-3))
    nearest = {"kimi_k2": "deepseek_v3", "glm4_moe_lite": "deepseek_v3"}
    nearest |= {} if model.window else {"mistral": "llama"}
    assert family_for(model) == nearest.get(config["model_type"], config["model_type"])


_QWEN3_SIZES = {
    "qwen3_0_6b": 0.596e9, "qwen3_1_7b": 1.720e9, "qwen3_4b": 4.022e9, "qwen3_8b": 8.19e9, "qwen3_14b": 14.77e9,
    "qwen3_32b": 32.76e9,
}  # fmt: skip


@pytest.mark.parametrize("recipe", _QWEN3_SIZES)
def test_recipes_of_qwen3_have_the_published_sizes(recipe: str) -> None:
    total, active = parameter_counts(RECIPES[recipe]().model)
    assert total == active == pytest.approx(_QWEN3_SIZES[recipe], rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("llama3_8b", "Llama-3-8B"),
        ("llama3_1_8b", "Llama-3.1-8B"),
        ("llama3_1_70b", "Llama-3.1-70B"),
        ("qwen3_0_6b", "Qwen3-0.6B"),
        ("qwen3_8b", "Qwen3-8B"),
        ("qwen3_30b_a3b", "Qwen3-30B-A3B"),
        ("qwen3_235b_a22b", "Qwen3-235B-A22B"),
        ("mixtral_8x7b", "Mixtral-8x7B-v0.1"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("gpt_oss_120b", "gpt-oss-120b"),
        ("glm4_5_air", "GLM-4.5-Air"),
        ("olmo2_7b", "OLMo-2-1124-7B"),
        ("olmoe_1b_7b", "OLMoE-1B-7B-0924"),
        ("deepseek_v2_lite", "DeepSeek-V2-Lite"),
        ("moonlight_16b", "Moonlight-16B-A3B"),
        ("deepseek_v3", "DeepSeek-V3"),
        ("kimi_k2", "Kimi-K2"),
        ("qwen3_next_80b_a3b", "Qwen3-Next-80B-A3B"),
    ],
)
def test_recipes_are_the_published_models(recipe: str, name: str) -> None:
    assert not differences(RECIPES[recipe]().model, model_of(PUBLISHED[name][0]))


def test_old_and_new_forms_of_positions_are_one() -> None:
    """transformers 5 writes `rope_parameters`, and so do files that it saves again."""
    old = {**_LLAMA3_1}
    theta, scaling = old.pop("rope_theta"), old.pop("rope_scaling")
    new = {**old, "rope_parameters": {**scaling, "rope_theta": theta}}
    assert model_of(new) == model_of(_LLAMA3_1)
    assert model_of(_LLAMA3_1).rope == RopeConfig(kind="llama3", factor=8.0, original_positions=8192)
    glm = {**PUBLISHED["GLM-4.5"][0]}
    share = glm.pop("partial_rotary_factor")
    assert model_of(glm).rope.width == 64  # transformers' default
    for key in ("rope_theta", "rope_scaling"):
        del glm[key]
    assert model_of({**glm, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": share}}).rope.width == 64


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

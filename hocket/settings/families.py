"""Models with true sizes, as data.

Their authors publish no first values but a standard deviation. So they take those of torchtitan, which trains these
families from scratch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hocket.config import ModelConfig, RopeConfig

LLAMA3_8B = ModelConfig(
    vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    rope_theta=500000.0, norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""Llama 3 8B: 8.03 billion parameters, dense."""


def llama3_1(hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    """Llama 3.1: Llama 3 with rotary positions that were slowed down for sequences of 131,072 tokens."""
    rope = RopeConfig(kind="llama3", factor=8.0, original_positions=8192)
    return replace(LLAMA3_8B, hidden=hidden, layers=layers, heads=heads, ffn=ffn, rope=rope)


def qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> ModelConfig:
    """A dense Qwen3."""
    return ModelConfig(
        vocab=151936, hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, ffn=ffn, tied=tied,
        qk_norm=True, rope_theta=1e6, init="torchtitan",
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    """Windows in every other layer, sinks, and biases everywhere. Its authors balance experts as they do not say."""
    return ModelConfig(
        vocab=201088, hidden=2880, layers=layers, heads=64, kv_heads=8, head_dim=64, qkv_bias=True, o_bias=True,
        window=128, full_layers=tuple(range(1, layers, 2)), sinks=True,
        experts=experts, top_k=4, expert_ffn=2880, router_bias=True, expert_bias=True, swiglu_limit=7.0,
        aux_loss=0.001, rope_theta=150000.0, norm_eps=1e-5, init="torchtitan",
        rope=RopeConfig(kind="yarn", factor=32.0, original_positions=4096, truncate=False),
    )  # fmt: skip


MIXTRAL_8X7B = ModelConfig(
    vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
    experts=8, top_k=2, expert_ffn=14336, aux_loss=0.02, rope_theta=1e6, norm_eps=1e-5,
    init="torchtitan",
)  # fmt: skip
"""Mixtral 8x7B: 46.7 billion parameters, 12.9 active, 8 experts of which 2 are used."""
QWEN3_30B_A3B = ModelConfig(
    vocab=151936, hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
    experts=128, top_k=8, expert_ffn=768, aux_loss=0.001, qk_norm=True, rope_theta=1e6,
    init="torchtitan",
)  # fmt: skip
"""Qwen3-30B-A3B: 30.5 billion parameters, 3.3 active, 128 small experts of which 8 are used."""
QWEN3_235B_A22B = replace(QWEN3_30B_A3B, hidden=4096, layers=94, heads=64, expert_ffn=1536)
"""Qwen3-235B-A22B: 235.1 billion parameters, 22.2 active, 128 experts of which 8 are used."""
GLM4_5_AIR = ModelConfig(
    vocab=151552, hidden=4096, layers=46, heads=96, kv_heads=8, head_dim=128, ffn=10944, dense_layers=(0,),
    experts=128, top_k=8, expert_ffn=1408, shared_ffn=1408, router="sigmoid", bias_rate=0.001, qkv_bias=True,
    rope_theta=1e6, rope=RopeConfig(width=64), norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""GLM-4.5-Air: 106.9 billion parameters, 13.4 active, half of each head with positions, a dense first layer."""
OLMO2_7B = ModelConfig(
    vocab=100352, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=11008, norms="after",
    qk_norm=True, qk_norm_over="whole", rope_theta=500000.0, init="torchtitan",
)  # fmt: skip
"""OLMo 2 7B: 7.3 billion parameters, dense, norms after attention and MLP."""
OLMOE_1B_7B = ModelConfig(
    vocab=50304, hidden=2048, layers=16, heads=16, kv_heads=16, head_dim=128, experts=64, top_k=8, expert_ffn=1024,
    normalize_top_k=False, aux_loss=0.01, qk_norm=True, qk_norm_over="whole", norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""OLMoE-1B-7B: 6.9 billion parameters, 1.3 active, 64 small experts of which 8 are used."""
_NEXT: dict[str, Any] = dict(
    hidden=2048, heads=16, kv_heads=2, head_dim=256, qk_norm=True, attn_gate=True, norm_plus_one=True,
    delta_heads=32, expert_ffn=512, shared_ffn=512, shared_gate=True, aux_loss=0.001,
    rope_theta=1e7, rope=RopeConfig(width=64), init="torchtitan",
)  # fmt: skip
"""What Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B have in common."""
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Sizes of latent attention that all of DeepSeek's models have, and those made like them."""
DEEPSEEK_V2_LITE = ModelConfig(
    vocab=102400, hidden=2048, layers=27, heads=16, ffn=10944, dense_layers=(0,), **_LATENT,
    experts=64, top_k=6, expert_ffn=1408, shared_ffn=2816, normalize_top_k=False, aux_loss=0.001,
    rope=RopeConfig(kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707),
    init="torchtitan",
)  # fmt: skip
"""DeepSeek-V2-Lite: 15.7 billion parameters, 2.7 active. Its two shared experts of width 1408 are one of 2816."""
MOONLIGHT_16B = ModelConfig(
    vocab=163840, hidden=2048, layers=27, heads=16, ffn=11264, dense_layers=(0,), **_LATENT,
    experts=64, top_k=6, expert_ffn=1408, shared_ffn=2816, router="sigmoid", route_scale=2.446,
    bias_rate=0.001, rope_theta=50000.0, norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""Moonlight-16B-A3B: 16.0 billion parameters, 2.9 active. Its two shared experts of width 1408 are one of 2816."""
DEEPSEEK_V3 = ModelConfig(
    vocab=129280, hidden=7168, layers=61, heads=128, ffn=18432, dense_layers=(0, 1, 2), q_lora_rank=1536, **_LATENT,
    experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, router="sigmoid", route_scale=2.5,
    route_groups=8, route_top_groups=4, bias_rate=0.001,
    rope=RopeConfig(kind="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    init="torchtitan",
)  # fmt: skip
"""DeepSeek-V3: 671 billion parameters, 37 active, without the layer that predicts a second token."""
KIMI_K2 = ModelConfig(
    vocab=163840, hidden=7168, layers=61, heads=64, ffn=18432, dense_layers=(0,), q_lora_rank=1536, **_LATENT,
    experts=384, top_k=8, expert_ffn=2048, shared_ffn=2048, router="sigmoid", route_scale=2.827,
    bias_rate=0.001, rope_theta=50000.0,
    rope=RopeConfig(
        kind="yarn", factor=32.0, original_positions=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
    ),
    init="torchtitan",
)  # fmt: skip
"""Kimi-K2 in its first release: 1.03 trillion parameters, 33 billion active."""
GPT_OSS_20B = _gpt_oss(layers=24, experts=32)
"""gpt-oss-20b: 20.9 billion parameters, 3.6 active without the embedding, 32 experts of which 4 are used."""
GPT_OSS_120B = _gpt_oss(layers=36, experts=128)
"""gpt-oss-120b: 116.8 billion parameters, 5.1 active without the embedding, 128 experts of which 4 are used."""
QWEN3_NEXT_80B_A3B = ModelConfig(
    vocab=151936, layers=48, experts=512, top_k=10, **_NEXT, full_layers=tuple(range(3, 48, 4))
)  # fmt: skip
"""Qwen3-Next-80B-A3B: 79.7 billion parameters, 3.9 active, three gated delta nets for each layer of attention."""
TINY = ModelConfig(
    vocab=256, hidden=128, layers=8, heads=4, kv_heads=2, head_dim=32, ffn=384, dense_layers=(0, 4),
    experts=8, top_k=2, expert_ffn=128, shared_ffn=128, aux_loss=0.01, init="torchtitan",
)  # fmt: skip
"""A model for a laptop that has every kind of part: dense and MoE layers, shared expert, grouped queries."""

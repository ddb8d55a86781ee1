"""Tiny models of transformers, as they come, with norms and biases at random.

Ranks import this module: it has no tests.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

VOCAB, LENGTH, SEQUENCES = 64, 8, 2

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=0,
    tie_word_embeddings=False, attention_dropout=0.0,
)  # fmt: skip
_ROUTED: dict[str, Any] = dict(moe_intermediate_size=16, num_experts_per_tok=2)
_DEEPSEEK: dict[str, Any] = dict(
    **_ROUTED, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)

DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=4),
    "qwen2": {},
    "qwen3": {},
    "granite": dict(embedding_multiplier=2.0, residual_multiplier=0.3, logits_scaling=4.0, attention_multiplier=0.2),
    "olmo2": {},
    "gemma2": dict(sliding_window=4, final_logit_softcapping=5.0),
    "glm4": {},
    "smollm3": {},
    "phi3": dict(resid_pdrop=0.0, embd_pdrop=0.0),
}
"""Keyword arguments of a family's configuration."""
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(**_ROUTED, num_experts=4, mlp_only_layers=[1]),
    "qwen2_moe": dict(**_ROUTED, num_experts=4, shared_expert_intermediate_size=24, decoder_sparse_step=1),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": dict(**_DEEPSEEK, **_LATENT, topk_method="greedy"),
    "deepseek_v3": dict(**{**_DEEPSEEK, "n_group": 2}, **_LATENT),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": dict(**_DEEPSEEK, **_LATENT, mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.3),
    "dots1": _DEEPSEEK,
    "ernie4_5_moe": dict(moe_intermediate_size=16, moe_num_experts=4, moe_k=2),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cohere": ({}, "its norms are input_layernorm"),
    "flex_olmo": (dict(num_experts=4, num_experts_per_tok=2), "it has a norm after its experts"),
    "granitemoeshared": (dict(num_local_experts=4, shared_intermediate_size=16), "an MLP: shared_mlp"),
    "qwen3_next": (dict(**_ROUTED, num_experts=4), "an MLP: linear_attn"),
}
"""And what is said of it."""
FAMILIES = {**DENSE, **EXPERTS}


def configuration(family: str, **changes: Any) -> Any:
    """A family's configuration."""
    sizes = FAMILIES.get(family) or REFUSED.get(family, ({}, ""))[0]
    known = importlib.import_module(f"transformers.models.{family}")
    kind = next(getattr(known, name) for name in dir(known) if name.endswith("Config") and "Text" not in name)
    return kind(**{**_SIZES, **sizes, **changes})


def model(family: str, **changes: Any) -> Any:
    """A causal language model with weights at random, the same in every process."""
    known = importlib.import_module(f"transformers.models.{family}")
    kind = next(getattr(known, name) for name in dir(known) if name.endswith("ForCausalLM"))
    made = kind(configuration(family, **changes)).train()
    randomize(made)
    return made


def randomize(made: torch.nn.Module) -> None:
    """Give all parameters and saved buffers values that no first values have."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if param.dim() > 1 or name.endswith("bias"):
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
            else:
                param.copy_(torch.rand(param.shape, generator=generator) + 0.5)
        for name, buffer in made.named_buffers():
            if "bias" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.1)


def batches(microbatches: int, ranks: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Token ids and targets by microbatch and data-parallel rank."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return [[batch() for _ in range(ranks)] for _ in range(microbatches)]

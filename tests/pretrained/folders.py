"""Folders as transformers writes them, of small models in whose sizes no two numbers are the same."""

from __future__ import annotations

import importlib
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hocket.config import ModelConfig
from hocket.model.transformer import Chunk
from hocket.pretrained.weights import PretrainedFolder
from tests.adapters.families import randomize

VOCAB = 61
_FULL, _WINDOW, _DELTA = "full_attention", "sliding_attention", "linear_attention"
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=10, max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=0,
    attention_dropout=0.0, rope_theta=5e4, rms_norm_eps=3e-6, tie_word_embeddings=False,
)  # fmt: skip
_GLM = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2, n_group=1, topk_group=1,
    first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
)  # fmt: skip
_LATENT = dict(
    kv_lora_rank=14, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=8, num_key_value_heads=6,
)  # fmt: skip
_DEEPSEEK = {
    **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_ALONE = {"n_group": 1, "topk_group": 1, "q_lora_rank": None}
_QWEN = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[1])
_DELTAS = dict(
    linear_num_value_heads=6, linear_num_key_heads=2, linear_key_head_dim=9, linear_value_head_dim=7, head_dim=16,
    linear_conv_kernel_dim=4, layer_types=[_DELTA, _DELTA, _FULL],
)  # fmt: skip
_NEXT: dict[str, Any] = dict(
    **{key: value for key, value in _DELTAS.items() if key != "layer_types"},
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=12,
)  # fmt: skip
_OLMOE = dict(head_dim=None, num_experts=8, num_experts_per_tok=3)
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
_YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.5, truncate=False,
    mscale=0.7, mscale_all_dim=0.4,
)  # fmt: skip
_GPT_OSS = dict(
    num_local_experts=8, num_experts_per_tok=3, intermediate_size=32, hidden_size=64, sliding_window=5,
    swiglu_limit=0.3, swiglu_alpha=1.5,
    rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.5, truncate=False
    ),
)  # fmt: skip
"""With a limit that cuts off some gates and ups. Sizes are multiples of 32, of which quantised blocks are."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", dict(tie_word_embeddings=True)),
    "llama_biases": ("llama", dict(attention_bias=True)),
    "llama_linear": ("llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama3": ("llama", dict(rope_scaling=_LLAMA3)),
    "llama_yarn": ("llama", dict(rope_scaling=_YARN)),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=16))),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2)),
    "smollm3_listed": ("smollm3", dict(no_rope_layers=[0, 1, 0], tie_word_embeddings=True)),
    "olmo2": ("olmo2", {}),
    "olmo2_biases": ("olmo2", dict(attention_bias=True)),
    "olmo3": ("olmo3", dict(head_dim=None, num_hidden_layers=5, sliding_window=6, rope_theta=5e5, rope_scaling=_YARN)),
    "olmo3_plain": ("olmo3", dict(head_dim=None, layer_types=[_WINDOW, _FULL, _WINDOW], rope_theta=5e5)),
    "olmoe": ("olmoe", dict(**_OLMOE, norm_topk_prob=False)),
    "olmoe_normalised": ("olmoe", dict(**_OLMOE, norm_topk_prob=True, attention_bias=True, num_key_value_heads=6)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral_window": ("mistral", dict(sliding_window=7)),
    "qwen2_windows": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "qwen3_windows": ("qwen3", dict(use_sliding_window=True, sliding_window=5, layer_types=[_WINDOW, _FULL, _WINDOW])),
    "qwen3_moe_window": (
        "qwen3_moe",
        dict(**_QWEN, norm_topk_prob=True, use_sliding_window=True, sliding_window=9),
    ),
    "mixtral_window": ("mixtral", dict(num_local_experts=8, num_experts_per_tok=3, sliding_window=6)),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss_no_windows": (
        "gpt_oss",
        {**_GPT_OSS, "layer_types": [_FULL] * 3, "attention_bias": False, "swiglu_limit": 0.05},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_next": ("qwen3_next", {**_NEXT, "num_hidden_layers": 4, "mlp_only_layers": [2]}),
    "qwen3_5": ("qwen3_5_text", {**_DELTAS, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_NEXT, "intermediate_size": None, "layer_types": [_DELTA, _FULL, _DELTA]}),
    "qwen3_next_biases": ("qwen3_next", {**_NEXT, "attention_bias": True, "layer_types": [_FULL, _DELTA, _FULL]}),
    "qwen3_moe": ("qwen3_moe", dict(**_QWEN, norm_topk_prob=True)),
    "qwen2_moe": ("qwen2_moe", {**_QWEN, "shared_expert_intermediate_size": 12, "norm_topk_prob": True}),
    "qwen2_moe_as_they_are": (
        "qwen2_moe",
        {
            **_QWEN,
            "shared_expert_intermediate_size": 12,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
        },
    ),
    "qwen3_moe_as_they_are": ("qwen3_moe", dict(**_QWEN, norm_topk_prob=False)),
    "qwen3_moe_steps": (
        "qwen3_moe",
        {**_QWEN, "mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", dict(num_local_experts=8, num_experts_per_tok=3)),
    "minimax_m2": ("minimax_m2", dict(num_local_experts=8, num_experts_per_tok=3, rotary_dim=6)),
    "minimax_m2_whole": ("minimax_m2", dict(num_local_experts=8, num_experts_per_tok=3)),
    "glm4_moe": ("glm4_moe", dict(**_GLM, use_qk_norm=True, partial_rotary_factor=1.0)),
    "glm4_moe_without_norms": ("glm4_moe", dict(**_GLM, use_qk_norm=False, partial_rotary_factor=1.0)),
    "glm4_moe_partial": ("glm4_moe", dict(**_GLM, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.4)),
    "glm4_moe_yarn": (
        "glm4_moe",
        dict(**_GLM, use_qk_norm=False, attention_bias=True, partial_rotary_factor=0.6, rope_scaling=_YARN),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        dict(**_DEEPSEEK, q_lora_rank=16, topk_method="group_limited_greedy", rope_scaling=_YARN),
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**_DEEPSEEK, **_ALONE, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", dict(**_DEEPSEEK, q_lora_rank=16, norm_topk_prob=True, rope_scaling=_YARN)),
    "moonlight": ("deepseek_v3", {**_DEEPSEEK, **_ALONE, "norm_topk_prob": True}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**_DEEPSEEK, **_ALONE, "q_lora_rank": 16, "norm_topk_prob": True, "v_head_dim": 17},
    ),
}
"""Family and changes, by name."""


def made(case: str, **sizes: Any) -> Any:
    """A model with random norms, weights and balance biases."""
    family, changes = CASES[case]
    known = importlib.import_module(f"transformers.models.{family.removesuffix('_text')}")

    def find(end: str) -> Any:
        """The class with this end; of models for pictures too, that of text."""
        wanted = end.replace("Config", "TextConfig") if family.endswith("_text") else end
        return next(getattr(known, n) for n in dir(known) if n.endswith(wanted) and ("Text" in n) == ("Text" in wanted))

    given = deepcopy({**_SIZES, **changes, **sizes})  # a configuration changes its rope_scaling
    unsaid = [key for key in ("head_dim", "intermediate_size") if given[key] is None]
    given = {key: value for key, value in given.items() if key not in unsaid}
    if "kv_lora_rank" in given:
        del given["head_dim"]
    model = find("ForCausalLM")(find("Config")(**given))
    randomize(model)
    return model


def saved(case: str, folder: Path, vocab_size: int = VOCAB, **options: Any) -> Path:
    """A folder with such a model."""
    made(case, vocab_size=vocab_size).save_pretrained(folder, **options)
    return folder


def ours(path: Path) -> Chunk:
    """hocket's transformer with the weights of a folder, as a plain module without a loss that balances."""
    folder = PretrainedFolder(str(path))
    model = Chunk(replace(folder.model, aux_loss=0.0), range(folder.model.layers))
    shapes = {name: tuple(value.shape) for name, value in (*model.named_parameters(), *model.named_buffers())}
    folder.check(shapes)
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(folder.value(name, shapes[name]))
    return model


def change_config(path: Path, **changes: Any) -> Path:
    """The folder, with other values in config.json; None removes a key."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if k not in changes or v is not None}))
    return path


def settings(path: Path) -> ModelConfig:
    """The settings of a folder's model."""
    return PretrainedFolder(str(path)).model

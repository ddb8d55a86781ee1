"""Families of models as Hugging Face has them: one table each, which is read in both directions.

A family says which key of config.json is which setting, what hocket computes of the other keys, and which tensors make
which parameter. Shapes are those of `docs/models.md`: D hidden width, E experts, F width of an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FULL, WINDOW = "full_attention", "sliding_attention"
"""How `layer_types` calls layers without and with a window."""
REQUIRED = object()
"""In place of a value: a configuration without that key is refused."""


@dataclass(frozen=True)
class Key:
    """Where config.json has a setting."""

    name: str
    """Empty: no key has it, and `missing` always counts."""
    missing: Any = REQUIRED
    """Its value where the key is missing or null; a text is a product or quotient of settings."""
    other: str = ""
    """Another name that some versions give it."""
    times: str = ""
    """Key of a number by which this one is multiplied."""


@dataclass(frozen=True)
class Only:
    """A key of which hocket computes some values alone, or lists of them alone. The first one is written."""

    values: tuple[Any, ...]
    missing: Any = None
    """What a model does where the key is missing."""
    written: bool = True
    """Whether transformers reads it. Other code may."""


Way = Literal["rows", "experts", "fused", "stacked", "mxfp4"]


@dataclass(frozen=True)
class Rule:
    """A parameter and its tensors on disk; `{i}` is the layer, `{e}` the expert."""

    ours: str
    """The parameter, without its layer."""
    theirs: tuple[str, ...]
    way: Way = "rows"
    """rows: tensors are stacked along rows. experts: so are those of each expert, and [rows, columns] is turned over.
    fused: one tensor for all experts, [E, rows, columns] turned over. stacked: one for all experts, as it is. mxfp4: as
    fused, of blocks of 32 columns, [E, rows, columns / 32, 16], and their scales, [E, rows, columns / 32]; only read.
    """
    pairs: bool = False
    """Of stacked and mxfp4: there gate and up take turns, where the parameter has one behind the other."""


@dataclass(frozen=True)
class Windows:
    """Windows of attention: what a family's config.json says of them beside `sliding_window`."""

    missing: int | None = None
    """The window of a model that does not say. That differs from null, which is none."""
    switch: str = ""
    """Key without which no layer has a window."""
    listed: bool = True
    """Whether transformers reads `layer_types`. Without, all layers have a window or none has."""
    every: int = 0
    """Where no layers are listed: each so many-th has no window."""
    first: tuple[str, int] | None = None
    """Where no layers are listed: a key that says how many first ones have no window, and how many if it is missing."""
    plain: float = 0.0
    """Above 0 layers with a window have plain positions, and `rope_scaling` is that of the others. Their base where
    config.json does not name them: transformers takes this one, not `rope_theta`."""


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    architecture: str
    keys: Mapping[str, Key]
    """By setting, without `model.`."""
    rules: tuple[Rule, ...]
    """Of several for one parameter, the first whose tensors are there counts. The first of all is written."""
    only: Mapping[str, Only] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the family itself has."""
    partial: tuple[str, float] | None = None
    """Whether a part of each head may rotate: the key that says how much, and how much does where the key is missing.
    The key is a share of the head, or `rotary_dim`."""
    without: int = 0
    """Whether layers may have no positions: every how many layers one has none where config.json does not say."""
    windows: Windows | None = None
    """None: no layer may have a window."""
    dense: Literal["all", "none", "steps", "first"] = "all"
    """Which layers have no experts: all, none, those of `decoder_sparse_step` and `mlp_only_layers`, or the first
    `first_k_dense_replace`."""


def _layer(ours: str, *theirs: str, way: Way = "rows", pairs: bool = False) -> Rule:
    return Rule(ours, tuple(f"model.layers.{{i}}.{name}" for name in theirs), way, pairs)


def _experts(where: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """One tensor per expert, or fused as transformers 5 holds them in memory."""
    each = f"{where}.experts.{{e}}."
    return (
        _layer("router.weight", f"{where}.gate.weight"),
        _layer("router.weight", "mlp.gate.weight"),
        _layer("experts.w_gate_up", f"{each}{gate}.weight", f"{each}{up}.weight", way="experts"),
        _layer("experts.w_gate_up", "mlp.experts.gate_up_proj", way="fused"),
        _layer("experts.w_down", f"{each}{down}.weight", way="experts"),
        _layer("experts.w_down", "mlp.experts.down_proj", way="fused"),
    )


def _quantised(name: str) -> tuple[str, str]:
    return f"mlp.experts.{name}_blocks", f"mlp.experts.{name}_scales"


_COMMON = (
    Rule("embed.weight", ("model.embed_tokens.weight",)),
    Rule("head.norm", ("model.norm.weight",)),
    Rule("head.weight", ("lm_head.weight",)),
    *(_layer(f"attn.w{x}", f"self_attn.{x}_proj.weight") for x in "qkvo"),
    *(_layer(f"attn.b{x}", f"self_attn.{x}_proj.bias") for x in "qkvo"),
)
_ATTENTION = (
    *_COMMON,
    _layer("attn_norm", "input_layernorm.weight"),
    _layer("ffn_norm", "post_attention_layernorm.weight"),
)
_NORMS_BEHIND = (
    *_COMMON,
    _layer("attn_norm", "post_attention_layernorm.weight"),
    _layer("ffn_norm", "post_feedforward_layernorm.weight"),
)
_HEAD_NORMS = tuple(
    _layer(f"attn.{x}{wide}_norm", f"self_attn.{x}_norm.weight") for x in "qk" for wide in ("", "_wide")
)
"""Of each head, or of all heads together: a model has one or the other."""
_MLP = (
    _layer("mlp.w_gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("mlp.w_down", "mlp.down_proj.weight"),
)
_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")

_SIZES = {
    "vocab": Key("vocab_size"),
    "hidden": Key("hidden_size"),
    "layers": Key("num_hidden_layers"),
    "heads": Key("num_attention_heads"),
    "kv_heads": Key("num_key_value_heads", "heads"),
    "head_dim": Key("head_dim"),
    "norm_eps": Key("rms_norm_eps"),
    "tied": Key("tie_word_embeddings", False),
}
_DENSE = {**_SIZES, "ffn": Key("intermediate_size")}
_ROUTED = {"top_k": Key("num_experts_per_tok"), "normalize_top_k": Key("norm_topk_prob")}
_WIDTH_OF_HEADS = Key("head_dim", "hidden / heads")
_SILU, _OFF, _NONE = Only(("silu",), "silu"), Only((False,), False), Only((None,))
_BIASES = {name: Key("attention_bias", False) for name in ("qkv_bias", "o_bias")}
_QWEN_WINDOWS = Windows(4096, "use_sliding_window", first=("max_window_layers", 28))
_WHOLE_NORMS = {"qk_norm": True, "qk_norm_over": "whole"}

_OF_MINIMAX_M1 = {
    "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "attn_type_list": 1,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
"""Keys of MiniMax-M2 with the values that it always has."""

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        (*_ATTENTION, *_MLP),
        {"hidden_act": _SILU, "mlp_bias": _OFF},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**_DENSE, "head_dim": _WIDTH_OF_HEADS},
        (*_ATTENTION, *_MLP),
        {"hidden_act": _SILU},
        windows=Windows(4096, listed=False),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_DENSE, "head_dim": _WIDTH_OF_HEADS},
        (*_ATTENTION, *_MLP),
        {"hidden_act": _SILU, "use_mrope": _OFF},
        {"qkv_bias": True},
        windows=_QWEN_WINDOWS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_DENSE, **_BIASES},
        (*_ATTENTION, *_HEAD_NORMS, *_MLP),
        {"hidden_act": _SILU},
        {"qk_norm": True},
        windows=_QWEN_WINDOWS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS, "tied": Key("tie_word_embeddings", True)},
        (*_ATTENTION, *_MLP),
        {"hidden_act": _SILU, "mlp_bias": _OFF, "use_sliding_window": _OFF},
        without=4,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        (*_NORMS_BEHIND, *_HEAD_NORMS, *_MLP),
        {"hidden_act": _SILU},
        {**_WHOLE_NORMS, "norms": "after"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        (*_NORMS_BEHIND, *_HEAD_NORMS, *_MLP),
        {"hidden_act": _SILU},
        {**_WHOLE_NORMS, "norms": "after"},
        windows=Windows(4096, every=4, plain=500000.0),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            **_SIZES,
            "head_dim": _WIDTH_OF_HEADS,
            "experts": Key("num_local_experts"),
            "top_k": Key("num_experts_per_tok"),
            "expert_ffn": Key("intermediate_size"),
            "aux_loss": Key("router_aux_loss_coef", 0.0),
        },
        (*_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
        {"hidden_act": _SILU, "router_jitter_noise": Only((0.0,), 0.0)},
        {"normalize_top_k": True},
        windows=Windows(listed=False),
        dense="none",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {
            **_SIZES,
            "experts": Key("num_local_experts"),
            "top_k": Key("num_experts_per_tok"),
            "expert_ffn": Key("intermediate_size"),
            "aux_loss": Key("router_aux_loss_coef", 0.0),
        },
        (
            *_ATTENTION,
            *_HEAD_NORMS,
            *_experts("block_sparse_moe", "w1", "w3", "w2"),
            _layer("router.bias", "block_sparse_moe.e_score_correction_bias"),
            _layer("router.bias", "mlp.e_score_correction_bias"),
        ),
        {
            "hidden_act": _SILU,
            "router_jitter_noise": Only((0.0,), 0.0),
            "sliding_window": _NONE,
            **{key: Only((value,), value, written=False) for key, value in _OF_MINIMAX_M1.items()},
        },
        {**_WHOLE_NORMS, "router": "sigmoid", "bias_rate": 0.001, "normalize_top_k": True},
        ("rotary_dim", 1.0),
        dense="none",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_DENSE,
            **_BIASES,
            **_ROUTED,
            "experts": Key("num_experts", other="num_local_experts"),
            "expert_ffn": Key("moe_intermediate_size"),
            "aux_loss": Key("router_aux_loss_coef", 0.0),
        },
        (*_ATTENTION, *_HEAD_NORMS, *_MLP, *_EXPERTS),
        {"hidden_act": _SILU},
        {"qk_norm": True},
        windows=Windows(4096, "use_sliding_window", listed=False),
        dense="steps",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **_SIZES,
            **{name: Key("attention_bias", True) for name in ("qkv_bias", "o_bias")},
            "experts": Key("num_local_experts", other="num_experts"),
            "top_k": Key("num_experts_per_tok", other="experts_per_token"),
            "expert_ffn": Key("intermediate_size"),
            "swiglu_limit": Key("swiglu_limit", 7.0),
            "swiglu_alpha": Key("swiglu_alpha", 1.702),
        },
        (
            *_ATTENTION,
            _layer("attn.sinks", "self_attn.sinks"),
            _layer("router.weight", "mlp.router.weight"),
            _layer("router.b_logits", "mlp.router.bias"),
            _layer("experts.w_gate_up", "mlp.experts.gate_up_proj", way="stacked", pairs=True),
            _layer("experts.w_gate_up", *_quantised("gate_up_proj"), way="mxfp4", pairs=True),
            _layer("experts.b_gate_up", "mlp.experts.gate_up_proj_bias", way="stacked", pairs=True),
            _layer("experts.w_down", "mlp.experts.down_proj", way="stacked"),
            _layer("experts.w_down", *_quantised("down_proj"), way="mxfp4"),
            _layer("experts.b_down", "mlp.experts.down_proj_bias", way="stacked"),
        ),
        {"hidden_act": _SILU},
        {"normalize_top_k": True, "sinks": True, "router_bias": True, "expert_bias": True},
        windows=Windows(128, every=2),
        dense="none",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **_SIZES,
            **_BIASES,
            "head_dim": Key("", "hidden / heads"),
            "norm_eps": Key("rms_norm_eps", 1e-5),
            "experts": Key("num_experts", other="num_local_experts"),
            "top_k": Key("num_experts_per_tok"),
            "normalize_top_k": Key("norm_topk_prob", False),
            "expert_ffn": Key("intermediate_size"),
            "aux_loss": Key("router_aux_loss_coef", 0.0),
        },
        (*_ATTENTION, *_HEAD_NORMS, *_EXPERTS),
        {"hidden_act": _SILU, "clip_qkv": _NONE},
        _WHOLE_NORMS,
        dense="none",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            **_DENSE,
            **_ROUTED,
            "experts": Key("n_routed_experts", other="num_local_experts"),
            "expert_ffn": Key("moe_intermediate_size"),
            "shared_ffn": Key("n_shared_experts", times="moe_intermediate_size"),
            "route_scale": Key("routed_scaling_factor"),
            "qk_norm": Key("use_qk_norm", False),
            "qkv_bias": Key("attention_bias", False),
        },
        (
            *_ATTENTION,
            *_HEAD_NORMS,
            *_MLP,
            *_EXPERTS,
            _layer("router.bias", "mlp.gate.e_score_correction_bias"),
            _layer("shared.w_gate_up", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
            _layer("shared.w_down", "mlp.shared_experts.down_proj.weight"),
        ),
        {
            "hidden_act": _SILU,
            "n_group": Only((1,), 1),
            "topk_group": Only((1,), 1),
        },
        {"router": "sigmoid", "bias_rate": 0.001},
        ("partial_rotary_factor", 0.5),
        dense="first",
    ),
}
"""By `model_type`."""

REFUSED: dict[str, str] = {
    "qwen2_moe": "a gate on the shared expert",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "kimi_k2": "latent attention",
    "glm4": "four norms of a layer, and rotary positions of neighbouring elements",
    "gemma2": "four norms of a layer, GELU, and windows",
    "gemma3_text": "four norms of a layer, GELU, and windows",
    "phi3": "queries, keys and values in one tensor",
    "qwen3_next": "gated delta nets",
    "qwen3_5_moe": "gated delta nets",
    "llama4_text": "chunked attention",
    "nemotron_h": "Mamba layers",
}
"""Families that hocket's transformer does not compute, and what they need for that."""

IGNORED_KEYS = frozenset(
    (
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings",
        "max_window_layers", "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "id2label",
        "num_nextn_predict_layers", "label2id", "return_dict", "output_attentions", "output_hidden_states",
        "use_return_dict", "_attn_implementation", "attn_implementation", "_experts_implementation", "is_decoder",
        "is_encoder_decoder", "num_mtp_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp",
        "mlp_intermediate_size", "initial_context_length",
    )
)  # fmt: skip
"""Keys of config.json that say nothing of what a model computes. All others are read, or refused by name."""

IGNORED_TENSORS = r"\.rotary_emb\.inv_freq$"
"""Tensors that files have and no model needs: they follow from config.json."""

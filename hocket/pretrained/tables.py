"""Families of models as Hugging Face has them: one table each, which is read in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# -- family ------------------------------------------------------------------------------------------------------------
# What says how Hugging Face has a family of models; the families are in `tables.py`.
#
# A family says which key of config.json is which setting, what hocket computes of the other keys, and which tensors
# make which parameter. Shapes are those of `docs/models.md`: D hidden width, E experts, F width of an MLP.

FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
"""How `layer_types` calls layers without and with a window, and those with a delta net."""
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
    null: bool = False
    """Whether its value where the key is missing is written as null."""


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
    pairs: str = ""
    """Setting that counts the rows before those of rotary positions, `qk_rope_head_dim` of them: in each head, or in
    all. On disk these stand last, and neighbours are a pair. Here they stand first, and the halves are pairs."""
    blocks: tuple[str, ...] = ()
    """Of delta nets: each tensor has blocks of rows, one after the other, where the parameter has one key head after
    the other, and of each what it has in all blocks. For a key head, k are as many rows as keys are wide, v as the
    values of its value heads, and h one for each of these."""
    channels: bool = False
    """Whether a tensor has a dimension of 1 behind the first, as convolutions have."""
    turns: bool = False
    """Of stacked and mxfp4: on disk gate and up take turns, where the parameter has one behind the other."""


@dataclass(frozen=True)
class Layers:
    """How config.json says which layers are of a kind: by a list, or where it has none by a number."""

    key: str = ""
    """Of a list with a value for each layer; empty: there is none."""
    values: tuple[Any, ...] = ()
    """What it says of these layers, and of all others."""
    every: tuple[str, int] = ("", 0)
    """Key of a number: each so many-th is one. Beside it the number where the key is missing; 0: none is."""
    first: tuple[str, Any] | None = None
    """Key that counts them where they are the first ones, and the number where it is missing."""


@dataclass(frozen=True)
class Windows:
    """Windows of attention: what a family's config.json says of them beside `sliding_window`."""

    missing: int | None = None
    """The window of a model that does not say. That differs from null, which is none."""
    switch: str = ""
    """Key without which no layer has a window."""
    listed: bool = True
    """Whether transformers reads `layer_types`. Without, all layers have a window or none has."""
    full: Layers = Layers("layer_types", (FULL, WINDOW))
    """Layers without a window."""
    plain: float = 0.0
    """Above 0 layers with a window have plain positions, and `rope_scaling` is that of the others. Their base where
    config.json does not name them: transformers takes this one, not `rope_theta`."""


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    architecture: str
    keys: Mapping[str, Key]
    """By setting, without `model.`."""
    only: Mapping[str, Only] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the family itself has."""
    partial: tuple[str, float] | None = None
    """Whether a part of each head may rotate: the key that says how much, and how much does where the key is missing.
    The key is a share of the head, or `rotary_dim`."""
    own: tuple[Rule, ...] = ()
    """Rules that come before `RULES`."""
    pictures: bool = False
    """Whether transformers has a model for pictures too, whose tokens have three positions. Those of text are one."""
    without: Layers | None = None
    """Layers that have no positions; None: all have."""
    windows: Windows | None = None
    """None: no layer may have a window."""
    deltas: Layers | None = None
    """Layers with full attention where the others have delta nets."""
    dense: Literal["all", "none", "steps"] | Layers = "all"
    """Layers that have no experts; steps: those of `decoder_sparse_step` and `mlp_only_layers`."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Keys that say again what a setting says."""

    @property
    def full(self) -> Layers:
        """Layers with full attention."""
        return self.deltas or (self.windows.full if self.windows else Layers("layer_types", (FULL,)))

    @property
    def limits(self) -> Mapping[str, Only]:
        """Keys of which hocket computes some values alone."""
        return {"hidden_act": Only(("silu",), "silu"), **self.only}

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of several for one parameter, the first whose tensors are there counts. The first of all is written."""
        return (*self.own, *RULES)


FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys that count layers behind the last one, which predict tokens further on. hocket trains none."""

IGNORED_TENSORS = r"\.rotary_emb\.inv_freq$"
"""Tensors that files have and no model needs: they follow from config.json."""


# -- tables ------------------------------------------------------------------------------------------------------------


def _layer(ours: str, *theirs: str, way: Way = "rows", **more: Any) -> Rule:
    return Rule(ours, tuple(f"model.layers.{{i}}.{name}" for name in theirs), way, **more)


def _experts(where: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """One tensor per expert."""
    each = f"{where}.experts.{{e}}."
    return (
        _layer("router.weight", f"{where}.gate.weight"),
        _layer("experts.w_gate_up", f"{each}{gate}.weight", f"{each}{up}.weight", way="experts"),
        _layer("experts.w_down", f"{each}{down}.weight", way="experts"),
    )


def _quantised(name: str) -> tuple[str, str]:
    return f"mlp.experts.{name}_blocks", f"mlp.experts.{name}_scales"


RULES = (
    Rule("embed.weight", ("model.embed_tokens.weight",)),
    Rule("head.norm", ("model.norm.weight",)),
    Rule("head.weight", ("lm_head.weight",)),
    _layer("attn_norm", "input_layernorm.weight"),
    _layer("ffn_norm", "post_attention_layernorm.weight"),
    *(_layer(f"attn.w{x}", f"self_attn.{x}_proj.weight") for x in "qkvo"),
    *(_layer(f"attn.b{x}", f"self_attn.{x}_proj.bias") for x in "qkvo"),
    # Norms of each head, or of all heads together: a model has one or the other.
    *(_layer(f"attn.{x}{wide}_norm", f"self_attn.{x}_norm.weight") for x in "qk" for wide in ("", "_wide")),
    _layer("mlp.w_gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("mlp.w_down", "mlp.down_proj.weight"),
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    # As transformers 5 holds them in memory:
    _layer("experts.w_gate_up", "mlp.experts.gate_up_proj", way="fused"),
    _layer("experts.w_down", "mlp.experts.down_proj", way="fused"),
    _layer("router.bias", "mlp.gate.e_score_correction_bias"),
    _layer("shared.w_gate_up", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    _layer("shared.w_down", "mlp.shared_experts.down_proj.weight"),
)
"""Of parameters that most families have under these names. Which of them a model has its settings say."""
_LATENT = (
    _layer("attn.wq", "self_attn.q_proj.weight", pairs="qk_nope_head_dim"),
    _layer("attn.wq_a", "self_attn.q_a_proj.weight"),
    _layer("attn.q_a_norm", "self_attn.q_a_layernorm.weight"),
    _layer("attn.wq_b", "self_attn.q_b_proj.weight", pairs="qk_nope_head_dim"),
    _layer("attn.wkv_a", "self_attn.kv_a_proj_with_mqa.weight", pairs="kv_lora_rank"),
    _layer("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight"),
    _layer("attn.wkv_b", "self_attn.kv_b_proj.weight"),
)
_NORMS_BEHIND = (
    _layer("attn_norm", "post_attention_layernorm.weight"),
    _layer("ffn_norm", "post_feedforward_layernorm.weight"),
)
_GATED_SHARED = (
    _layer("shared.w_gate_up", "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    _layer("shared.w_down", "mlp.shared_expert.down_proj.weight"),
    _layer("shared.w_gate", "mlp.shared_expert_gate.weight"),
)
_DELTA_NET = (
    _layer("attn.conv", "linear_attn.conv1d.weight", blocks=("kkv",), channels=True),
    _layer("attn.dt", "linear_attn.dt_bias"),
    _layer("attn.a_log", "linear_attn.A_log"),
    _layer("attn.o_norm", "linear_attn.norm.weight"),
    _layer("attn.w_out", "linear_attn.out_proj.weight"),
)

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
_OF_QWEN = {
    "experts": Key("num_experts", other="num_local_experts"),
    "top_k": Key("num_experts_per_tok"),
    "expert_ffn": Key("moe_intermediate_size"),
    "aux_loss": Key("router_aux_loss_coef", 0.0),
}
_WIDTH_OF_HEADS = Key("head_dim", "hidden / heads")
_OFF, _NONE = Only((False,), False), Only((None,))
_BIASES = {name: Key("attention_bias", False) for name in ("qkv_bias", "o_bias")}
_QWEN_WINDOWS = Windows(
    4096, "use_sliding_window", full=Layers("layer_types", (FULL, WINDOW), first=("max_window_layers", 28))
)
_FIRST = Layers(first=("first_k_dense_replace", None))
_WHOLE_NORMS = {"qk_norm": True, "qk_norm_over": "whole"}

_OF_MINIMAX_M1 = {
    "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "attn_type_list": 1,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
"""Keys of MiniMax-M2 with the values that it always has."""

_DEEPSEEK = {
    **{setting: key for setting, key in _DENSE.items() if setting not in ("kv_heads", "head_dim")},
    "top_k": Key("num_experts_per_tok"),
    "experts": Key("n_routed_experts", other="num_local_experts"),
    "expert_ffn": Key("moe_intermediate_size"),
    "shared_ffn": Key("n_shared_experts", times="moe_intermediate_size"),
    "route_scale": Key("routed_scaling_factor"),
    "route_groups": Key("n_group", 1),
    "route_top_groups": Key("topk_group", 1),
    "q_lora_rank": Key("q_lora_rank", 0, null=True),
    **{name: Key(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}
_ONE_BY_ONE = {"attention_bias": _OFF, "moe_layer_freq": Only((1,), 1)}
_SAME = {"num_key_value_heads": "heads", "head_dim": "qk_rope_head_dim", "qk_head_dim": "key_width"}
_V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        **_DEEPSEEK,
        "normalize_top_k": Key("norm_topk_prob"),
        "route_groups": Key("n_group"),
        "route_top_groups": Key("topk_group"),
    },
    {
        **_ONE_BY_ONE,
        "scoring_func": Only(("sigmoid",), "sigmoid"),
        "topk_method": Only(("noaux_tc",), "noaux_tc"),
        "rope_interleave": Only((True,), True),
    },
    {"router": "sigmoid", "bias_rate": 0.001, "route_group_score": "best_two"},
    own=_LATENT,
    dense=_FIRST,
    same=_SAME,
)

_DELTA_SIZES = {
    "delta_heads": Key("linear_num_value_heads", 32),
    "delta_key_heads": Key("linear_num_key_heads", 16),
    "delta_key_dim": Key("linear_key_head_dim", 128),
    "delta_value_dim": Key("linear_value_head_dim", 128),
    "delta_conv": Key("linear_conv_kernel_dim", 4),
}
_QWEN_NEXT = {"qk_norm": True, "attn_gate": True, "norm_plus_one": True}
_NEXT = Family(
    "Qwen3NextForCausalLM",
    {
        **_DENSE,
        **_BIASES,
        **_DELTA_SIZES,
        **_OF_QWEN,
        "head_dim": Key("head_dim", 256),
        "shared_ffn": Key("shared_expert_intermediate_size"),
        "normalize_top_k": Key("norm_topk_prob", True),
    },
    {"use_sliding_window": Only((False,), False, written=False)},
    {**_QWEN_NEXT, "shared_gate": True},
    ("partial_rotary_factor", 0.25),
    own=(
        _layer("attn.w_qkvz", "linear_attn.in_proj_qkvz.weight"),
        _layer("attn.w_ba", "linear_attn.in_proj_ba.weight"),
        *_DELTA_NET,
        *_GATED_SHARED,
    ),
    deltas=Layers("layer_types", (FULL, DELTA), ("full_attention_interval", 4)),
    dense="steps",
)

_3_5_DELTA_NET = (
    _layer("attn.w_qkvz", "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", blocks=("kkv", "v")),
    _layer("attn.w_ba", "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight", blocks=("h", "h")),
    *_DELTA_NET,
)
_3_5 = Family(
    "Qwen3_5ForCausalLM",
    {**_DENSE, **_BIASES, **_DELTA_SIZES, "head_dim": Key("head_dim", 256)},
    always=_QWEN_NEXT,
    partial=("partial_rotary_factor", 0.25),
    own=_3_5_DELTA_NET,
    pictures=True,
    deltas=Layers("layer_types", (FULL, DELTA), ("full_attention_interval", 4)),
)
_ROUTED_NEXT = {name: key for name, key in _NEXT.keys.items() if name not in ("ffn", "normalize_top_k")}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        {"mlp_bias": _OFF},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**_DENSE, "head_dim": _WIDTH_OF_HEADS},
        windows=Windows(4096, listed=False),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_DENSE, "head_dim": _WIDTH_OF_HEADS},
        {"use_mrope": _OFF},
        {"qkv_bias": True},
        windows=_QWEN_WINDOWS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_DENSE, **_BIASES},
        always={"qk_norm": True},
        windows=_QWEN_WINDOWS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS, "tied": Key("tie_word_embeddings", True)},
        {"mlp_bias": _OFF, "use_sliding_window": _OFF},
        without=Layers("no_rope_layers", (0, 1), ("no_rope_layer_interval", 4)),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        always={**_WHOLE_NORMS, "norms": "after"},
        own=_NORMS_BEHIND,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**_DENSE, **_BIASES, "head_dim": _WIDTH_OF_HEADS},
        always={**_WHOLE_NORMS, "norms": "after"},
        own=_NORMS_BEHIND,
        windows=Windows(4096, plain=500000.0, full=Layers("layer_types", (FULL, WINDOW), ("", 4))),
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
        {"router_jitter_noise": Only((0.0,), 0.0)},
        {"normalize_top_k": True},
        own=_experts("block_sparse_moe", "w1", "w3", "w2"),
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
        {
            "router_jitter_noise": Only((0.0,), 0.0),
            "sliding_window": _NONE,
            **{key: Only((value,), value, written=False) for key, value in _OF_MINIMAX_M1.items()},
        },
        {**_WHOLE_NORMS, "router": "sigmoid", "bias_rate": 0.001, "normalize_top_k": True},
        ("rotary_dim", 1.0),
        own=(
            *_experts("block_sparse_moe", "w1", "w3", "w2"),
            _layer("router.bias", "block_sparse_moe.e_score_correction_bias"),
            _layer("router.bias", "mlp.e_score_correction_bias"),
        ),
        dense="none",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **_DENSE,
            "head_dim": _WIDTH_OF_HEADS,
            **_OF_QWEN,
            "qkv_bias": Key("qkv_bias", True),
            "shared_ffn": Key("shared_expert_intermediate_size"),
            "normalize_top_k": Key("norm_topk_prob", False),
        },
        {"use_sliding_window": Only((False,), False)},
        {"shared_gate": True},
        own=_GATED_SHARED,
        dense="steps",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_DENSE, **_BIASES, **_OF_QWEN, "normalize_top_k": Key("norm_topk_prob")},
        always={"qk_norm": True},
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
        always={"normalize_top_k": True, "sinks": True, "router_bias": True, "expert_bias": True},
        own=(
            _layer("attn.sinks", "self_attn.sinks"),
            _layer("router.weight", "mlp.router.weight"),
            _layer("router.b_logits", "mlp.router.bias"),
            _layer("experts.w_gate_up", "mlp.experts.gate_up_proj", way="stacked", turns=True),
            _layer("experts.w_gate_up", *_quantised("gate_up_proj"), way="mxfp4", turns=True),
            _layer("experts.b_gate_up", "mlp.experts.gate_up_proj_bias", way="stacked", turns=True),
            _layer("experts.w_down", "mlp.experts.down_proj", way="stacked"),
            _layer("experts.w_down", *_quantised("down_proj"), way="mxfp4"),
            _layer("experts.b_down", "mlp.experts.down_proj_bias", way="stacked"),
        ),
        windows=Windows(128, full=Layers("layer_types", (FULL, WINDOW), ("", 2))),
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
        {"clip_qkv": _NONE},
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
        {
            "n_group": Only((1,), 1),
            "topk_group": Only((1,), 1),
        },
        {"router": "sigmoid", "bias_rate": 0.001},
        ("partial_rotary_factor", 0.5),
        dense=_FIRST,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK,
        {
            **_ONE_BY_ONE,
            "mlp_bias": _OFF,
            "scoring_func": Only(("softmax",), "softmax"),
            "topk_method": Only(("group_limited_greedy", "greedy")),
            "norm_topk_prob": Only((False,), False),
        },
        {"router": "softmax", "normalize_top_k": False, "route_group_score": "best"},
        own=_LATENT,
        dense=_FIRST,
        same=_SAME,
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": replace(
        _V3,
        architecture="Glm4MoeLiteForCausalLM",
        keys={**_V3.keys, "route_groups": Key("n_group", 1), "route_top_groups": Key("topk_group", 1)},
        only={**_V3.only, "partial_rotary_factor": Only((1.0,), 1.0)},
        dense=replace(_FIRST, key="mlp_layer_types", values=("dense", "sparse")),
    ),
    "qwen3_5_text": _3_5,
    "qwen3_next": _NEXT,
    "qwen3_5_moe_text": replace(
        _3_5,
        architecture="Qwen3_5MoeForCausalLM",
        keys=_ROUTED_NEXT,
        own=(*_3_5_DELTA_NET, *_GATED_SHARED),
        always={**_QWEN_NEXT, "shared_gate": True, "normalize_top_k": True},
        dense="none",
    ),
}
"""By `model_type`."""

REFUSED: dict[str, str] = {
    "glm4": "four norms of a layer, and rotary positions of neighbouring elements",
    "gemma2": "four norms of a layer, GELU, and windows",
    "gemma3_text": "four norms of a layer, GELU, and windows",
    "phi3": "queries, keys and values in one tensor",
    "qwen3_5": "its text model alone, of model_type qwen3_5_text, as Qwen3_5ForCausalLM saves it",
    "qwen3_5_moe": "its text model alone, of model_type qwen3_5_moe_text, as Qwen3_5MoeForCausalLM saves it",
    "llama4_text": "chunked attention",
    "nemotron_h": "Mamba layers",
}
"""Families that hocket's transformer does not compute, and what they need for that."""

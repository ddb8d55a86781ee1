"""Families of models as Hugging Face defines them: one table each, by which config.json is read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hocket.config import ModelConfig
from hocket.config.rule import show
from hocket.config.schema import flat
from hocket.files import json_in
from hocket.pretrained.fields import (
    DELTA,
    FULL,
    Deltas,
    DenseSteps,
    Field,
    Full,
    Key,
    Layers,
    Only,
    Rope,
    Same,
    Windows,
    without_effect,
)

# -- family ------------------------------------------------------------------------------------------------------------
# A family defines which keys of config.json are which settings (`fields.py`), and which tensors make which parameter.
# Shapes are those of `docs/models.md`: D hidden width, E experts, F width of an MLP.

Way = Literal["rows", "experts", "fused", "stacked", "mxfp4"]


@dataclass(frozen=True)
class Rule:
    """A parameter and its tensors on disk; `{i}` is the layer, `{e}` the expert."""

    ours: str
    """The parameter, without its layer."""
    theirs: tuple[str, ...]
    way: Way = "rows"
    """rows: tensors are stacked along rows. experts: the same for each expert, transposed from [rows, columns]. fused:
    one tensor for all experts, [E, rows, columns], transposed. stacked: one for all experts, unchanged. mxfp4: as
    fused, in blocks of 32 columns, [E, rows, columns / 32, 16], and their scales, [E, rows, columns / 32]; only read.
    """
    pairs: str = ""
    """Setting that counts the rows without rotary positions, next to `qk_rope_head_dim` with them: in each head, or
    over all. On disk the rotary rows are last, with neighbours as pairs. Here they are first, with halves as pairs."""
    blocks: tuple[str, ...] = ()
    """For delta nets: each tensor has blocks of rows, one after the other; the parameter has one key head after the
    other, each with its rows of all blocks. Per key head, k are as many rows as keys are wide, v as the values of its
    value heads, and h one per value head."""
    channels: bool = False
    """Whether a tensor has a dimension of 1 after the first, as convolutions do."""
    turns: bool = False
    """For stacked and mxfp4: on disk gate and up are interleaved; the parameter has one after the other."""


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    architecture: str
    fields: Mapping[str, Field]
    """In reading order. Names are those of settings without `model.`, or of keys."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are the same for the whole family."""
    own: tuple[Rule, ...] = ()
    """Rules that precede `RULES`."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of a parameter's rules, reading uses the first whose tensors exist, and writing the first of all."""
        return (*self.own, *RULES)


FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys that count additional layers after the last one, which predict further tokens. hocket trains none."""

IGNORED_TENSORS = r"\.rotary_emb\.inv_freq$"
"""Tensors in files that no model needs, because they follow from config.json."""


# -- tables ------------------------------------------------------------------------------------------------------------


def _layer(ours: str, *theirs: str, way: Way = "rows", **more: Any) -> Rule:
    return Rule(ours, tuple(f"model.layers.{{i}}.{name}" for name in theirs), way, **more)


def _experts(where: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Experts with one tensor each."""
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
    # Norms of each head, or over all heads: a model has one or the other.
    *(_layer(f"attn.{x}{wide}_norm", f"self_attn.{x}_norm.weight") for x in "qk" for wide in ("", "_wide")),
    _layer("mlp.w_gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("mlp.w_down", "mlp.down_proj.weight"),
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    # The layout of transformers 5 in memory:
    _layer("experts.w_gate_up", "mlp.experts.gate_up_proj", way="fused"),
    _layer("experts.w_down", "mlp.experts.down_proj", way="fused"),
    _layer("router.bias", "mlp.gate.e_score_correction_bias"),
    _layer("shared.w_gate_up", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    _layer("shared.w_down", "mlp.shared_experts.down_proj.weight"),
)
"""Parameters that have these names in most families. The settings decide which of them a model has."""
_LATENT = (
    _layer("attn.wq", "self_attn.q_proj.weight", pairs="qk_nope_head_dim"),
    _layer("attn.wq_a", "self_attn.q_a_proj.weight"),
    _layer("attn.q_a_norm", "self_attn.q_a_layernorm.weight"),
    _layer("attn.wq_b", "self_attn.q_b_proj.weight", pairs="qk_nope_head_dim"),
    _layer("attn.wkv_a", "self_attn.kv_a_proj_with_mqa.weight", pairs="kv_lora_rank"),
    _layer("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight"),
    _layer("attn.wkv_b", "self_attn.kv_b_proj.weight"),
)
_NORMS_AFTER = (
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

_OFF, _NONE = Only((False,), False), Only((None,))
_SIZES: dict[str, Field] = {
    "vocab": Key("vocab_size"),
    "hidden": Key("hidden_size"),
    "layers": Key("num_hidden_layers"),
    "heads": Key("num_attention_heads"),
    "kv_heads": Key("num_key_value_heads", "heads"),
    "head_dim": Key("head_dim"),
    "norm_eps": Key("rms_norm_eps"),
    "tied": Key("tie_word_embeddings", False),
    "hidden_act": Only(("silu",), "silu"),
    "full_layers": Full("layer_types", (FULL,)),
    "rope": Rope(),
}
_DENSE = {**_SIZES, "ffn": Key("intermediate_size")}
_WIDTH_OF_HEADS = {"head_dim": Key("head_dim", "hidden / heads")}
_BIASES = {name: Key("attention_bias", False) for name in ("qkv_bias", "o_bias")}
_NO_WINDOWS = Only((False,), False, idle=("sliding_window",))
_QWEN_WINDOWS = Windows(missing=4096, switch="use_sliding_window", first=("max_window_layers", 28))
_EXPERTS_OF_QWEN = {
    "experts": Key("num_experts", other="num_local_experts"),
    "top_k": Key("num_experts_per_tok"),
    "expert_ffn": Key("moe_intermediate_size"),
    "aux_loss": Key("router_aux_loss_coef", 0.0),
}
_EXPERTS_OF_MIXTRAL = {
    "experts": Key("num_local_experts"),
    "top_k": Key("num_experts_per_tok"),
    "expert_ffn": Key("intermediate_size"),
    "aux_loss": Key("router_aux_loss_coef", 0.0),
    "router_jitter_noise": Only((0.0,), 0.0),
}
_EXPERTS_OF_DEEPSEEK = {
    "experts": Key("n_routed_experts", other="num_local_experts"),
    "top_k": Key("num_experts_per_tok"),
    "expert_ffn": Key("moe_intermediate_size"),
    "shared_ffn": Key("n_shared_experts", times="moe_intermediate_size"),
    "route_scale": Key("routed_scaling_factor"),
    "dense_layers": Layers(first=("first_k_dense_replace", None)),
}
_NORMALIZED = {"normalize_top_k": Key("norm_topk_prob")}
_WHOLE_NORMS = {"qk_norm": True, "qk_norm_over": "whole"}
_OLMO = {"always": {**_WHOLE_NORMS, "norms": "after"}, "own": _NORMS_AFTER}

_OF_MINIMAX_M1 = {
    "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "attn_type_list": 1,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
"""Keys of MiniMax-M2 with the values that it always has."""

_DEEPSEEK: dict[str, Field] = {
    **{name: each for name, each in _DENSE.items() if name not in ("kv_heads", "head_dim", "rope")},
    **_EXPERTS_OF_DEEPSEEK,
    "route_groups": Key("n_group", 1),
    "route_top_groups": Key("topk_group", 1),
    "q_lora_rank": Key("q_lora_rank", 0, null=True),
    "kv_lora_rank": Key("kv_lora_rank", zero="only latent attention is there"),
    **{name: Key(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "rope": Rope(),
    "attention_bias": _OFF,
    "moe_layer_freq": Only((1,), 1),
    "num_key_value_heads": Same("heads"),
    "head_dim": Same("qk_rope_head_dim"),
    "qk_head_dim": Same("key_width"),
}
_V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        **_DEEPSEEK,
        **_NORMALIZED,
        "route_groups": Key("n_group"),
        "route_top_groups": Key("topk_group"),
        "scoring_func": Only(("sigmoid",), "sigmoid"),
        "topk_method": Only(("noaux_tc",), "noaux_tc"),
        "rope_interleave": Only((True,), True),
    },
    {"router": "sigmoid", "bias_rate": 0.001, "route_group_score": "best_two"},
    _LATENT,
)

_QWEN_NEXT = {"qk_norm": True, "attn_gate": True, "norm_plus_one": True}
_NEXT: dict[str, Field] = {
    **_DENSE,
    **_BIASES,
    "delta_heads": Key("linear_num_value_heads", 32, zero="only models with delta nets are there"),
    "delta_key_heads": Key("linear_num_key_heads", 16),
    "delta_key_dim": Key("linear_key_head_dim", 128),
    "delta_value_dim": Key("linear_value_head_dim", 128),
    "delta_conv": Key("linear_conv_kernel_dim", 4),
    "head_dim": Key("head_dim", 256),
    "full_layers": Deltas("layer_types", (FULL, DELTA), ("full_attention_interval", 4)),
    "rope": Rope(("partial_rotary_factor", 0.25)),
}
_ROUTED_NEXT = {**_NEXT, **_EXPERTS_OF_QWEN, "shared_ffn": Key("shared_expert_intermediate_size")}
_3_5 = {"rope": Rope(("partial_rotary_factor", 0.25), pictures=True)}
_3_5_DELTA_NET = (
    _layer("attn.w_qkvz", "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", blocks=("kkv", "v")),
    _layer("attn.w_ba", "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight", blocks=("h", "h")),
    *_DELTA_NET,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {**_DENSE, **_BIASES, **_WIDTH_OF_HEADS, "mlp_bias": _OFF}),
    "mistral": Family(
        "MistralForCausalLM", {**_DENSE, **_WIDTH_OF_HEADS, "full_layers": Windows(missing=4096, listed=False)}
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_DENSE, **_WIDTH_OF_HEADS, "full_layers": _QWEN_WINDOWS, "use_mrope": _OFF},
        {"qkv_bias": True},
    ),
    "qwen3": Family("Qwen3ForCausalLM", {**_DENSE, **_BIASES, "full_layers": _QWEN_WINDOWS}, {"qk_norm": True}),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **_DENSE,
            **_BIASES,
            **_WIDTH_OF_HEADS,
            "tied": Key("tie_word_embeddings", True),
            "rope": Rope(without=Layers("no_rope_layers", (0, 1), ("no_rope_layer_interval", 4))),
            "mlp_bias": _OFF,
            "use_sliding_window": _NO_WINDOWS,
        },
    ),
    "olmo2": Family("Olmo2ForCausalLM", {**_DENSE, **_BIASES, **_WIDTH_OF_HEADS}, **_OLMO),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {
            **_DENSE,
            **_BIASES,
            **_WIDTH_OF_HEADS,
            "full_layers": Windows(missing=4096, every=("", 4)),
            "rope": Rope(plain=500000.0),
        },
        **_OLMO,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_SIZES, **_EXPERTS_OF_MIXTRAL, **_WIDTH_OF_HEADS, "full_layers": Windows(listed=False)},
        {"normalize_top_k": True},
        _experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {
            **_SIZES,
            **_EXPERTS_OF_MIXTRAL,
            "rope": Rope(("rotary_dim", 1.0)),
            "sliding_window": _NONE,
            **{key: Only((value,), value, written=False) for key, value in _OF_MINIMAX_M1.items()},
        },
        {**_WHOLE_NORMS, "router": "sigmoid", "bias_rate": 0.001, "normalize_top_k": True},
        (
            *_experts("block_sparse_moe", "w1", "w3", "w2"),
            _layer("router.bias", "block_sparse_moe.e_score_correction_bias"),
            _layer("router.bias", "mlp.e_score_correction_bias"),
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **_DENSE,
            **_WIDTH_OF_HEADS,
            **_EXPERTS_OF_QWEN,
            "qkv_bias": Key("qkv_bias", True),
            "shared_ffn": Key("shared_expert_intermediate_size"),
            "normalize_top_k": Key("norm_topk_prob", False),
            "dense_layers": DenseSteps(),
            "use_sliding_window": _NO_WINDOWS,
        },
        {"shared_gate": True},
        _GATED_SHARED,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_DENSE,
            **_BIASES,
            **_EXPERTS_OF_QWEN,
            **_NORMALIZED,
            "dense_layers": DenseSteps(),
            "full_layers": Windows(missing=4096, switch="use_sliding_window", listed=False),
        },
        {"qk_norm": True},
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
            "full_layers": Windows(missing=128, every=("", 2)),
        },
        {"normalize_top_k": True, "sinks": True, "router_bias": True, "expert_bias": True},
        (
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
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **_SIZES,
            **_BIASES,
            **_EXPERTS_OF_QWEN,
            "head_dim": Key("", "hidden / heads"),
            "norm_eps": Key("rms_norm_eps", 1e-5),
            "normalize_top_k": Key("norm_topk_prob", False),
            "expert_ffn": Key("intermediate_size"),
            "clip_qkv": _NONE,
        },
        _WHOLE_NORMS,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            **_DENSE,
            **_EXPERTS_OF_DEEPSEEK,
            **_NORMALIZED,
            "qk_norm": Key("use_qk_norm", False),
            "qkv_bias": Key("attention_bias", False),
            "rope": Rope(("partial_rotary_factor", 0.5)),
            "n_group": Only((1,), 1),
            "topk_group": Only((1,), 1),
        },
        {"router": "sigmoid", "bias_rate": 0.001},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK,
            "mlp_bias": _OFF,
            "scoring_func": Only(("softmax",), "softmax"),
            "topk_method": Only(("group_limited_greedy", "greedy"), alone=("greedy", "route_groups")),
            "norm_topk_prob": Only((False,), False),
        },
        {"router": "softmax", "normalize_top_k": False, "route_group_score": "best"},
        _LATENT,
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": replace(
        _V3,
        architecture="Glm4MoeLiteForCausalLM",
        fields={
            **_V3.fields,
            "route_groups": Key("n_group", 1),
            "route_top_groups": Key("topk_group", 1),
            "partial_rotary_factor": Only((1.0,), 1.0),
            "dense_layers": Layers("mlp_layer_types", ("dense", "sparse"), first=("first_k_dense_replace", None)),
        },
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", {**_NEXT, **_3_5}, _QWEN_NEXT, _3_5_DELTA_NET),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            **_ROUTED_NEXT,
            "normalize_top_k": Key("norm_topk_prob", True),
            "dense_layers": DenseSteps(),
            "use_sliding_window": Only((False,), False, written=False, idle=("sliding_window",)),
        },
        {**_QWEN_NEXT, "shared_gate": True},
        (
            _layer("attn.w_qkvz", "linear_attn.in_proj_qkvz.weight"),
            _layer("attn.w_ba", "linear_attn.in_proj_ba.weight"),
            *_DELTA_NET,
            *_GATED_SHARED,
        ),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {name: each for name, each in {**_ROUTED_NEXT, **_3_5}.items() if name != "ffn"},
        {**_QWEN_NEXT, "shared_gate": True, "normalize_top_k": True},
        (*_3_5_DELTA_NET, *_GATED_SHARED),
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
"""Families that hocket's transformer cannot compute, and what they would need."""


# -- config.json -------------------------------------------------------------------------------------------------------

_NOT_SHAPE = ("aux_loss", "aux_loss_over", "z_loss", "routing", "init", "init_std", "weights")
"""Settings that define training, or where weights come from, but not what the model computes."""
TYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of formats in config.json and in torch."""

IGNORED_KEYS = frozenset(
    (
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings",
        "max_window_layers", "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "id2label",
        "num_nextn_predict_layers", "label2id", "return_dict", "output_attentions", "output_hidden_states",
        "use_return_dict", "_attn_implementation", "attn_implementation", "_experts_implementation", "is_decoder",
        "is_encoder_decoder", "num_mtp_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp",
        "mlp_intermediate_size", "quantization_config", "aux_loss_alpha", "seq_aux", "ep_size",
        "initial_context_length", "is_llama_config", "unsloth_version", "unsloth_fixed", "transformers.js_config",
    )
)  # fmt: skip
"""Keys of config.json that do not affect what a model computes. All others are read, or refused by name."""
OFF_KEYS = {"attention_dropout": "there is no dropout", "rope_interleaved": "a rotary pair is half a head apart"}
"""Keys of config.json that must be false, and why."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises ValueError."""
    path = folder / "config.json"
    try:
        found = json_in(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no table of keys")
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for one that hocket's transformer cannot compute."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    needs = REFUSED.get(str(name), f"a table of its own: there is {', '.join(FAMILIES)}")
    raise ValueError(f"model_type = {show(name)}: needs {needs}")


class _TrackedConfig(dict[str, Any]):
    """A config.json that records which keys are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ValueError naming the key that is not supported."""
    family, asked = family_of(config), _TrackedConfig(config)
    values: dict[str, Any] = dict(family.always)
    for name, each in family.fields.items():
        values |= each.read(name, asked, values)
    for key, reason in OFF_KEYS.items():
        if asked.get(key):
            raise ValueError(f"{key} = {show(config[key])}: {reason}")
    known = asked.asked | IGNORED_KEYS
    for key, value in config.items():
        if key not in known and value is not None:
            raise ValueError(f"{show(key)} = {show(value)}: config.json of {config['model_type']} has no such key")
    return ModelConfig(**values)


def config_of(name: str, model: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """config.json of a model as one of family `name`, which must compute it (`family_for`)."""
    family = FAMILIES[name]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    for field_name, each in family.fields.items():
        config |= each.write(field_name, model)
    config |= {"max_position_embeddings": positions, "use_cache": True}
    config |= {"pad_token_id": None, "initializer_range": model.init_std}  # a family's pad token may be out of range
    return {**config, "torch_dtype": dtype, "dtype": dtype}


def family_for(model: ModelConfig) -> str:
    """The name of a family that computes a model: its config.json describes this very model.

    Raises ValueError naming what no family has.
    """
    names = [name for name, family in FAMILIES.items() if ("kv_lora_rank" in family.fields) == model.latent]
    wrong = {name: found for name in names if (found := _as_one_of(name, model)) is not None}
    best = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[best]:
        raise ValueError(f"no family computes it: the nearest is {best}, with {', '.join(wrong[best])}")
    return best


def _as_one_of(name: str, model: ModelConfig) -> list[str] | None:
    """Settings that a model loses in a family; None if the family gives it impossible sizes."""
    try:
        return differences(model, model_of(config_of(name, model, "float32", 1)))
    except ValueError:
        return None


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Settings in which two models compute different things, with the values of the other one.

    Of `bias_rate` only whether there is a bias matters.
    """
    mine, theirs, there = _shape(model), _shape(other), flat(asdict(other))
    return [f"model.{name} = {there[name]}" for name in there if mine.get(name) != theirs.get(name)]


def _shape(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect what a model computes."""
    idle = {*_NOT_SHAPE, *(name.removeprefix("model.") for name in without_effect(model))}
    if "moe" not in model.kinds():
        idle |= {"experts", "dense_layers"}
    if model.route_groups == model.route_top_groups:
        idle |= {"route_groups", "route_top_groups"}
    if not any(model.windows()) and not any(model.deltas()):
        idle |= {"window", "delta_heads", "full_layers"}
    found = {name: value for name, value in flat(asdict(model)).items() if name not in idle}
    return found | {"bias_rate": "moe" in model.kinds() and model.bias_rate > 0}


def config_for(model: ModelConfig, positions: int, dtype: str) -> tuple[str, dict[str, Any], str]:
    """Family, config.json, and a remark. An imported model keeps its own config.json while that describes it."""
    type_name, remark = TYPES[dtype], ""
    if model.weights:
        try:
            config = read_config(Path(model.weights))
            if not (found := differences(model, model_of(config))):
                config |= {"torch_dtype": type_name, "dtype": type_name}
                config.pop("quantization_config", None)  # written weights are not quantised, and have no further layers
                config |= {key: 0 for key in FURTHER_LAYERS if config.get(key)}
                return config["model_type"], config, ""
            remark = f"model.weights = {model.weights}: its config.json now says {', '.join(found)}"
        except ValueError as error:
            remark = f"model.weights = {model.weights}: {error}"
    name = family_for(model)
    return name, config_of(name, model, type_name, positions), remark

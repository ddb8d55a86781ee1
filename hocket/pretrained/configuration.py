"""config.json as settings, and settings as config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hocket.config import ModelConfig
from hocket.files import json_in
from hocket.pretrained.positions import (
    keys_of_positions,
    keys_of_windows,
    read_rope,
    read_windows,
    require,
    written_rope,
    written_windows,
)
from hocket.pretrained.tables import FAMILIES, FURTHER_LAYERS, REFUSED, REQUIRED, Family, Key
from hocket.settings.schema import flat, show

_NOT_SHAPE = ("aux_loss", "aux_loss_over", "z_loss", "routing", "init", "init_std", "weights")
"""Settings that say how a model is trained, or where its weights come from, not what it computes."""
_OF_EXPERTS = (
    "top_k", "expert_ffn", "shared_ffn", "router", "normalize_top_k", "route_scale", "dense_layers", "route_groups",
    "route_top_groups", "route_group_score", "router_bias", "expert_bias", "shared_gate",
)  # fmt: skip
_DELTA = ("delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim", "delta_conv")
TYPES = {"fp32": ("float32", "F32"), "bf16": ("bfloat16", "BF16")}
"""Names of formats in config.json, and in safetensors."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

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
"""Keys of config.json that say nothing of what a model computes. All others are read, or refused by name."""
OFF_KEYS = {"attention_dropout": "there is no dropout", "rope_interleaved": "a rotary pair is half a head apart"}
"""Keys of config.json that say nothing while they are false, and why they must be."""


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
    """The family of a config.json. Raises ValueError for one that hocket's transformer does not compute."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    needs = REFUSED.get(str(name), f"a table of its own: there is {', '.join(FAMILIES)}")
    raise ValueError(f"model_type = {show(name)}: needs {needs}")


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ValueError naming the key that asks for what is not there."""
    family = family_of(config)
    _refuse_others(config, family)
    values: dict[str, Any] = dict(family.always)
    for setting, key in family.keys.items():
        value = config.get(key.name, config.get(key.other))
        value = value if value is not None else _missing(key, values)
        require(key.name, setting, value)
        values[setting] = value * config[key.times] if key.times else value
    turning = values["qk_rope_head_dim"] if "kv_lora_rank" in values else values["head_dim"]
    values["rope_theta"], values["rope"] = read_rope(config, family, turning, values["layers"])
    values["window"], values["full_layers"] = read_windows(config, family, values["layers"])
    if family.windows is not None and family.windows.plain and values["window"] and values["rope"].kind != "default":
        values["rope"] = replace(values["rope"], plain_windows=True)
    values["dense_layers"] = _dense_layers(config, family, values)
    model = replace(ModelConfig(), **values)
    if "kv_lora_rank" in family.keys and not model.latent:
        raise ValueError("kv_lora_rank = 0: only latent attention is there")
    if family.deltas and not model.delta_heads:
        raise ValueError("linear_num_value_heads = 0: only models with delta nets are there")
    if config.get("topk_method") == "greedy" and model.route_groups > 1:
        raise ValueError(f"n_group = {model.route_groups}: topk_method = greedy asks for no groups")
    for key, setting in family.same.items():
        if (value := config.get(key)) is not None and value != getattr(model, setting):
            raise ValueError(f"{key} = {value}: only model.{setting} = {getattr(model, setting)} is there")
    return model


def config_of(name: str, model: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """config.json of a model as one of family `name`, which must compute it (`family_for`)."""
    family = FAMILIES[name]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    for setting, key in family.keys.items():
        value = getattr(model, setting)
        if key.name:
            config[key.name] = value // model.expert_ffn if key.times else value
        if key.null and value == key.missing:
            config[key.name] = None
    config |= {key: getattr(model, setting) for key, setting in family.same.items()}
    config |= {key: only.values[0] for key, only in family.only.items() if only.written}
    if family.dense == "steps":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)}
    if family.dense in ("first", "types"):
        config["first_k_dense_replace"] = len(model.dense_layers)
    if family.dense == "types":
        config["mlp_layer_types"] = ["dense" if kind == "dense" else "sparse" for kind in model.kinds()]
    config |= {**written_rope(family, model), **written_windows(family, model)}
    config |= {"max_position_embeddings": positions, "use_cache": True}
    config |= {"pad_token_id": None, "initializer_range": model.init_std}  # a family's own token may be beyond ours
    return {**config, "torch_dtype": dtype, "dtype": dtype}


def family_for(model: ModelConfig) -> str:
    """The name of a family that computes a model: what its config.json says is this model again.

    Raises ValueError naming what no family has.
    """
    names = [name for name, family in FAMILIES.items() if ("kv_lora_rank" in family.keys) == model.latent]
    wrong = {name: found for name in names if (found := _as_one_of(name, model)) is not None}
    best = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[best]:
        raise ValueError(f"no family computes it: the nearest is {best}, with {', '.join(wrong[best])}")
    return best


def _as_one_of(name: str, model: ModelConfig) -> list[str] | None:
    """What a model loses as one of a family; None if the family gives it sizes that no model has."""
    try:
        return differences(model, model_of(config_of(name, model, "float32", 1)))
    except ValueError:
        return None


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Settings in which two models compute different things, with the values of the other one.

    Of `bias_rate` it matters only whether there is a bias.
    """
    mine, theirs = _shape(model), _shape(other)
    return [f"model.{name} = {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def _shape(model: ModelConfig) -> dict[str, Any]:
    found = {name: value for name, value in flat(asdict(model)).items() if name not in _NOT_SHAPE}
    routed = "moe" in model.kinds()
    found["bias_rate"] = 0.001 if routed and model.bias_rate else 0.0
    if not routed:
        found |= dict.fromkeys((*_OF_EXPERTS, "experts"), 0)
    if model.route_groups == model.route_top_groups:
        found |= dict.fromkeys(("route_groups", "route_top_groups", "route_group_score"), 0)
    found |= dict.fromkeys(("kv_heads", "head_dim") if model.latent else _LATENT, 0)
    if "dense" not in model.kinds():
        found["ffn"] = 0
    if not any(model.windows()):
        found |= {"window": 0, "rope.plain_windows": False}
    if not any(model.deltas()):
        found |= dict.fromkeys(_DELTA, 0)
        found |= {} if any(model.windows()) else {"full_layers": ()}
    if not model.shared_ffn:
        found["shared_gate"] = 0
    if model.rope.kind == "default":
        found["rope.plain_windows"] = False
    if not model.swiglu_limit:
        found["swiglu_alpha"] = 0.0
    return found


def _missing(key: Key, values: Mapping[str, Any]) -> Any:
    if key.missing is REQUIRED:
        raise ValueError(f"config.json has no {key.name}")
    if key.missing == "hidden / heads":
        return values["hidden"] // values["heads"]
    return values[key.missing] if isinstance(key.missing, str) else key.missing


def _refuse_others(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a key that asks for what is not there, or that nobody knows."""
    known = {name for key in family.keys.values() for name in (key.name, key.other)}
    known |= {
        "steps": {"decoder_sparse_step", "mlp_only_layers"},
        "first": {"first_k_dense_replace"},
        "types": {"first_k_dense_replace", "mlp_layer_types"},
    }.get(family.dense, set())
    for key, only in family.only.items():
        value = config.get(key, only.missing)
        values = value if isinstance(value, list) else [value]
        if any(x not in only.values and not (x is None and only.missing in only.values) for x in values):
            there = "" if key in config else ", where the key is missing"
            raise ValueError(f"{key} = {show(value)}{there}: only {only.values[0]} is there")
    for key, reason in OFF_KEYS.items():
        if config.get(key):
            raise ValueError(f"{key} = {show(config[key])}: {reason}")
    known |= keys_of_positions(family) | keys_of_windows(family)
    known |= {*family.only, *family.same, *IGNORED_KEYS, *OFF_KEYS}
    known |= {"sliding_window"} if "use_sliding_window" in family.only else set()
    strange = [key for key, value in config.items() if key not in known and value is not None]
    if strange:
        name, value = show(strange[0]), show(config[strange[0]])
        raise ValueError(f"{name} = {value}: config.json of {config['model_type']} has no such key")


def _dense_layers(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> tuple[int, ...]:
    layers = range(values["layers"])
    if family.dense == "steps":
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        require("decoder_sparse_step", "layers", step)
        require("mlp_only_layers", "dense_layers", tuple(dense) if isinstance(dense, list) else dense)
        return tuple(i for i in layers if i in dense or (i + 1) % step)
    if family.dense == "types" and (kinds := config.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != len(layers) or not {*kinds} <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types = {kinds}: not dense or sparse for each of {len(layers)} layers")
        return tuple(i for i in layers if kinds[i] == "dense")
    if family.dense in ("first", "types"):
        require("first_k_dense_replace", "experts", config.get("first_k_dense_replace"))
        return tuple(layers[: config["first_k_dense_replace"]])
    return ()


def config_for(model: ModelConfig, positions: int, dtype: str) -> tuple[str, dict[str, Any], str]:
    """Family, config.json, and a remark: of an imported model its own config.json, as long as it says the same."""
    type_name, remark = TYPES[dtype][0], ""
    if model.weights:
        try:
            config = read_config(Path(model.weights))
            if not (found := differences(model, model_of(config))):
                config |= {"torch_dtype": type_name, "dtype": type_name}
                config.pop("quantization_config", None)  # what is written is not quantised, and has no further layers
                config |= {key: 0 for key in FURTHER_LAYERS if config.get(key)}
                return config["model_type"], config, ""
            remark = f"model.weights = {model.weights}: its config.json now says {', '.join(found)}"
        except ValueError as error:
            remark = f"model.weights = {model.weights}: {error}"
    name = family_for(model)
    return name, config_of(name, model, type_name, positions), remark

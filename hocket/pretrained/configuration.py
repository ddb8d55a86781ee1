"""config.json as settings, and settings as config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hocket.config import ModelConfig
from hocket.config.rule import show
from hocket.config.schema import flat
from hocket.files import json_in
from hocket.pretrained.fields import without_effect
from hocket.pretrained.tables import FAMILIES, FURTHER_LAYERS, REFUSED, Family

_NOT_SHAPE = ("aux_loss", "aux_loss_over", "z_loss", "routing", "init", "init_std", "weights")
"""Settings that say how a model is trained, or where its weights come from, not what it computes."""
TYPES = {"fp32": ("float32", "F32"), "bf16": ("bfloat16", "BF16")}
"""Names of formats in config.json, and in safetensors."""

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


class _Asked(dict[str, Any]):
    """A config.json that notes which keys it was asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ValueError naming the key that asks for what is not there."""
    family, asked = family_of(config), _Asked(config)
    values: dict[str, Any] = dict(family.always)
    for name, field in family.fields.items():
        values |= field.read(name, asked, values)
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
    for field_name, field in family.fields.items():
        config |= field.write(field_name, model)
    config |= {"max_position_embeddings": positions, "use_cache": True}
    config |= {"pad_token_id": None, "initializer_range": model.init_std}  # a family's own token may be beyond ours
    return {**config, "torch_dtype": dtype, "dtype": dtype}


def family_for(model: ModelConfig) -> str:
    """The name of a family that computes a model: what its config.json says is this model again.

    Raises ValueError naming what no family has.
    """
    names = [name for name, family in FAMILIES.items() if ("kv_lora_rank" in family.fields) == model.latent]
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
    mine, theirs, there = _shape(model), _shape(other), flat(asdict(other))
    return [f"model.{name} = {there[name]}" for name in there if mine.get(name) != theirs.get(name)]


def _shape(model: ModelConfig) -> dict[str, Any]:
    """What decides about what a model computes: the settings that have an effect."""
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

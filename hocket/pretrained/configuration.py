"""config.json as settings, and settings as config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hocket.config import Config, ModelConfig, RopeConfig, RopeKind
from hocket.config.rule import OnlyWith, show
from hocket.config.schema import annotated, beyond, flat, types
from hocket.files import json_in
from hocket.pretrained.tables import (
    DELTA,
    FAMILIES,
    FULL,
    FURTHER_LAYERS,
    REFUSED,
    REQUIRED,
    WINDOW,
    Family,
    Key,
    Layers,
)
from hocket.rules import fact_of
from hocket.typed import describe, is_a

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


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ValueError naming the key that asks for what is not there."""
    family = family_of(config)
    _refuse_others(config, family)
    values: dict[str, Any] = dict(family.always)
    for setting, key in family.keys.items():
        value = config.get(key.name, config.get(key.other))
        value = value if value is not None else _missing(key, values)
        _require(key.name, setting, value)
        values[setting] = value * config[key.times] if key.times else value
    turning = values["qk_rope_head_dim"] if "kv_lora_rank" in values else values["head_dim"]
    values["rope_theta"], values["rope"] = _read_rope(config, family, turning, values["layers"])
    values["window"], values["full_layers"] = _read_windows(config, family, values["layers"])
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
    config |= {key: only.values[0] for key, only in family.limits.items() if only.written}
    if family.dense == "steps":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)}
    if isinstance(family.dense, Layers):
        config |= _said(family.dense, model.dense_layers, model.layers)
    config |= {**_written_rope(family, model), **_written_windows(family, model)}
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
    mine, theirs, there = _shape(model), _shape(other), flat(asdict(other))
    return [f"model.{name} = {there[name]}" for name in there if mine.get(name) != theirs.get(name)]


def _shape(model: ModelConfig) -> dict[str, Any]:
    """What decides about what a model computes: the settings that have an effect."""
    idle = {*_NOT_SHAPE, *(name.removeprefix("model.") for name in _without_effect(model))}
    if "moe" not in model.kinds():
        idle |= {"experts", "dense_layers"}
    if model.route_groups == model.route_top_groups:
        idle |= {"route_groups", "route_top_groups"}
    if not any(model.windows()) and not any(model.deltas()):
        idle |= {"window", "delta_heads", "full_layers"}
    found = {name: value for name, value in flat(asdict(model)).items() if name not in idle}
    return found | {"bias_rate": "moe" in model.kinds() and model.bias_rate > 0}


def _without_effect(model: ModelConfig) -> set[str]:
    """Settings of a model whose values change nothing beside its other settings."""
    config = Config(model=model)
    return {
        setting
        for setting, (_, marks) in annotated().items()
        for fact in (fact_of(mark.what) for mark in marks if isinstance(mark, OnlyWith))
        if all(name.startswith("model.") for name in (setting, *fact.settings)) and not fact.holds(config)
    }


def _missing(key: Key, values: Mapping[str, Any]) -> Any:
    if key.missing is REQUIRED:
        raise ValueError(f"config.json has no {key.name}")
    if key.missing == "hidden / heads":
        return values["hidden"] // values["heads"]
    return values[key.missing] if isinstance(key.missing, str) else key.missing


def _refuse_others(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a key that asks for what is not there, or that nobody knows."""
    known = {name for key in family.keys.values() for name in (key.name, key.other)}
    known |= {"decoder_sparse_step", "mlp_only_layers"} if family.dense == "steps" else set()
    for spec in (family.full, family.without, family.dense):
        known |= {spec.key, spec.every[0], *(spec.first or ())[:1]} if isinstance(spec, Layers) else set()
    known |= {SIZE, family.windows.switch} if family.windows is not None else set()
    for key, only in family.limits.items():
        value = config.get(key, only.missing)
        values = value if isinstance(value, list) else [value]
        if any(x not in only.values and not (x is None and only.missing in only.values) for x in values):
            there = "" if key in config else ", where the key is missing"
            raise ValueError(f"{key} = {show(value)}{there}: only {only.values[0]} is there")
    for key, reason in OFF_KEYS.items():
        if config.get(key):
            raise ValueError(f"{key} = {show(config[key])}: {reason}")
    known |= {*KEYS, *((_SHARE, family.partial[0]) if family.partial else ())}
    known |= {*family.limits, *family.same, *IGNORED_KEYS, *OFF_KEYS}
    known |= {"sliding_window"} if "use_sliding_window" in family.limits else set()
    strange = [key for key, value in config.items() if key not in known and value is not None]
    if strange:
        name, value = show(strange[0]), show(config[strange[0]])
        raise ValueError(f"{name} = {value}: config.json of {config['model_type']} has no such key")


def _dense_layers(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> tuple[int, ...]:
    layers = range(values["layers"])
    if isinstance(family.dense, Layers):
        return _chosen(config, family.dense, len(layers))
    if family.dense == "steps":
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        _require("decoder_sparse_step", "layers", step)
        _require("mlp_only_layers", "dense_layers", tuple(dense) if isinstance(dense, list) else dense)
        return tuple(i for i in layers if i in dense or (i + 1) % step)
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


# -- Values of config.json, checked as the settings that they become ---------------------------------------------------


def _require(key: str, setting: str, value: Any) -> None:
    """Raise ValueError for a value that `model.<setting>` cannot have."""
    name = f"model.{setting}"
    if not is_a(value, types()[name]):
        raise ValueError(f"{key} = {value!r}: not {describe(types()[name])}")
    if bounds := beyond(name, value):
        raise ValueError(f"{key} = {value}: {name} is {bounds}")


def _table_of(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key that is a table of keys, or nothing, without those that are null."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} = {found!r}: not a table of keys")
    return {name: value for name, value in found.items() if value is not None}


# -- Layers of a kind, such as those that have windows of attention, all of one size, or delta nets --------------------

SIZE = "sliding_window"


def _chosen(config: Mapping[str, Any], spec: Layers, layers: int) -> tuple[int, ...]:
    """The layers of a kind. Raises ValueError for a list or number that is none."""
    if spec.key and (listed := config.get(spec.key)) is not None:
        if not isinstance(listed, list | tuple) or len(listed) < layers or any(x not in spec.values for x in listed):
            values = " or ".join(map(str, spec.values))
            raise ValueError(f"{spec.key} = {listed}: not a list of {values} for each of {layers} layers")
        return tuple(i for i in range(layers) if listed[i] == spec.values[0])
    if spec.first:
        key, missing = spec.first
        count = config.get(key, missing)
        _require(key, "experts", count)  # a number from 0 on
        return tuple(range(layers))[:count]
    key, every = spec.every
    if not every:
        return ()
    every = every if config.get(key) is None else config[key]
    _require(key, "layers", every)
    return tuple(range(every - 1, layers, every))


def _said(spec: Layers, chosen: Collection[int], layers: int) -> dict[str, Any]:
    """The keys of config.json for the layers of a kind."""
    found = {spec.key: [spec.values[i not in chosen] for i in range(layers)]} if spec.key else {}
    return found | ({spec.first[0]: len(chosen)} if spec.first else {})


def _read_windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    """`model.window` and `model.full_layers`. Raises ValueError for kinds of layers that are not there."""
    windows, full = family.windows, _chosen(config, family.full, layers)
    if family.deltas and len(full) == layers:
        raise ValueError(f"no layer is {DELTA}: only models with some are there")
    if windows is None:
        return 0, full if family.deltas else ()
    size = config.get(SIZE, windows.missing)
    if windows.switch:
        on = config.get(windows.switch) or False
        if not isinstance(on, bool):
            raise ValueError(f"{windows.switch} = {on!r}: not True or False")
        size = size if on else None
    if size is not None:
        _require(SIZE, "window", size)
        if not size:
            raise ValueError(f"{SIZE} = 0: a token attends to itself at least; null means no window")
    listed = config.get(family.full.key)
    if listed and (size is None or not windows.listed) and len(full) != (layers if size is None else 0):
        raise ValueError(f"{family.full.key} = {listed}: {SIZE} = {size} is that of all layers")
    return (0, ()) if size is None or len(full) == layers else (size, full)


def _written_windows(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for a model's windows and delta nets."""
    windows, sizes = family.windows, model.windows()
    if windows is None:
        return _said(family.full, model.full_layers, model.layers) if family.deltas else {}
    # Where layers are listed transformers wants a size, even if none has it.
    found: dict[str, Any] = {SIZE: max(sizes) or (windows.missing if windows.listed and not windows.switch else None)}
    if windows.switch:
        found[windows.switch] = any(sizes)
    return found | (
        _said(family.full, [i for i, n in enumerate(sizes) if not n], model.layers) if windows.listed else {}
    )


# -- positions ---------------------------------------------------------------------------------------------------------

KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
_SHARE = "partial_rotary_factor"
_NAMES = {
    "original_positions": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
}
"""Those parameters that have other names in config.json."""
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""Which pairs of a head turn by which of three positions, which are the same for a token of text."""
_REQUIRED = ("factor", "low_frequency", "high_frequency")
"""Parameters that transformers reads without a default."""


@cache
def _parameters(kind: RopeKind) -> tuple[str, ...]:
    """What a kind reads: what has an effect with it alone."""
    default, idle = (_without_effect(ModelConfig(rope=RopeConfig(kind=each))) for each in ("default", kind))
    return tuple(name.removeprefix("model.rope.") for name in types() if name in default - idle)


def _read_rope(config: Mapping[str, Any], family: Family, head_dim: int, layers: int) -> tuple[float, RopeConfig]:
    """`model.rope_theta` and `model.rope`. Raises ValueError for a kind that is not there, and unknown parameters."""
    parameters = _table_of(config, "rope_parameters")
    if family.windows is not None and family.windows.plain:
        parameters = _of_full_layers(parameters, config.get("rope_theta"), family.windows.plain)
    rope = {**_table_of(config, "rope_scaling"), **parameters}
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    for key in _OF_PICTURES if family.pictures else ():
        rope.pop(key, None)
    if kind not in get_args(RopeKind):
        raise ValueError(f"rope_type = {kind}: only {', '.join(get_args(RopeKind))} are there")
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta, neither by itself nor in rope_parameters")
    _require("rope_theta", "rope_theta", theta)
    width = _width(config, family, rope.pop(_SHARE, config.get(_SHARE)), head_dim)
    without = () if family.without is None else _chosen(config, family.without, layers)
    values: dict[str, Any] = {"kind": kind, "width": width, "without": without}
    if "original_positions" in _parameters(kind):
        rope.setdefault(_NAMES["original_positions"], config.get("max_position_embeddings"))
    for name in _parameters(kind):
        key = _NAMES.get(name, name)
        if key in rope:
            values[name] = rope.pop(key)
            _require(f"{key} of rope_parameters", f"rope.{name}", values[name])
        elif name in _REQUIRED:
            raise ValueError(f"rope_parameters of rope_type = {kind} have no {key}")
    if rope:
        raise ValueError(f"{next(iter(rope))} of rope_parameters: rope_type = {kind} has no such key")
    return float(theta), RopeConfig(**values)


def _written_rope(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for a model's positions, as all versions of transformers read them."""
    rope, default = model.rope, RopeConfig()
    found: dict[str, Any] = {"rope_theta": model.rope_theta}
    if rope.kind != "default":
        needed = (*_REQUIRED, "original_positions")
        values = {name: getattr(rope, name) for name in _parameters(rope.kind)}
        said = {name: value for name, value in values.items() if name in needed or value != getattr(default, name)}
        parameters = {_NAMES.get(name, name): value for name, value in said.items()}
        found["rope_scaling"] = {"rope_type": rope.kind, **parameters}
    if family.partial:
        width = rope.width or model.head_dim
        share = width / model.head_dim
        if int(share * model.head_dim) < width:
            share = math.nextafter(share, 1)
        found[family.partial[0]] = share if family.partial[0] == _SHARE else width
    if family.without:
        found |= _said(family.without, rope.without, model.layers)
    return found


def _of_full_layers(parameters: dict[str, Any], theta: Any, missing: float) -> dict[str, Any]:
    """Of positions by kind of layer those of layers without a window. The others' are plain, with the same base."""
    full, others = _table_of(parameters, FULL), _table_of(parameters, WINDOW)
    bases = full.get("rope_theta", theta), others.pop("rope_theta", missing)
    if others.pop("rope_type", "default") != "default" or others or bases[0] not in (None, bases[1]):
        raise ValueError(
            f"layers with a window have plain positions with a base of {bases[1]}, and others have {bases[0]}: only "
            "the same one is there"
        )
    if FULL not in parameters:
        return parameters
    if strange := parameters.keys() - {FULL, WINDOW}:
        raise ValueError(f"{min(strange)} of rope_parameters: no kind of layer")
    return full


def _width(config: Mapping[str, Any], family: Family, share: Any, head_dim: int) -> int:
    """Elements of a head that rotate; 0 if all do."""
    key, missing = family.partial or (_SHARE, 1.0)
    if key != _SHARE and config.get(key) is not None:
        width = config[key]
        _require(key, "rope.width", width)
        if share is not None and int(head_dim * share) != width:
            raise ValueError(f"{key} = {width}: {_SHARE} = {share} is another number of {head_dim} elements")
    else:
        share = missing if share is None else share
        if not is_a(share, float) or not 0 < share <= 1:
            raise ValueError(f"{_SHARE} = {share!r}: not a share of a head")
        width = int(head_dim * share)
        if width != head_dim and not family.partial:
            raise ValueError(f"{_SHARE} = {share}: only 1.0 is there")
    if width == head_dim:
        return 0
    if width > head_dim or width < 2 or width % 2:
        raise ValueError(f"{width} of {head_dim} elements of a head would rotate: an even number from 2 on must")
    return width

"""Kinds of fields in a family's config.json: each converts keys to settings of a model, and settings to keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, get_args

from hocket.config import Config, ModelConfig, RopeConfig, RopeKind
from hocket.config.rule import OnlyWith, show
from hocket.config.schema import annotated, beyond, types
from hocket.rules import fact_of
from hocket.typed import describe, is_a

FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
"""Values of `layer_types` for layers without and with a window, and with a delta net."""
REQUIRED = object()
"""Marks a key that a configuration must have."""

Json = Mapping[str, Any]
"""A config.json."""
Values = Mapping[str, Any]
"""Settings by name, without `model.`."""


def require(key: str, setting: str, value: Any) -> None:
    """Raise ValueError for a value that `model.<setting>` cannot have."""
    name = f"model.{setting}"
    if not is_a(value, types()[name]):
        raise ValueError(f"{key} = {value!r}: not {describe(types()[name])}")
    if bounds := beyond(name, value):
        raise ValueError(f"{key} = {value}: {name} is {bounds}")


def without_effect(model: ModelConfig) -> set[str]:
    """Settings of a model that have no effect with its other settings."""
    config = Config(model=model)
    return {
        setting
        for setting, (_, marks) in annotated().items()
        for fact in (fact_of(mark.what) for mark in marks if isinstance(mark, OnlyWith))
        if all(name.startswith("model.") for name in (setting, *fact.settings)) and not fact.holds(config)
    }


class Field:
    """Some keys of config.json and the settings that they become. `name` is the field's name in its family's table.

    A key that no field of a family reads is refused (`families.model_of`).
    """

    def read(self, name: str, config: Json, values: Values) -> Values:
        """Settings from keys, and from settings that earlier fields have read. Raises ValueError."""
        return {}

    def write(self, name: str, model: ModelConfig) -> Json:
        """Keys and their values."""
        return {}


@dataclass(frozen=True)
class Key(Field):
    """A setting with the field's name, read from a key."""

    key: str
    """Empty: there is no key, and the value is always `missing`."""
    missing: Any = REQUIRED
    """The value if the key is missing or null; a text is a product or quotient of settings."""
    other: str = ""
    """Another name of the key in some versions."""
    times: str = ""
    """Key of a factor for the value."""
    null: bool = False
    """Whether the value for a missing key is written as null."""
    zero: str = ""
    """Why the value cannot be 0; empty if it can."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        value = config.get(self.key, config.get(self.other))
        value = self._missing(values) if value is None else value
        require(self.key, name, value)
        if self.zero and not value:
            raise ValueError(f"{self.key} = 0: {self.zero}")
        return {name: value * config[self.times] if self.times else value}

    def write(self, name: str, model: ModelConfig) -> Json:
        value = getattr(model, name)
        value = value // model.expert_ffn if self.times else value
        return {self.key: None if self.null and value == self.missing else value} if self.key else {}

    def _missing(self, values: Values) -> Any:
        if self.missing is REQUIRED:
            raise ValueError(f"config.json has no {self.key}")
        if self.missing == "hidden / heads":
            return values["hidden"] // values["heads"]
        return values[self.missing] if isinstance(self.missing, str) else self.missing


@dataclass(frozen=True)
class Only(Field):
    """The key with the field's name, of which hocket supports only some values, or lists of them. The first is written.

    Keys in `idle` have no effect with these values.
    """

    values: tuple[Any, ...]
    missing: Any = None
    """The value that a missing key means."""
    written: bool = True
    """Whether transformers reads it. Other code may."""
    idle: tuple[str, ...] = ()
    alone: tuple[str, str] = ("", "")
    """A value, and a setting that must be 1 with it."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        value, (alone, setting), _ = config.get(name, self.missing), self.alone, [*map(config.get, self.idle)]
        each = value if isinstance(value, list) else [value]
        if any(x not in self.values and not (x is None and self.missing in self.values) for x in each):
            there = "" if name in config else ", where the key is missing"
            raise ValueError(f"{name} = {show(value)}{there}: only {self.values[0]} is there")
        if alone and value == alone and values[setting] > 1:
            raise ValueError(f"{name} = {value}: not with model.{setting} = {values[setting]}")
        return {}

    def write(self, name: str, model: ModelConfig) -> Json:
        return {name: self.values[0]} if self.written else {}


@dataclass(frozen=True)
class Same(Field):
    """The key with the field's name, which repeats a setting or a property of the model."""

    setting: str

    def read(self, name: str, config: Json, values: Values) -> Values:
        expected = getattr(ModelConfig(**values), self.setting)
        if config.get(name) not in (None, expected):
            raise ValueError(f"{name} = {config[name]}: only model.{self.setting} = {expected} is there")
        return {}

    def write(self, name: str, model: ModelConfig) -> Json:
        return {name: getattr(model, self.setting)}


# -- Layers of a kind, such as those with windows of attention, all of one size, or delta nets -------------------------


@dataclass(frozen=True)
class Layers(Field):
    """The setting with the field's name lists layers, from a list in config.json, or without one from a number."""

    key: str = ""
    """Key of a list with a value for each layer; empty: there is none."""
    values: tuple[Any, ...] = ()
    """The list's value for these layers, and for all others."""
    every: tuple[str, int] = ("", 0)
    """Key of a number n: every n-th layer is one. Then the number if the key is missing; 0: no layer is."""
    first: tuple[str, Any] = ("", 0)
    """Key of their number if they are the first layers, and the number if it is missing."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        layers, listed = values["layers"], config.get(self.key)
        every, first = (config.get(key, missing) for key, missing in (self.every, self.first))
        if listed is not None:
            whole = isinstance(listed, list | tuple) and len(listed) >= layers
            if not whole or any(x not in self.values for x in listed):
                there = " or ".join(map(str, self.values))
                raise ValueError(f"{self.key} = {listed}: not a list of {there} for each of {layers} layers")
            return {name: tuple(i for i in range(layers) if listed[i] == self.values[0])}
        if self.first[0]:
            require(self.first[0], "experts", first)  # a number from 0 on
            return {name: tuple(range(layers))[:first]}
        every = self.every[1] if every is None else every
        if not self.every[0] and not every:
            return {name: ()}
        require(self.every[0], "layers", every)
        return {name: tuple(range(every - 1, layers, every))}

    def write(self, name: str, model: ModelConfig) -> Json:
        return self.listing(getattr(model, name), model.layers)

    def listing(self, chosen: Collection[int], layers: int) -> dict[str, Any]:
        """The keys for the chosen layers."""
        found = {self.key: [self.values[i not in chosen] for i in range(layers)]} if self.key else {}
        return found | ({self.first[0]: len(chosen)} if self.first[0] else {})


class DenseSteps(Field):
    """Dense layers: those that are listed, and all except every n-th."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        require("decoder_sparse_step", "layers", step)
        require("mlp_only_layers", "dense_layers", tuple(dense) if isinstance(dense, list) else dense)
        return {"dense_layers": tuple(i for i in range(values["layers"]) if i in dense or (i + 1) % step)}

    def write(self, name: str, model: ModelConfig) -> Json:
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)}


class Full(Layers):
    """Layers with full attention: all of them."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        super().read(name, config, values)
        return {}

    def write(self, name: str, model: ModelConfig) -> Json:
        return {}


class Deltas(Layers):
    """Layers with full attention; the others have delta nets."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        found = super().read(name, config, values)
        if len(found[name]) == values["layers"]:
            raise ValueError(f"no layer is {DELTA}: only models with some are there")
        return found


_SIZE = "sliding_window"


@dataclass(frozen=True)
class Windows(Layers):
    """Layers with full attention; the others have windows of one size, if `sliding_window` gives one."""

    key: str = "layer_types"
    values: tuple[Any, ...] = (FULL, WINDOW)
    missing: int | None = None
    """The window if the key is missing. Null means no window."""
    switch: str = ""
    """Key without which no layer has a window."""
    listed: bool = True
    """Whether transformers reads `layer_types`. Otherwise all layers have a window, or none has."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        full = super().read(name, config, values)[name]
        size = config.get(_SIZE, self.missing)
        if self.switch:
            on = config.get(self.switch) or False
            if not isinstance(on, bool):
                raise ValueError(f"{self.switch} = {on!r}: not True or False")
            size = size if on else None
        if size is not None:
            require(_SIZE, "window", size)
            if not size:
                raise ValueError(f"{_SIZE} = 0: a token attends to itself at least; null means no window")
        listed, alike = config.get(self.key), values["layers"] if size is None else 0
        if listed and (size is None or not self.listed) and len(full) != alike:
            raise ValueError(f"{self.key} = {listed}: {_SIZE} = {size} is that of all layers")
        return {} if size is None or len(full) == values["layers"] else {"window": size, "full_layers": full}

    def write(self, name: str, model: ModelConfig) -> Json:
        sizes = model.windows()
        # If layers are listed, transformers needs a size, even if no layer has a window.
        found: dict[str, Any] = {_SIZE: max(sizes) or (self.missing if self.listed and not self.switch else None)}
        found |= {self.switch: any(sizes)} if self.switch else {}
        full = [i for i, size in enumerate(sizes) if not size]
        return found | (self.listing(full, model.layers) if self.listed else {})


# -- Rotary positions --------------------------------------------------------------------------------------------------

_SHARE = "partial_rotary_factor"
_NAMES = {
    "original_positions": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
}
"""Parameters with other names in config.json."""
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""Keys for three positions per token in pictures; a token of text has the same one three times."""
_REQUIRED = ("factor", "low_frequency", "high_frequency")
"""Parameters that transformers reads without a default."""


@cache
def _parameters(kind: RopeKind) -> tuple[str, ...]:
    """The parameters of a kind: those that have an effect only with it."""
    default, idle = (without_effect(ModelConfig(rope=RopeConfig(kind=each))) for each in ("default", kind))
    return tuple(name.removeprefix("model.rope.") for name in types() if name in default - idle)


@dataclass(frozen=True)
class Rope(Field):
    """Rotary positions, as all versions of transformers write them."""

    share: tuple[str, float] | None = None
    """For partial rotation of heads: the key, and its value if it is missing. The key is a share of the head, or a
    number of its elements."""
    pictures: bool = False
    """Whether transformers also has a model for pictures, whose tokens have three positions. Text has one."""
    without: Layers | None = None
    """Layers without positions; None: there are none."""
    plain: float = 0.0
    """Above 0: layers with a window have plain positions, and `rope_scaling` is for the others. This is the base of
    their positions if config.json does not name it: transformers takes this value, not `rope_theta`."""

    def read(self, name: str, config: Json, values: Values) -> Values:
        parameters = _table_of(config, "rope_parameters")
        parameters = self._of_full_layers(parameters, config.get("rope_theta")) if self.plain else parameters
        rope = {**_table_of(config, "rope_scaling"), **parameters}
        kind = rope.pop("rope_type", None) or rope.get("type") or "default"
        for key in ("type", *(_OF_PICTURES if self.pictures else ())):
            rope.pop(key, None)
        if kind not in get_args(RopeKind):
            raise ValueError(f"rope_type = {kind}: only {', '.join(get_args(RopeKind))} are there")
        theta = rope.pop("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("config.json has no rope_theta, neither by itself nor in rope_parameters")
        require("rope_theta", "rope_theta", theta)
        head = values["qk_rope_head_dim" if "kv_lora_rank" in values else "head_dim"]
        found: dict[str, Any] = {
            "width": self._width(config, rope.pop(_SHARE, config.get(_SHARE) if self.share else None), head)
        }
        found |= self.without.read("without", config, values) if self.without else {}
        found["plain_windows"] = bool(self.plain and values.get("window") and kind != "default")
        if "original_positions" in _parameters(kind):
            rope.setdefault(_NAMES["original_positions"], config.get("max_position_embeddings"))
        for parameter in _parameters(kind):
            key = _NAMES.get(parameter, parameter)
            if key in rope:
                found[parameter] = rope.pop(key)
                require(f"{key} of rope_parameters", f"rope.{parameter}", found[parameter])
            elif parameter in _REQUIRED:
                raise ValueError(f"rope_parameters of rope_type = {kind} have no {key}")
        if rope:
            raise ValueError(f"{next(iter(rope))} of rope_parameters: rope_type = {kind} has no such key")
        return {"rope_theta": float(theta), "rope": RopeConfig(kind=kind, **found)}

    def write(self, name: str, model: ModelConfig) -> Json:
        rope, default = model.rope, asdict(RopeConfig())
        found: dict[str, Any] = {"rope_theta": model.rope_theta}
        if rope.kind != "default":
            values = {each: getattr(rope, each) for each in _parameters(rope.kind)}
            needed = (*_REQUIRED, "original_positions")
            said = {_NAMES.get(each, each): x for each, x in values.items() if each in needed or x != default[each]}
            found["rope_scaling"] = {"rope_type": rope.kind, **said}
        if self.share:
            width = rope.width or model.head_dim
            share = width / model.head_dim
            share = math.nextafter(share, 1) if int(share * model.head_dim) < width else share
            found[self.share[0]] = share if self.share[0] == _SHARE else width
        return found | (self.without.listing(rope.without, model.layers) if self.without else {})

    def _of_full_layers(self, parameters: dict[str, Any], theta: Any) -> dict[str, Any]:
        """The parameters of layers without a window. Layers with one must be plain, with the same base."""
        full, others = _table_of(parameters, FULL), _table_of(parameters, WINDOW)
        bases = full.get("rope_theta", theta), others.pop("rope_theta", self.plain)
        if others.pop("rope_type", "default") != "default" or others or bases[0] not in (None, bases[1]):
            raise ValueError(
                f"layers with a window have plain positions with a base of {bases[1]}, and others have {bases[0]}: "
                "only the same one is there"
            )
        if FULL not in parameters:
            return parameters
        if strange := parameters.keys() - {FULL, WINDOW}:
            raise ValueError(f"{min(strange)} of rope_parameters: no kind of layer")
        return full

    def _width(self, config: Json, share: Any, head: int) -> int:
        """Elements of a head that rotate; 0 if all do."""
        key, missing = self.share or (_SHARE, 1.0)
        if key != _SHARE and config.get(key) is not None:
            width = config[key]
            require(key, "rope.width", width)
            if share is not None and int(head * share) != width:
                raise ValueError(f"{key} = {width}: {_SHARE} = {share} is another number of {head} elements")
        else:
            share = missing if share is None else share
            if not is_a(share, float) or not 0 < share <= 1:
                raise ValueError(f"{_SHARE} = {share!r}: not a share of a head")
            width = int(head * share)
            if width != head and not self.share:
                raise ValueError(f"{_SHARE} = {share}: only 1.0 is there")
        if width != head and (width > head or width < 2 or width % 2):
            raise ValueError(f"{width} of {head} elements of a head would rotate: an even number from 2 on must")
        return 0 if width == head else width


def _table_of(config: Json, key: str) -> dict[str, Any]:
    """The value of a key that is a table or missing, without null entries."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} = {found!r}: not a table of keys")
    return {name: value for name, value in found.items() if value is not None}

"""Rotary positions as config.json has them: of new files in `rope_parameters`, of others in keys of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from hocket.config import ModelConfig, RopeConfig
from hocket.config.rope import PARAMETERS, RopeKind
from hocket.pretrained.tables import DELTA, FULL, WINDOW, Family
from hocket.settings.schema import beyond, types
from hocket.typed import describe, is_a

# -- Values of config.json, checked as the settings that they become ---------------------------------------------------


def require(key: str, setting: str, value: Any) -> None:
    """Raise ValueError for a value that `model.<setting>` cannot have."""
    name = f"model.{setting}"
    if not is_a(value, types()[name]):
        raise ValueError(f"{key} = {value!r}: not {describe(types()[name])}")
    if bounds := beyond(name, value):
        raise ValueError(f"{key} = {value}: {name} is {bounds}")


def table_of(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key that is a table of keys, or nothing, without those that are null."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} = {found!r}: not a table of keys")
    return {name: value for name, value in found.items() if value is not None}


# -- Kinds of layers as config.json has them: which have windows of attention, all of one size, or delta nets ----------

SIZE, KINDS, EVERY = "sliding_window", "layer_types", "full_attention_interval"


def keys_of_windows(family: Family) -> set[str]:
    """The keys of a family's config.json that say something of windows and delta nets."""
    if family.deltas:
        return {KINDS, EVERY}
    return {KINDS} if family.windows is None else {KINDS, SIZE, family.windows.switch}


def read_windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    """`model.window` and `model.full_layers`. Raises ValueError for kinds of layers that are not there."""
    windows, kinds = family.windows, config.get(KINDS)
    known = (FULL, *((DELTA,) if family.deltas else ()), *((WINDOW,) if windows is not None else ()))
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind not in known for kind in kinds)):
        raise ValueError(f"{KINDS} = {kinds}: only {' and '.join(known)} {'is' if len(known) == 1 else 'are'} there")
    if kinds and len(kinds) < layers and len(known) > 1:
        raise ValueError(f"{KINDS} = {kinds}: not one for each of {layers} layers")
    if family.deltas:
        return 0, _between_deltas(config, family.deltas, layers)
    if windows is None:
        return 0, ()
    size = config.get(SIZE, windows.missing)
    if windows.switch:
        on = config.get(windows.switch) or False
        if not isinstance(on, bool):
            raise ValueError(f"{windows.switch} = {on!r}: not True or False")
        size = size if on else None
    if size is not None:
        require(SIZE, "window", size)
        if not size:
            raise ValueError(f"{SIZE} = 0: a token attends to itself at least; null means no window")
    full = _full_layers(config, family, layers) if not kinds else [i for i in range(layers) if kinds[i] == FULL]
    if kinds and (size is None or not windows.listed) and len(full) != (layers if size is None else 0):
        raise ValueError(f"{KINDS} = {kinds}: {SIZE} = {size} is that of all layers")
    return (0, ()) if size is None or len(full) == layers else (size, tuple(full))


def written_windows(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for a model's windows."""
    windows, sizes = family.windows, model.windows()
    if family.deltas:
        return {KINDS: [DELTA if delta else FULL for delta in model.deltas()]}
    if windows is None:
        return {}
    # Where layers are listed transformers wants a size, even if none has it.
    found: dict[str, Any] = {SIZE: max(sizes) or (windows.missing if windows.listed and not windows.switch else None)}
    if windows.switch:
        found[windows.switch] = any(sizes)
    if windows.first and any(sizes):
        found[windows.first[0]] = sizes.count(0)
    if windows.listed:
        found[KINDS] = [WINDOW if size else FULL for size in sizes]
    return found


def _between_deltas(config: Mapping[str, Any], every: int, layers: int) -> tuple[int, ...]:
    """The layers with full attention of a model whose others have delta nets."""
    if kinds := config.get(KINDS):
        full = tuple(i for i in range(layers) if kinds[i] == FULL)
    else:
        every = config.get(EVERY, every)
        require(EVERY, "layers", every)
        full = tuple(range(every - 1, layers, every))
    if len(full) == layers:
        raise ValueError(f"no layer is {DELTA}: only models with some are there")
    return full


def _full_layers(config: Mapping[str, Any], family: Family, layers: int) -> list[int]:
    """The layers without a window where none are listed."""
    windows = family.windows
    assert windows is not None
    if windows.first:
        key, missing = windows.first
        first = config.get(key, missing)
        require(key, "experts", first)  # a number from 0 on
        return list(range(layers))[:first]
    return list(range(windows.every - 1, layers, windows.every)) if windows.every else []


# -- positions ---------------------------------------------------------------------------------------------------------

KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
_SHARE, _WITHOUT, _EVERY = "partial_rotary_factor", "no_rope_layers", "no_rope_layer_interval"
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


def keys_of_positions(family: Family) -> set[str]:
    """The keys of a family's config.json that say something of positions."""
    return {*KEYS, *((_SHARE, family.partial[0]) if family.partial else ()), *((_WITHOUT, _EVERY) * family.without)}


def read_rope(config: Mapping[str, Any], family: Family, head_dim: int, layers: int) -> tuple[float, RopeConfig]:
    """`model.rope_theta` and `model.rope`. Raises ValueError for a kind that is not there, and unknown parameters."""
    parameters = table_of(config, "rope_parameters")
    if family.windows is not None and family.windows.plain:
        parameters = _of_full_layers(parameters, config.get("rope_theta"), family.windows.plain)
    rope = {**table_of(config, "rope_scaling"), **parameters}
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    for key in _OF_PICTURES if family.pictures else ():
        rope.pop(key, None)
    if kind not in get_args(RopeKind):
        raise ValueError(f"rope_type = {kind}: only {', '.join(get_args(RopeKind))} are there")
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta, neither by itself nor in rope_parameters")
    require("rope_theta", "rope_theta", theta)
    width = _width(config, family, rope.pop(_SHARE, config.get(_SHARE)), head_dim)
    values: dict[str, Any] = {"kind": kind, "width": width, "without": _without(config, family, layers)}
    if "original_positions" in PARAMETERS[kind]:
        rope.setdefault(_NAMES["original_positions"], config.get("max_position_embeddings"))
    for name in PARAMETERS[kind]:
        key = _NAMES.get(name, name)
        if key in rope:
            values[name] = rope.pop(key)
            require(f"{key} of rope_parameters", f"rope.{name}", values[name])
        elif name in _REQUIRED:
            raise ValueError(f"rope_parameters of rope_type = {kind} have no {key}")
    if rope:
        raise ValueError(f"{next(iter(rope))} of rope_parameters: rope_type = {kind} has no such key")
    return float(theta), RopeConfig(**values)


def written_rope(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for a model's positions, as all versions of transformers read them."""
    rope, default = model.rope, RopeConfig()
    found: dict[str, Any] = {"rope_theta": model.rope_theta}
    if rope.kind != "default":
        needed = (*_REQUIRED, "original_positions")
        values = {name: getattr(rope, name) for name in PARAMETERS[rope.kind]}
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
        found[_WITHOUT] = [int(layer not in rope.without) for layer in range(model.layers)]
    return found


def _of_full_layers(parameters: dict[str, Any], theta: Any, missing: float) -> dict[str, Any]:
    """Of positions by kind of layer those of layers without a window. The others' are plain, with the same base."""
    full, others = table_of(parameters, FULL), table_of(parameters, WINDOW)
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
        require(key, "rope.width", width)
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


def _without(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """The layers without positions. A 1 in the list is a layer that has them."""
    if not family.without:
        return ()
    listed, every = config.get(_WITHOUT), config.get(_EVERY)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < layers or any(x not in (0, 1) for x in listed):
            raise ValueError(f"{_WITHOUT} = {listed}: not a list of 0 or 1 for each of {layers} layers")
        return tuple(i for i in range(layers) if not listed[i])
    every = family.without if every is None else every
    require(_EVERY, "layers", every)
    return tuple(range(every - 1, layers, every))

"""Kinds of layers as config.json has them: which have windows of attention, all of one size, or delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.config import ModelConfig
from hocket.pretrained.family import DELTA, FULL, WINDOW, Family
from hocket.pretrained.reading import require

SIZE, KINDS, EVERY = "sliding_window", "layer_types", "full_attention_interval"


def keys_of(family: Family) -> set[str]:
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

"""Windows of attention as config.json has them: one size, and which layers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.config import ModelConfig
from hocket.pretrained.family import FULL, WINDOW, Family
from hocket.pretrained.reading import require

SIZE, KINDS = "sliding_window", "layer_types"


def keys_of(family: Family) -> set[str]:
    """The keys of a family's config.json that say something of windows."""
    return {KINDS} if family.windows is None else {KINDS, SIZE, family.windows.switch}


def read_windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    """`model.window` and `model.full_layers`. Raises ValueError for kinds of layers that are not there."""
    windows, kinds = family.windows, config.get(KINDS)
    known = (FULL,) if windows is None else (FULL, WINDOW)
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind not in known for kind in kinds)):
        there = "only full_attention is" if windows is None else "only full_attention and sliding_attention are"
        raise ValueError(f"{KINDS} = {kinds}: {there} there")
    if windows is None:
        return 0, ()
    if kinds and len(kinds) < layers:
        raise ValueError(f"{KINDS} = {kinds}: not one for each of {layers} layers")
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

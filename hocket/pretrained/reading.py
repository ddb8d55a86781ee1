"""Values of config.json, checked as the settings that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.settings.schema import beyond, describe, is_a, types


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

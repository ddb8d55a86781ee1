"""Settings that have moved: what they were called, and how what an older hocket stored is read today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMER: dict[str, str] = {
    "plan.merge": "overlap.ep.merge",
    "plan.merge_ends": "overlap.ep.merge_ends",
    "plan.defer_wgrad": "overlap.defer_wgrad",
    "plan.p2p_backward_lane": "overlap.pp.backward_lane",
    "plan.p2p_defer_layers": "overlap.pp.defer_layers",
    "plan.p2p_defer_parts": "overlap.pp.defer_parts",
    "plan.strategy": "overlap.dp.strategy",
    "plan.prefetch": "overlap.dp.prefetch",
    "train.dtype": "precision.compute",
    "overlap.ep.capacity": "overlap.ep.room",
    "overlap.dp.gather_in_update": "overlap.dp.update",
}
"""Former name of a setting -> its name now. Only that is accepted: this is for messages, and for stored settings."""

_VALUES: dict[str, dict[Any, Any]] = {"overlap.dp.gather_in_update": {"on": "next_step", "off": "end"}}
"""Former name of a setting -> what its values are called now, where that has changed too."""


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as nested dictionaries with today's names, from such with those of any time."""
    tree = {name: renamed(value) if isinstance(value, Mapping) else value for name, value in stored.items()}
    for former, now in FORMER.items():
        *sections, last = former.split(".")
        holder: Any = tree
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and last in holder:
            value = holder.pop(last)
            put(tree, now, _VALUES.get(former, {}).get(value, value))
    return tree


def put(tree: dict[str, Any], setting: str, value: Any) -> None:
    """Set one value in nested dictionaries, by dotted name."""
    *sections, last = setting.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found

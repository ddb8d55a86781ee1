"""Settings as kept results have them, from hockets of several days, under today's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.config import Config
from hocket.config.overlap import DIRECTIONS, ROLES
from hocket.config.schema import changed, flat, types

_FORMER = {
    "plan.merge": "overlap.ep.merge",
    "plan.merge_ends": "overlap.ep.merge_ends",
    "plan.defer_wgrad": "overlap.defer_wgrad",
    "plan.p2p_defer_layers": "overlap.pp.defer_layers",
    "plan.p2p_defer_parts": "overlap.pp.defer_parts",
    "plan.strategy": "overlap.dp.strategy",
    "plan.prefetch": "overlap.dp.prefetch",
    "train.dtype": "precision.compute",
    "overlap.ep.capacity": "overlap.ep.room",
    "overlap.dp.gather_in_update": "overlap.dp.update",
}
"""Former name of a setting -> its name now."""

_VALUES = {"overlap.dp.gather_in_update": {"on": "next_step", "off": "end"}}
"""Former name of a setting -> what its values are called now, where that has changed too."""

_GONE: dict[str, Any] = {
    "overlap.ep.clones": 0, "run.memory": "/dev/shm", "train.memory_every": 0, "data.order": "as_read",
    "plan.mlp_pieces": 1, "plan.stride": 2, "precision.dispatch": "compute", "overlap.env": "set",
    "overlap.tp.pieces": 0,
    "network.bandwidth": "auto", "network.latency": "auto", "hardware.measured": "off",
    "overlap.on_unmet": "error", "optimizer.momentum": 0.95,
    "train.slow_groups": (), "train.slow_latency": (), "train.slow_bandwidth": (),
}  # fmt: skip
"""Former settings -> the value with which a run was as one without them."""

_NO_PART = {
    "data.seed", "plan.p2p_backward_lane", "train.log_every",
    "data.processes", "data.prompt_key", "data.sources", "data.text_key", "data.validation",
    "data.validation_paths", "optimizer.rewinds", "optimizer.skip_limit", "overlap.pp.backward_lane",
    "precision.fp8_ends", "precision.fp8_products", "run.port", "train.decay", "train.decay_shape",
    "train.experts_every", "train.keep", "train.keep_best", "train.keep_every", "train.lane_seed", "train.min_lr_ratio",
    "train.save_behind",
}  # fmt: skip
"""Former settings that said nothing of a step."""

_ROLES = {f"{role}_{direction}" for role in ROLES for direction in DIRECTIONS}
"""What once had settings of their own below overlap.tp."""

_LATER: dict[str, Any] = {
    "overlap.ep.merge_ends": "off",
    "overlap.ep.copies": "per_expert",
    "overlap.ep.splits": "host",
    "overlap.ep.room": 2.0,
    "overlap.dp.update": "end",
    "plan.graphs": "off",
    "plan.recompute": (),
    "overlap.tp.method": ("off",),
}
"""Settings that came after the first results and are automatic now, and what runs did before there was a choice."""


def config_of(tree: Mapping[str, Any]) -> Config:
    """The configuration that nested dictionaries of some day stand for. Raises ValueError for a setting of no day."""
    stored: dict[str, Any] = {}
    for former, value in flat(tree).items():
        name = _FORMER.get(former, former)
        value = _VALUES[former].get(value, value) if former in _VALUES else value
        if name == "overlap.tp.method" and isinstance(value, str):
            value = [value]
        stored[name] = tuple(value) if isinstance(value, list) else value
    layers, parts = stored.get("overlap.pp.defer_layers", 0), stored.pop("overlap.pp.defer_parts", "all")
    if parts == "attn" and isinstance(layers, int) and layers:
        stored["overlap.pp.defer_layers"] = f"attn:{layers}" if layers > 0 else "attn"
    for name in _NO_PART:
        stored.pop(name, None)
    for name, neutral in _GONE.items():
        if stored.get(name, neutral) == neutral:
            stored.pop(name, None)
    by_role = [(name, stored.pop(name)) for name in list(stored) if name.removeprefix("overlap.tp.") in _ROLES]
    if named := tuple(f"{name.removeprefix('overlap.tp.')}:{way}" for name, way in by_role if way != "auto"):
        stored["overlap.tp.method"] = named
    if strange := sorted(set(stored) - set(types())):
        raise ValueError(f"{strange[0]}: there is no such setting; fix: a result of hocket")
    wire = {"precision.wire": stored["precision.compute"]} if "precision.compute" in stored else {}
    return changed(Config(), {**_LATER, **wire, **stored})


def put(tree: dict[str, Any], setting: str, value: Any) -> None:
    """Set one value in nested dictionaries, by dotted name."""
    *sections, last = setting.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value

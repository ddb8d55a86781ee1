"""Settings one by one: their names, types and bounds, and how a problem with one of them is worded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from typing import Any, TypeVar, get_type_hints

from hocket.config import Config
from hocket.program.ops import offloadable, recomputable, recomputed_layers
from hocket.program.transformer import STANDARD
from hocket.settings.absent import why_not
from hocket.sizes import WITH_UNITS
from hocket.typed import describe, is_a

ANY = float("inf")
_UNSEEN = ("Cc", "Cs")
"""Kinds of characters: controls, and the halves of pairs, for which Python takes bytes that are no text."""

MOST_RANKS = 10**6
"""Largest number of ranks of a mesh, and of each of its axes."""

ConfigLike = TypeVar("ConfigLike", bound=Config)

_WIDE, _MANY, _LONG = 2**20, 2**16, 2**27
"""Largest width of a layer; largest number of parts and passes; largest number of things that have a row in a layer.
All are far above the largest known models."""

BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("model.hidden", "model.ffn", "model.expert_ffn"), (1, _WIDE)),
    "model.layers": (1, 1024),
    "precision.fp8_ends": (0, 1024),
    **dict.fromkeys(("model.heads", "model.kv_heads", "model.top_k"), (1, _MANY)),
    **dict.fromkeys(("model.route_groups", "model.route_top_groups"), (1, _MANY)),
    "model.vocab": (2, _LONG),
    **dict.fromkeys(("model.head_dim", "model.qk_rope_head_dim"), (2, _MANY)),
    **dict.fromkeys(("model.kv_lora_rank", "model.q_lora_rank"), (0, _WIDE)),
    **dict.fromkeys(("model.qk_nope_head_dim", "model.v_head_dim"), (1, _MANY)),
    "model.delta_heads": (0, _MANY),
    **dict.fromkeys((f"model.delta_{x}" for x in ("key_heads", "key_dim", "value_dim", "conv")), (1, _MANY)),
    "model.experts": (0, _MANY),
    "model.shared_ffn": (0, _WIDE),
    "model.window": (0, _LONG),
    "model.swiglu_limit": (0, 1e6),
    "model.swiglu_alpha": (1e-6, 1e6),
    **dict.fromkeys(("model.dense_layers", "model.aux_loss", "model.bias_rate", "model.init_std"), (0, ANY)),
    "model.z_loss": (0, ANY),
    "model.full_layers": (0, ANY),
    **dict.fromkeys(("model.norm_eps", "train.lr", "train.eps"), (1e-30, 1e30)),
    **dict.fromkeys(("model.route_scale", "model.rope_theta"), (1e-6, 1e12)),
    "model.rope.width": (0, _MANY),
    "model.rope.without": (0, ANY),
    "model.rope.factor": (1, 1e6),
    "model.rope.original_positions": (0, _LONG),
    **dict.fromkeys((f"model.rope.{x}_frequency" for x in ("low", "high")), (1e-6, 1e6)),
    **dict.fromkeys((f"model.rope.beta_{x}" for x in ("fast", "slow")), (1e-6, 1e6)),
    **dict.fromkeys((f"model.rope.{x}" for x in ("attention_factor", "mscale", "mscale_all_dim")), (0, 1e6)),
    **dict.fromkeys(("mesh.pp", "plan.chunks"), (1, 1024)),
    **dict.fromkeys(("mesh.dp", "mesh.cp", "mesh.ep", "mesh.tp", "network.ranks_per_host"), (1, MOST_RANKS)),
    "mesh.shard": (0, MOST_RANKS),
    "plan.layers_per_stage": (0, ANY),
    **dict.fromkeys(("plan.loss_pieces", "plan.mlp_pieces"), (1, _MANY)),
    **dict.fromkeys(("plan.group", "overlap.dp.prefetch", "overlap.tp.pieces"), (0, _MANY)),
    **dict.fromkeys(("overlap.pp.defer_layers", "overlap.pp.defer_head"), (-1, ANY)),
    "overlap.ep.room": (1, ANY),
    "overlap.ep.clones": (0, _MANY),
    "data.sequence_length": (1, _LONG),
    "data.validation": (0, 0.9),
    "data.processes": (0, _MANY),
    **dict.fromkeys(("data.seed", "train.seed", "train.lane_seed"), (0, 2**63 - 1)),
    **dict.fromkeys(("train.microbatches", "train.sequences"), (1, _MANY)),
    **dict.fromkeys(("train.steps", "train.log_every"), (1, ANY)),
    "train.hang_timeout": (1, 1e6),
    "train.min_lr": (-1, ANY),
    **dict.fromkeys(("train.warmup", "train.weight_decay", "train.clip"), (0, ANY)),
    "train.min_lr_ratio": (0, 1),
    "train.decay": (1e-6, 1e12),
    **dict.fromkeys(("train.eval_every", "train.eval_batches", "train.profile"), (0, ANY)),
    **dict.fromkeys(("train.save_every", "train.memory_every", "train.experts_every"), (0, ANY)),
    **dict.fromkeys(("train.keep", "train.keep_every", "train.keep_best"), (0, ANY)),
    **dict.fromkeys(("train.slow_latency", "train.slow_bandwidth"), (0, ANY)),
    "train.betas": (0, 0.999999),
    "optimizer.momentum": (0, 0.999999),
    "optimizer.skip_spikes": (0, 1e12),
    "optimizer.skip_limit": (0, ANY),
    "optimizer.rewinds": (0, ANY),
    "run.port": (0, 65535),
}
"""Smallest and largest value of every number. In a tuple they hold for each member.

Numbers that set the size of tables and plans have a largest value. So a mistyped number is an error at once, instead of
a process that is silent for minutes.
"""


def _recomputed_part(text: str) -> None:
    """Raises ValueError for a text that is no item of `plan.recompute`."""
    part, _ = recomputed_layers(text)
    if part not in recomputable(STANDARD):
        raise ValueError(f"{part!r} is none of the parts {', '.join(recomputable(STANDARD))}")


def _offloaded_part(text: str) -> None:
    """Raises ValueError for a text that is no item of `plan.offload`."""
    part, _ = recomputed_layers(text)
    if part not in offloadable(STANDARD):
        raise ValueError(f"{part!r} is none of the parts {', '.join(offloadable(STANDARD))}")


TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    **WITH_UNITS,
    "plan.recompute": (_recomputed_part, "attn:2"),
    "plan.offload": (_offloaded_part, "attn:2"),
}
"""Settings whose texts have a form, or auto -> what reads such a text, and an example."""


@cache
def types() -> dict[str, Any]:
    """Dotted name of every setting -> its type, in the order of the tree."""
    return dict(_types(Config, ""))


def _types(section: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _types(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint


def leaf(config: Config, setting: str) -> Any:
    """Value of one setting or section, named like `overlap.ep.merge`."""
    return reduce(getattr, setting.split("."), config)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries of settings as one, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def changed(config: ConfigLike, changes: Mapping[str, Any]) -> ConfigLike:
    """A configuration with other values for some settings, by dotted name. Each section is made once."""
    whole: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for setting, value in changes.items():
        name, _, rest = setting.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            whole[name] = value
            parts.pop(name, None)
    for name, inner in parts.items():
        whole[name] = changed(whole[name] if name in whole else getattr(config, name), inner)
    return dataclasses.replace(config, **whole) if whole else config


def impossible(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """The settings that have the wrong type, or are no choice, too small or too large, with a line about each."""
    lines: dict[str, str] = {}
    for setting, hint in types().items():
        value = leaf(config, setting)
        if not is_a(value, hint):
            reason = why_not(setting, value) or "not " + describe(hint)
            lines[setting] = line(config, origins, setting, reason, f"give {describe(hint)}")
        elif unseen(value):
            lines[setting] = line(config, origins, setting, "has a character that cannot be shown", "leave it out")
        elif reason := unreadable(setting, value):
            lines[setting] = line(config, origins, setting, reason, f"auto, or such as {TEXTS[setting][1]}")
        elif bounds := beyond(setting, value):
            lines[setting] = line(config, origins, setting, "out of range", bounds)
    return lines


def unseen(value: object) -> bool:
    """Whether a text, or one of several, has characters that no line can have, such as control characters."""
    texts = value if isinstance(value, tuple) else (value,)
    return any(unicodedata.category(x) in _UNSEEN for text in texts if isinstance(text, str) for x in text)


def unreadable(setting: str, value: object) -> str:
    """Why a text, or one of several, has not the form that a setting needs; empty if it has, or if none is needed."""
    texts = value if isinstance(value, tuple) else (value,)
    for text in texts if setting in TEXTS else ():
        try:
            if isinstance(text, str) and text != "auto":
                TEXTS[setting][0](text)
        except ValueError as error:
            return str(error)
    return ""


def beyond(setting: str, value: object) -> str:
    """The bounds of a setting's numbers if one of the numbers is outside; empty if all are inside."""
    low, high = BOUNDS.get(setting, (-ANY, ANY))
    numbers = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, int | float)]
    if all(low <= x <= high and x != ANY for x in numbers):
        return ""
    if high == ANY:
        return f"at least {written(low)}{', and no infinity' if ANY in numbers else ''}"
    return f"at most {written(high)}" if all(x >= low for x in numbers) else f"at least {written(low)}"


def written(bound: float) -> str:
    """A bound as one would type it."""
    return f"{bound:.0f}" if bound == int(bound) and abs(bound) < 1e12 else f"{bound:g}"


def ill_typed(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line per section or setting that has a wrong type, as only a configuration made in Python can have."""
    return list(_ill_typed(Config, config, "", origins))


def _ill_typed(kind: type[Any], section: Any, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(hint):
            if isinstance(value, hint):
                yield from _ill_typed(hint, value, f"{prefix}{name}.", origins)
            else:
                yield problem(prefix + name, value, origins, f"not a {hint.__name__}", f"give a {hint.__name__}")
        elif not is_a(value, hint):
            yield problem(prefix + name, value, origins, f"not {describe(hint)}", f"give {describe(hint)}")


def line(config: Config, origins: Mapping[str, str], setting: str, reason: str, fix: str) -> str:
    """One problem of a configuration."""
    return problem(setting, leaf(config, setting), origins, reason, fix)


def problem(setting: str, value: object, origins: Mapping[str, str], reason: str, fix: str) -> str:
    """One problem as a line: setting, value, where the value came from, what is wrong with it, and a fix."""
    origin = origins.get(setting) or origins.get("", "configuration")
    return f"{setting} = {show(value)} ({origin}): {reason}; fix: {fix}"


def show(value: object) -> str:
    """A value as one would type it after a flag."""
    if isinstance(value, tuple):
        return " ".join(map(show, value)) or "(none)"
    text = str(value) if value != "" else "(empty)"
    return "".join(ascii(x)[1:-1] if unicodedata.category(x) in _UNSEEN else x for x in text)


def digest(config: Config) -> str:
    """A short name for everything that a configuration says of a step: all settings but name and place of the run."""
    said = {setting: leaf(config, setting) for setting in types() if not setting.startswith("run.")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]

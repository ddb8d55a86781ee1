"""Named settings of several switches at once, weaker than anything that a recipe, a file or a flag says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.settings.schema import meant

PLAIN: dict[str, Any] = {
    "overlap.ep.merge": "off",
    "overlap.ep.merge_ends": "off",
    "overlap.defer_wgrad": "off",
    "overlap.pp.defer_layers": 0,
}
"""Nothing merged and nothing deferred: every microbatch alone, and weight gradients where autograd would have them."""


@dataclass(frozen=True)
class Preset:
    """Some settings, and what they are good for."""

    description: str
    changes: dict[str, Any]


PRESETS: dict[str, Preset] = {
    "throughput": Preset(
        "short steps where memory is left: weights are gathered once a step, and gathers run far ahead",
        {"overlap.dp.strategy": "optim_grads", "overlap.dp.prefetch": 4},
    ),
    "memory": Preset(
        "what fits: weights are given back after every use, gathers run one layer ahead, parts run forward again",
        {
            "plan.recompute": ("auto",),
            "plan.graphs": "off",
            "overlap.dp.strategy": "optim_grads_params",
            "overlap.dp.prefetch": 1,
            "overlap.ep.merge_ends": "off",
            "overlap.pp.defer_layers": 0,
        },
    ),
    "debug": Preset(
        "one thing after another, and hangs told soon: does a problem come from overlap?",
        {
            **PLAIN,
            "overlap.dp.prefetch": 0,
            "overlap.dp.update": "end",
            "plan.graphs": "off",
            "train.hang_timeout": 60.0,
        },
    ),
}


def preset(name: str, origin: str) -> dict[str, Any]:
    """The settings of a preset. Raises ValueError for an unknown name; `origin` is where it was named."""
    if name in PRESETS:
        return PRESETS[name].changes
    close = meant(name, PRESETS)
    fix = f"did you mean {close}?" if close else f"choose one of {', '.join(PRESETS)}"
    raise ValueError(f"preset = {name} ({origin}): there is no such preset; fix: {fix}")

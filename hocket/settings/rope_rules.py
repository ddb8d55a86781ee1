"""Rules for rotary positions: which elements and layers can have them, and what each kind needs and reads."""

from __future__ import annotations

from typing import get_args

from hocket.config.rope import PARAMETERS, RopeConfig, RopeKind
from hocket.settings.rule import Rule

_READERS = {
    name: tuple(kind for kind in get_args(RopeKind) if name in PARAMETERS[kind])
    for name in dict.fromkeys(name for names in PARAMETERS.values() for name in names)
}
"""Parameter -> the kinds that read it."""


def _yarn_without_range(rope: RopeConfig, theta: float) -> bool:
    return rope.kind == "yarn" and (rope.beta_slow > rope.beta_fast or theta == 1)


ROPE_RULES: tuple[Rule, ...] = (
    Rule(
        ("model.rope.width", "model.head_dim"),
        lambda c, h: not c.model.latent and (c.model.rope.width % 2 != 0 or c.model.rope.width > c.model.head_dim),
        "pairs of elements rotate, and a head has {model.head_dim}",
        "an even number up to model.head_dim, or 0 for all of them",
    ),
    Rule(
        ("model.rope.without", "model.layers"),
        lambda c, h: any(layer >= c.model.layers for layer in c.model.rope.without),
        "names layers that do not exist; they are numbered 0 to {last_layer}",
        "smaller numbers, or more model.layers",
    ),
    Rule(
        ("model.rope.original_positions", "model.rope.kind"),
        lambda c, h: "original_positions" in PARAMETERS[c.model.rope.kind] and c.model.rope.original_positions == 0,
        "{model.rope.kind} goes by how often a pair turns in the positions that the model was trained on first",
        "model.rope.original_positions with their number, such as 8192, or model.rope.kind = default",
    ),
    Rule(
        ("model.rope.high_frequency", "model.rope.low_frequency"),
        lambda c, h: c.model.rope.kind == "llama3" and c.model.rope.high_frequency <= c.model.rope.low_frequency,
        "pairs between the two are slowed down in part, and model.rope.low_frequency is {model.rope.low_frequency}",
        "more than model.rope.low_frequency",
    ),
    Rule(
        ("model.rope.beta_fast", "model.rope.beta_slow", "model.rope_theta"),
        lambda c, h: _yarn_without_range(c.model.rope, c.model.rope_theta),
        "pairs between the two are slowed down in part; model.rope.beta_slow is {model.rope.beta_slow}, and "
        "model.rope_theta is {model.rope_theta}",
        "at least model.rope.beta_slow, and another model.rope_theta than 1",
    ),
    *(
        Rule(
            (f"model.rope.{name}", "model.rope.kind"),
            lambda c, h, kinds=kinds: c.model.rope.kind not in kinds,
            f"no effect: model.rope.kind = {{model.rope.kind}}, and only {', '.join(kinds)} reads it",
            f"model.rope.kind = {kinds[-1]}, or leave it out",
            only_if_set=True,
        )
        for name, kinds in _READERS.items()
    ),
)

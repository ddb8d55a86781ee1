"""Rules for rotary positions: which elements and layers can have them, and what each kind needs and reads."""

from __future__ import annotations

from typing import get_args

from hocket.config.rope import PARAMETERS, RopeKind
from hocket.settings.rule import Rule

_READERS = {
    name: tuple(kind for kind in get_args(RopeKind) if name in PARAMETERS[kind])
    for name in dict.fromkeys(name for names in PARAMETERS.values() for name in names)
}
"""Parameter -> the kinds that read it."""


ROPE_RULES: tuple[Rule, ...] = (
    Rule(
        ("model.rope.width", "model.head_dim"),
        lambda c, h: not c.model.latent and (c.model.rope.width % 2 != 0 or c.model.rope.width > c.model.head_dim),
        "pairs of elements rotate, and a head has {model.head_dim}",
        "an even model.rope.width up to model.head_dim, or model.rope.width = 0, which turns all of them",
    ),
    Rule(
        ("model.rope.without", "model.layers"),
        lambda c, h: any(layer >= c.model.layers for layer in c.model.rope.without),
        "names layers that do not exist; they are numbered 0 to {last_layer}",
        "model.rope.without with smaller numbers, or more model.layers",
    ),
    Rule(
        ("model.rope.original_positions", "model.rope.kind"),
        lambda c, h: "original_positions" in PARAMETERS[c.model.rope.kind] and c.model.rope.original_positions == 0,
        "{model.rope.kind} goes by how often a pair turns in the positions that the model was trained on first",
        "model.rope.original_positions above 0, or model.rope.kind = default",
    ),
    Rule(
        ("model.rope.high_frequency", "model.rope.low_frequency"),
        lambda c, h: c.model.rope.kind == "llama3" and c.model.rope.high_frequency <= c.model.rope.low_frequency,
        "pairs between the two are slowed down in part, and model.rope.low_frequency is {model.rope.low_frequency}",
        "model.rope.high_frequency above model.rope.low_frequency",
    ),
    Rule(
        ("model.rope.beta_fast", "model.rope.beta_slow"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope.beta_slow > c.model.rope.beta_fast,
        "pairs between the two are slowed down in part, and model.rope.beta_slow is {model.rope.beta_slow}",
        "model.rope.beta_fast at least model.rope.beta_slow",
    ),
    Rule(
        ("model.rope_theta", "model.rope.kind"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope_theta == 1,
        "all pairs turn alike, and yarn slows down those that turn less often than others",
        "another model.rope_theta, or model.rope.kind = default",
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

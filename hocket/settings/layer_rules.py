"""Rules for windows, sinks and biases: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.settings.rule import Rule

LAYER_RULES: tuple[Rule, ...] = (
    Rule(
        ("model.full_layers", "model.layers"),
        lambda c, h: any(layer >= c.model.layers for layer in c.model.full_layers),
        "model.full_layers names layers that do not exist; they are numbered 0 to {last_layer}",
        "model.full_layers with smaller numbers, or more model.layers",
    ),
    Rule(
        ("model.full_layers", "model.window"),
        lambda c, h: c.model.window == 0 and bool(c.model.full_layers),
        "no effect: no layer has a window",
        "set model.window, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.window", "model.full_layers"),
        lambda c, h: c.model.window > 0 and not any(c.model.windows()),
        "no effect: model.full_layers names every layer",
        "model.window = 0, or fewer model.full_layers",
        only_if_set=True,
    ),
    Rule(
        ("model.window",),
        lambda c, h: c.model.window == 1,
        "a token that attends to itself alone needs no queries and keys, and flash attention has no such window",
        "model.window = 0 for all tokens before it, or 2 and more",
    ),
    Rule(
        ("model.window", "data.sequence_length"),
        lambda c, h: any(c.model.windows()) and c.model.window >= c.data.sequence_length,
        "no effect: sequences have {data.sequence_length} tokens",
        "longer sequences, or leave it as the model has it",
        remark=True,
    ),
    Rule(
        ("model.rope.plain_windows", "model.window", "model.rope.kind"),
        lambda c, h: c.model.rope.plain_windows and (c.model.rope.kind == "default" or not any(c.model.windows())),
        "no effect: model.rope.kind = {model.rope.kind}, and model.window = {model.window}",
        "another model.rope.kind and a model.window, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.swiglu_alpha", "model.swiglu_limit"),
        lambda c, h: c.model.swiglu_limit == 0,
        "no effect: model.swiglu_limit = 0 is silu",
        "set model.swiglu_limit, or leave it out",
        only_if_set=True,
    ),
)

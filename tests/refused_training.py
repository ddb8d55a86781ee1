"""What is refused of the optimizer and of the learning rate, for `test_config.py`; rows as in `refused_orders.py`."""

from __future__ import annotations

from typing import Any

MUON: dict[str, Any] = {"optimizer__name": "muon"}

REFUSED_TRAINING: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({}, {"train__min_lr": 1.0}, "train.min_lr", "above the highest"),
    ({}, {"train__min_lr": -0.5}, "train.min_lr", "out of range; fix: at least 0"),
    ({}, {"train__min_lr": "101%"}, "train.min_lr", "neither a number nor a share, 0% to 100%; fix: such as 10%"),
    (
        {"train__schedule": "constant"},
        {"train__min_lr": 1e-4},
        "train.min_lr",
        "no effect with train.schedule = constant",
    ),
    ({}, {"train__schedule": "linear:0.1"}, "train.schedule", "wsd alone has more"),
    ({}, {"train__schedule": "wsd:0.1:cosine:1"}, "train.schedule", "wsd alone has more"),
    ({}, {"train__schedule": "wsd:1.5"}, "train.schedule", "neither a whole number of steps"),
    ({}, {"train__schedule": "wsd:0"}, "train.schedule", "neither a whole number of steps"),
    ({}, {"train__schedule": "wsd:5:sqrt"}, "train.schedule", "'sqrt' is none of linear, cosine, 1-sqrt"),
    ({}, {"train__schedule": "wsd:140"}, "train.schedule", "15 steps of train.warmup and 140 of the decay"),
    (
        {"model__aux_loss": 0.0},
        {"model__aux_loss_over": "batch"},
        "model.aux_loss_over",
        "no effect with model.aux_loss = 0",
    ),
    ({"model__aux_loss": 0.1, "mesh__tp": 2}, {"model__aux_loss_over": "sequence"}, "model.aux_loss_over", "share the"),
    ({}, {"train__keep": (0, "every:60")}, "train.keep", "0 writes no checkpoint"),
    ({}, {"train__keep": (2, 3)}, "train.keep", "one number and one every"),
    ({}, {"train__keep": ("every:60", "every:120")}, "train.keep", "one number and one every"),
    ({}, {"train__keep": ("best:1",)}, "train.keep", "is not every with a number"),
    ({}, {"train__keep": (-1,)}, "train.keep", "out of range; fix: at least 0"),
    ({"train__save_every": 10}, {"train__keep": ("every:25",)}, "train.keep", "every train.save_every = 10 steps"),
    ({"train__save_every": 0}, {"train__keep": ("every:25",)}, "train.keep", "every train.save_every = 0 steps"),
    ({}, {"optimizer__scale": "original"}, "optimizer.scale", "no effect with optimizer.name = adamw"),
    ({}, {"optimizer__adamw": ("*.router.*",)}, "optimizer.adamw", "no effect with optimizer.name = adamw"),
    ({"mesh__tp": 2}, {"optimizer__name": "muon"}, "optimizer.name", "tensor-parallel ranks have parts of matrices"),
    (MUON, {"precision__averages": "bf16"}, "precision.averages", "its average in fp32"),
    ({}, {"optimizer__skip_spikes": 0.5}, "optimizer.skip_spikes", "above their median"),
    ({}, {"train__weight_decay": float("inf")}, "train.weight_decay", "out of range; fix: at least 0, and no"),
    ({}, {"train__schedule": "wds"}, "train.schedule", "'wds' is none of cosine, linear, wsd, constant"),
)

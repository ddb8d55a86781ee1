"""What is refused of the optimizer and of the learning rate, for `test_config.py`; rows as in `refused_orders.py`."""

from __future__ import annotations

from typing import Any

MUON: dict[str, Any] = {"optimizer__name": "muon"}
WSD: dict[str, Any] = {"train__schedule": "wsd"}

REFUSED_TRAINING: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({}, {"train__min_lr": 1.0}, "train.min_lr", "above the highest"),
    (
        {},
        {"train__min_lr": -0.5},
        "train.min_lr",
        "no learning rate is negative; fix: train.min_lr = 0 or more, or train.min_lr = -1",
    ),
    ({"train__min_lr": 1e-4}, {"train__min_lr_ratio": 0.2}, "train.min_lr_ratio", "train.min_lr = 0.0001 is"),
    ({"train__schedule": "constant"}, {"train__min_lr": 1e-4}, "train.min_lr", "never falls"),
    ({"train__schedule": "constant"}, {"train__min_lr_ratio": 0.2}, "train.min_lr_ratio", "never falls"),
    ({}, {"train__decay": 0.1}, "train.decay", "only train.schedule = wsd"),
    ({}, {"train__decay_shape": "cosine"}, "train.decay_shape", "only train.schedule = wsd"),
    (WSD, {"train__decay": 1.5}, "train.decay", "neither a whole number of steps"),
    (WSD, {"train__decay": 140}, "train.decay", "15 steps of train.warmup and 140 of the decay"),
    ({"model__aux_loss": 0.0}, {"model__aux_loss_over": "batch"}, "model.aux_loss_over", "no load-balancing loss"),
    ({"model__aux_loss": 0.1, "mesh__tp": 2}, {"model__aux_loss_over": "sequence"}, "model.aux_loss_over", "share the"),
    ({"train__keep": 0}, {"optimizer__rewinds": 1}, "optimizer.rewinds", "no checkpoint to go back to"),
    ({"train__keep": 0}, {"train__keep_best": 1}, "train.keep_best", "writes no checkpoint"),
    ({"train__save_every": 10}, {"train__keep_every": 25}, "train.keep_every", "every train.save_every = 10 steps"),
    ({"train__save_every": 0}, {"train__keep_every": 25}, "train.keep_every", "every train.save_every = 0 steps"),
    ({"train__save_every": 60}, {"train__keep_best": 1}, "train.keep_best", "only behind a validation"),
    (
        {"train__eval_batches": 0, "train__eval_every": 0},
        {"train__keep_best": 1, "train__save_every": 0},
        "train.keep_best",
        "there is no held-out loss",
    ),
    ({}, {"optimizer__scale": "original"}, "optimizer.scale", "only optimizer.name = muon"),
    ({}, {"optimizer__adamw": ("*.router.*",)}, "optimizer.adamw", "only optimizer.name = muon"),
    ({"mesh__tp": 2}, {"optimizer__name": "muon"}, "optimizer.name", "tensor-parallel ranks have parts of matrices"),
    (MUON, {"precision__averages": "bf16"}, "precision.averages", "its average in fp32"),
    ({}, {"optimizer__skip_spikes": 0.5}, "optimizer.skip_spikes", "above their median"),
    ({}, {"train__weight_decay": float("inf")}, "train.weight_decay", "out of range; fix: at least 0, and no"),
    ({}, {"train__min_lr_ratio": 1.5}, "train.min_lr_ratio", "out of range; fix: at most 1"),
    ({}, {"train__schedule": "wds"}, "train.schedule", "not one of cosine, linear, wsd, constant"),
)

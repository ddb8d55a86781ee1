"""The settings of section `optimizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.bounds import Between, OnlyWith


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does with which weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """What updates weights. muon updates the matrices of layers, those of routers and of each expert among them, and
    AdamW the rest: embedding, head, vectors, and what `adamw` names."""
    adamw: Annotated[tuple[str, ...], OnlyWith("optimizer.name = muon")] = ()
    """Of muon: names of further weights that AdamW updates, in patterns as those of `no_decay`."""
    scale: Annotated[Literal["match_rms_adamw", "original"], OnlyWith("optimizer.name = muon")] = "match_rms_adamw"
    """Of muon: factor of the learning rate by a matrix's shape. match_rms_adamw makes updates as large as those of
    AdamW: 0.2 times the root of its longer side. original: the root of rows by columns, at least 1."""
    no_decay: tuple[str, ...] = ()
    """Names of weights without weight decay, beside all vectors, such as embed.weight or *.router.weight. In a pattern
    * stands for any text. hocket explain shows which weights decay."""
    skip_spikes: Annotated[float, Between(0, 1e12)] = 0.0
    """A step is skipped if the norm of its gradient is above this factor times the median of those of the last 128
    steps that were taken; 0 skips none. A step whose gradient is not finite is always skipped: weights, the optimizer's
    state and balance biases stay as they were."""

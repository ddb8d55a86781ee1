"""The settings of section `optimizer`, as a frozen dataclass. `config.py` exports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does with which weights."""

    no_decay: tuple[str, ...] = ()
    """Names of weights without weight decay, beside all vectors, such as embed.weight or *.router.weight. In a pattern
    * stands for any text. hocket explain shows which weights decay."""

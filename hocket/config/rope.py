"""The settings `model.rope`: how rotary positions are stretched, and which elements and layers have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.bounds import LONG, MANY, Between, OnlyWith

RopeKind = Literal["default", "linear", "llama3", "yarn"]
YARN = OnlyWith("model.rope.kind = yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions beyond their base, `model.rope_theta`."""

    kind: RopeKind = "default"
    """How the angles of a model that was trained on short sequences are made smaller for long ones. default: not at
    all. linear: all alike. llama3 and yarn: slow pairs alone, as Llama 3.1 and Peng et al. 2023 (YaRN) have it."""
    width: Annotated[int, Between(0, MANY)] = 0
    """Elements of each head that rotate, from its first one on. The others have no position. 0 means all."""
    without: Annotated[tuple[int, ...], Between(0)] = ()
    """Numbers of the layers whose queries and keys do not rotate."""
    plain_windows: Annotated[
        bool, OnlyWith("model.rope.kind other than default", idle=(False,)), OnlyWith("a window", idle=(False,))
    ] = False
    """Whether layers with a window keep their angles, whatever `kind` is."""
    factor: Annotated[float, Between(1, 1e6), OnlyWith("model.rope.kind = linear or llama3 or yarn")] = 1.0
    """Divisor of the angles that are made smaller. Of linear, llama3 and yarn."""
    original_positions: Annotated[int, Between(0, LONG), OnlyWith("model.rope.kind = llama3 or yarn")] = 0
    """Positions of the model before its angles were made smaller. llama3 and yarn need it."""
    low_frequency: Annotated[float, Between(1e-6, 1e6), OnlyWith("model.rope.kind = llama3")] = 1.0
    """Of llama3: pairs that turn fewer times than this in the original positions have all of the factor."""
    high_frequency: Annotated[float, Between(1e-6, 1e6), OnlyWith("model.rope.kind = llama3")] = 4.0
    """Of llama3: pairs that turn more often than this in the original positions keep their angles."""
    beta_fast: Annotated[float, Between(1e-6, 1e6), YARN] = 32.0
    """Of yarn: pairs that turn more often than this in the original positions keep their angles."""
    beta_slow: Annotated[float, Between(1e-6, 1e6), YARN] = 1.0
    """Of yarn: pairs that turn fewer times than this have all of the factor."""
    truncate: Annotated[bool, YARN] = True
    """Of yarn: whether the first and the last pair between the two are rounded to whole numbers."""
    attention_factor: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """Of yarn: factor on cosines and sines. 0 computes it from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """Of yarn: weight of ln(factor) in the numerator of that factor, if `mscale_all_dim` is given too."""
    mscale_all_dim: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """Of yarn: weight of ln(factor) in its denominator, if `mscale` is given too."""


PARAMETERS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_positions", "low_frequency", "high_frequency"),
    "yarn": (
        "factor",
        "original_positions",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
}
"""What each kind reads."""
PLAIN = RopeConfig()

"""Rotary positions: inverse frequencies by kind, and tables of cosines and sines.

Shapes: S sequence length, R elements of a head that rotate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hocket.config import PLAIN, ModelConfig, RopeConfig, RopeKind


class Rope(NamedTuple):
    """The rotary positions of a layer."""

    width: int
    """R."""
    theta: float
    settings: RopeConfig


def rope_of(config: ModelConfig, layer: int) -> Rope | None:
    """The rotary positions of a layer, by its number; None if it has none."""
    rope, width = config.rope, config.qk_rope_head_dim if config.latent else config.head_dim
    if layer in rope.without:
        return None
    plain = rope.plain_windows and config.windows()[layer] > 0
    return Rope(rope.width or width, config.rope_theta, PLAIN if plain else rope)


def table_of(rope: Rope, seq: int, packing: Any, device: torch.device) -> Tensor:
    """`rotary_table` of whole sequences, or of the tokens' positions in `packing`: [2, T, 1, R / 2]."""
    table = rotary_table(seq if packing is None else packing.length, rope.width, rope.theta, device, rope.settings)
    return table if packing is None else table.index_select(1, packing.position_T)


@lru_cache(maxsize=16)
def rotary_table(seq: int, width: int, theta: float, device: torch.device, settings: RopeConfig = PLAIN) -> Tensor:
    """Cosine and sine of every position's angles (Su et al. 2021, "RoFormer"): fp32 [2, S, 1, R / 2].

    `width` is R. With kind yarn both are multiplied by `attention_factor`.
    """
    # Cached, so the table must not become an inference tensor, which autograd cannot save.
    with torch.inference_mode(False), torch.no_grad():
        angle_SR = torch.outer(
            torch.arange(seq, device=device, dtype=torch.float32), inverse_frequencies(width, theta, device, settings)
        )
        table = torch.stack([angle_SR.cos(), angle_SR.sin()]).unsqueeze(2)
        factor = attention_factor(settings)
        return table if factor == 1.0 else table * factor


def inverse_frequencies(width: int, theta: float, device: torch.device, settings: RopeConfig = PLAIN) -> Tensor:
    """Radians per position of every pair, fp32 [R / 2]; bitwise those of transformers' `modeling_rope_utils`."""
    period = theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    return _SLOWED[settings.kind](period, width, theta, settings)


def attention_factor(settings: RopeConfig) -> float:
    """The factor of cosines and sines (Peng et al. 2023, "YaRN", section 3.4)."""
    if settings.kind != "yarn":
        return 1.0
    if settings.attention_factor:
        return settings.attention_factor
    if settings.mscale and settings.mscale_all_dim:
        return mscale(settings.factor, settings.mscale) / mscale(settings.factor, settings.mscale_all_dim)
    return mscale(settings.factor)


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's logarithmic growth of attention with `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(period: Tensor, width: int, theta: float, s: RopeConfig) -> Tensor:
    """Interpolates between the two bounds, by how often a pair rotates over the original positions."""
    inverse = 1.0 / period
    length = 2 * math.pi / inverse
    slow, fast = length > s.original_positions / s.low_frequency, length < s.original_positions / s.high_frequency
    share = (s.original_positions / length - s.low_frequency) / (s.high_frequency - s.low_frequency)
    between = (1 - share) * inverse / s.factor + share * inverse
    return torch.where(fast, inverse, torch.where(slow, inverse / s.factor, between))


def _yarn(period: Tensor, width: int, theta: float, s: RopeConfig) -> Tensor:
    """NTK-by-parts (Peng et al. 2023, section 3.2): a ramp over the pairs between two numbers of rotations."""

    def pair(turns: float) -> float:
        """The pair that rotates this often over the original positions."""
        return width * math.log(s.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    pairs = torch.arange(width // 2, device=period.device, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (s.factor * period) * (1 - kept) + 1.0 / period * kept


_SLOWED: dict[RopeKind, Callable[[Tensor, int, float, RopeConfig], Tensor]] = {
    "default": lambda period, width, theta, s: 1.0 / period,
    "linear": lambda period, width, theta, s: 1.0 / period / s.factor,
    "llama3": _llama3,
    "yarn": _yarn,
}

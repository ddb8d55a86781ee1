"""Frequencies of rotary positions against transformers and published values, and where they apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hocket.config import RopeConfig
from hocket.layers.norms import rotate
from hocket.model.layers import Attention
from hocket.model.rotary import attention_factor, inverse_frequencies, rope_of, rotary_table
from hocket.model.transformer import Chunk
from tests.helpers.chunks import init_chunk
from tests.helpers.plans import small

CPU = torch.device("cpu")
LLAMA = dict(kind="llama3", original_positions=8192)
YARN = dict(kind="yarn", original_positions=4096)
VECTORS: list[tuple[int, float, dict[str, Any], dict[int, float], float]] = [
    (128, 5e5, dict(**LLAMA, factor=8), {16: 0.037606, 28: 0.00321145, 32: 0.000524846, 63: 3.06893e-07}, 1),
    (64, 5e5, dict(**LLAMA, factor=32), {8: 0.037606, 12: 0.00729267, 16: 0.000429557, 31: 9.41831e-08}, 1),
    (64, 1e4, dict(**YARN, factor=40, mscale=1, mscale_all_dim=1), {8: 0.1, 12: 0.0268794, 31: 3.3338e-06}, 1),
    (64, 1.5e5, dict(**YARN, factor=32, truncate=False), {8: 0.0508133, 12: 0.00679496, 16: 0.000456484}, 1.3465736),
    (128, 5e5, dict(kind="yarn", original_positions=8192, factor=8), {28: 0.0015585, 36: 7.78466e-05}, 1.2079442),
    (
        64,
        5e4,
        dict(**YARN, factor=32, beta_fast=1, mscale=1, mscale_all_dim=1),
        {8: 0.066874, 16: 0.00447214, 20: 3.61405e-05, 31: 8.76441e-07},
        1,
    ),
]
"""Width, base, settings, frequencies by pair, and factor: Llama 3.1 and 3.2, DeepSeek-V3, gpt-oss, OLMo 3, Kimi-K2."""


@pytest.mark.parametrize(("width", "theta", "settings", "expected", "factor"), VECTORS)
def test_published(width: int, theta: float, settings: dict, expected: dict[int, float], factor: float) -> None:
    rope = RopeConfig(**settings)
    found = inverse_frequencies(width, theta, CPU, rope)
    assert {i: found[i].item() for i in expected} == pytest.approx(expected, rel=5e-6)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-7)


NAMES = {
    "original_positions": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
}
AGAINST: list[tuple[int, float, dict[str, Any]]] = [
    *((width, theta, settings) for width, theta, settings, _, _ in VECTORS),
    (10, 5e4, dict(kind="linear", factor=3.0)),
    (6, 1e4, dict(kind="yarn", factor=4.0, original_positions=16, beta_fast=8.0, beta_slow=2.0)),
    (16, 1e4, dict(kind="yarn", factor=4.0, original_positions=64, mscale=0.7, mscale_all_dim=0.3, truncate=False)),
    (16, 1e4, dict(kind="yarn", factor=4.0, original_positions=64, mscale=0.7)),
    (16, 1e4, dict(kind="yarn", factor=4.0, original_positions=64, attention_factor=1.5, beta_fast=2.0, beta_slow=2.0)),
    (12, 1e4, dict(kind="llama3", factor=2.0, original_positions=8, low_frequency=0.5, high_frequency=3.0)),
]


@pytest.mark.parametrize(("width", "theta", "settings"), AGAINST)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_as_transformers(width: int, theta: float, settings: dict[str, Any], share: float) -> None:
    """Bit for bit; with a share below 1, the first part of a head that is wider."""
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="needs transformers")
    from transformers import LlamaConfig

    rope = RopeConfig(**settings)
    needed = {"low_frequency": 1.0, "high_frequency": 4.0} if rope.kind == "llama3" else {}
    said = {NAMES.get(name, name): value for name, value in {**needed, **settings}.items() if name != "kind"}
    parameters = {"rope_type": rope.kind, "rope_theta": theta, "partial_rotary_factor": share, **said}
    config = LlamaConfig(head_dim=int(width / share), rope_parameters=parameters)
    expected, factor = utils.ROPE_INIT_FUNCTIONS[rope.kind](config, CPU)
    assert torch.equal(inverse_frequencies(width, theta, CPU, rope), expected)
    assert attention_factor(rope) == factor
    angle = torch.outer(torch.arange(9.0), expected)
    table = torch.stack([angle.cos(), angle.sin()]).unsqueeze(2) * factor
    assert torch.equal(rotary_table(9, width, theta, CPU, rope), table)


def test_a_part_of_a_head_rotates() -> None:
    x = torch.randn(1, 5, 2, 12)
    turned = rotate(x, rotary_table(5, 8, 1e4, CPU))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8], rotary_table(5, 8, 1e4, CPU)))


def test_layers_without_positions() -> None:
    """Two tokens before the last one may then change places."""
    config = small(layers=2, init_std=0.5, rope=RopeConfig(without=(1,)))
    with_positions, without = rope_of(config, 0), rope_of(config, 1)
    assert with_positions is not None
    assert without is None
    h = torch.randn(1, 3, config.hidden)
    for number in range(2):
        for normed in (False, True):
            attention = init_chunk(Chunk(replace(config, qk_norm=normed), range(2)), 0).layer(number).attn
            assert isinstance(attention, Attention)
            last, swapped = attention(h)[0, -1], attention(h[:, [1, 0, 2]])[0, -1]
            assert torch.allclose(last, swapped, atol=1e-4) == (number == 1)

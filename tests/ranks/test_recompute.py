"""Memory that recomputation saves: the plan's word for it, and the bytes that are really there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hocket.config import DataConfig
from hocket.engine import Engine
from hocket.model.microbatch import Microbatch
from hocket.program.network import hardware_of
from hocket.program.simulate import simulate
from hocket.program.stages import costs_of
from hocket.settings.schema import changed
from tests.helpers.live import LiveBytes
from tests.helpers.parity import config
from tests.reference import random_batches

LENGTH = 128


def peaks(kind: str, recompute: tuple[str, ...]) -> tuple[int, int]:
    """(real, predicted) most bytes of values and gradients in a step of four merged microbatches."""
    model: dict[str, Any] = dict(layers=4, hidden=64, kv_heads=4, head_dim=16, ffn=256, expert_ffn=128, vocab=64)
    model["dense_layers"] = () if kind == "moe" else range(4)
    shared = kind == "shared"
    c = config(model, {"cp": 4} if shared else {}, dict(merge="on", recompute=recompute), 4, "fp32")
    c = replace(c, data=DataConfig(sequence_length=LENGTH))
    if shared:
        c = changed(c, {"train.transport": "null", "overlap.cp.method": "gather"})
    engine = Engine(c, 0, torch.device("cpu"))
    engine.init_weights()
    (batches,) = random_batches(c.model, 1, 4, 1, (2, LENGTH))
    microbatches = [Microbatch(*of_ranks[0]) for of_ranks in batches]
    engine.train_step(microbatches, 1e-2)
    with LiveBytes() as live:
        engine.train_step(microbatches, 1e-2)
    assert live.now < 2**13, "something of the step is left"
    costs = costs_of(c, hardware_of(c))
    predicted = simulate(engine.program, costs).ranks[0].peak_bytes - costs.fixed_bytes(engine.program, 0)
    return live.peak, predicted


@pytest.mark.parametrize(("kind", "parts"), [("dense", ("attn", "mlp")), ("moe", ("attn", "experts"))])
def test_memory_falls_as_predicted(kind: str, parts: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    kept = peaks(kind, ())
    some, everything = peaks(kind, parts[1:]), peaks(kind, parts)
    half = peaks(kind, tuple(f"{part}:2" for part in parts))
    for fewer in (some, half, everything):
        saved, expected = kept[0] - fewer[0], kept[1] - fewer[1]
        assert saved == pytest.approx(expected, rel=0.2)
    assert everything[0] < some[0] < 0.8 * kept[0]
    assert everything[0] < half[0] < 0.8 * kept[0]


def test_what_is_gathered_again_is_not_kept() -> None:
    torch.set_num_threads(1)
    for others in ((), ("attn",)):
        kept, again = (peaks("shared", (*others, *parts)) for parts in ((), ("kv",)))
        assert kept[0] - again[0] == pytest.approx(kept[1] - again[1], rel=0.05)
        assert again[0] < 0.96 * kept[0]

"""Memory that recomputation saves: the plan's word for it, and the bytes that are really there."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from hocket.config import Config, DataConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import simulate
from tests.helpers.live import LiveBytes
from tests.helpers.parity import config
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches

LENGTH = 128


@functools.cache
def peaks(kind: str, recompute: tuple[str, ...], offload: tuple[str, ...] = (), layers: int = 4) -> tuple[int, int]:
    """(real, predicted) most bytes of values and gradients in a step of four merged microbatches."""
    model: dict[str, Any] = dict(layers=layers, hidden=64, kv_heads=4, head_dim=16, ffn=256, expert_ffn=128, vocab=64)
    model["dense_layers"] = () if kind == "moe" else range(layers)
    shared = kind == "shared"
    c = config(model, {"cp": 4} if shared else {}, dict(merge="on", recompute=recompute, offload=offload), 4, "fp32")
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


@pytest.mark.parametrize(
    ("kind", "part"), [("dense", "mlp"), ("moe", "experts"), pytest.param("moe", "attn", marks=pytest.mark.full)]
)
def test_what_is_on_the_host_is_not_here(kind: str, part: str) -> None:
    torch.set_num_threads(1)
    kept, away = (peaks(kind, (), parts, layers=10) for parts in ((), (f"{part}:9",)))
    saved, expected = kept[0] - away[0], kept[1] - away[1]
    assert saved == pytest.approx(expected, rel=0.2)
    assert away[0] < 0.85 * kept[0]


def test_rows_made_again_are_not_kept() -> None:
    """Of all rows of all layers but the one whose backward runs."""
    torch.set_num_threads(1)
    rows = 2 * LENGTH * 2 * 64 * 4  # tokens, choices, width, bytes
    for others in ((), ("experts",)):
        kept, again = (peaks("moe", (*others, *parts)) for parts in ((), ("dispatch",)))
        assert kept[0] - again[0] == pytest.approx(kept[1] - again[1], rel=0.02)
        assert kept[0] - again[0] > 3.5 * rows


def held(rank: int, c: Config) -> int:
    """Most bytes of values, saved tensors and gradients of a rank's step."""
    torch.set_num_threads(1)
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    (batches,) = random_batches(c.model, 1, 2, 2, (2, LENGTH))
    microbatches = [Microbatch(*of_ranks[rank]) for of_ranks in batches]
    engine.train_step(microbatches, 1e-2)
    with LiveBytes() as live:
        engine.train_step(microbatches, 1e-2)
    engine.close()
    return live.peak


@pytest.mark.parametrize(
    ("copies", "choices", "expected"),
    [("per_expert", 2, 6 * 2 * 64 - 2 * 2 * 64), ("per_rank", 4, 6 * (4 * 64 - 2 * 80) - (4 * 64 + 2 * 80))],
)
def test_rows_dispatched_again_are_not_kept(copies: str, choices: int, expected: int) -> None:
    """Numbers of a token: the rows of six layers, less those of one that come again and those in experts' order.

    One row for each rank, with a label of 16, is kept where it is sent.
    """
    model = dict(layers=6, hidden=64, expert_ffn=16, experts=4, top_k=choices, routing="even")
    found = []
    for parts in ((), ("dispatch",)):
        c = config(model, dict(dp=2, ep=2), dict(merge="off", copies=copies, recompute=parts), 2, "fp32")
        found.append(max(run_ranks(held, 2, replace(c, data=DataConfig(sequence_length=LENGTH)))))
    assert found[0] - found[1] == pytest.approx(2 * LENGTH * 4 * expected, rel=0.02)


def test_what_is_gathered_again_is_not_kept() -> None:
    torch.set_num_threads(1)
    for others in ((), ("attn",)):
        kept, again = (peaks("shared", (*others, *parts)) for parts in ((), ("kv",)))
        assert kept[0] - again[0] == pytest.approx(kept[1] - again[1], rel=0.2)
        assert again[0] < 0.96 * kept[0]

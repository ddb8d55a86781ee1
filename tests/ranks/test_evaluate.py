"""Validation between steps: the losses of the plain model, and training goes on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.runtime.weights import DTYPES
from tests.helpers.parity import LR, adamw, config, whole
from tests.helpers.ranks import run_ranks
from tests.reference import Batch, Reference, random_batches

CASES: dict[str, Config] = {
    "everything on": config(
        dict(layers=5, dense_layers=(0,), shared_ffn=16, bias_rate=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_layers=2),
        4,
        "bf16",
    ),
    "a V": config(
        dict(layers=5, dense_layers=(1, 3)),
        dict(pp=2, dp=2, ep=2),
        dict(order="zb_v", chunks=2, merge="off"),
        3,
        "fp32",
    ),
    "one rank": config(dict(layers=3), {}, dict(merge="on"), 2, "fp32"),
    "fewer slots than forwards alone would take": config(
        dict(layers=3, dense_layers=(2,)), dict(dp=2, ep=2), dict(chunks=3, merge="off", group=3), 5, "fp32"
    ),
}


def run(rank: int, c: Config, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """The first and third batch are trained on, the second one is validated in between, twice."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    first, validation, third = ([Microbatch(*batches[engine.where.dp]) for batches in step] for step in steps)
    engine.train_step(first, LR)
    losses = [float(engine.evaluate(validation)) for _ in range(2)]
    engine.assert_clean()
    engine.train_step(third, LR)
    engine.assert_clean()
    pieces = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for u in engine.sharded.units.values() for p in u.pieces()]
    has_head = any(chunk.head is not None for chunk in engine.chunks)
    return {"where": engine.where, "has head": has_head, "losses": losses, "pieces": pieces}


@pytest.mark.parametrize("name", CASES)
def test_validation_between_steps(name: str) -> None:
    c = CASES[name]
    steps = random_batches(c.model, 3, c.train.microbatches, c.mesh.dp, (2, 8))
    reference = Reference(c.model, c.mesh.dp, c.mesh.ep, DTYPES[c.precision.compute], 0, c.train.clip, adamw)
    expected: list[list[float]] = reference.run(steps[:2]).losses[1]
    trained: dict[str, Tensor] = reference.run([steps[0], steps[2]]).weights
    ranks = run_ranks(run, c.mesh.pp * c.mesh.dp, c, steps)
    assert sum(r["has head"] for r in ranks) == c.mesh.dp
    for r in ranks:
        mean = float(torch.tensor([losses[r["where"].dp] for losses in expected]).mean())
        assert r["losses"] == (pytest.approx([mean] * 2, rel=1e-6) if r["has head"] else [0.0] * 2)
        assert r["losses"][0] == r["losses"][1]
    weights = whole([piece for r in ranks for piece in r["pieces"]])
    assert all(torch.equal(weights[name], trained[name]) for name in trained)

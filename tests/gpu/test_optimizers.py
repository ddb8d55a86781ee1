"""Steps that the device skips while no host waits, and Muon over NCCL and copy engines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, MeshConfig, OverlapConfig, PlanConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from tests.gpu.test_parity import BASE
from tests.gpu.test_placed_splits import batches_of
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
DENSE = changed(
    dataclasses.replace(
        BASE, mesh=MeshConfig(dp=2), plan=PlanConfig(order="sequential"), overlap=OverlapConfig(defer_wgrad="off")
    ),
    {"model.experts": 0, "model.dense_layers": (), "overlap.ep.merge": "off", "optimizer.skip_spikes": 50.0},
)
BAD = 5
"""A step behind those that are issued before one is recorded."""


def state_of(engine: Engine) -> dict[str, Tensor]:
    found = {}
    for name, state in engine.optimizer.state.items():
        found |= {name: state.piece.main, f"{name} 1": state.exp_avg, f"{name} 2": state.exp_avg_sq}
    for name, (piece, momentum) in engine.optimizer.momenta.items():
        found |= {name: piece.main, f"{name} momentum": momentum}
    return {name: tensor.cpu() for name, tensor in found.items()}


def train(rank: int, config: Config, steps: tuple[int, ...], bad: int) -> dict[str, Any]:
    """The steps of these numbers; in one rank 0's gradient of the first unit has an infinity."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)  # attention adds in a fixed order only if it must not warn instead
    engine = Engine(config, rank, device)
    engine.init_weights()
    complete, now = engine.sharded.complete_grads, [0]

    def spoil() -> None:
        complete()
        if rank == 0 and now[0] == bad:
            next(iter(engine.sharded.units.values())).group.main_grad[:1].fill_(math.inf)

    engine.sharded.complete_grads = spoil  # type: ignore[method-assign]
    batches, skips = batches_of(engine, 8), []
    for step in steps:
        now[0] = step
        skips.append(bool(engine.train_step(batches[step], 1e-3).skipped))
    found = dict(skips=skips, state=state_of(engine), steps=engine.optimizer.steps)
    engine.close()
    return found


def assert_same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    "config",
    [
        planned(DENSE, update="end", graphs="off"),
        planned(DENSE, update="next_step", graphs="off"),
        planned(DENSE, update="end", graphs="on"),
        changed(planned(DENSE, update="end", graphs="off"), {"precision.averages": "bf16"}),
        changed(planned(DENSE, update="end", graphs="off"), {"optimizer.name": "muon"}),
        changed(planned(DENSE, update="next_step", graphs="off"), {"optimizer.name": "muon"}),
    ],
    ids=["end", "next step", "graph", "bf16", "muon", "muon, next step"],
)
def test_a_skipped_step_is_as_if_it_had_not_been(config: Config) -> None:
    whole = run_ranks(train, 2, config, tuple(range(8)), BAD, backend="nccl", timeout=200)
    without = run_ranks(train, 2, config, tuple(n for n in range(8) if n != BAD), -1, backend="nccl", timeout=200)
    for mine, theirs in zip(whole, without, strict=True):
        assert mine["skips"] == [n == BAD for n in range(8)]
        assert mine["steps"] == theirs["steps"] == 7
        assert_same(mine["state"], theirs["state"])


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_muon_in_the_next_step_is_muon_at_the_end(transport: str) -> None:
    """The same matrices on the same ranks, beside other work or not."""
    later, end = (
        changed(planned(DENSE, update=update, graphs="off"), {"optimizer.name": "muon", "train.transport": transport})
        for update in ("next_step", "end")
    )
    found = [run_ranks(train, 2, config, (0, 1, 2, 3), -1, backend="nccl", timeout=200) for config in (later, end)]
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine["state"], theirs["state"])


@pytest.mark.parametrize("update", ["end", "next_step"])
def test_copy_engines_serve_muon(update: str) -> None:
    nccl = changed(planned(DENSE, update=update, graphs="off"), {"optimizer.name": "muon"})
    copies = changed(nccl, {"train.transport": "copy_engine"})
    found = [run_ranks(train, 2, config, (0, 1, 2), -1, backend="nccl", timeout=200) for config in (nccl, copies)]
    for mine, theirs in zip(*found, strict=True):
        moved = {
            name: float((mine["state"][name] - value).norm() / value.norm().clamp(min=1e-6))
            for name, value in theirs["state"].items()
        }
        # Sums of two gradients round alike, but kernels may differ.
        assert not {name: far for name, far in moved.items() if far > 0.05}, sorted(moved.values())

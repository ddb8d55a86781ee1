"""Strategies of sharding under a plan: they hand checkpoints on to each other, and send what they should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hocket.config import Config, Strategy
from hocket.engine import Engine
from hocket.fsdp.piece import Boxes
from hocket.model.documents import Microbatch
from hocket.train import checkpoint
from tests.helpers.parity import config, whole
from tests.helpers.ranks import run_ranks
from tests.helpers.stats import stats_of
from tests.reference import random_batches
from tests.test_checkpoint import settings_in

MODEL = dict(layers=2, dense_layers=(0,))
STRATEGIES = get_args(Strategy)


def settings_of(strategy: str, microbatches: int) -> Config:
    return config(MODEL, dict(dp=2, ep=1), dict(strategy=strategy), microbatches, "fp32")


def engine_of(rank: int, strategy: str, microbatches: int = 1) -> Engine:
    engine = Engine(settings_of(strategy, microbatches), rank, torch.device("cpu"))
    engine.init_weights()
    return engine


def steps(engine: Engine, count: int, first: int = 0) -> list[Tensor]:
    c = engine.config
    batches = random_batches(c.model, first + count, c.train.microbatches, c.mesh.dp, (2, 8))[first:]
    return [
        engine.train_step([Microbatch(*batch[engine.where.dp]) for batch in microbatches], 1e-2).loss.clone()
        for microbatches in batches
    ]


def state(engine: Engine) -> dict[str, Boxes]:
    """What a trainer saves of an engine without experts' biases."""
    states = engine.optimizer.state.values()
    kept = {
        "weight": [(s.piece, s.piece.main) for s in states],
        "exp_avg": [(s.piece, s.exp_avg) for s in states],
        "exp_avg_sq": [(s.piece, s.exp_avg_sq) for s in states],
    }
    return {f"{kind}.{p.name}": p.boxes(t) for kind, found in kept.items() for p, t in found}


def weights(found: Mapping[str, Boxes]) -> list[tuple[str, tuple[int, ...], int, int, Tensor]]:
    """The weights that this rank keeps."""
    kept = ((name.removeprefix("weight."), r) for name, r in found.items() if name.startswith("weight."))
    return [(name, tuple(r.shape), r.span.lo, r.span.hi, r.flat.clone()) for name, r in kept]


def handed_on(rank: int, folder: Path) -> list[list[tuple[str, tuple[int, ...], int, int, Tensor]]]:
    """Each strategy trains a step on what the one before has saved."""
    settings = settings_in(folder)
    out = []
    for done, strategy in enumerate(STRATEGIES):
        engine = engine_of(rank, strategy)
        if done:
            assert checkpoint.restore(settings, state(engine)) is not None
            engine.optimizer.steps = done
            engine.sharded.refresh()
        steps(engine, 1, first=done)
        engine.assert_clean()
        checkpoint.save(settings, checkpoint.Moment(done + 1, 0), state(engine))
        out.append(weights(state(engine)))
        engine.close()
    return out


def alone(rank: int, strategy: str) -> list[tuple[str, tuple[int, ...], int, int, Tensor]]:
    engine = engine_of(rank, strategy)
    steps(engine, len(STRATEGIES))
    return weights(state(engine))


def test_a_checkpoint_of_one_strategy_goes_on_under_any_other(tmp_path: Path) -> None:
    """With one microbatch in fp32 on two ranks all of them have the same bits."""
    relay = whole([piece for out in run_ranks(handed_on, 2, tmp_path) for piece in out[-1]])
    one = whole([piece for out in run_ranks(alone, 2, "optim_grads_params") for piece in out])
    assert relay.keys() == one.keys()
    for name, value in one.items():
        assert torch.equal(relay[name], value), name


def counted(rank: int, strategy: str) -> dict[str, Any]:
    engine = engine_of(rank, strategy, microbatches=3)
    steps(engine, 2)
    stats = stats_of(engine.sharded)
    units = len(engine.sharded.units)
    numel = sum(unit.group.layout.total for unit in engine.sharded.units.values())
    return {
        "gathers": stats.gathers / units / 2,
        "reduces": stats.reduces / units / 2,
        "gathered": stats.gathered_bytes / numel / 4 / 2,
        "reduced": stats.reduced_bytes / numel / 4 / 2,
    }


@pytest.mark.parametrize(
    ("strategy", "gathers", "reduces", "reduced"),
    [("no_shard", 0, 1, 1), ("optim", 1, 1, 1 / 2), ("optim_grads", 1, 3, 3 / 2)],
)
def test_what_a_step_sends(strategy: str, gathers: float, reduces: float, reduced: float) -> None:
    """Per unit and step, and bytes in units of the whole model's: on two ranks, half of it leaves each in a reduce."""
    for found in run_ranks(counted, 2, strategy):
        assert (found["gathers"], found["reduces"]) == (gathers, reduces)
        assert found["reduced"] == pytest.approx(reduced, rel=2e-3)  # and how many rows each expert got
        assert found["gathered"] == pytest.approx(gathers / 2)

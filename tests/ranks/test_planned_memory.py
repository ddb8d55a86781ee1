"""What a plan says about memory is what the engine allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.program.stages import mesh_of
from hocket.program.values import unit_moved, unit_written
from hocket.runtime.comm import make_groups
from tests.helpers.parity import config
from tests.helpers.ranks import run_ranks
from tests.helpers.stats import stats_of, sum_bytes
from tests.reference import random_batches

PADDING = 0.01
"""Of a unit's elements, at most: parameters and shards start at multiples of 64, which the formulas leave out."""


def bytes_of(rank: int, c: Config) -> dict[str, tuple[int, int]]:
    """(allocated, predicted) bytes of one rank: kept between steps, slots, and gradients when the optimizer reads."""
    cpu = torch.device("cpu")
    groups = make_groups(mesh_of(c), rank, cpu, "gloo")
    engine = Engine(c, rank, cpu, groups=groups)
    engine.init_weights()
    costs, pp = costs_of(c, hardware_of(c)), engine.where.pp
    gradients: list[int] = []
    finish = engine.optimizer.apply
    units = engine.sharded.units.values()

    def apply(**how: Any) -> None:
        gradients.append(sum(unit.group.grads.nbytes + sum_bytes(unit) for unit in units))
        finish(**how)

    engine.optimizer.apply = apply  # type: ignore[method-assign]
    (batches,) = random_batches(c.model, 1, c.train.microbatches, c.mesh.dp, (2, 8))
    engine.train_step([Microbatch(*batch[engine.where.dp]) for batch in batches], 1e-2)
    stats = stats_of(engine.sharded)
    moments = sum(s.exp_avg.nbytes + s.exp_avg_sq.nbytes for s in engine.optimizer.state.values())
    by_unit = {
        (op.verb, unit_moved(op) if op.verb == "add" else unit_written(op, engine.layout)): costs.of(op).grad_bytes
        for op in engine.program.ranks[pp]
        if op.verb in ("wgrad", "add")
    }
    return {
        "kept": (stats.shard_bytes + moments, costs.state_bytes[pp]),
        "slots": (
            stats.weight_slot_bytes + stats.grad_slot_bytes,
            costs.fixed_bytes(engine.program, pp) - costs.state_bytes[pp],
        ),
        "gradients": (gradients[0], sum(by_unit.values())),
    }


WAYS: list[tuple[dict[str, int], str, str, str]] = [
    (mesh, "optim_grads_params", dtype, "auto")
    for mesh in (dict(), dict(dp=2), dict(dp=2, ep=2), dict(pp=2, dp=2))
    for dtype in ("fp32", "bf16")
]
WAYS += [
    (dict(dp=2, ep=2), "no_shard", "bf16", "auto"),
    (dict(dp=2), "no_shard", "fp32", "bf16"),
    (dict(dp=2, ep=2), "optim", "bf16", "auto"),
    (dict(dp=4, ep=2), "optim_grads", "bf16", "fp32"),
    (dict(tp=2, ep=2), "optim_grads_params", "bf16", "auto"),
    (dict(tp=2, dp=2, ep=4), "optim", "fp32", "auto"),
    (dict(tp=4, dp=1, ep=2), "optim_grads", "fp32", "auto"),
]


@pytest.mark.parametrize(("mesh", "strategy", "dtype", "wire"), WAYS, ids=str)
def test_a_plan_predicts_what_is_kept_and_what_gradients_take(
    mesh: dict[str, int], strategy: str, dtype: Any, wire: str
) -> None:
    model = dict(layers=4, dense_layers=(0, 2), hidden=64, head_dim=16, ffn=192, expert_ffn=128, vocab=256)
    c = config(model, mesh, dict(merge="on", strategy=strategy), 3, dtype)
    c = changed(c, {"precision.wire": wire})
    for found in run_ranks(bytes_of, c.mesh.world, c):
        for what, (allocated, predicted) in found.items():
            assert allocated == pytest.approx(predicted, rel=PADDING), what

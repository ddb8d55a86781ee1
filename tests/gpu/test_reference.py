"""On GPUs a planned step computes what the plain sequential step computes on a CPU, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.model.source import init_tensor
from hocket.runtime.weights import DTYPES
from tests.gpu.test_parity import BASE, EXPERTS
from tests.helpers.parity import adamw, whole
from tests.helpers.ranks import run_ranks
from tests.reference import Batch, Reference, random_batches

SHAPE = changed(BASE, {"mesh.dp": 2}) if torch.cuda.device_count() >= 4 else EXPERTS
"""A pipeline of two ranks with two replicas of each; on fewer than four GPUs the replicas alone."""
TOLERANCE = {"fp32": 2e-4, "bf16": 0.15}
"""Largest norm of the difference over the norm, by compute dtype. Coarse in bf16, where close routing choices may
flip: the experts between which they flip get other rows."""


def gradients(rank: int, config: Config, batches: list[list[Batch]]) -> dict[str, Any]:
    """One rank's losses and gradients of one step from weights that were drawn on the CPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = Engine(config, rank, device)
    experts = config.model.experts // config.mesh.ep
    shapes = {w.name: w.shape for unit in engine.sharded.units.values() for w in unit.weights}
    first = engine.where.ep * experts
    engine.sharded.load(lambda name: init_tensor(name, shapes[name], config.model, 0, first_expert=first).to(device))
    for layer in engine.balance.layers.values():
        layer.router.bias = torch.zeros(config.model.experts, device=device)
    out: dict[str, Any] = {}

    def keep(**how: Any) -> None:
        units = engine.sharded.units.values()
        pieces = [p for unit in units for p in unit.pieces()]
        out["grads"] = [(p.name, p.shape, p.lo, p.hi, p.grad.cpu()) for p in pieces]

    engine.optimizer.apply = keep  # type: ignore[method-assign]
    mine = [Microbatch(*(half.to(device) for half in batch[engine.where.dp][:2])) for batch in batches]
    for _ in range(2):  # the rehearsal, and a step whose lanes overlap
        engine.sharded.forget_grads()
        for bias in engine.balance.biases().values():  # every step moves them
            bias.zero_()
        engine.train_step(mine, 0.0)
    torch.cuda.synchronize()
    out["losses"] = [float(loss) for loss in engine.executor.actions.losses]
    return out


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("dtype", "wire"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_gradients_are_those_of_the_plain_step(dtype: Any, wire: Any) -> None:
    torch.set_num_threads(8)
    config = changed(
        SHAPE,
        {"train.microbatches": 3, "data.sequence_length": 64, "precision.compute": dtype, "precision.wire": wire},
    )
    batches = random_batches(config.model, 1, 3, 2, (config.train.sequences, 64))
    reference = Reference(config.model, 2, 2, DTYPES["fp32"], 0, 1.0, adamw).run(batches)
    ranks = run_ranks(gradients, config.mesh.world, config, batches[0], backend="nccl", timeout=150)
    losses = sorted(loss for result in ranks for loss in result["losses"])
    expected = sorted(loss for microbatch in reference.losses[0] for loss in microbatch)
    assert losses == pytest.approx(expected, rel=TOLERANCE[dtype] / 2)
    grads = whole([piece for result in ranks for piece in result["grads"]])
    errors = {name: float((grads[name] - g).norm() / g.norm()) for name, g in reference.grads[0].items()}
    wrong = {name: round(error, 5) for name, error in errors.items() if not error < TOLERANCE[dtype]}
    assert not wrong, wrong

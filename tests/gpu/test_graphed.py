"""Steps that are replayed as one CUDA graph give the bits of steps issued op by op, and take the host no time."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.engine import Engine
from hocket.settings.leaves import changed
from tests.gpu.test_placed_splits import CONFIG, WORLD, batches_of
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
STEPS = 10
DENSE = changed(planned(CONFIG, splits="host"), {"mesh.ep": 1, "model.experts": 0, "overlap.ep.merge": "off"})
CONFIGS = {
    "experts": CONFIG,
    "little room": planned(CONFIG, room=1.0),
    "whole gradients": planned(CONFIG, strategy="no_shard"),
    "dense": dataclasses.replace(DENSE, plan=dataclasses.replace(DENSE.plan, order="sequential")),
}


def steps(rank: int, config: Config) -> tuple[list[float], list[Tensor], float]:
    """Losses and norms of all steps and of validations between them; weights; seconds of the host in the last step."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = Engine(config, rank, device)
    engine.init_weights()
    numbers: list[float] = []
    seconds = 0.0
    for i, batch in enumerate(batches_of(engine, STEPS)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = engine.train_step(batch, 1e-3)
        seconds = time.perf_counter() - started
        numbers += [float(result.loss), float(result.grad_norm)]
        if i in (2, 6):
            numbers.append(float(engine.evaluate(batch)))
    return numbers, [unit.group.main.cpu() for unit in engine.sharded.units.values()], seconds


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_give_the_same_bits(name: str) -> None:
    config = CONFIGS[name]
    plain = planned(config, splits="host")  # with little room, steps are made again, and room grows
    issued: list[Any] = run_ranks(steps, WORLD, plain, backend="nccl", timeout=130)
    replayed: list[Any] = run_ranks(steps, WORLD, planned(config, graphs="on"), backend="nccl", timeout=130)
    for (numbers, weights, seconds), (found_numbers, found, found_seconds) in zip(issued, replayed, strict=True):
        assert found_numbers == numbers
        assert all(map(torch.equal, found, weights))
        assert found_seconds < 0.7 * seconds

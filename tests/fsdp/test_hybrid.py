"""Two axes: replicas of shards (HSDP), and experts elsewhere."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fsdp.test_parity import STRATEGIES, optimizer_for, train
from tests.fsdp.twin import Case, Pair
from tests.helpers.ranks import run_ranks

SHARDING = STRATEGIES[1:]


def test_two_axes():
    """Every strategy has each way to sum microbatches, in half of the programs."""
    told: list[tuple[str, int, Any]] = [
        ("stack", 3, "each"), ("stack", 3, "accumulating"), ("stack", 2, "no_sync"), ("tied_across", 2, "no_sync"),
        ("conditional", 2, "accumulating"), ("odd", 1, "each"),
    ]  # fmt: skip
    cases = [
        Case(model, strategy, m, (2, 2), sync=sync, optimizer=optimizer_for(model), steps=2)
        for i, strategy in enumerate(SHARDING)
        for model, m, sync in told[i % 2 :: 2]
    ]
    train(4, cases)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1)], ids=str)
def test_axes_of_one(shape):
    cases = [
        Case(model, strategy, 2, shape, sync=sync, steps=2)
        for model, sync in (("stack", "each"), ("odd", "accumulating"))
        for strategy in SHARDING
    ]
    train(shape[0] * shape[1], cases)


def test_two_axes_in_mixed_precision():
    precision = {"compute": torch.bfloat16}
    cases = [
        Case("stack", strategy, 2, (2, 2), precision=precision, optimizer="adamw", sync=sync, steps=2)
        for strategy, sync in (("optim", "accumulating"), ("optim_grads_params", "each"))
    ]
    train(4, cases)


@pytest.mark.parametrize("world", [2, 4])
def test_experts_on_a_mesh_of_their_own(world):
    """With two ranks, each expert is alone in its group: nothing is sent, and nothing is counted twice. Each strategy
    has one way to sum microbatches, another one with four ranks.
    """
    ways: list[Any] = ["each", "accumulating", "no_sync"]
    cases = [
        Case("moe", strategy, 3, experts=2, sync=ways[(i + world // 2) % 3], optimizer="adamw", steps=2)
        for i, strategy in enumerate(STRATEGIES)
    ]
    train(world, cases)


def alone(rank: int) -> None:
    """Sixteen microbatches in groups of one."""
    pair = Pair(Case("moe", microbatches=16, experts=dist.get_world_size(), steps=2), rank, dist.get_world_size())
    pair.train()


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_of_one_is_the_identity(world):
    run_ranks(alone, world)


def replicas(rank: int) -> list[torch.Tensor]:
    """The main weights after some steps over three replicas."""
    pair = Pair(Case("stack", "no_shard", 2, steps=3), rank, dist.get_world_size())
    pair.train()
    return [group.main.clone() for unit in pair.ctx.units for group in unit.groups]


def test_replicas_stay_equal():
    first, *others = run_ranks(replicas, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

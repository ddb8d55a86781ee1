"""Orders that only streams could break: on a CPU results are right without them, so the record is looked at."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hocket
from benchmarks.history import History, record
from tests.helpers.ranks import run_ranks


def recorded(rank: int, replicas: int) -> tuple[History, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
    ctx = hocket.fully_shard(model, units=nn.Linear, mesh=mesh)
    history = record(ctx)
    return history, torch.optim.SGD(model.parameters(), lr=0.1), model


def exchanges(rank: int) -> None:
    history, _, model = recorded(rank, 2)
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
    for unit in ("0", "1"):
        assert history.before(history.one(f"reduce {unit}", 0), history.one(f"outer {unit}", 0))
        assert history.before(history.one(f"outer {unit}", 0), history.one(f"reduce {unit}", 1))


def test_a_reduction_comes_behind_what_replicas_exchange_in_the_same_memory() -> None:
    run_ranks(exchanges, 4)


def updates(rank: int) -> None:
    history, optimizer, model = recorded(rank, 1)
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        stepped = history.note("stepped")
    model(torch.ones(3, 8))
    for unit in ("0", "1"):
        assert history.before(stepped, history.one(f"gather {unit}", -1)), unit


def test_weights_are_gathered_behind_the_optimizer() -> None:
    run_ranks(updates, 2)


def forgotten(rank: int) -> None:
    """All gradients are forgotten before any is read."""
    history, _, model = recorded(rank, 1)
    model(torch.ones(3, 8)).sum().backward()
    for shard in model.parameters():
        shard.grad = None
    gone = history.note("gone")
    for unit in ("0", "1"):
        assert history.before(history.one(f"reduce {unit}"), gone), unit


def test_memory_of_forgotten_gradients_goes_behind_their_reduction() -> None:
    run_ranks(forgotten, 2)


class Scale(nn.Module):
    """Autograd saves its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def saved(rank: int, device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(*(Scale() for _ in range(4)))
    options = hocket.ShardOptions(prefetch=0, device="cpu")
    hocket.fully_shard(model, units=Scale, options=options)
    if device == "meta":
        model.to_empty(device="cpu")
        for one in model:
            one.reset_parameters()  # pyrefly: ignore[not-callable]
    x = torch.ones(3, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 16.0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gathering_again_leaves_what_autograd_has_saved(device: str) -> None:
    """Weights are gathered twice, to where they were when forward saved them; torch would refuse new versions."""
    run_ranks(saved, 2, device)


def apart(rank: int) -> None:
    torch.manual_seed(rank)
    for strategy in ("no_shard", "optim_grads_params"):
        with pytest.raises(ValueError, match=r"ranks hold different values of weight, .* torch\.manual_seed\(0\)"):
            hocket.fully_shard(nn.Linear(8, 8), strategy=strategy)


def test_ranks_with_different_weights_are_refused() -> None:
    run_ranks(apart, 2)


def apart_later(rank: int, sizes: tuple[int, int], strategy: str) -> None:
    model = nn.Linear(8, 8, device="meta")
    mesh, options = init_device_mesh("cpu", sizes), hocket.ShardOptions(device="cpu")
    hocket.fully_shard(model, mesh=mesh, strategy=strategy, options=options)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    model.reset_parameters()
    with pytest.raises(ValueError, match="replicas gave weight different initial values: seed all ranks alike"):
        model(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("sizes", "strategy"), [((1, 2), "no_shard"), ((2, 1), "optim"), ((2, 1), "no_shard")], ids=str
)
def test_replicas_that_get_different_weights_after_sharding_are_refused(sizes: tuple[int, int], strategy: str) -> None:
    run_ranks(apart_later, 2, sizes, strategy)

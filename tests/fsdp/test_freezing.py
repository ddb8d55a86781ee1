"""Parameters that are frozen, or trained again, after sharding, beside a plain model to which the same happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import hocket
from tests.fsdp.twin import naming
from tests.fsdp.zoo.program import Block, stack
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def one_block(model: nn.Module, step: int) -> None:
    if step in (1, 3):
        model.get_submodule("2").requires_grad_(step == 3)


def one_weight(model: nn.Module, step: int) -> None:
    if step in (1, 3):
        model.get_submodule("1").get_submodule("up").weight.requires_grad = step == 3  # pyrefly: ignore


def all_but_the_head(model: nn.Module, step: int) -> None:
    for number in range(4):
        model.get_submodule(str(number)).requires_grad_(step == 0)


def one_after_the_other(model: nn.Module, step: int) -> None:
    """Everything but the head is frozen when the model is sharded."""
    if step:
        model.get_submodule(str(4 - step)).requires_grad_(True)


def one_of_a_frozen_unit(model: nn.Module, step: int) -> None:
    if step == 1:
        model.get_submodule("3").get_submodule("down").weight.requires_grad_(True)  # pyrefly: ignore
    if step == 3:
        model.get_submodule("3").requires_grad_(False)


STORIES: dict[Callable[[nn.Module, int], None], bool] = {
    one_block: False, one_weight: False, all_but_the_head: False, one_after_the_other: True, one_of_a_frozen_unit: True,
}  # fmt: skip
"""What happens before each step, and whether all but the head is frozen at first."""


def made(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = stack().double()
    for one in list(model)[:-1] if frozen else ():
        one.requires_grad_(False)
    return model


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + rank)
    return tuple(torch.randn(4, n, generator=drawn, dtype=torch.float64) for n in (8, 4))  # pyrefly: ignore


def told(rank: int, strategy: str, replicas: int) -> None:
    for story, frozen in STORIES.items():
        with naming(f"{story.__name__} {strategy} {replicas}"):
            tell(rank, story, frozen, strategy, replicas)


def tell(rank: int, story: Callable[[nn.Module, int], None], frozen: bool, strategy: str, replicas: int) -> None:
    plain, model = made(frozen), made(frozen)
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas))
    precision = hocket.Precision(accumulate=torch.float64)
    ctx = hocket.fully_shard(model, units=Block, mesh=mesh, strategy=strategy, precision=precision)
    updates = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=LINEAR, fused=True) for one in (plain, model)]
    for step in range(4):
        for one in (plain, model):
            story(one, step)
        for other in range(2):
            x, y = data(step, other)
            (F.mse_loss(plain(x), y) / 2).backward()
        x, y = data(step, rank)
        F.mse_loss(model(x), y).backward()
        for (name, whole), shard in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert whole.requires_grad == shard.requires_grad, name
            assert (whole.grad is None) == (shard.grad is None), (name, step)
        for update in updates:
            update.step()
            update.zero_grad()
    with ctx.gathered():
        for name, whole in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), whole, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_frozen_and_trained_again(strategy: str) -> None:
    run_ranks(told, 2, strategy, 1)


def test_replicas_of_what_is_frozen_and_trained_again() -> None:
    run_ranks(told, 2, "optim_grads_params", 2)


def refused(rank: int) -> None:
    model = made(frozen=True)
    ctx = hocket.fully_shard(model, units=Block)
    loss = model(data(0, rank)[0]).sum()
    with pytest.raises(ValueError, match=r"4\.weight is set between a forward and its backward"):
        model[4].requires_grad_(False)
    loss.backward()
    model[4].requires_grad_(False)
    ctx.abort()


def test_changes_that_come_too_late() -> None:
    run_ranks(refused, 2)

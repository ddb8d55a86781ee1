"""`torch.optim.Muon` on DTensors beside itself on whole parameters: weights and averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import hocket
from tests.fsdp.elements import here, local
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

CLOSE = {"rtol": 0.01, "atol": 1e-3}
"""A step iterates in bf16, and DTensor adds up products of rows in another order: a step is 0.02 at most."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 3, "momentum": 0.8},
)


class Blocks(nn.Module):
    """Matrices of several shapes in several units, and vectors beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12, bias=False)) for _ in range(3)
        )
        self.head = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def optimizers(model: nn.Module, settings: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Muon for matrices but the head's, which another group has with another rate, and AdamW for vectors."""
    named = dict(model.named_parameters())
    head, others = named["head.weight"], [p for n, p in named.items() if p.ndim == 2 and n != "head.weight"]
    groups = [{"params": others}, {"params": [head], "lr": 0.005, "weight_decay": 0.0}]
    vectors = [p for p in named.values() if p.ndim < 2]
    return [torch.optim.Muon(groups, **settings), torch.optim.AdamW(vectors, lr=0.01, foreach=True)]


def train(model: nn.Module, made: list[torch.optim.Optimizer]) -> None:
    for step in range(3):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))  # alike on all ranks: the mean is exact
        model(x).backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()


def beside(shape: tuple[int, ...], strategy: str, settings: dict[str, Any], rank: int) -> None:
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    units = tuple(type(block) for block in model.blocks[:1])
    ctx = hocket.fully_shard(model, units=units, mesh=mesh, strategy=strategy)
    twins, mine = optimizers(plain, settings), optimizers(model, settings)
    train(plain, twins)
    train(model, mine)
    for shard in (shard for unit in ctx.units for group in unit.groups for shard in group.shards):
        whole = plain.get_parameter(shard.full_name).detach()
        torch.testing.assert_close(local(shard), here(shard, whole), **CLOSE)
    full = get_optimizer_state_dict(model, mine[:1], options=StateDictOptions(full_state_dict=True))
    averages = {n: twins[0].state[p]["momentum_buffer"] for n, p in plain.named_parameters() if p in twins[0].state}
    if rank == 0:
        state: Any = full["state"]
        assert len(averages) == 7
        for name, average in averages.items():
            torch.testing.assert_close(state[name]["momentum_buffer"], average, **CLOSE)


def all_beside(rank: int, shape: tuple[int, ...], several: Sequence[tuple[str, dict[str, Any]]]) -> None:
    for strategy, settings in several:
        with naming((strategy, settings)):
            beside(shape, strategy, settings, rank)


def test_shards_learn_as_whole_matrices_do() -> None:
    several = [("optim_grads_params", SETTINGS[0]), ("optim", SETTINGS[1]), ("no_shard", SETTINGS[0])]
    run_ranks(all_beside, 2, (2,), several)


def test_shards_with_replicas_learn_as_whole_matrices_do() -> None:
    run_ranks(all_beside, 4, (2, 2), [("optim_grads_params", SETTINGS[0])])


def refusals(rank: int) -> None:
    model = Blocks()
    hocket.fully_shard(model, strategy="optim_grads_params")
    matrices: list[Any] = [p for p in model.parameters() if p.ndim == 2]
    model(torch.ones(2, 12)).backward()
    with pytest.raises(ValueError, match=r"^step_and_gather updates units while others are still reduced"):
        hocket.sharding.step_and_gather(model, torch.optim.Muon(matrices))


def beside_others(rank: int) -> None:
    """One optimizer has parameters of a sharded model and of a plain one, and was made before its closure is called."""
    torch.manual_seed(0)
    one, other = Blocks(), Blocks()
    model = copy.deepcopy(other)
    hocket.fully_shard(model, units=nn.Sequential)
    alone = copy.deepcopy(one)

    def closure_of(*models: nn.Module) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(model(torch.ones(2, 12)) for model in models)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss

        return closure

    losses, rate = [], cast(float, torch.tensor(0.01))
    for models in ((alone, other), (one, model)):
        optimizer = torch.optim.Muon([each.head.weight for each in models], lr=rate)
        losses.append([cast(torch.Tensor, optimizer.step(closure_of(*models))).item() for _ in range(2)])
    torch.testing.assert_close(losses[0], losses[1], **CLOSE)
    torch.testing.assert_close(one.head.weight, alone.head.weight)
    torch.testing.assert_close(cast(Any, model.head.weight).full_tensor(), other.head.weight.detach(), **CLOSE)


def grown(rank: int) -> None:
    """A larger group of parameters comes behind the first step."""
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    hocket.fully_shard(model, units=nn.Sequential)
    for one in (plain, model):
        made = torch.optim.Muon([one.head.weight])
        train(one, [made])
        made.add_param_group({"params": [p for p in one.blocks.parameters() if p.ndim == 2]})
        train(one, [made])
    shards: list[Any] = list(model.parameters())
    for whole, shard in zip(plain.parameters(), shards, strict=True):
        torch.testing.assert_close(local(shard), here(shard, whole), **CLOSE)


def test_parameters_are_added_later() -> None:
    run_ranks(grown, 2)


def test_what_it_cannot_update_is_refused() -> None:
    run_ranks(refusals, 2)


def test_plain_matrices_stand_beside_shards() -> None:
    run_ranks(beside_others, 2)

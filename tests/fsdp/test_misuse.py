"""What a user may do by mistake, and the words that say so."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hocket
from hocket.fsdp.module_context import ShardContext
from tests.helpers.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), Block())


def sharded() -> tuple[nn.Sequential, ShardContext]:
    model = plain()
    return model, hocket.fully_shard(model, units=Block)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 16)).square().mean()


def optimizer_of_before() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    hocket.fully_shard(model, units=Block)
    loss_of(model).backward()
    optimizer.step()


def sharded_twice() -> None:
    model, _ = sharded()
    hocket.fully_shard(model, units=Block)


def sharded_around() -> None:
    hocket.fully_shard(nn.Sequential(sharded()[0]))


def converted() -> None:
    sharded()[0].to(torch.bfloat16)


def moved() -> None:
    sharded()[0].to("meta")


def emptied() -> None:
    sharded()[0].to_empty(device="cpu")


def frozen_later() -> None:
    sharded()[0][1].requires_grad_(False)


def unfrozen_later() -> None:
    model = plain().requires_grad_(False)
    hocket.fully_shard(model, units=Block)
    model.requires_grad_(True)


def copied() -> None:
    copy.deepcopy(sharded()[0])


def pickled() -> None:
    pickle.dumps(sharded()[0])


def loaded_whole() -> None:
    sharded()[0].load_state_dict(plain().state_dict())


def tensor_parallel() -> None:
    model = parallelize_module(plain(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    hocket.fully_shard(model, units=Block)


def lazy() -> None:
    hocket.fully_shard(nn.LazyLinear(4))


def updated_too_early() -> None:
    model, _ = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    late = loss_of(model)
    optimizer.step()
    late.backward()


MISTAKES: dict[Callable[[], None], str] = {
    optimizer_of_before: "was built before hocket.fully_shard",
    sharded_twice: "belongs to a sharded model already",
    sharded_around: "its '0' belongs to a sharded model already",
    converted: "can't be moved or converted (weight from torch.float32 on cpu to torch.bfloat16 on cpu)",
    moved: "can't be moved or converted",
    emptied: "can't be moved or converted",
    frozen_later: "requires_grad of 1.linear.weight can't be set to False any more",
    unfrozen_later: "can't be set to True any more",
    copied: "can't be pickled or copied",
    pickled: "can't be pickled or copied",
    loaded_whole: "load whole weights with hocket.load_model_state(ctx, state)",
    tensor_parallel: "parameter 0.weight is a DTensor",
    lazy: "parameter weight has no shape yet",
    updated_too_early: "changed between a forward and its backward",
}


def mistake(rank: int, make: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize(("make", "words"), MISTAKES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_mistakes_are_named(make: Callable[[], None], words: str) -> None:
    run_ranks(mistake, 2, make, words)


def allowed(rank: int) -> None:
    """Calls that change nothing."""
    model, _ = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.to("cpu").float().to(torch.float32).requires_grad_(True)
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model).backward()
        optimizer.step()
        assert all(not torch.equal(a, b) or not a.numel() for a, b in zip(before, model.parameters(), strict=True))


def test_a_move_to_where_it_is_already_is_none() -> None:
    run_ranks(allowed, 2)

"""Tensors that leave a unit's forward another way than by `return`: in arguments, in attributes, in lists of others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.sharding import MixedPrecisionPolicy, fully_shard
from tests.fsdp.twin import naming
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

WIDTH, BLOCKS = 6, 4
KEPT: list[Tensor] = []
"""What a program keeps outside of its modules."""


class Block(nn.Module):
    """A block with a second loss of its own weights, computed behind its output: backward begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin, self.side = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + torch.tanh(self.lin(self.norm(x)))
        return y, F.softplus(self.side(torch.tanh(self.lin(y)))).mean() + 0.1 * self.lin.weight.pow(2).sum()


class InList(Block):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        y, aux = self.both(x)
        found.append(aux)
        return y


class ListModel(nn.Module):
    """A model that hands a container to its blocks, and adds up what they leave there."""

    def __init__(self, block: type[nn.Module] = InList, make: Callable[[], Any] = list) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        found = self.make()
        for block in self.blocks:
            x = block(x, found)
        return x.square().mean() + total(found)


class CheckpointedListModel(ListModel):
    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for block in self.blocks:
            x = checkpoint(block, x, found, use_reentrant=False)
        return x.square().mean() + total(found[: len(self.blocks)])


def total(found: Any) -> Tensor:
    if isinstance(found, SimpleNamespace):
        found = found.aux
    values = list(found.values()) if isinstance(found, dict) else list(found)
    return 0.1 * sum((value.sum() if isinstance(value, Tensor) else total(value) for value in values), torch.zeros(()))


class InDict(Block):
    def forward(self, x: Tensor, found: dict[str, Tensor]) -> Tensor:
        y, aux = self.both(x)
        found["aux"] = found.get("aux", 0) + aux
        return y


class HiddenStates(Block):
    """Writes its input, and changes what is there."""

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        y, aux = self.both(x)
        if len(found) > 2:
            found[0] = found[0] + aux
            found.pop(1)
        found.append(x.square())
        found.insert(0, aux * 2)
        return y


class InObject(Block):
    def forward(self, x: Tensor, found: Any) -> Tensor:
        y, aux = self.both(x)
        found.aux = [*getattr(found, "aux", []), aux]
        return y


class InDictOfLists(Block):
    def forward(self, x: Tensor, found: dict[str, list[Tensor]]) -> Tensor:
        y, aux = self.both(x)
        found.setdefault("aux", []).append(aux)
        found["x"] = [y]
        return y


class Holder(tuple[list[Tensor], ...]):
    """A tuple that torch's pytree takes for a leaf."""


class InHolder(Block):
    def forward(self, x: Tensor, found: Holder) -> Tensor:
        y, aux = self.both(x)
        found[0].append(aux)
        return y


class Attribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        y, self.aux = self.both(x)
        return y


class InnerAttribute(nn.Module):
    """The attribute is one of a module that is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attribute()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class InListOfSelf(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y, aux = self.both(x)
        self.losses.append(aux)
        return y


class InBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y, self.aux = self.both(x)
        return y


class Chain(nn.Module):
    """Blocks whose second losses the loop collects."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def late(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    for one in model.modules():
        if isinstance(one, InListOfSelf):
            loss = loss + 0.1 * sum(one.losses)
            one.losses.clear()
        elif isinstance(one, Attribute | InBuffer):
            loss = loss + 0.1 * one.aux
    return loss


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "list": (ListModel, lambda model, x: model(x)),
    "checkpointed list": (CheckpointedListModel, lambda model, x: model(x)),
    "dict": (lambda: ListModel(InDict, dict), lambda model, x: model(x)),
    "list that is changed": (lambda: ListModel(HiddenStates), lambda model, x: model(x)),
    "object": (lambda: ListModel(InObject, SimpleNamespace), lambda model, x: model(x)),
    "dict of lists": (lambda: ListModel(InDictOfLists, dict), lambda model, x: model(x)),
    "tuple of another class": (lambda: ListModel(InHolder, lambda: Holder([[]])), lambda model, x: model(x)),
    "attribute": (lambda: Chain(Attribute), late),
    "attribute of a module inside": (lambda: Chain(InnerAttribute), late),
    "list of the module": (lambda: Chain(InListOfSelf), late),
    "buffer": (lambda: Chain(InBuffer), late),
}
UNITS = (Block, InnerAttribute)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROGRAMS[name][0]()


def beside(rank: int, name: str, how: dict[str, Any]) -> None:
    """Three steps beside a plain model, gradients and weights."""
    world, loss_of = dist.get_world_size(), PROGRAMS[name][1]
    plain, model = build(name), build(name)
    hocket.fully_shard(model, units=UNITS, **how)
    updates = [torch.optim.AdamW(one.parameters(), lr=0.5, eps=LINEAR, fused=True) for one in (plain, model)]
    for step in range(2):
        inputs = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9 * step + i)) for i in range(world)]
        losses = [loss_of(plain, x.requires_grad_(step == 1)) for x in inputs]
        (torch.stack(losses).sum() / world).backward()
        ours = loss_of(model, inputs[rank].detach().requires_grad_(step == 1))
        ours.backward()
        torch.testing.assert_close(ours, losses[rank])
        for update in updates:
            update.step()
            update.zero_grad()
        for key, param in plain.named_parameters():
            shard = model.get_parameter(key)
            assert isinstance(shard, ShardedParameter)
            message = f"{key}, step {step}"
            torch.testing.assert_close(shard.full_tensor(), param.detach(), rtol=1e-4, atol=2e-5, msg=message)


def all_programs(rank: int) -> None:
    """Each under one of two strategies, and lists under both."""
    several: list[dict[str, Any]] = [{}, {"strategy": "optim_grads"}]
    for i, name in enumerate(["list", *PROGRAMS]):
        with naming(f"{name} {several[i % 2]}"):
            beside(rank, name, several[i % 2])


def test_what_leaves_a_forward_beside_its_output() -> None:
    run_ranks(all_programs, 2)


class InGlobal(Block):
    """Only its own weights reach what it leaves outside."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        KEPT.append(self.side(x.detach()).square().mean())
        return y


def outside(rank: int, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Chain(InGlobal)
    hocket.fully_shard(model, units=UNITS, **how)
    before = [p.to_local().clone() for p in model.parameters() if isinstance(p, ShardedParameter)]
    KEPT.clear()
    loss = model(torch.randn(3, WIDTH)) + 0.1 * torch.stack(KEPT).sum()
    if how.get("strategy") == "optim_grads":  # weights stay, so nothing can go wrong
        loss.backward()
        return
    with pytest.raises(ValueError, match="a list that the forward is called with"):
        loss.backward()
    after = [p.to_local() for p in model.parameters() if isinstance(p, ShardedParameter)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("how", [{}, {"strategy": "optim_grads"}], ids=str)
def test_what_is_kept_outside_of_modules_is_refused(how: dict[str, Any]) -> None:
    run_ranks(outside, 2, how)


def casts(rank: int) -> None:
    """What casts inputs writes to the caller's list, too, and what was in it stays as it was."""
    model = ListModel()
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    fully_shard(model)
    first = torch.ones((), requires_grad=True) * 1
    found = [first]
    for needs_grad in (True, False):
        with torch.set_grad_enabled(needs_grad):
            model.blocks[0](torch.ones(3, WIDTH, requires_grad=needs_grad), found)
        assert found[0] is first
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert [one.requires_grad for one in found] == [True, True, False]


def test_casts_of_inputs_keep_the_callers_containers() -> None:
    run_ranks(casts, 2)


def fails(rank: int) -> None:
    """After an exception in a forward the caller's containers hold what they held, or what was written."""

    class Failing(Block):
        def forward(self, x: Tensor, found: dict[str, Any]) -> Tensor:
            found["new"] = [self.lin(x)]
            raise KeyError

    block, x = Failing(), torch.ones(3, WIDTH, requires_grad=True) * 1
    model = nn.ModuleDict({"block": block})
    hocket.fully_shard(model, units=Block)
    found: dict[str, Any] = {"x": x, "more": [x, (x, 3)]}
    with pytest.raises(KeyError):
        block(x, found)
    assert found["x"] is x
    assert found["more"][0] is found["more"][1][0] is x
    assert found["new"][0].grad_fn is not None


def test_containers_after_an_exception() -> None:
    run_ranks(fails, 2)

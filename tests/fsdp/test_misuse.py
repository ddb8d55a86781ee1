"""What a user may do by mistake, and the words that say so."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hocket
from hocket.fsdp.module_context import ShardContext
from tests.fsdp.twin import naming
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


def layer() -> Any:
    """Of a sharded model."""
    return sharded()[0].get_submodule("1.linear")


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


def copied() -> None:
    copy.deepcopy(sharded()[0])


def pickled() -> None:
    pickle.dumps(sharded()[0])


def loaded_from_another() -> None:
    state = {name: value[:1] for name, value in plain().state_dict().items()}
    sharded()[0].load_state_dict(state)


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


def penalty_on_shards() -> None:
    model, _ = sharded()
    (loss_of(model) + sum(param.square().sum() for param in model.parameters())).backward()


def hook_on_a_shard() -> None:
    layer().weight.register_hook(lambda grad: 2 * grad)


def hook_after_a_gradient() -> None:
    model = plain()
    model.get_parameter("1.linear.weight").register_post_accumulate_grad_hook(lambda param: None)
    hocket.fully_shard(model, units=Block)


def whole_data() -> None:
    layer().weight.data = torch.zeros(16, 17)


def number_as_gradient() -> None:
    layer().weight.grad = 0


def clipped_in_backward() -> None:
    model, ctx = sharded()
    model[1].register_full_backward_hook(lambda *_: hocket.clip_grad_norm_(ctx, 1.0))
    loss_of(model).backward()


def replaced() -> None:
    layer().weight = nn.Parameter(torch.zeros(16, 16))


def removed() -> None:
    del layer().bias


def called_with_other_weights() -> None:
    class Doubled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.linear, {"weight": 2 * self.linear.weight}, (x,))

    model = nn.Sequential(Doubled())
    hocket.fully_shard(model, units=Block)
    loss_of(model)


def written_in_forward() -> None:
    class Shrinking(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return super().forward(x)

    model = nn.Sequential(Shrinking())
    hocket.fully_shard(model, units=Block)
    loss_of(model)


def other_memory_in_forward() -> None:
    class Clipped(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight.data = self.linear.weight.data.clamp(-1, 1)
            return super().forward(x)

    model = nn.Sequential(Clipped())
    hocket.fully_shard(model, units=Block)
    loss_of(model)


def embedding_with_a_norm() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 4))
    hocket.fully_shard(model, units=nn.Linear)
    model(torch.arange(9))


def same_memory() -> None:
    model = plain()
    other: Any = model[2].linear
    other.weight = nn.Parameter(model.get_parameter("0.weight").data)
    hocket.fully_shard(model, units=Block)


def newcomer() -> None:
    model, _ = sharded()
    model.get_submodule("1").linear = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


def newcomer_in_a_checkpoint() -> None:
    model, ctx = sharded()
    model.get_submodule("1").linear = nn.Linear(16, 16)
    hocket.checkpoint.save(ctx, None, "unused")


def state_of_a_module() -> None:
    hocket.checkpoint.save(sharded()[0].get_submodule("1"), None, "unused")


def scripted() -> None:
    hocket.fully_shard(nn.Sequential(torch.jit.script(nn.Linear(4, 4))))


def for_inference() -> None:
    with torch.inference_mode():
        sharded()


def made_for_inference() -> None:
    with torch.inference_mode():
        model = plain()
    hocket.fully_shard(model, units=Block)


MISTAKES: dict[Callable[[], None], str] = {
    optimizer_of_before: "was built before hocket.fully_shard",
    sharded_twice: "belongs to a sharded model already",
    sharded_around: "its '0' belongs to a sharded model already",
    converted: "can't be moved or converted (weight from torch.float32 on cpu to torch.bfloat16 on cpu)",
    moved: "can't be moved or converted",
    emptied: "can't be moved or converted",
    copied: "can't be pickled or copied",
    pickled: "can't be pickled or copied",
    loaded_from_another: "load a state dict of the same model, or a checkpoint with hocket.checkpoint.load",
    tensor_parallel: "parameter 0.weight is a DTensor",
    lazy: "parameter weight has no shape yet",
    updated_too_early: "changed between a forward and its backward",
    penalty_on_shards: "a gradient reached the shard of",
    hook_on_a_shard: "register_hook on 1.linear.weight: such a hook would never run",
    hook_after_a_gradient: "1.linear.weight has a hook by register_post_accumulate_grad_hook",
    whole_data: "data of shape (16, 17) does not fit 1.linear.weight",
    number_as_gradient: "grad=0 of 1.linear.weight is no tensor",
    clipped_in_backward: "clip_grad_norm_ is called inside of a backward",
    replaced: "1.linear.weight is sharded, and can't be replaced or removed",
    removed: "1.linear.bias is sharded, and can't be replaced or removed",
    called_with_other_weights: "0.linear.weight is sharded, and can't be replaced or removed",
    written_in_forward: "a weight of unit '0' was written in its forward",
    other_memory_in_forward: "a weight of unit '0' was written in its forward",
    embedding_with_a_norm: "a weight of the root unit was written in its forward",
    same_memory: "parameters 0.weight and 2.linear.weight lie in the same memory",
    newcomer: "1.linear.weight joined the Sequential after it was sharded",
    newcomer_in_a_checkpoint: "1.linear.weight joined the Sequential after it was sharded",
    state_of_a_module: "neither a ShardContext nor a whole sharded model: give what hocket.fully_shard returned",
    scripted: "0 is compiled by TorchScript",
    for_inference: "can't be sharded in torch.inference_mode()",
    made_for_inference: "0.weight was made in torch.inference_mode()",
}


def mistakes(rank: int, several: list[tuple[Callable[[], None], str]]) -> None:
    for make, words in several:
        with naming(make.__name__), pytest.raises(ValueError, match=re.escape(words)):
            make()


@pytest.mark.parametrize("part", range(3))
def test_mistakes_are_named(part: int) -> None:
    run_ranks(mistakes, 2, list(MISTAKES.items())[part::3])


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


def other_memory(rank: int) -> None:
    """Gathered weights may be given other memory by `.data`, as libraries of initial weights do."""
    model, ctx = sharded()
    weight = ctx.units[-1].parameters[0]
    for value in (1.0, 2.0):
        with ctx.gathered(changed=True):
            weight.data = torch.full_like(weight, value)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        with ctx.gathered():
            assert torch.equal(weight, torch.full_like(weight, 3 * value))


def test_other_memory_for_gathered_weights() -> None:
    run_ranks(other_memory, 2)

"""Programs as users write them, on two ranks: the losses and weights are those of the plain model on the same data."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hocket
from tests.fsdp.test_torch_functions import Block, model_of
from tests.helpers.ranks import run_ranks

WORLD = 2


class Hidden:
    """Tensors as attributes, with slots and without, and in a container of its own."""

    __slots__ = ("deep", "x")

    def __init__(self, x: Tensor, deep: Any) -> None:
        self.x, self.deep = x, deep


class Bag:
    def __init__(self, *values: Any) -> None:
        self.values = {"some": [*values], "myself": self}
        self.parts = [np.ones(2), range(3), threading, partial(max, values), self.first, lambda: values]

    def first(self) -> Any:
        return self.values["some"][0]


class Returning(Block):
    def forward(self, x: Any) -> Any:
        x = x.x + x.deep.values["some"][1] if isinstance(x, Hidden) else x
        return Hidden(super().forward(x), Bag(3, self.linear(x)))


def objects(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out.x + out.deep.values["some"][1]).square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    y = nn.functional.softplus(model(x))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    model(x.detach())  # the weights of the first forward are still needed
    return y.square().mean() + (grad.norm(dim=1) - 1).square().mean()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def cached(model: Any, ids: Tensor) -> Tensor:
    out = model(input_ids=ids, labels=ids)
    assert isinstance(out.past_key_values, DynamicCache)
    return out.loss


def generating(model: Any, ids: Tensor) -> Tensor:
    """`generate` before every step."""
    with torch.no_grad():
        model.generate(ids[:, :3], max_new_tokens=3, do_sample=False, pad_token_id=0)
    return cached(model, ids)


Loss = Callable[[Any, Tensor], Tensor]

PROGRAMS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], Loss]] = {
    "any object": (lambda: nn.Sequential(*(Returning() for _ in range(3))), Returning, objects),
    "gradient penalty": (lambda: model_of(0), Block, penalty),
    "DynamicCache": (llama, LlamaDecoderLayer, cached),
    "generate": (llama, LlamaDecoderLayer, generating),
}


def batch(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if name in ("DynamicCache", "generate"):
        return torch.randint(32, (4, 8), generator=generator)
    return torch.randn(4, 12, generator=generator)


def train(rank: int, name: str) -> None:
    make, units, loss_of = PROGRAMS[name]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    ctx = hocket.fully_shard(model, units=units)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, plain))
    for step in range(3):
        rows = batch(name, step)
        mine = rows[rank::WORLD].clone()
        loss = loss_of(model, mine)
        loss.backward()
        found = [loss_of(plain, rows[other::WORLD].clone()) for other in range(WORLD)]
        torch.stack(found).mean().backward()
        torch.testing.assert_close(loss, found[rank])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    with ctx.gathered():
        for key, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key), param, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    run_ranks(train, WORLD, name)

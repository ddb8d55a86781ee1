"""Ranks that issue other collectives than their peers are told so, before a wrong gradient is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.fsdp import same_order
from hocket.fsdp.same_order import SameOrder
from hocket.runtime import world
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Chosen(nn.Module):
    """Runs those of its blocks that it is told, in that order; the outputs of `dropped` do not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3), dropped: tuple[int, ...] = ()) -> Tensor:
        for i in order:
            x = x + self.blocks[i](x).detach() if i in dropped else self.blocks[i](x)
        return x


Run = Callable[[Chosen, int, int], Tensor]

RUNS: dict[str, tuple[Run, str]] = {
    "left out": (
        lambda model, rank, step: model(batch(), (0, 1, 3) if rank else (0, 1, 2, 3)),
        "unit 'blocks.",
    ),
    "left out later": (
        lambda model, rank, step: model(batch(), (0, 1, 3) if rank == step - 1 == 1 else (0, 1, 2, 3)),
        "unit 'blocks.",
    ),
    "another order": (
        lambda model, rank, step: model(batch(), (0, 2, 1, 3) if rank and step == 2 else (0, 1, 2, 3)),
        "unit 'blocks.",
    ),
    "misses the loss": (
        lambda model, rank, step: model(batch(), dropped=(2,) if rank == 0 else ()),
        "unit 'blocks.2'",
    ),
    "misses the loss later": (
        lambda model, rank, step: model(batch(), dropped=(1,) if rank and step == 2 else ()),
        "unit 'blocks.1'",
    ),
    "the last one is left out": (
        lambda model, rank, step: model(batch(), (0, 1, 2) if rank and step == 2 else (0, 1, 2, 3)),
        "unit 'blocks.3'",
    ),
}


def batch() -> Tensor:
    return torch.randn(3, WIDTH)


def apart(rank: int, name: str, strategy: str) -> None:
    """Told on one rank at least; the other may wait for it forever."""
    same_order.IDLE = world.IDLE = 0.2
    run, words = RUNS[name]
    torch.manual_seed(0)
    model = Chosen()
    hocket.fully_shard(model, units=Block, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(4):
            run(model, rank, step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with naming(name), pytest.raises(ValueError, match="ranks have gone apart: where rank") as caught:
        train()
    assert words in str(caught.value)
    assert f"rank {1 - rank} is about to" in str(caught.value)
    raise Told(rank)


class Told(Exception):
    pass


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_that_goes_its_own_way(name: str) -> None:
    with pytest.raises(Told):
        run_ranks(apart, 2, name, "optim_grads_params", timeout=20)


@pytest.mark.parametrize("strategy", ["optim", "no_shard"])
def test_wrong_gradients_are_never_used(strategy: str) -> None:
    with pytest.raises(Told):
        run_ranks(apart, 2, "misses the loss later", strategy, timeout=20)


def quiet(rank: int) -> None:
    """What was done before is done again without a question."""
    torch.manual_seed(0)
    model = Chosen()
    ctx = hocket.fully_shard(model, units=Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = ctx._order
    assert isinstance(order, SameOrder)
    asked = []
    for step in range(12):
        for microbatch in range(3):
            with ctx.no_sync() if microbatch < 2 else ctx.accumulating():
                model(batch()).square().mean().backward()
        hocket.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                model(batch(), (0, 1, 3))
        asked.append(order.asked)
    assert asked[-1] == asked[-5], asked
    assert asked[0] > 0
    dist.barrier()


def test_an_ordinary_step_asks_nobody() -> None:
    run_ranks(quiet, 2)


@pytest.mark.parametrize("microbatches", [1, 3, 20])
@pytest.mark.parametrize("evaluates", [0, 2, 3])
def test_a_step_like_those_before_is_expected(
    microbatches: int, evaluates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside evaluations, with what each of these and of microbatches repeats; and another one is not."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    order = SameOrder((0,), dist.HashStore())
    step = [*itertools.chain(*["2310"] * microbatches), *"401"]

    for _ in range(12):
        before = order.asked
        for item in [*step * (evaluates or 1), *"231" * (2 if evaluates else 0)]:
            order.note(item)
    assert order.asked == before
    order.note("2")
    order.note("9")
    assert order.asked == before + 1

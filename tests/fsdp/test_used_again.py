"""Layers used several times, and weights tied across units: a unit is not over before all gradients have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from tests.fsdp.kinds import Kind
from tests.fsdp.models import WIDTH
from tests.fsdp.twin import Case, Pair, naming
from tests.helpers.ranks import run_ranks


class Thrice(nn.Module):
    """One linear layer, three times, and a norm whose gradient comes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.linear(self.linear(x).tanh())))


class Branches(nn.Module):
    """Units that all read the data, none of which needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Thrice() for _ in range(3))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return torch.stack([unit(x) for unit in self.units]).sum(0)


class TiedAcross(nn.Module):
    """The weight of a linear layer of one unit is that of another unit's and of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        units = [Thrice() for _ in range(3)]
        units[0].linear.weight = units[2].linear.weight = self.embed.weight
        self.units = nn.ModuleList(units)

    def forward(self, ids: Tensor, step: int = 0) -> Tensor:
        x = self.embed(ids % WIDTH)
        for unit in self.units:
            x = torch.tanh(x + checkpoint(unit, x, use_reentrant=step % 2 == 0))
        return x


@dataclass(frozen=True)
class Model:
    kind: Kind
    exact: bool = True


def _thrice(name: str, module: nn.Module) -> bool:
    return isinstance(module, Thrice)


BRANCHES = Model(Kind(Branches, _thrice))
TIED = Model(Kind(TiedAcross, _thrice, ids=True), exact=False)
"""Inexact: the several gradients of reentrant checkpoints are added up by microbatch, and in the twin one by one."""


def train(rank: int, cases: Sequence[Case], check: Callable[[Pair], None]) -> None:
    for case in cases:
        with naming(case):
            pair = Pair(case, rank, dist.get_world_size())
            for _ in range(case.steps):
                for i in range(case.microbatches):
                    pair.microbatch(last=i + 1 == case.microbatches)
                    assert not any(
                        m.param.grad is not None for u in pair.ctx.units for g in u.groups for m in g.members
                    )
                check(pair)
                pair.step()
            pair.compare_gathered()


def one_reduction_each(pair: Pair) -> None:
    steps = pair.steps + 1
    assert [unit.reduces for unit in pair.ctx.units if unit.groups] == [steps] * 3


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 2, "staging": 1}], ids=str)
def test_a_unit_is_over_when_its_last_layer_has_contributed(options: dict[str, object]) -> None:
    """A parameter that has contributed may contribute again: until then its unit keeps weights and buffer."""
    run_ranks(train, 2, [Case(BRANCHES, options=options)], one_reduction_each)  # type: ignore[arg-type]


def nothing(pair: Pair) -> None:
    pass


@pytest.mark.parametrize("sync", ["each", "no_sync", "accumulating"])
def test_weights_tied_across_units_and_recomputed(sync: str) -> None:
    strategies = ("no_shard", "optim", "optim_grads_params")
    run_ranks(train, 2, [Case(TIED, s, microbatches=3, sync=sync) for s in strategies], nothing)  # type: ignore[arg-type]


def graph(rank: int) -> None:
    """With `create_graph=True` autograd makes the gradients, and what is staged is no part of its graph."""
    model = Thrice()
    plain = Thrice()
    plain.load_state_dict(model.state_dict())
    hocket.fully_shard(model)
    xs = [torch.ones(4, WIDTH).requires_grad_() for _ in range(2)]
    for module, x in zip((plain, model), xs, strict=True):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
    assert xs[1].grad is not None
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)


def test_gradient_penalty() -> None:
    run_ranks(graph, 2)

"""Linear layers of sharded modules: they write to the staging buffers, and a unit is not over before all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.fsdp.buffers import Staged
from hocket.layers import functional
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
"""Inexact: a weight used in three places has sums of one order here, and of another one in the twin."""


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
def test_a_unit_is_over_when_its_last_layer_has_written(options: dict[str, object]) -> None:
    """A parameter that has contributed may contribute again: until then its unit keeps weights and buffer."""
    run_ranks(train, 2, [Case(BRANCHES, options=options)], one_reduction_each)  # type: ignore[arg-type]


def nothing(pair: Pair) -> None:
    pass


@pytest.mark.parametrize("sync", ["each", "no_sync", "accumulating"])
def test_weights_tied_across_units_and_recomputed(sync: str) -> None:
    strategies = ("no_shard", "optim", "optim_grads_params")
    run_ranks(train, 2, [Case(TIED, s, microbatches=3, sync=sync) for s in strategies], nothing)  # type: ignore[arg-type]


def counted(rank: int) -> None:
    """Every weight of a linear layer is written by the layer; only the norms' come by autograd."""
    written: list[int] = []
    taken: list[tuple[int, ...]] = []
    write, add = functional.write_product, Staged.add

    def spy_write(a_FR: Tensor, b_RD: Tensor, out_FD: Tensor, add: bool, scale: float) -> None:
        written.append(out_FD.data_ptr())
        write(a_FR, b_RD, out_FD, add, scale)

    def spy_add(self: Staged, index: int, grad: Tensor) -> None:
        taken.append(tuple(grad.shape))
        add(self, index, grad)

    with mock.patch.object(functional, "write_product", spy_write), mock.patch.object(Staged, "add", spy_add):
        model = Branches()
        hocket.fully_shard(model, units=Thrice)
        model(torch.ones(4, WIDTH)).sum().backward()
    assert len(written) == 9
    assert len(set(written)) <= 3
    assert taken == [(WIDTH,)] * 6
    assert all(p.grad is not None for p in model.parameters() if p.numel())


def test_only_small_gradients_come_by_autograd() -> None:
    run_ranks(counted, 2)


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

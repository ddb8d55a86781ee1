"""Units that return their weights, or views of them, to be read when their own forward is over."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.fsdp.sharded_parameter import ShardedParameter
from tests.fsdp.elements import here, local
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

WIDTH = 8


@dataclass
class Boxed:
    value: Tensor


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda w: w,
    "slice": lambda w: w[:3],
    "expanded": lambda w: w[:1].unsqueeze(0).expand(2, 3, -1),
    "list": lambda w: [w[1:4], None],
    "dataclass": lambda w: Boxed(w[:3]),
}


class Table(nn.Module):
    """A learnt table, such as one of positions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH))
        self.form = form

    def forward(self) -> Any:
        return FORMS[self.form](self.weight)


class Model(nn.Module):
    """Reads the table when other units have run, and saves it for backward."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table = Table(form)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        rows = table.value if isinstance(table, Boxed) else table[0] if isinstance(table, list) else table
        return self.layers[0](x * rows[..., :1, :]) @ rows.transpose(-1, -2)


def steps(rank: int) -> None:
    ways: list[dict[str, Any]] = [{}, {"prefetch": 4, "staging": 3}]
    for way, form in itertools.product(ways, FORMS):
        with naming((form, way)):
            torch.manual_seed(0)
            model = Model(form)
            plain = copy.deepcopy(model)
            ctx = hocket.fully_shard(model, units=(Table, nn.Linear), options=hocket.ShardOptions(**way))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            other = torch.optim.SGD(plain.parameters(), lr=0.1)
            x = torch.randn(3, WIDTH)
            for _ in range(3):
                with torch.no_grad():
                    assert torch.equal(model(x), plain(x))
                for one, opt in ((model, optimizer), (plain, other)):
                    one(x).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                for (name, shard), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert isinstance(shard, ShardedParameter)
                    assert torch.equal(local(shard), here(shard, whole)), name
                assert not any(unit.claims for unit in ctx.units), "claims are given back with the step"
            full: Any = ctx.units[1].parameters[0]
            assert not full._backward_hooks, "no hook is left on a parameter that was returned"


def test_weights_that_are_returned_can_be_read_later() -> None:
    """Their memory went with the unit: a crash."""
    run_ranks(steps, 2)


def alone(rank: int) -> None:
    """A unit that is called by itself lends until the next forward; what a function transform computes is no weight."""
    torch.manual_seed(0)
    model = Model("slice")
    plain = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    ctx = hocket.fully_shard(model, units=(Table, nn.Linear))
    with torch.no_grad():
        rows = model.table()
        for unit in ctx.units[2:]:  # would take its room
            unit.acquire().release()
        assert torch.equal(rows, plain.table())
        assert torch.equal(model(x), plain(x))
        assert torch.equal(torch.func.vmap(model.layers[0])(x), torch.func.vmap(plain.layers[0])(x))
    assert not any(unit.claims for unit in ctx.units)


def test_how_long_weights_are_lent() -> None:
    run_ranks(alone, 2)

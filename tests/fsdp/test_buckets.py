"""Units joined by size: which modules share a bucket, the same bits as without, and what runs beside what."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import hocket
from hocket.fsdp.members import DEFAULT, Rule, make_buckets
from tests.fsdp.kinds import ZOO, Kind
from tests.fsdp.noted import Model, Noted, Run, exposed, named
from tests.fsdp.twin import Case, naming, train_all
from tests.helpers.ranks import run_ranks

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def linear(params: int) -> nn.Linear:
    return nn.Linear(1, params, bias=False)


def sizes(model: nn.Module, rule: Rule, most: int | None) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in make_buckets(model, rule, most)]


def test_buckets_are_filled_from_the_end_and_hold_no_more_than_they_may() -> None:
    model = nn.Sequential(*(linear(n) for n in (5, 30, 40, 30, 30, 7)))
    assert sizes(model, nn.Linear, 70) == [["0"], ["1", "2"], ["3", "4", "5"]]
    assert sizes(model, nn.Linear, 67) == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert sizes(model, nn.Linear, 142) == [["0", "1", "2", "3", "4", "5"]]
    assert sizes(model, nn.Linear, None) == [["0"], ["1"], ["2"], ["3"], ["4"], ["5"]]


def test_a_module_larger_than_a_bucket_is_alone() -> None:
    model = nn.Sequential(*(linear(n) for n in (5, 5, 100, 5, 5)))
    for rule in (nn.Linear, None):
        assert sizes(model, rule, 20) == [["0", "1"], ["2"], ["3", "4"]]


def test_without_units_modules_are_taken_as_large_as_they_fit() -> None:
    layers = nn.ModuleList(nn.Sequential(linear(10), linear(20)) for _ in range(3))
    model = nn.Sequential(linear(4), nn.ModuleDict({"layers": layers}), linear(50))
    assert sizes(model, None, 60) == [["0", "1.layers.0"], ["1.layers.1", "1.layers.2"], ["2"]]
    assert sizes(model, None, 25) == [
        ["0", "1.layers.0.0"], ["1.layers.0.1"], ["1.layers.1.0"], ["1.layers.1.1"], ["1.layers.2.0"],
        ["1.layers.2.1"], ["2"],
    ]  # fmt: skip
    assert sizes(model, None, 144) == [], "all of it is the root's"
    assert sizes(model, None, None) == []
    assert DEFAULT == 128 * 2**20


def test_a_unit_around_others_is_joined_to_none() -> None:
    block = nn.Sequential(linear(2), nn.Tanh(), linear(2))
    model = nn.Sequential(linear(1), block, linear(1))
    chosen = [model[0], block, block[0], block[2], model[2]]
    assert sizes(model, chosen, 100) == [["0"], ["1"], ["1.0", "1.2", "2"]]


@dataclass(frozen=True)
class Unnamed:
    """A model of the zoo without names for its units."""

    name: str
    exact = True

    def __str__(self) -> str:
        return f"{self.name} without units"

    @property
    def kind(self) -> Kind:
        return replace(ZOO[self.name], units=None)


def train(world: int, cases: list[Case]) -> None:
    assert run_ranks(train_all, world, cases) == [len(cases)] * world


@pytest.mark.parametrize("world", [2, 3])
def test_every_strategy_has_the_same_bits(world: int) -> None:
    """Buckets are made alike on any number of ranks, but of three none has as much as the others. Two of the strategies
    for each model.
    """
    models = ["deep", "stack", "tied_across", "odd", "unused", "twice", "conditional", "mixed_dtypes"]
    models = models if world == 2 else ["odd", "tied_across", "mixed_dtypes"]
    cases = []
    for n, model in enumerate(models):
        for k, strategy in list(enumerate(STRATEGIES))[n // 2 % 2 * 2 :][:2]:
            most = (300, 256, 2000, 10**6)[(n + k) % 4]
            named = model if (n + k) % 2 else Unnamed(model)
            sync = ("accumulating", "no_sync", "each")[(n + k) % 3]
            cases.append(Case(named, strategy, 2, options={"bucket": most}, sync=sync, steps=2))
    train(world, cases)


def test_with_recomputation_and_frozen_parameters() -> None:
    models = ["reentrant", "recomputed", "frozen", "frozen_input", "read_on_demand", "reordered", "nested"]
    models = [model for model in models if model in ZOO]
    assert len(models) >= 5
    options = [{"bucket": 500}, {"bucket": 1024, "prefetch": 2, "staging": 1}]
    told = [(m, s, options[(i + j) % 2]) for i, m in enumerate(models) for j, s in enumerate(STRATEGIES[1::2])]
    train(2, [Case(m, s, 2, options=o, steps=2) for m, s, o in told])


def test_with_experts_on_a_mesh_of_their_own() -> None:
    options = {"bucket": 1000}
    cases = [Case("moe", s, 2, experts=2, options=options, sync="accumulating", steps=2) for s in STRATEGIES]
    train(4, cases)


L, EACH = 6, sum(param.numel() for param in Model(1).parameters())


def structure(rank: int) -> None:
    for strategy in ("optim", "optim_grads_params"):
        with naming(strategy):
            options = hocket.ShardOptions(bucket=2 * EACH)
            run = Run(Model(L), 1, options=options, strategy=strategy)
            history = run.step()
            pairs = [f"layers.{i}..layers.{i + 1}" for i in range(0, L, 2)]
            assert {r.name for r in named(history, "reduce ")} == {f"reduce {pair}" for pair in pairs}
            assert len(named(history, "reduce ")) == len(pairs)
            assert [r.name for r in named(history, "reduce ") if exposed(history, r)] == [f"reduce {pairs[0]}"]
            assert [g.name for g in named(history, "gather ") if exposed(history, g)] == [f"gather {pairs[0]}"]
            for later in range(2, L, 2):  # beside the backward of the layers before
                reduce = history.one(f"reduce layers.{later}..layers.{later + 1}")
                assert history.concurrent(reduce, history.one(f"B {later - 1}"))
                gather = history.all(f"gather layers.{later}..layers.{later + 1}")[0]
                assert history.concurrent(gather, history.one(f"F {later - 1}"))


def test_a_bucket_is_one_gather_and_one_reduction_and_both_are_hidden() -> None:
    run_ranks(structure, 2)


class Backwards(nn.Module):
    """Runs its layers in another order than it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def learnt(rank: int) -> None:
    ctx = hocket.fully_shard(Backwards(), strategy="optim", options=hocket.ShardOptions(bucket=144))
    assert [len(unit.modules) for unit in ctx.units] == [1, 2, 2, 2]
    found = []
    for _ in range(3):
        ctx.root(torch.ones(2, 8)).sum().backward()
        ctx.finish_step()
        ctx.weights_updated()
        found.append(ctx.stats().surprises)
    assert found[0] > 0
    assert found == [found[0]] * 3


def test_the_order_of_buckets_is_learnt_in_the_first_step() -> None:
    run_ranks(learnt, 2)


def test_units_of_noted_models_are_not_joined_unless_asked() -> None:
    assert sizes(Model(3), Noted, None) == [[f"layers.{i}"] for i in range(3)]

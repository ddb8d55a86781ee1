"""Sharded training equals plain training, bit by bit: every kind of model, strategy and number of ranks.

Each test trains many cases in the same processes, so that most of its time is not spent on starting them.
"""

from dataclasses import replace

import pytest
import torch

from tests.fsdp.kinds import ZOO
from tests.fsdp.twin import Case, train_all, variants
from tests.helpers.ranks import run_ranks

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MODELS = [name for name in ZOO if name != "moe"]


def train(world: int, cases: list[Case]) -> None:
    assert run_ranks(train_all, world, cases) == [len(cases)] * world


def optimizer_for(model: str) -> str:
    """One with a state, unless steps without a gradient would be a question of its conventions."""
    return "sgd" if ZOO[model].skips else "adamw"


@pytest.mark.parametrize("part", range(4))
def test_every_model(part):
    """Two ranks, everything sharded, two microbatches, and nothing but defaults."""
    train(2, [Case(model, microbatches=2, optimizer=optimizer_for(model), steps=2) for model in MODELS[part::4]])


@pytest.mark.parametrize("world", [1, 3])
def test_strategies(world):
    """On two ranks the tests below have every strategy; on four, replicas and random models. Each model has one of the
    strategies here, another one on each number of ranks.
    """
    models = [("stack", 3), ("nested", 1), ("tied_across", 3), ("odd", 1), ("twice", 3), ("conditional", 1)]
    told = [(STRATEGIES[(i + world) % 4], *one) for i, one in enumerate(models)]
    train(world, [Case(model, strategy, m, optimizer=optimizer_for(model), steps=2) for strategy, model, m in told])


@pytest.mark.parametrize(("first", "sync"), [(0, "no_sync"), (1, "accumulating")])
def test_microbatches_whose_reduction_is_deferred(first, sync):
    """Each model under two of the strategies; over models and strategies, each with both ways."""
    models = ["stack", "tied_across", "odd", "unused", "frozen", "reentrant", "mixed_dtypes"]
    told = [(s, model) for i, s in enumerate(STRATEGIES) for j, model in enumerate(models) if (i + j) % 4 == 2 * first]
    train(2, [Case(model, s, 3, sync=sync, optimizer=optimizer_for(model), steps=2) for s, model in told])


def test_gradients_are_zeroed_or_dropped():
    train(2, [Case("stack", strategy, 2, set_to_none=keep) for strategy in STRATEGIES for keep in (True, False)])


def test_residency():
    """Where gathered weights live, and for how long, changes no bit."""
    options = [
        *({"prefetch": n} for n in (0, 1, 2, 9)),
        *({"staging": n} for n in (1, 2, 3)),
        {"prefetch": 2, "staging": 1},
    ]
    cases = [Case(("deep", "stack")[i % 2], microbatches=2, options=one, steps=2) for i, one in enumerate(options)]
    train(2, cases)


def test_residency_of_other_orders():
    """Models that do not run their units once each, in order."""
    options = [{"prefetch": 0}, {"prefetch": 2}, {"staging": 1}]
    models = ["nested", "tied_across", "read_on_demand", "conditional", "reordered", "twice", "parallel", "reentrant"]
    told = [(options[(i + j) % 3], model) for i, model in enumerate(models) for j in range(2)]
    train(2, [Case(model, microbatches=2, options=one, steps=2) for one, model in told])


OFFLOADED = {"offload": "pageable"}


@pytest.mark.parametrize("world", [1, 2])
def test_shards_in_the_hosts_memory(world):
    """The copies that a step on GPUs makes, with a CPU at both ends. Each model under one of the strategies."""
    models = ["stack", "nested", "tied_across", "odd", "unused", "frozen", "mixed_dtypes", "reentrant"]
    told = [(STRATEGIES[i % 4], model) for i, model in enumerate(models)]
    few = {"options": OFFLOADED, "microbatches": 2, "steps": 2}
    cases = [Case(model, strategy, optimizer=optimizer_for(model), **few) for strategy, model in told]
    first = Case("stack", microbatches=3, options=OFFLOADED, optimizer="adamw", steps=2)
    ways = {"sync": ["each", "no_sync", "accumulating"], "set_to_none": [True, False], "by_unit": [True, False]}
    formats = [{}, {"compute": torch.bfloat16}, {"main": None, "compute": torch.bfloat16}]
    more = variants(first, **ways, precision=formats, optimizer=["adamw", "adamw_fused"])
    train(world, [*cases, *more, replace(first, mesh=(1, world))])


def test_shards_in_the_hosts_memory_of_replicas():
    first = Case("stack", microbatches=2, mesh=(2, 1), options=OFFLOADED, optimizer="adamw", steps=2)
    ways = {"mesh": [(2, 1), (2, 2)], "strategy": STRATEGIES, "sync": ["each", "accumulating"]}
    both = variants(first, **ways)
    train(2, [case for case in both if case.mesh == (2, 1)])
    train(4, [case for case in both if case.mesh == (2, 2)])


F32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = {
    "bf16_compute": {"compute": BF16},
    "bf16_compute_f32_wire": {"compute": BF16, "wire": F32},
    "bf16_wire": {"wire": BF16},
    "bf16_everywhere": {"main": BF16, "compute": BF16, "wire": BF16, "accumulate": BF16},
    "bf16_main": {"main": BF16, "compute": BF16},
    "bf16_accumulation": {"accumulate": BF16},
    "f64_main": {"main": torch.float64},
    "f64_accumulation": {"accumulate": torch.float64, "main": torch.float64},
}


@pytest.mark.parametrize("names", [list(PRECISIONS)[::2], list(PRECISIONS)[1::2]], ids=" ".join)
def test_precision(names):
    """Four choices of their own: main weights, compute weights, what is sent, and what adds up. Each with two
    strategies, models and ways to sum microbatches.
    """
    models, syncs = ("stack", "tied_across", "frozen", "stack"), ("each", "no_sync", "accumulating")
    cases = [
        Case(models[(i + j) % 4], strategy, 2, precision=PRECISIONS[name], sync=syncs[(i - j) % 3], optimizer="adamw")
        for i, name in enumerate(names)
        for j, strategy in enumerate(STRATEGIES)
        if (i + j) % 2
    ]
    train(2, [replace(case, steps=2) for case in cases])

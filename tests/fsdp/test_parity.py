"""Sharded training equals plain training, bit by bit: every kind of model, strategy and number of ranks.

Each test trains many cases in the same processes, so that most of its time is not spent on starting them.
"""

import pytest
import torch

from tests.fsdp.twin import Case, train_all, variants
from tests.fsdp.zoo import ZOO
from tests.helpers.ranks import run_ranks

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MODELS = [name for name in ZOO if name != "moe"]
COMPILED_KERNELS = ("lstm",)


def train(world: int, cases: list[Case], timeout: float = 50.0) -> None:
    assert run_ranks(train_all, world, cases, timeout=timeout) == [len(cases)] * world


def optimizer_for(model: str) -> str:
    """One with a state, unless steps without a gradient would be a question of its conventions."""
    return "sgd" if ZOO[model].skips else "adamw"


@pytest.mark.parametrize("model", MODELS)
def test_every_model(model):
    """Two ranks, everything sharded, two microbatches, and nothing but defaults."""
    train(2, [Case(model, microbatches=2, optimizer=optimizer_for(model), steps=4)])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(world, strategy):
    models = ["stack", "nested", "tied_across", "odd", "twice", "conditional"]
    train(
        world,
        [Case(model, strategy, m, optimizer=optimizer_for(model), steps=2) for model in models for m in (1, 3)],
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sync", ["no_sync", "accumulating"])
def test_microbatches_whose_reduction_is_deferred(strategy, sync):
    models = ["stack", "tied_across", "odd", "unused", "frozen", "reentrant", "mixed_dtypes"]
    train(2, [Case(model, strategy, 3, sync=sync, optimizer=optimizer_for(model)) for model in models])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_zeroed_or_dropped(strategy):
    train(2, [Case("stack", strategy, 2, set_to_none=keep) for keep in (True, False)])


def test_residency():
    """Where gathered weights live, and for how long, changes no bit."""
    options = [
        *({"prefetch": n} for n in (0, 1, 2, 9, "1KiB", "4KiB", "1MiB")),
        *({"slots": n} for n in ("auto", "dynamic", 2, 3, 8)),
        *({"staging": n} for n in (1, 2, 3)),
        {"unified": True},
        {"unified": True, "prefetch": 2, "staging": 1, "slots": 3},
    ]
    cases = [
        Case(model, strategy, 3, options=one, steps=2)
        for one in options
        for model, strategy in [("deep", "optim_grads_params"), ("stack", "optim_grads_params"), ("deep", "optim")]
    ]
    train(2, cases)


def test_residency_of_other_orders():
    """Models that do not run their units once each, in order."""
    options = [{"prefetch": 0}, {"prefetch": 2}, {"prefetch": "1KiB"}, {"slots": "dynamic", "staging": 1}]
    models = ["nested", "tied_across", "read_outside", "conditional", "reordered", "twice", "parallel", "reentrant"]
    train(2, [Case(model, microbatches=2, options=one) for one in options for model in models])


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
def test_granularity(granularity):
    """Elsewhere than at 256 bytes, a parameter may get another kernel, so only close."""
    models = ["stack", "odd", "tied_across", "mixed_dtypes", "lstm"]
    for world in (2, 3):
        train(
            world,
            [Case(model, microbatches=2, options={"granularity": granularity}, optimizer="adamw") for model in models],
        )


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


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_precision(precision):
    """Four choices of their own: main weights, compute weights, what is sent, and what adds up."""
    first = Case("stack", microbatches=2, precision=precision, optimizer="adamw")
    cases = [*variants(first, model=["stack", "tied_across", "frozen"], strategy=STRATEGIES)]
    cases += variants(first, sync=["no_sync", "accumulating"])
    train(2, cases)
    train(3, [first])

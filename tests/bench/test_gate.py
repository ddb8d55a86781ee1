"""The numerics gate: it lets through what agrees and names who does not."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hocket.bench import gate
from hocket.bench.gate import NumericsError
from hocket.bench.peers.bound import WholeWeights, bound
from hocket.bench.plain import MainWeights
from hocket.bench.workload import batches
from tests.bench.setup import CPU, workload
from tests.helpers.ranks import run_ranks


def test_agreement_is_reported_with_its_figures():
    verdict = gate.judge({"a": [4.0, 2.0], "b": [4.0, 2.0001], "c": [4.0, 2.0]}, workload(1))
    assert verdict.worst == pytest.approx(2.5e-5)
    assert verdict.fall == pytest.approx(0.5)
    assert verdict.tolerance == 1e-4


def test_rounding_of_a_loss_that_is_almost_gone_is_let_through():
    assert gate.judge({"a": [4.0, 1e-5], "b": [4.0, 2e-5]}, workload(1)).worst < 1e-5


@pytest.mark.parametrize("wrong", [2.001, math.nan, math.inf])
def test_who_disagrees_is_named_with_step_and_difference(wrong):
    with pytest.raises(NumericsError, match=r"c does not compute what a computes: at step 1 .* nothing was timed"):
        gate.judge({"a": [4.0, 2.0], "b": [4.0, 2.0], "c": [4.0, wrong]}, workload(1))


def test_the_tolerance_is_that_of_the_dtype():
    work = workload(1)
    train = dataclasses.replace(work.config.train, dtype="bf16")
    coarse = dataclasses.replace(work, config=dataclasses.replace(work.config, train=train))
    curves = {"a": [4.0, 2.0], "b": [4.0, 2.006]}
    assert gate.judge(curves, coarse).worst == pytest.approx(1.5e-3)
    with pytest.raises(NumericsError):
        gate.judge(curves, work)


def curve_with_factor(rank: int, factor: float) -> list[float]:
    """A plain program on one rank whose gradients are off by a factor, in experts only."""
    work = workload(1, moe=True)
    made = bound(work, rank, CPU)
    assert isinstance(made, WholeWeights)
    named = dict(made.model.named_parameters())
    experts = {name: param for name, param in named.items() if ".experts." in name}
    dense = {name: param for name, param in named.items() if name not in experts}
    made.optimizers = [MainWeights(dense, work, rank), MainWeights(experts, work, rank, scale=factor)]
    return gate.curve(made, work, rank, CPU, 8)


def test_gradients_that_are_off_by_a_factor_are_caught():
    """AdamW alone would hide it."""
    (right,), (half,) = run_ranks(curve_with_factor, 1, 1.0), run_ranks(curve_with_factor, 1, 0.5)
    assert gate.judge({"right": right, "again": right}, workload(1)).worst == 0.0
    with pytest.raises(NumericsError):
        gate.judge({"right": right, "half": half}, workload(1))


def test_without_an_optimizer_a_smaller_model_with_one_is_compared():
    work = workload(1, moe=True, optimizer=False)
    deep = dataclasses.replace(work.config.model, layers=32, dense_layers=(0, 20))
    small = gate.small(dataclasses.replace(work, config=dataclasses.replace(work.config, model=deep)))
    assert small.optimizer
    assert small.config.model.layers == 4
    assert small.config.model.dense_layers == (0,)
    assert small.config.model.hidden == work.config.model.hidden


def test_the_gates_epsilon_is_about_an_element_of_a_gradient():
    work = workload(1)
    made = bound(dataclasses.replace(work, optimizer=False), 0, CPU)
    assert isinstance(made, WholeWeights)
    microbatch = batches(work, 0, 0, CPU)[0]
    made.model(microbatch.ids, microbatch.targets).backward()
    grads = torch.cat([param.grad.flatten() for param in made.model.parameters() if param.grad is not None])
    assert 0.02 < grads.square().mean().sqrt().item() / work.config.train.eps < 50

"""The numerics gate: it lets through what agrees and names who does not."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.bench import gate
from benchmarks.bench.gate import NumericsError
from benchmarks.bench.peers.bound import WholeWeights, bound
from benchmarks.bench.plain import MainWeights
from benchmarks.bench.workload import Workload, batches
from hocket.config.schema import changed
from tests.bench.setup import CPU, workload
from tests.helpers.ranks import run_ranks


def in_bf16(work: Workload) -> Workload:
    return dataclasses.replace(work, config=changed(work.config, {"precision.compute": "bf16"}))


def test_agreement_is_reported_with_its_figures():
    verdict = gate.judge({"a": [4.0, 3.0], "b": [4.0, 3.00005], "c": [4.0, 3.0]}, workload(1))
    assert verdict.worst == pytest.approx(5e-5), "of what was learnt, which is 1"
    assert verdict.fall == pytest.approx(0.25)
    assert verdict.tolerance == 1e-4
    assert verdict.sequence_length == 16


def test_a_gate_that_shows_nothing_is_no_gate():
    for still in ([4.0, 4.001], [4.0, math.nan]):
        with pytest.raises(NumericsError, match="the gate shows nothing: over 2 steps the loss of a went from 4 to"):
            gate.judge({"a": still, "b": still}, workload(1))


@pytest.mark.parametrize("wrong", [2.001, math.nan, math.inf])
def test_who_disagrees_is_named_with_step_and_difference(wrong):
    with pytest.raises(NumericsError, match=r"c does not compute what a computes: at step 1 .* nothing was timed"):
        gate.judge({"a": [4.0, 2.0], "b": [4.0, 2.0], "c": [4.0, wrong]}, workload(1))


def test_the_tolerance_is_that_of_the_dtype():
    curves = {"a": [4.0, 3.0], "b": [4.0, 3.005]}
    assert gate.judge(curves, in_bf16(workload(1))).worst == pytest.approx(5e-3)
    with pytest.raises(NumericsError):
        gate.judge(curves, workload(1))


def with_factor(rank: int, factor: float, group: str) -> dict[str, list[float]]:
    """Plain programs on one rank; `wrong` has gradients off by a factor, of parameters with `group` in their name."""
    work, found = workload(1, moe=True), {}
    for kind, scale in (("right", 1.0), ("wrong", factor)):
        made = bound(work, rank, CPU)
        assert isinstance(made, WholeWeights)
        named = dict(made.model.named_parameters())
        chosen = {name: param for name, param in named.items() if group in name}
        others = {name: param for name, param in named.items() if name not in chosen}
        made.optimizers = [MainWeights(chosen, work, rank, scale=scale)]
        made.optimizers += [MainWeights(others, work, rank)] if others else []
        found[kind] = gate.curve(made, work, rank, CPU, 8)
    return found


@pytest.mark.parametrize("group", ["embed", "layers.0.", "layers.1.", "experts", "head.w"])
def test_gradients_of_one_group_that_are_off_by_a_few_per_cent_are_caught(group):
    """AdamW alone would hide even half of a gradient."""
    (curves,) = run_ranks(with_factor, 1, 0.95, group)
    assert 0.05 < gate.judge({"a": curves["right"], "b": curves["right"]}, workload(1)).fall < 0.3
    with pytest.raises(NumericsError, match="wrong does not compute what right computes"):
        gate.judge(curves, workload(1))


@pytest.mark.parametrize("group", ["", "embed", "layers.", "head.w"])
def test_in_bf16_a_wrong_factor_is_caught(group):
    (curves,) = run_ranks(with_factor, 1, 0.5, group)
    with pytest.raises(NumericsError):
        gate.judge(curves, in_bf16(workload(1)))


def test_a_smaller_model_with_an_optimizer_is_compared():
    work = workload(1, moe=True, optimizer=False)
    deep = dataclasses.replace(work.config.model, layers=32, dense_layers=(0, 20))
    small = gate.small(dataclasses.replace(work, config=dataclasses.replace(work.config, model=deep)))
    assert small.optimizer
    assert small.config.model.layers == 4
    assert small.config.train.sequences == 1
    assert small.config.model.dense_layers == (0,)
    assert small.config.model.hidden == work.config.model.hidden


def test_stages_of_the_smaller_model_are_even_where_those_of_the_whole_one_cannot_be():
    work = workload(1)
    uneven = changed(work.config, {"model.layers": 3, "mesh.pp": 2, "plan.layers_per_stage": (2, 1)})
    small = gate.small(dataclasses.replace(work, config=uneven))
    assert (small.config.model.layers, small.config.plan.layers_per_stage) == (2, ())
    thirds = changed(uneven, {"plan.chunks": 3, "plan.layers_per_stage": ()})
    assert gate.small(dataclasses.replace(work, config=uneven, variants={"thirds": thirds})).config.model.layers == 6


def test_the_gates_epsilon_is_about_an_element_of_a_gradient():
    work = workload(1)
    made = bound(dataclasses.replace(work, optimizer=False), 0, CPU)
    assert isinstance(made, WholeWeights)
    microbatch = batches(work, 0, 0, CPU)[0]
    made.model(microbatch.ids, microbatch.targets).backward()
    grads = torch.cat([param.grad.flatten() for param in made.model.parameters() if param.grad is not None])
    assert 1 < grads.square().mean().sqrt().item() / work.config.train.eps < 10

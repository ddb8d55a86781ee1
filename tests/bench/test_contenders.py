"""Contenders that share the plain stack, and hocket: all must learn the same, in every mesh they know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench.contender import CONTENDERS, load
from benchmarks.bench.ours import Muted, Planned
from benchmarks.bench.plain import Exchange, first_value, materialize, plain_model
from benchmarks.bench.workload import Workload, batches
from tests.bench.setup import CPU, built, curves, learn_the_same, workload
from tests.helpers.ranks import run_ranks

FSDP = ["fsdp2", "fsdp2_fp32", "fsdp2_tuned", "fsdp2_tuned_fp32"]
CASES = {
    "dense": (2, workload(2), ["hocket", "ddp", *FSDP]),
    "experts whole": (2, workload(2, moe=True), ["hocket", "ddp", "fsdp2_tuned"]),
    "experts spread": (
        2,
        workload(2, 2, moe=True),
        [
            "hocket",
            "hocket_sequential",
            "hocket_per_rank",
            "hocket_device",
            "ep_sync",
            "fsdp2_tuned_fp32",
        ],
    ),
    "experts spread and sharded": (4, workload(4, 2, moe=True), ["hocket", "ep_sync", "fsdp2_tuned"]),
}
USUAL = ("dense", "experts spread")
"""Of these, what `make test` runs."""


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_all_learn_the_same(case):
    learn_the_same(*CASES[case])


def compiled(rank: int) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Curves of eager and of compiled contenders, and how many graphs were compiled for them."""
    graphs = []
    with_inductor = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def without(function: Callable[..., Any], **options: Any) -> Any:
        return with_inductor(function, backend=backend, **options)

    torch.compile = without  # pyrefly: ignore
    work, names = workload(1, moe=True), ["bound", "ddp", "fsdp2", "fsdp2_tuned"]
    eager = curves(rank, names, work, 3)
    return eager, curves(rank, names, dataclasses.replace(work, compile=True), 3), len(graphs)


def test_compiled_layers_compute_the_same_and_share_their_graphs():
    eager, fast, graphs = run_ranks(compiled, 1)[0]
    for name, curve in eager.items():
        assert fast[name] == pytest.approx(curve, rel=1e-5)
    assert 2 <= graphs <= 4, "one of the dense layer, one of all attentions, for plain and for sharded modules"


def test_tokens_are_the_same_for_all_and_differ_by_rank_and_step():
    work = workload(2)
    first, again = batches(work, 0, 0, CPU), batches(work, 0, 0, CPU)
    others = [batches(work, 1, 0, CPU), batches(work, 0, 1, CPU)]
    assert len(first) == 2
    assert first[0].ids.shape == (2, 16)
    assert torch.equal(first[0].ids[:, 1:], first[0].targets[:, :-1])
    assert torch.equal(first[1].ids, again[1].ids)
    assert not any(torch.equal(first[0].ids, other[0].ids) for other in others)
    assert not torch.equal(first[0].ids, first[1].ids)


class Probe(Exchange):
    """Notes how many rows were moved."""

    def now(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:  # pyrefly: ignore
        self.moved = [*getattr(self, "moved", []), (len(rows), sum(receive), sum(send))]
        return super().now(rows, receive, send)


def test_the_bound_keeps_kernels_and_splits_of_experts_and_moves_nothing():
    work = workload(2, 2, moe=True)
    probe = Probe(None, 2, 0)
    model = plain_model(work, 0, exchange=probe)
    materialize(model, work, 0, CPU)
    microbatch = batches(work, 0, 0, CPU)[0]
    model(microbatch.ids, microbatch.targets).backward()
    rows = 2 * 16 * 2  # sequences, tokens, choices
    assert probe.moved == [(rows, rows, rows)] * 8, "two exchanges per layer and direction"
    assert all(param.grad is not None for param in model.parameters())


def steps_of_bounds(rank: int, optimizer: bool) -> list[tuple[float, float]]:
    work = workload(2, 2, moe=True, optimizer=optimizer)
    found = []
    for name in ("bound", "hocket_null"):
        contender = built(name, rank, work)
        losses = [contender.step(batches(work, rank, 0, CPU)).item() for _ in range(3)]
        found.append((losses[0], losses[-1]))
    return found


@pytest.mark.parametrize("optimizer", [True, False])
def test_bounds_step_with_and_without_an_optimizer(optimizer):
    for plain, null in run_ranks(steps_of_bounds, 2, optimizer):
        assert all(map(math.isfinite, [*plain, *null]))
        assert (plain[0] != plain[1]) == optimizer, "without an optimizer the weights stay"


def share_weights(rank: int) -> tuple[bool, list[float], int]:
    work = workload(2, optimizer=False)
    ours = built("hocket", rank, work)
    null = built("hocket_null", rank, work)
    assert isinstance(ours, Planned)
    microbatches = batches(work, rank, 0, CPU)
    losses = [ours.step(microbatches).item()]
    calls = ours.engine.groups.gather_dense.calls["all_gather"]
    null.step(microbatches)
    losses.append(ours.step(microbatches).item())
    gathers = ours.engine.groups.gather_dense.calls["all_gather"] - calls
    ours.engine.assert_clean()
    return isinstance(null, Muted), losses, gathers


def test_the_bound_of_hocket_borrows_its_weights_and_leaves_them_as_they_are():
    for borrowed, losses, gathers in run_ranks(share_weights, 2):
        assert borrowed
        assert losses[0] == losses[1]
        assert gathers > 0


def main_weights(rank: int) -> list[float]:
    """The bound's updates: how many elements of each dense weight have changed on this rank."""
    work = workload(2)
    contender = built("bound", rank, work)
    contender.step(batches(work, rank, 0, CPU))
    model = contender.model  # pyrefly: ignore[missing-attribute]
    changed = []
    for name, param in model.named_parameters():
        first = first_value(name, param.shape, work, rank, CPU)
        changed.append((param != first).float().mean().item())
    return changed


def test_the_bound_updates_the_share_that_it_would_own():
    for shares in run_ranks(main_weights, 2):
        assert shares[1:] == pytest.approx([0.5] * (len(shares) - 1), abs=0.05)


def test_every_contender_can_be_loaded_or_names_its_package():
    for name, entry in CONTENDERS.items():
        module = entry.make.partition(":")[0]
        assert module.startswith("benchmarks.bench.")
        if not entry.package:
            assert callable(load(name))


def test_flops_and_tokens_count_all_ranks():
    work: Workload = workload(2)
    assert work.tokens == 2 * 2 * 2 * 16
    assert work.flops / work.tokens > 6 * 3 * (4 * 32 * 32 + 3 * 32 * 64) * 0.5

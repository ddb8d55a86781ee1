"""`hocket.fully_shard` as contenders: they learn what hocket learns, and each is what it says it is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from benchmarks.bench.sharded import Sharded
from benchmarks.bench.workload import batches
from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.transports import Null
from tests.bench.setup import CPU, built, learn_the_same, workload
from tests.helpers.ranks import run_ranks

EVERY = [f"fully_shard{way}" for way in ("", "_fp32_wire")]
CASES = {
    "dense": (2, workload(2), ["hocket", *EVERY]),
    "weights whole": (2, workload(2), ["hocket", "fully_shard_optim", "fully_shard_no_shard", "ddp", "fsdp2_kept"]),
    "experts spread": (2, workload(2, 2, moe=True), ["hocket", "fully_shard"]),
    "experts spread and sharded": (4, workload(4, 2, moe=True), ["hocket", "fully_shard"]),
}
USUAL = ("dense",)
"""Of these, what `make test` runs."""


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_all_learn_the_same(case):
    learn_the_same(*CASES[case])


def of(contender: object) -> list[ParamGroup]:
    assert isinstance(contender, Sharded)
    return [group for unit in contender.context.units for group in unit.groups]


def ways(rank: int) -> None:
    work = workload(2)
    for name in EVERY:
        contender = built(name, rank, work)
        assert isinstance(contender, Sharded)
        contender.step(batches(work, rank, 0, CPU))
        assert contender.context.stats().reduces == 5 * 2, "embedding, three layers, head, in two microbatches"
        contender.close()


def test_each_contender_is_what_it_says():
    run_ranks(ways, 2)


def alone(rank: int, optimizer: bool) -> None:
    work = workload(2, optimizer=optimizer)
    null = built("fully_shard_null", rank, work)
    assert all(isinstance(group.groups.gather.transport, Null) for group in of(null))
    losses = torch.stack([null.step(batches(work, rank, 0, CPU)) for _ in range(3)])
    assert losses.isfinite().all()


@pytest.mark.parametrize("optimizer", [True, False])
def test_the_bound_computes_on_numbers(optimizer):
    run_ranks(alone, 2, optimizer)


def every_step_gathers(rank: int) -> None:
    """Also without an optimizer: nothing gathered before is used again."""
    work = workload(2, optimizer=False, microbatches=1)
    contender = built("fully_shard", rank, work)
    assert isinstance(contender, Sharded)
    counts = []
    for _ in range(4):
        before = contender.context.stats().gathers
        contender.step(batches(work, rank, 0, CPU))
        counts.append(contender.context.stats().gathers - before)
    # Of five units, three stay for backward, and backward gathers the other two again.
    assert counts[1:] == [7, 7, 7]


def test_a_step_without_an_optimizer_gathers_all_weights_anew():
    run_ranks(every_step_gathers, 2)


def closed(rank: int) -> None:
    for optimizer in (True, False):
        work = workload(2, optimizer=optimizer)
        contender = built("fully_shard", rank, work)
        assert isinstance(contender, Sharded)
        contender.step(batches(work, rank, 0, CPU))
        held = [weakref.ref(group.main) for group in of(contender)]
        held += [weakref.ref(buffer.flat) for unit in contender.context.units for buffer in unit.full.values()]
        contender.context.gathering.join()  # what is in flight has its memory
        contender.close()
        del contender
        gc.collect()
        assert not [ref for ref in held if ref() is not None]


def test_a_closed_contender_leaves_no_memory_behind():
    run_ranks(closed, 2)

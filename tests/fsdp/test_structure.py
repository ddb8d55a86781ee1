"""What runs beside what, read from the record of what was issued and waited for: no clock, no GPU."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hocket
from benchmarks.history import CALLER
from tests.fsdp.noted import Model, Run, computes, exposed, named
from tests.fsdp.twin import mesh_of, naming
from tests.helpers.ranks import run_ranks

L = 6
VARIANTS: list[dict[str, Any]] = [
    {},
    {"prefetch": 2},
    {"staging": 3},
]


def variants() -> list[hocket.ShardOptions]:
    return [hocket.ShardOptions(**options) for options in VARIANTS]


def communication_runs_beside_compute(rank: int) -> None:
    for options in variants():
        with naming(options):
            history = Run(Model(L), microbatches=2, options=options).step()
            for m in range(2):
                for i in range(L - 1):
                    forward = history.one(f"F {i}", m)
                    gathers = [g for g in history.all(f"gather layers.{i + 1}") if g.index < forward.index]
                    # Either it runs beside this forward, or it was there before.
                    assert gathers or history.concurrent(history.one(f"gather layers.{i + 1}", 0), forward)
                for i in range(1, L):
                    earlier, backward = history.one(f"reduce layers.{i}", m), history.one(f"B {i - 1}", m)
                    assert history.concurrent(earlier, backward), (m, i)
            prefetched = [g for g in named(history, "gather ") if not exposed(history, g)]
            for gather in prefetched:
                assert any(history.concurrent(gather, compute) for compute in computes(history)), gather


def one_gather_and_one_reduction_of_a_step_are_exposed(rank: int) -> None:
    for options in variants():
        for m in (1, 3):
            with naming((options, m)):
                run = Run(Model(L), m, options=options)
                history = run.step()
                gathers = [g.name for g in named(history, "gather ") if exposed(history, g)]
                reduces = [r.name for r in named(history, "reduce ") if exposed(history, r)]
                assert gathers == ["gather layers.0"]
                assert reduces == ["reduce layers.0"]
                assert len(named(history, "reduce ")) == m * L
                ahead = 2 if options.prefetch == 2 else 1
                expected = 2 * L - 1 - ahead + (m - 1) * (2 * L - 2 - 2 * ahead)
                assert len(named(history, "gather ")) == expected


def parameters_of_the_root_take_no_room(rank: int) -> None:
    """A unit around others collects gradients all through their backward, and takes no room from them."""
    history = Run(Model(L, head=True), 2).step()
    for m in range(2):
        for i in range(1, L):
            assert history.concurrent(history.one(f"reduce layers.{i}", m), history.one(f"B {i - 1}", m)), (
                m,
                i,
            )
    shown = [g.name for g in named(history, "gather ") if exposed(history, g)]
    assert sorted(shown) == ["gather ", "gather layers.0"]
    shown = [r.name for r in named(history, "reduce ") if exposed(history, r)]
    assert sorted(shown) == ["reduce ", "reduce layers.0"]


def nothing_waits_for_reductions_between_microbatches(rank: int) -> None:
    for options in variants():
        with naming(options):
            history = Run(Model(L), 3, options=options).step()
            marks = computes(history)
            for m in range(2):
                turn = history.one("staged layers.0", m).index, history.one("F 0", m + 1).index
                between = [e.name for e in history.entries[slice(*turn)] if e.queue == CALLER]
                assert not [name for name in between if name.startswith(("wait reduce", "join"))], between
            end = marks[-1].index
            joins = [e for e in history.entries if e.queue == CALLER and e.name.startswith("join")]
            assert joins
            assert all(e.index > end for e in joins)


def gradients_wait_for_their_own_staging_buffer_only(rank: int) -> None:
    """With `staging` buffers, unit i writes gradients behind the reduction of unit i + staging only."""
    for buffers in (1, 2, 3):
        with naming(buffers):
            history = Run(Model(L), options=hocket.ShardOptions(staging=buffers)).step()
            for i in range(L - buffers):
                written = history.one(f"staged layers.{i}")
                assert history.before(history.one(f"reduce layers.{i + buffers}"), written), i
                for later in range(i + 1, min(i + buffers, L)):
                    assert not history.before(history.one(f"reduce layers.{later}"), written), (i, later)


def a_gather_comes_after_the_last_readers_of_its_memory(rank: int) -> None:
    """Memory is handed on behind its last reader."""
    history = Run(Model(L)).step()
    for i in range(L - 2):
        assert history.before(history.one(f"F {i}"), history.one(f"gather layers.{i + 2}")), i
    for i in range(2, L - 1):
        backward = history.all(f"gather layers.{i - 2}")[-1]
        assert history.before(history.one(f"B {i}"), backward), i


def two_groups_do_not_serialise(rank: int) -> None:
    """Units with parameters of two dtypes: neither group's reduction stands between compute and the other."""
    run = Run(Model(L, two_dtypes=True), 2)
    assert all(len(unit.groups) == 2 for unit in run.ctx.units if unit.module is not run.model)
    history = run.step()
    for m in range(2):
        for i in range(1, L):
            both = history.all(f"reduce layers.{i}")[2 * m : 2 * m + 2]
            written = history.all(f"staged layers.{i}")[2 * m : 2 * m + 2]
            assert len(both) == 2
            assert not history.before(both[0], written[1])
            assert all(history.concurrent(one, history.one(f"B {i - 1}", m)) for one in both), (m, i)
    assert [r.name for r in named(history, "reduce ") if exposed(history, r)] == ["reduce layers.0"] * 2


def gathers_and_reductions_have_groups_of_their_own(rank: int) -> None:
    groups = [group.groups for unit in Run(Model(2)).ctx.units for group in unit.groups]
    assert all(one.gather is not one.reduce for one in groups)
    assert all(one.gather is groups[0].gather for one in groups)


def gathers_of_every_strategy(rank: int) -> None:
    """Weights that stay are gathered once a step; whole ones never."""
    for strategy, per_step in (("no_shard", 0), ("optim", L), ("optim_grads", L)):
        with naming(strategy):
            run = Run(Model(L), 3, strategy=strategy)
            group = run.ctx.units[1].groups[0].groups.gather
            run.step()
            before = group.calls["all_gather"]
            history = run.step()
            assert (group.calls["all_gather"] - before) == 2 * per_step  # `step` does two
            if per_step:
                assert [g.name for g in named(history, "gather ") if exposed(history, g)] == ["gather layers.0"]


def outer(rank: int) -> None:
    run = Run(Model(L), 3, mesh=mesh_of((2, 2), ("replicate", "shard")))
    run.defer = True
    group = run.ctx.units[1].groups[0].groups.outer
    run.step()
    before = group.calls.copy()
    history = run.step()
    assert group.calls["all_reduce"] - before["all_reduce"] == 2 * L  # in two steps
    assert len(named(history, "outer ")) == L
    for i in range(1, L):
        assert history.concurrent(history.one(f"outer layers.{i}"), history.one(f"B {i - 1}", 2)), i
        assert history.before(history.one(f"reduce layers.{i}", 2), history.one(f"outer layers.{i}"))


def test_replicas_exchange_once_a_step_beside_backward():
    run_ranks(outer, 4)


def the_order_is_learned_in_the_first_step(rank: int) -> None:
    """Units run in another order than they are registered in: the first pass learns it."""
    run = Run(Model(L, order=[3, 1, 5, 0, 4, 2]))
    run.step()
    surprises = run.ctx.stats().surprises
    assert surprises
    history = run.step()
    assert run.ctx.stats().surprises == surprises
    assert [g.name for g in named(history, "gather ") if exposed(history, g)] == ["gather layers.3"]


def recomputation_gathers_nothing_more(rank: int) -> None:
    """Recomputation in backward reads what backward gathers anyway."""
    for reentrant in (False, True):
        with naming(f"{reentrant=}"):
            model = Model(L)
            model.run = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)  # noqa: B023
            history = Run(model, 2).step()
            assert len(named(history, "gather ")) == 2 * L - 2 + 2 * L - 4
            assert len([g for g in named(history, "gather ") if exposed(history, g)]) == 1
            assert len(named(history, "reduce ")) == 2 * L


def claims_are_balanced(rank: int) -> None:
    """After a step no claim is held, and no collective is under way."""
    run = Run(Model(L), 2)
    history = run.step()
    assert not any(unit.claims for unit in run.ctx.units)
    for queue in (run.ctx.gathering, run.ctx.reducing, run.ctx.outer):
        assert not queue._pending
    for unit in run.ctx.units:
        gathers, releases = history.all(f"gather {unit.name}"), history.all(f"release {unit.name}")
        assert len(releases) == 4  # two forwards, two backwards
        assert len(gathers) <= 4


def frozen_units_are_not_reduced(rank: int) -> None:
    model = Model(L)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    run = Run(model)
    history = run.step()
    assert {e.name for e in named(history, "reduce ")} == {f"reduce layers.{i}" for i in range(2, L)}
    assert not any(unit.claims for unit in run.ctx.units)
    with torch.no_grad():
        run.model(torch.ones(3, 11))
    assert not any(unit.claims for unit in run.ctx.units)


@pytest.mark.parametrize("ahead", [0, 3])
def test_prefetch_decides_how_many_gathers_are_exposed(ahead):
    run_ranks(prefetching, 2, ahead)


def prefetching(rank: int, ahead: int) -> None:
    run = Run(Model(L), options=hocket.ShardOptions(prefetch=ahead))
    history = run.step()
    shown = [g.name for g in named(history, "gather ") if exposed(history, g)]
    if ahead:
        assert shown == ["gather layers.0"]
    else:
        assert len(shown) == len(named(history, "gather ")) == 2 * L - 1  # the last of forward stays for backward


ON_TWO_RANKS = (
    communication_runs_beside_compute,
    one_gather_and_one_reduction_of_a_step_are_exposed,
    parameters_of_the_root_take_no_room,
    nothing_waits_for_reductions_between_microbatches,
    gradients_wait_for_their_own_staging_buffer_only,
    a_gather_comes_after_the_last_readers_of_its_memory,
    two_groups_do_not_serialise,
    gathers_and_reductions_have_groups_of_their_own,
    gathers_of_every_strategy,
    the_order_is_learned_in_the_first_step,
    recomputation_gathers_nothing_more,
    claims_are_balanced,
    frozen_units_are_not_reduced,
)


def each(rank: int) -> None:
    for fn in ON_TWO_RANKS:
        with naming(fn.__name__):
            fn(rank)


def test_structure_on_two_ranks():
    run_ranks(each, 2)

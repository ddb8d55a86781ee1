"""Clones of hot experts: which are chosen, how rows are divided, and where a plan moves weights and gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config import Config, MeshConfig, Strategy, TrainConfig
from hocket.program.check import check
from hocket.program.cloning import Clones, choose, divide, fullest, loads_with, owner_of, rank_loads
from hocket.program.dryrun import dry_run
from hocket.program.lower import build_forward, build_program
from hocket.program.network import hardware_of
from hocket.program.ops import Layout, Program
from hocket.program.shard import Sharding
from hocket.program.simulate import simulate
from hocket.program.stages import costs_of, layout_of, sharding_of
from hocket.program.text import from_json, to_json, to_text
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.clone_choice import unevenness
from hocket.tune.trials import model_costs
from tests.helpers.plans import planned, small
from tests.plan.programs import reordered, with_op, without

COUNTS = st.integers(1, 4).flatmap(
    lambda local: st.integers(2, 4).flatmap(
        lambda ranks: st.tuples(
            st.lists(st.integers(0, 1000), min_size=local * ranks, max_size=local * ranks), st.just(ranks)
        )
    )
)
"""Rows by expert, and the ranks that own these."""


@given(COUNTS, st.integers(0, 3))
def test_clones_are_on_other_ranks_in_seats_of_their_own(drawn: tuple[list[int], int], room: int) -> None:
    counts, ranks = drawn
    clones = choose(counts, ranks, room)
    assert clones == choose(tuple(counts), ranks, room)
    assert len({(c.rank, c.seat) for c in clones}) == len({(c.expert, c.rank) for c in clones}) == len(clones)
    for clone in clones:
        assert owner_of(clone.expert, len(counts), ranks) != clone.rank
        assert 0 <= clone.seat < room
    others = len(counts) - len(counts) // ranks
    if all(counts):
        assert len(clones) == ranks * min(room, others), "no room is left over"


@given(COUNTS, COUNTS, st.integers(1, 3))
def test_a_division_moves_rows_and_loses_none(drawn: tuple[list[int], int], other: Any, room: int) -> None:
    """Also by clones that other rows have chosen."""
    counts, ranks = drawn
    before = (other[0] * len(counts))[: len(counts)]
    clones = choose(before, ranks, room)
    rows = divide(counts, clones, ranks)
    assert all(n >= 0 for n in rows)
    for expert, count in enumerate(counts):
        assert sum(n for n, clone in zip(rows, clones, strict=True) if clone.expert == expert) <= count
    loads = loads_with(counts, clones, ranks)
    assert sum(loads) == sum(counts)
    assert max(loads) <= max(rank_loads(counts, ranks))


def least(counts: list[int], clones: Clones, ranks: int) -> int:
    """Rows of the fullest rank by the best division there is, found by trying all."""
    best = max(rank_loads(counts, ranks))
    for rows in itertools.product(*(range(counts[clone.expert] + 1) for clone in clones)):
        given = [sum(n for n, c in zip(rows, clones, strict=True) if c.expert == e) for e in range(len(counts))]
        if any(given[e] > counts[e] for e in range(len(counts))):
            continue
        loads = rank_loads([count - less for count, less in zip(counts, given, strict=True)], ranks)
        for n, clone in zip(rows, clones, strict=True):
            loads[clone.rank] += n
        best = min(best, max(loads))
    return best


@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=3) | st.lists(st.integers(0, 7), min_size=4, max_size=4),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_division_is_about_the_most_even_one(counts: list[int], seed: int) -> None:
    ranks = 3 if len(counts) == 3 else 2
    before = [(seed * (n + 3)) % 11 + 1 for n in range(len(counts))]
    clones = choose(before, ranks, 1)
    assert max(loads_with(counts, clones, ranks)) <= least(counts, clones, ranks) + len(clones)


def test_ranks_that_divide_their_own_rows_even_out_the_sum() -> None:
    """See Note: [Each rank divides its own rows]."""
    sources = [[400, 10, 20, 30, 15, 25, 60, 40], [300, 90, 20, 10, 45, 15, 20, 100]]
    total = [sum(rows) for rows in zip(*sources, strict=True)]
    clones = choose(total, 4, 1)
    loads = [sum(loads) for loads in zip(*(loads_with(rows, clones, 4) for rows in sources), strict=True)]
    assert fullest(rank_loads(total, 4)) == pytest.approx(2.67, abs=0.01)
    assert fullest(loads) < 1.35


def program(strategy: Strategy, experts: int, prefetch: int = 2, update: str = "end", **layout: Any) -> Program:
    c = planned(merge="on", prefetch=prefetch, update=update, order="1f1b" if "pp" in layout else "auto")
    whole = Layout(kinds=("moe", "dense", "moe", "moe"), ep=2, clones=1, **layout)
    return build_program(whole, 3, c, Sharding(2, experts, strategy))


WAYS = list(itertools.product(("no_shard", "optim", "optim_grads", "optim_grads_params"), (1, 2), ("end", "next_step")))


@pytest.mark.parametrize(("strategy", "experts", "update"), WAYS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_plans_with_clones_are_valid(strategy: Strategy, experts: int, update: str, prefetch: int) -> None:
    for layout in ({}, {"pp": 2}):
        made = program(strategy, experts, prefetch, update, **layout)
        assert check(made) == []
        for seed in range(4):
            dry_run(made, seed)
        forward = build_forward(made, planned(prefetch=prefetch), Sharding(2, experts, strategy))
        assert check(forward, forward_only=True) == []
        dry_run(forward, 0, forward_only=True)
        assert from_json(to_json(made)) == made
        assert "clones=1" in to_text(made)
        for ops in made.ranks:
            counts = {verb: sum((op.verb, op.part) == (verb, "experts") for op in ops) for verb in VERBS}
            layers = len({op.layer for op in ops if (op.verb, op.part) == ("fwd", "experts")})
            gathers = experts > 1 and strategy != "no_shard"
            assert counts["clone"] == (counts["gather"] if gathers else layers)
            assert counts["home"] == (counts["reduce"] if experts > 1 else layers)


VERBS = ("gather", "clone", "home", "reduce")


@pytest.mark.parametrize("experts", [1, 2])
def test_what_is_left_out_or_comes_too_early_is_found(experts: int) -> None:
    made = program("optim_grads_params", experts)
    ops = made.ranks[0]
    for position, op in enumerate(ops):
        if op.verb in ("clone", "home"):
            assert check(without(made, 0, position)), f"{op} can be left out"
            assert caught(without(made, 0, position)), f"{op} can be left out in a dry run"
            assert any(v.invariant == 10 for v in check(with_op(made, 0, position, lane="a2a")))
    homes = [p for p, op in enumerate(ops) if op.verb == "home"]
    last = next(p for p in range(homes[-1], len(ops)) if (ops[p].verb, ops[p].part) == ("reduce", "experts"))
    order = [p for p in range(len(ops)) if p not in (homes[-1], last)]
    behind = reordered(made, 0, [*order[:-1], last, homes[-1], order[-1]])
    assert any("behind its reduce" in str(violation) for violation in check(behind))
    none = replace(made, layout=replace(made.layout, clones=0))
    assert {violation.invariant for violation in check(none)} == {4}


def caught(mutant: Program) -> bool:
    try:
        for seed in range(10):
            dry_run(mutant, seed)
    except ValueError:
        return True
    return False


def settled(clones: int, dp: int = 4, ep: int = 2) -> Config:
    model = small(layers=3, experts=8, expert_ffn=32)
    whole = Config(model=model, mesh=MeshConfig(dp=dp, ep=ep), train=TrainConfig(microbatches=3))
    return planned(
        whole, clones=clones, merge="on", order="1f1b", splits="host", copies="per_expert", update="end",
        strategy="optim_grads_params",
    )  # fmt: skip


def test_exchanges_and_room_have_a_cost() -> None:
    plain, cloned = (simulated(settled(clones)) for clones in (0, 2))
    assert cloned[0] > plain[0], "the room of clones is in slots and state"
    c = settled(2)
    table, one = costs_of(c, hardware()).table, 3 * c.model.hidden * c.model.expert_ffn
    assert table["clone", "experts", "moe"].wire_bytes == 2 * one * c.element_bytes
    assert table["home", "experts", "moe"].wire_bytes == 2 * one * c.wire_bytes
    whole = costs_of(settled(2, dp=2), hardware()).table
    assert whole["home", "experts", "moe"].wire_bytes == 2 * one * 4, "what is summed up at rest travels as it is"


@pytest.mark.parametrize(("purpose", "verb"), [("clones", "clone"), ("clone_grads", "home")])
def test_an_imitated_network_makes_their_exchanges_longer(purpose: Any, verb: str) -> None:
    c, fast = settled(1), costs_of(settled(1), hardware())
    slow = replace(c.train, transport="slow", slow=(f"{purpose}:7s,1MB/s",))
    late = costs_of(replace(c, train=slow), hardware())
    changed_ops = {key[:2] for key, cost in late.table.items() if cost != fast.table[key]}
    assert changed_ops == {(verb, "experts")}


def test_graphs_that_nobody_asked_for_give_way() -> None:
    host = Host(gpus=2, processors=132, memory=2**37, capability=(9, 0))
    asked = {"model.experts": 8, "mesh.dp": 2, "mesh.ep": 2, "overlap.ep.clones": 1}
    found = resolve(changed(Config(), asked), host)
    assert (found.plan.graphs, found.overlap.ep.splits, found.overlap.ep.clones) == ("off", "host", 1)


def test_auto_takes_clones_that_pay_and_says_why() -> None:
    def chosen(given: dict[str, Any]) -> tuple[int, str]:
        asked = {"overlap.ep.clones": "auto", "plan.graphs": "off", **given}
        host = Host(gpus=8, processors=132, memory=139 * 2**30, capability=(9, 0))
        found = resolve(changed(recipe("moe_8gpu"), asked), host)
        decision = next(d for d in found.decisions if d.setting == "overlap.ep.clones")
        assert resolve(found).overlap == found.overlap, "it is chosen once"
        return found.overlap.ep.cloned, decision.reason

    count, reason = chosen({})
    assert count == 1
    assert "times the mean of rows, with 1 clone on each rank" in reason
    assert "of exchanges" in reason
    assert chosen({"mesh.ep": 1}) == (0, "all experts are on every rank")
    count, reason = chosen({"optimizer.name": "muon"})
    assert count == 0
    assert "Muon" in reason
    found = resolve(changed(recipe("tiny"), {"overlap.ep.clones": "auto"}))
    decision = next(d for d in found.decisions if d.setting == "overlap.ep.clones")
    assert (found.overlap.ep.clones, decision.value) == (0, 0)
    assert decision.reason.endswith("that is little")


def hardware() -> Any:
    return hardware_of(settled(0))


def simulated(c: Config) -> tuple[int, float]:
    made = build_program(layout_of(c), c.train.microbatches, c, sharding_of(c))
    timeline = simulate(made, model_costs(c))
    return max(use.peak_bytes for use in timeline.ranks), float(timeline.makespan)


def test_more_ranks_are_less_even_and_more_clones_more() -> None:
    assert unevenness(128, 2, 0) < unevenness(128, 8, 0) < unevenness(128, 32, 0)
    for ranks in (2, 8, 32):
        assert unevenness(128, ranks, 4) <= unevenness(128, ranks, 1) < unevenness(128, ranks, 0)

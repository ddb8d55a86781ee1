"""Contention and the host in the simulator: toy programs with known answers, and what must hold for real ones."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.predict.simulate import KINDS, Overheads, Time, simulate
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op
from hocket.program.shard import Sharding
from tests.helpers.calls import calls
from tests.helpers.costs import Table, published
from tests.helpers.plans import planned
from tests.plan.programs import Case, cases, times, toy

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)


# --- contention


def test_compute_gets_on_slower_as_long_as_communication_runs() -> None:
    ops = [Op("gather", "dense", 0, 0, 0, "gather"), Op("fwd", "attn", 0, 0, 0), Op("fwd", "experts", 0, 0, 0)]
    costs = Table({("gather", "dense"): 6, ("fwd", "attn"): 10, ("fwd", "experts"): 3})
    timeline = simulate(toy(ops), costs, Overheads({"gather": HALF}))
    # 6 seconds at two thirds do 4 of 10; the other 6 go at full speed, and so does the next op
    assert times(timeline) == [(0, 6), (0, 12), (12, 15)]
    assert timeline.ranks[0].busy == 15
    assert timeline.ranks[0].exposed_total == 0


def test_factors_of_kinds_that_run_at_once_add_up() -> None:
    ops = [
        Op("gather", "dense", 0, 0, 0, "gather"),
        Op("reduce", "dense", 0, 0, 0, "reduce"),
        Op("fwd", "attn", 0, 0, 0),
    ]
    costs = Table({("gather", "dense"): 7, ("reduce", "dense"): 4, ("fwd", "attn"): 8})
    timeline = simulate(toy(ops), costs, Overheads({"gather": HALF, "reduce": HALF}))
    # to 4 at half speed: 2 done; to 7 at two thirds: 2 more; the last 4 at full speed
    assert times(timeline)[2] == (0, 11)


def test_an_op_that_starts_beside_communication_is_slow_from_its_start() -> None:
    ops = [Op("fwd", "dispatch", 0, 0, 0, "a2a"), Op("fwd", "attn", 0, 0, 0), Op("fwd", "experts", 0, 0, 0)]
    costs = Table({("fwd", "dispatch"): 100, ("fwd", "attn"): 4, ("fwd", "experts"): 8})
    timeline = simulate(toy(ops), costs, Overheads({"a2a": QUARTER}))
    assert times(timeline) == [(0, 100), (0, 5), (5, 15)]


def test_a_p2p_slows_both_of_its_ends() -> None:
    first = [
        Op("send", "act", 0, 0, lane="send_act"),
        Op("fwd", "attn", 0, 0, 0),
    ]
    second = [Op("recv", "act", 0, 0, lane="recv_act"), Op("fwd", "attn", 0, 0, 1)]
    costs = Table({("recv", "act"): 3, ("fwd", "attn"): 4})
    timeline = simulate(toy(first, second), costs, Overheads({"pp": HALF}))
    assert times(timeline, 0)[1] == times(timeline, 1)[1] == (0, 5)


def test_only_a_kind_with_a_factor_slows() -> None:
    ops = [Op("gather", "dense", 0, 0, 0, "gather"), Op("fwd", "attn", 0, 0, 0)]
    costs = Table({("gather", "dense"): 6, ("fwd", "attn"): 10})
    assert times(simulate(toy(ops), costs, Overheads({"a2a": HALF}))) == [(0, 6), (0, 10)]


# --- the host


def test_ops_start_when_the_host_comes_to_them_and_end_when_it_is_through() -> None:
    ops = [Op("fwd", "attn", 0, 0, 0), Op("fwd", "experts", 0, 0, 0), Op("gather", "dense", 0, 0, 0, "gather")]
    costs = Table({("fwd", "attn"): 1, ("fwd", "experts"): 9, ("gather", "dense"): 2})
    issue = {("fwd", "attn", "moe"): 4, ("fwd", "experts", "moe"): 3}
    timeline = simulate(toy(ops), costs, Overheads(issue=issue))
    # attn is there at once but lasts until its last kernel is issued; the gather has to wait for both
    assert times(timeline) == [(0, 4), (4, 13), (7, 9)]


def test_the_host_stands_still_at_a_dispatch_until_the_counts_are_known() -> None:
    ops = [
        Op("fwd", "attn", 0, 0, 0),
        Op("fwd", "dispatch", 0, 0, 0, "a2a", deps=(0,)),
        Op("wgrad", "experts", 0, 0, 0),
        Op("fwd", "experts", 0, 0, 0),
    ]
    costs = Table({("fwd", "attn"): 5, ("fwd", "dispatch"): 9, ("wgrad", "experts"): 2, ("fwd", "experts"): 2})
    assert times(simulate(toy(ops), costs)) == [(0, 5), (5, 14), (5, 7), (7, 9)]
    # counts arrive 3 after the start of the dispatch: compute has nothing to do until then
    timeline = simulate(toy(ops), costs, Overheads(counts=3))
    assert times(timeline) == [(0, 5), (5, 14), (8, 10), (10, 12)]


# --- real programs


@settings(max_examples=40, deadline=None)
@given(case=cases(3), seed=st.integers(0, 2**32))
def test_no_overheads_changes_nothing_and_overheads_keeps_order_and_work(case: Case, seed: int) -> None:
    built = case.build()
    keys = sorted({(op.verb, op.part) for _, _, op in built})
    costs = Table({key: Fraction((seed >> n) % 7, 3) for n, key in enumerate(keys)})
    plain = simulate(built, costs)
    assert simulate(built, costs, Overheads(dict.fromkeys(KINDS, 0))) == plain
    factors: dict[str, Fraction] = {kind: Fraction((seed >> n) % 4, 4) for n, kind in enumerate(KINDS)}
    slow = simulate(built, costs, Overheads(factors, counts=Fraction(1, 9)))
    most = 1 + sum(factors.values())
    assert slow.makespan >= max((use.busy for use in plain.ranks), default=0)
    for rank, (ops, spans) in enumerate(zip(built.ranks, slow.spans, strict=True)):
        lane_end: dict[str, Time] = {}
        for op, span in zip(ops, spans, strict=True):
            assert span.start >= lane_end.get(op.lane, 0)
            assert all(spans[dep].end <= span.start for dep in op.deps)
            lane_end[op.lane] = span.end
            duration = 0 if op.verb == "send" else costs.of(op).seconds
            assert duration <= span.end - span.start <= duration * (most if op.lane == "compute" else 1)
        use = slow.ranks[rank]
        assert use.busy + use.exposed_total + use.idle == slow.makespan


def test_compute_slows_by_the_time_that_it_met_communication() -> None:
    """With one factor for all kinds, what compute lost is the factor's share of its time beside communication."""
    layout = Layout(kinds=("moe",) * 4, ep=2)
    built = build_program(layout, 4, planned(merge="on"), Sharding(dense=2))
    costs = Table({**published(Fraction(0)), ("gather", "dense"): Fraction(1, 3), ("reduce", "dense"): Fraction(1, 5)})
    plain, slow = simulate(built, costs), simulate(built, costs, Overheads({"a2a": QUARTER}))
    beside: Time = 0
    for op, span in zip(built.ranks[0], slow.spans[0], strict=True):
        if op.lane == "a2a":
            spans = [s for o, s in zip(built.ranks[0], slow.spans[0], strict=True) if o.lane == "compute"]
            beside += sum(max(0, min(s.end, span.end) - max(s.start, span.start)) for s in spans)
    assert slow.ranks[0].busy - plain.ranks[0].busy == beside * (1 - 1 / (1 + QUARTER)) > 0


@pytest.mark.parametrize(
    "overheads", [Overheads(), Overheads(dict.fromkeys(KINDS, 0.1), counts=0.1)], ids=["no", "full"]
)
def test_simulation_grows_with_the_ops_and_not_faster(overheads: Overheads) -> None:
    costs = Table({key: float(value) for key, value in published(Fraction(1)).items()})
    layout = Layout(kinds=("moe",) * 8, pp=4, chunks=2, ep=8)
    small, large = (build_program(layout, m, planned(chunks=2), Sharding(dense=8)) for m in (4, 32))
    few, many = (calls(lambda p=program: simulate(p, costs, overheads)) for program in (small, large))
    assert few < 80 * len(small)
    assert many / few < 1.2 * len(large) / len(small)

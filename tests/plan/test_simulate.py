"""The simulator: toy programs with known answers, closed forms, and properties of real programs."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.predict.simulate import KINDS, Time, simulate
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding
from tests.helpers.costs import Table, published
from tests.helpers.plans import planned
from tests.plan.programs import sample, times, toy

# --- toys


def test_two_ops_on_two_lanes() -> None:
    ops = [Op("gather", "dense", 0, 0, 0, "gather"), Op("fwd", "attn", 0, 0, 0, deps=(0,))]
    timeline = simulate(toy(ops), Table({("gather", "dense"): 3, ("fwd", "attn"): 2}))
    assert times(timeline) == [(0, 3), (3, 5)]
    use = timeline.ranks[0]
    assert (use.busy, use.exposed_total, use.idle, timeline.makespan) == (2, 3, 0, 5)
    assert use.exposed == {"a2a": 0, "pp": 0, "gather": 3, "reduce": 0}


def test_ops_of_one_lane_run_in_list_order_and_lanes_overlap() -> None:
    ops = [
        Op("fwd", "attn", 0, 0, 0),
        Op("fwd", "dispatch", 0, 0, 0, "a2a"),
        Op("fwd", "experts", 0, 0, 0),
        Op("fwd", "combine", 0, 0, 0, "a2a", deps=(2,)),
        Op("fwd", "head", 0, 0, deps=(3,)),
    ]
    costs = {
        ("fwd", "attn"): 4,
        ("fwd", "dispatch"): 6,
        ("fwd", "experts"): 1,
        ("fwd", "combine"): 2,
        ("fwd", "head"): 3,
    }
    timeline = simulate(toy(ops), Table(costs))
    assert times(timeline) == [(0, 4), (0, 6), (4, 5), (6, 8), (8, 11)]
    assert timeline.ranks[0].busy == 8
    assert timeline.ranks[0].exposed["a2a"] == 3


def test_time_of_several_kinds_counts_for_the_one_that_ends_last() -> None:
    ops = [
        Op("fwd", "dispatch", 0, 0, 0, "a2a"),
        Op("gather", "dense", 0, 0, 0, "gather"),
        Op("reduce", "dense", 0, 0, 0, "reduce"),
        Op("fwd", "attn", 0, 0, 0),
        Op("step", "all", deps=(1,)),
    ]
    costs = {("fwd", "dispatch"): 7, ("gather", "dense"): 9, ("reduce", "dense"): 4, ("fwd", "attn"): 2}
    use = simulate(toy(ops), Table({**costs, ("step", "all"): 1})).ranks[0]
    assert use.exposed == {"a2a": 0, "pp": 0, "gather": 7, "reduce": 0}
    assert (use.busy, use.exposed_total, use.idle) == (3, 7, 0)


def test_p2p_starts_when_the_send_is_posted_and_the_recv_heads_its_lane() -> None:
    first = [
        Op("fwd", "attn", 0, 0, 0),
        Op("send", "act", 0, 0, lane="send_act", deps=(0,)),
        Op("fwd", "attn", 1, 0, 0),
        Op("send", "act", 1, 0, lane="send_act", deps=(2,)),
    ]
    second = [
        Op("recv", "act", 0, 0, lane="recv_act"),
        Op("recv", "act", 1, 0, lane="recv_act"),
        Op("fwd", "experts", 0, 0, 1, deps=(0,)),
        Op("fwd", "experts", 1, 0, 1, deps=(1,)),
    ]
    costs = {("fwd", "attn"): 5, ("recv", "act"): 7, ("send", "act"): 1000, ("fwd", "experts"): 1}
    timeline = simulate(toy(first, second), Table(costs))
    assert times(timeline, 0) == [(0, 5), (5, 5), (5, 10), (10, 10)]
    # the second p2p transfer's data is ready at 10, but its lane is still busy with the first one
    assert times(timeline, 1) == [(5, 12), (12, 19), (12, 13), (19, 20)]
    late = [*second[:1], second[1]._replace(deps=(2,)), *second[2:]]
    late = [late[0], late[2]._replace(deps=(0,)), late[1]._replace(deps=(1,)), late[3]._replace(deps=(2,))]
    assert times(simulate(toy(first, late), Table(costs)), 1) == [(5, 12), (12, 13), (13, 20), (20, 21)]


def test_ranks_that_wait_on_different_lanes_in_opposite_list_order_finish() -> None:
    left = [Op("recv", "grad", 0, 0, lane="recv_grad"), Op("send", "act", 0, 0, lane="send_act")]
    right = [Op("recv", "act", 0, 0, lane="recv_act"), Op("send", "grad", 0, 0, lane="send_grad", deps=(0,))]
    timeline = simulate(toy(left, right), Table({("recv", "act"): 2, ("recv", "grad"): 3}))
    assert times(timeline, 0) == [(2, 5), (0, 0)]
    assert times(timeline, 1) == [(0, 2), (2, 2)]


def test_all_ranks_take_the_optimizer_step_together() -> None:
    ranks = [[Op("fwd", "attn", 0, 0, rank), Op("step", "all")] for rank in range(2)]
    ranks[1].insert(0, Op("fwd", "experts", 0, 0, 1))
    timeline = simulate(toy(*ranks), Table({("fwd", "attn"): 1, ("fwd", "experts"): 4, ("step", "all"): 2}))
    assert times(timeline, 0)[-1] == times(timeline, 1)[-1] == (5, 7)
    assert timeline.ranks[0].idle == 4


def test_a_program_that_cannot_finish_names_where_it_stops() -> None:
    crossed = [
        [
            Op("fwd", "attn", 0, 0, 0),
            Op("recv", "grad", 0, 0, lane="recv_grad"),
            Op("send", "act", 0, 0, lane="send_act", deps=(1,)),
        ],
        [Op("recv", "act", 0, 0, lane="recv_act"), Op("send", "grad", 0, 0, lane="send_grad", deps=(0,))],
    ]
    first = r"rank 0 lane recv_grad: 'recv grad m0 c0' \(position 1\)"
    with pytest.raises(ValueError, match=f"never finishes.*; stuck at {first}"):
        simulate(toy(*crossed), Table({}))
    with pytest.raises(ValueError, match=r"rank 1 waits at 'recv act m0 c0' for a send that rank 0 does not have"):
        simulate(toy([], [Op("recv", "act", 0, 0, lane="recv_act")]), Table({}))


def test_an_empty_program_takes_no_time() -> None:
    timeline = simulate(toy([]), Table({}, fixed=5))
    assert timeline.makespan == 0
    assert timeline.ranks[0].peak_bytes == 5


def test_peak_memory_counts_values_and_saved_state_for_their_lifetimes() -> None:
    ops = [
        Op("fwd", "attn", 0, 0, 0),  # 0..1 value 10; saves 100 from 1
        Op("fwd", "experts", 0, 0, 0, frees=(0,)),  # 1..2 value 20; saves 200 from 2; drops 10 at 2
        Op("bwd", "experts", 0, 0, 0, frees=(1,)),  # 2..3 value 7; drops 20 and 200 at 3, keeps 50 for wgrad
        Op("wgrad", "experts", 0, 0, 0),  # 3..4 drops 50
        Op("bwd", "attn", 0, 0, 0, frees=(2,)),  # 4..5 drops 100
    ]
    everything: dict[tuple[str, str], Time] = {(op.verb, op.part): 1 for op in ops}
    output = {("fwd", "attn"): 10, ("fwd", "experts"): 20, ("bwd", "experts"): 7}
    saved = {("fwd", "attn"): 100, ("fwd", "experts"): 200, ("bwd", "experts"): 50, ("bwd", "attn"): 999}
    table = Table(everything, output, saved, fixed=1000)
    assert simulate(toy(ops), table).ranks[0].peak_bytes == 1000 + 100 + 200 + 20 + 7
    table.saved = {("fwd", "attn"): 100, ("bwd", "experts"): 500}
    assert simulate(toy(ops), table).ranks[0].peak_bytes == 1000 + 100 + 500 + 7


def test_peak_memory_counts_gradients_from_their_first_wgrad_on() -> None:
    def peak(microbatches: int) -> int:
        ops = [
            op
            for m in range(microbatches)
            for op in (Op("fwd", "attn", m, 0, 0), Op("bwd", "attn", m, 0, 0), Op("wgrad", "attn", m, 0, 0))
        ]
        everything: dict[tuple[str, str], Time] = {(op.verb, op.part): 1 for op in ops}
        table = Table(everything, saved={("fwd", "attn"): 100}, grads={("wgrad", "attn"): 30})
        return simulate(toy([*ops, Op("step", "all")]), table).ranks[0].peak_bytes

    assert peak(1) == 100
    assert peak(2) == peak(3) == 100 + 30


# --- closed forms


DENSE: dict[tuple[str, str], Time] = {
    ("fwd", "attn"): Fraction(7, 9), ("bwd", "attn"): Fraction(11, 5), ("wgrad", "attn"): Fraction(11, 20),
    ("fwd", "mlp"): Fraction(14, 9), ("bwd", "mlp"): Fraction(11, 10), ("wgrad", "mlp"): Fraction(11, 20),
}  # fmt: skip
LAYER = sum(Fraction(cost) for cost in DENSE.values())
LATENCY = LAYER - Fraction(DENSE["wgrad", "attn"])
"""From a layer's input to the gradient it sends: attention's weight gradient runs behind the send."""


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_1f1b_has_the_textbook_makespan_bubble_and_memory(pp: int, microbatches: int) -> None:
    plan = planned(order="1f1b", merge="off", defer_wgrad="off")
    built = build_program(Layout(kinds=("dense",) * pp, pp=pp), microbatches, plan, Sharding())
    timeline = simulate(built, Table(DENSE, saved={("fwd", "attn"): 1}))
    assert timeline.makespan == microbatches * LAYER + (pp - 1) * LATENCY
    for rank, use in enumerate(timeline.ranks):
        assert use.busy == microbatches * LAYER
        assert use.idle == (pp - 1) * LATENCY
        assert use.exposed_total == 0
        assert use.peak_bytes == min(pp - rank, microbatches)


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 8)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(pp: int, chunks: int, microbatches: int) -> None:
    plan = planned(order="interleaved", chunks=chunks, merge="off", defer_wgrad="off")
    layout = Layout(kinds=("dense",) * pp * chunks, pp=pp, chunks=chunks)
    timeline = simulate(build_program(layout, microbatches, plan, Sharding()), Table(DENSE))
    assert timeline.makespan == microbatches * chunks * LAYER + (pp - 1) * LATENCY


def test_merging_without_a_pipeline_hides_every_all_to_all_but_the_first_and_the_last() -> None:
    microbatches, layers = 5, 3
    plan = planned(merge="on", defer_wgrad="on")
    built = build_program(Layout(kinds=("moe",) * layers, ep=2), microbatches, plan, Sharding())
    timeline = simulate(built, Table(published(p2p=Fraction(0))))
    compute = microbatches * layers * 6
    assert timeline.ranks[0].busy == compute
    # the first forward exposes both all-to-alls; of the last backward's, weight gradients (1.0 and 0.7, one layer
    # earlier) hide dispatch and all but the first combine
    assert timeline.ranks[0].exposed["a2a"] == layers * Fraction(14, 10) + Fraction(7, 10)
    alone = build_program(built.layout, microbatches, planned(plan, merge="off", order="sequential"), Sharding())
    assert simulate(alone, Table(published(p2p=Fraction(0)))).makespan > timeline.makespan


# --- real programs


@st.composite
def cases(draw: st.DrawFn) -> Program:
    pp = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 3))
    kind: st.SearchStrategy[Literal["dense", "moe"]] = st.sampled_from(["dense", "moe"])
    kinds = draw(st.lists(kind, min_size=pp * chunks, max_size=pp * chunks + 4))
    plan = planned(
        chunks=chunks,
        merge=draw(st.sampled_from(["auto", "off"])),
        defer_wgrad=draw(st.sampled_from(["auto", "off"])),
        defer_layers=draw(st.sampled_from([0, 1, -1])),
        layer_order=draw(st.sampled_from(["literature", "early_release", "wgrad_last"])),
    )
    layout = Layout(kinds=tuple(kinds), pp=pp, chunks=chunks, ep=draw(st.sampled_from([1, 2])))
    return build_program(layout, draw(st.integers(1, 6)), plan, Sharding(dense=2))


@settings(max_examples=40, deadline=None)
@given(built=cases(), seed=st.integers(0, 2**32))
def test_every_timeline_keeps_lanes_and_dependencies_and_accounts_for_all_time(built: Program, seed: int) -> None:
    keys = sorted({(op.verb, op.part) for _, _, op in built})
    costs = Table({key: Fraction((seed >> n) % 7, 3) for n, key in enumerate(keys)})
    timeline = simulate(built, costs)
    for rank, (ops, spans) in enumerate(zip(built.ranks, timeline.spans, strict=True)):
        lane_end: dict[str, Time] = {}
        for op, span in zip(ops, spans, strict=True):
            assert span.start >= lane_end.get(op.lane, 0)
            assert all(spans[dep].end <= span.start for dep in op.deps)
            assert span.end - span.start == (0 if op.verb == "send" else costs.of(op).seconds)
            lane_end[op.lane] = span.end
        use = timeline.ranks[rank]
        assert use.busy + use.exposed_total + use.idle == timeline.makespan
        assert sum(use.exposed[kind] for kind in KINDS) == use.exposed_total
        assert use.busy == sum(s.end - s.start for op, s in zip(ops, spans, strict=True) if op.lane == "compute")
    rounded = simulate(built, Table({key: float(value) for key, value in costs.times.items()}))
    assert rounded.makespan == pytest.approx(float(timeline.makespan))


def test_activations_never_exceed_those_planned_to_be_in_flight() -> None:
    layout = Layout(kinds=("moe",) * 16, pp=4, chunks=2, ep=2)
    built = build_program(layout, 16, planned(chunks=2), Sharding())
    table = Table(published(Fraction(1)), saved={("fwd", "attn"): 1})
    for rank, use in enumerate(simulate(built, table).ranks):
        layers = 2
        assert built.in_flight[rank] * layers - layers < use.peak_bytes <= built.in_flight[rank] * layers


def test_times_do_not_depend_on_where_values_are_dropped() -> None:
    for n, case in enumerate(sample(20, seed=3)):
        table = Table({key: Fraction(1 + (n * len(key[0]) + 3 * len(key[1])) % 7) for key in published(Fraction(1))})
        whole, quick = (
            build_program(case.layout, case.microbatches, case.config, case.sharding, frees) for frees in (True, False)
        )
        assert simulate(whole, table).makespan == simulate(quick, table).makespan

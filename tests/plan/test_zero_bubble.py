"""Zero-bubble orders: small ones written out, the bubble that is left, what they hold, and where a V sends things."""

from __future__ import annotations

from itertools import product

import pytest

from hocket.predict.simulate import simulate
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import Layout, Program
from hocket.program.pipeline import Order, Times, in_flight, one_f_one_b, zb_h1, zb_v
from hocket.program.shard import Sharding
from tests.helpers.costs import Table
from tests.helpers.plans import planned

SIZES = tuple(product(range(1, 9), (1, 2, 3, 4, 7, 8, 16, 32)))
UNIT = Times(1, 1, 1)
UNITS = {(verb, part): 1 for verb in ("fwd", "bwd", "wgrad") for part in ("mlp",)}


def text(order: Order) -> list[str]:
    return [" ".join(map(str, steps)) for steps in order]


def length(order: Order) -> int | None:
    """Units until all is done, if every step takes one and p2p transfers take none; None if the order deadlocks."""
    pp = len(order)
    stages = pp * (1 + max(step.fwd[1] for step in order[0] if step.fwd))
    layout = Layout(("dense",) * stages, pp=pp, chunks=stages // pp, turning=stages > pp)
    done: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                item = step.fwd or step.bwd or step.wgrad
                assert item is not None
                m, stage = item[0], layout.stage(rank, item[1])
                verb = "F" if step.fwd else "B" if step.bwd else "W"
                needs = {
                    "F": [("F", m, stage - 1)],
                    "B": [("F", m, stage), ("B", m, stage + 1)],
                    "W": [("B", m, stage)],
                }
                wanted = [need for need in needs[verb] if 0 <= need[2] < stages]
                if any(need not in done for need in wanted):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in wanted)]) + 1
                done[verb, m, stage] = clock[rank]
                at[rank] += 1
                moved = True
    return max(clock) if all(at[r] == len(order[r]) for r in range(pp)) else None


def test_small_orders_written_out() -> None:
    assert text(zb_h1(2, 3)) == [
        "F0.0 F1.0 [B0.0] W0.0 F2.0 [B1.0] W1.0 [B2.0] W2.0",
        "F0.0 [B0.0] F1.0 [B1.0] W0.0 F2.0 [B2.0] W1.0 W2.0",
    ]
    assert text(zb_v(2, 3)) == [
        "F0.0 F1.0 F2.0 F0.1 [B0.1] F1.1 [B1.1] W0.1 W1.1 [B0.0] W0.0 [B1.0] F2.1 [B2.1] W1.0 W2.1 [B2.0] W2.0",
        "F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] [B0.0] [B1.1] [B1.0] F2.1 W0.0 W0.1 W1.0 W1.1 [B2.1] [B2.0] W2.0 W2.1",
    ]


@pytest.mark.parametrize("make", [zb_h1, zb_v])
def test_every_size_is_complete_legal_and_in_ascending_order(make: object) -> None:
    for pp, microbatches in SIZES:
        order = zb_h1(pp, microbatches) if make is zb_h1 else zb_v(pp, microbatches)
        chunks = 1 if make is zb_h1 else 2
        assert length(order) is not None, (pp, microbatches)
        for steps in order:
            for kind in ("fwd", "bwd", "wgrad"):
                items = [getattr(step, kind) for step in steps if getattr(step, kind)]
                assert sorted(items) == sorted(product(range(microbatches), range(chunks)))
                for chunk in range(chunks):
                    mine = [m for m, c in items if c == chunk]
                    assert mine == sorted(mine)


def test_the_bubble_that_is_left() -> None:
    """Against 3 * (pp - 1) units of 1F1B, whose weight gradients are part of a backward of two units."""
    for pp, microbatches in SIZES:
        if microbatches >= pp:
            assert length(zb_h1(pp, microbatches)) == 3 * microbatches + pp - 1
            found = length(zb_v(pp, microbatches, UNIT, spare=0))
            assert found is not None
            assert 0 <= found - 6 * microbatches - (pp - 1) <= 3, (pp, microbatches)


def test_they_hold_no_more_than_1f1b() -> None:
    for pp, microbatches in SIZES:
        most = in_flight(one_f_one_b(pp, 1, microbatches, merge=False)[0])
        assert [in_flight(steps) for steps in zb_h1(pp, microbatches)] == [
            in_flight(steps) for steps in one_f_one_b(pp, 1, microbatches, merge=False)
        ]
        assert max(held(zb_h1(pp, microbatches))) <= most
        assert max(held(zb_v(pp, microbatches, spare=0))) <= 2 * most  # of half as many layers
        assert max(held(zb_v(pp, microbatches))) <= 2 * most + 2


def held(order: Order) -> list[int]:
    """Most chunk activations of each rank, from forward to weight gradient."""
    found = []
    for steps in order:
        live = peak = 0
        for step in steps:
            live += (step.fwd is not None) - (step.wgrad is not None)
            peak = max(peak, live)
        found.append(peak)
    return found


def build(pp: int, microbatches: int, order: str, layers: int = 0, ep: int = 1) -> Program:
    chunks = {"zb_v": 2, "interleaved": 2}.get(order, 1)
    layout = Layout(
        (("dense", "moe") if ep > 1 else ("dense",)) * (layers or pp * chunks),
        pp=pp, chunks=chunks, ep=ep, turning=order == "zb_v",
    )  # fmt: skip
    plan = planned(order=order, chunks=chunks, merge="off")  # type: ignore[arg-type]
    return build_program(layout, microbatches, plan, Sharding())


def test_the_simulator_finds_the_same_bubble() -> None:
    """Programs of the real lowering: a dense layer per chunk, whose MLP takes a unit forward, back and for weights."""
    for pp, microbatches in ((2, 4), (4, 8), (4, 16)):
        classic = simulate(build(pp, microbatches, "1f1b"), Table(UNITS)).makespan
        h1 = simulate(build(pp, microbatches, "zb_h1"), Table(UNITS)).makespan
        v = simulate(build(pp, microbatches, "zb_v"), Table(UNITS)).makespan  # of another ratio than it was made for
        assert h1 == 3 * microbatches + pp - 1
        assert v == length(zb_v(pp, microbatches))
        assert 3 * microbatches + 2 * (pp - 1) <= classic <= 3 * (microbatches + pp - 1)


def test_a_v_goes_to_the_last_rank_and_back() -> None:
    layout = Layout(("dense",) * 8, pp=4, chunks=2, turning=True)
    assert [layout.stage(rank, 0) for rank in range(4)] == [0, 1, 2, 3]
    assert [layout.stage(rank, 1) for rank in range(4)] == [7, 6, 5, 4]
    assert all(layout.owner(layout.stage(rank, chunk)) == (rank, chunk) for rank in range(4) for chunk in (0, 1))
    ends = [(rank, chunk) for rank in range(4) for chunk in (0, 1) if layout.is_first(rank, chunk)]
    ends += [(rank, chunk) for rank in range(4) for chunk in (0, 1) if layout.is_last(rank, chunk)]
    assert ends == [(0, 0), (0, 1)]
    assert layout.after(3, 0) == (3, 1)
    assert not any((layout.sends(3, 0, "act"), layout.receives(3, 1, "act")))
    assert not any((layout.sends(3, 1, "grad"), layout.receives(3, 0, "grad")))


def test_a_v_sends_to_both_neighbours_on_lanes_of_their_own() -> None:
    program = build(3, 4, "zb_v", layers=7)
    found = {(op.lane, program.layout.peer(op, 1)[0]) for op in program.ranks[1] if op.verb == "send"}
    assert found == {("send_act", 2), ("send_act_back", 0), ("send_grad", 0), ("send_grad_back", 2)}
    turn = [op for op in program.ranks[2] if op.verb in ("send", "recv")]
    assert {(op.verb, op.part, op.chunk) for op in turn} == {
        ("recv", "act", 0), ("send", "act", 1), ("recv", "grad", 1), ("send", "grad", 0),
    }  # fmt: skip


def test_embedding_and_head_of_a_v_are_on_the_first_rank() -> None:
    program = build(3, 4, "zb_v", layers=7)
    where = {(op.part, rank) for rank, _, op in program if op.part in ("embed", "head") and op.verb == "fwd"}
    assert where == {("embed", 0), ("head", 0)}
    validation = build_forward(program, planned(order="zb_v", chunks=2), Sharding())
    assert {rank for rank, _, op in validation if op.part == "head"} == {0}


def test_weight_gradients_of_a_step_follow_all_of_its_backward() -> None:
    program = build(2, 4, "zb_h1", layers=3, ep=2)
    for ops in program.ranks:
        for m in range(4):
            mine = [op for op in ops if op.microbatch == m and op.layer >= 0 and op.verb in ("bwd", "wgrad")]
            verbs = [op.verb for op in mine]
            assert verbs == sorted(verbs)  # bwd, then wgrad
            wgrads = [(op.layer, op.part) for op in mine if op.verb == "wgrad"]
            assert [layer for layer, _ in wgrads] == sorted((layer for layer, _ in wgrads), reverse=True)

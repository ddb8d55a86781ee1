"""Pairs at the ends of a merged order: two forwards or two backwards as one step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import pytest

from hocket.predict.simulate import simulate
from hocket.program.check import check
from hocket.program.layer import BACKWARDS, FORWARDS, FULL, Half, chains, pair_undeferred
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Program
from hocket.program.pipeline import Item, Order, in_flight, one_f_one_b
from hocket.program.shard import Sharding
from tests.helpers.costs import Table, published
from tests.helpers.plans import known_of, merged_share, planned
from tests.plan.programs import find, with_op

ONE_RANK = """
(F0.0|F1.0) (F2.0|B0.0) (F3.0|B1.0) [B2.0|B3.0]
"""
TWO_RANKS = """
(F0.0|F1.0) (F0.1|F1.1) (F2.0|F3.0) (F2.1|B0.1) (F3.1|B1.1) [B0.0|B1.0] [B2.1|B3.1] [B2.0|B3.0]
(F0.0|F1.0) (F0.1|F1.1) (F2.0|B0.1) (F3.0|B1.1) (F2.1|B0.0) (F3.1|B1.0) [B2.1|B3.1] [B2.0|B3.0]
"""
MOE = Layout(("moe",) * 4, ep=2)


def build(layout: Layout, microbatches: int, ends: bool = True, **plan: object) -> Program:
    settings = planned(merge="on", merge_ends="on" if ends else "off", chunks=layout.chunks, **plan)  # type: ignore[arg-type]
    return build_program(layout, microbatches, settings, Sharding(2, 2))


def text(order: Order) -> str:
    return "\n" + "\n".join(" ".join(map(str, steps)) for steps in order) + "\n"


# --- orders


def test_the_ends_of_an_order_are_paired() -> None:
    assert text(one_f_one_b(1, 1, 4, ends=True)) == ONE_RANK
    assert text(one_f_one_b(2, 2, 4, ends=True)) == TWO_RANKS


def test_one_more_activation_is_in_flight_and_all_is_merged() -> None:
    for microbatches in range(2, 9):
        order = one_f_one_b(1, 1, microbatches, ends=True)
        assert merged_share(order[0]) == 1
        assert in_flight(order[0]) == min(3, microbatches)
    assert [in_flight(steps) for steps in one_f_one_b(4, 2, 16, group=8)] == [16, 14, 12, 10]
    assert [in_flight(steps) for steps in one_f_one_b(4, 2, 16, group=8, ends=True)] == [17, 15, 13, 11]


def runs(order: Order, chunks: int) -> bool:
    """Whether every rank comes to its end if a step needs all of its inputs before it begins."""
    pp = len(order)
    done: set[tuple[str, int, Item]] = set()
    at = [0] * pp

    def ready(rank: int, verb: str, item: Item) -> bool:
        m, c = item
        if verb == "F":
            return (rank, c) == (0, 0) or ("F", (rank - 1) % pp, (m, c if rank else c - 1)) in done
        last = (rank, c) == (pp - 1, chunks - 1)
        return ("F", rank, item) in done and (
            last or ("B", (rank + 1) % pp, (m, c if rank < pp - 1 else c + 1)) in done
        )

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                halves = [("F", item) for item in step.forwards] + [("B", item) for item in step.backwards]
                if not all(ready(rank, *half) for half in halves):
                    break
                done.update((verb, rank, item) for verb, item in halves)
                at[rank] += 1
                moved = True
    return all(count == len(steps) for count, steps in zip(at, order, strict=True))


def test_every_order_with_pairs_is_legal_and_ascending() -> None:
    for pp, chunks in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        for group, microbatches in itertools.product(range(pp, 2 * pp + 2), range(1, 3 * pp + 2)):
            order = one_f_one_b(pp, chunks, microbatches, group=group, ends=True)
            assert runs(order, chunks), (pp, chunks, group, microbatches)
            for steps in order:
                wanted = {(m, c) for m in range(microbatches) for c in range(chunks)}
                for items in ([i for s in steps for i in s.forwards], [i for s in steps for i in s.backwards]):
                    assert len(items) == len(wanted)
                    assert set(items) == wanted
                    for chunk in range(chunks):
                        assert [m for m, c in items if c == chunk] == list(range(microbatches))


# --- layers


@pytest.mark.parametrize("template", [FORWARDS, BACKWARDS, pair_undeferred(BACKWARDS)])
def test_a_template_has_each_half_in_an_order_that_can_run(template: tuple[Half, ...]) -> None:
    names = [f"{part[0]}{ {'fwd': 'F', 'bwd': 'B', 'wgrad': 'W'}[verb] }{half}" for half, (verb, part) in template]
    others = {"uF1", "uB0", "uB1"}  # those of another layer
    for chain in chains(FULL):
        for half in (0, 1):
            places = [names.index(f"{op}{half}") for op in chain if f"{op}{half}" in set(names) - others]
            assert places == sorted(places)


def test_halves_of_a_layer_take_turns() -> None:
    ops = [str(op) for op in build(MOE, 2).ranks[0] if op.verb in ("fwd", "bwd", "wgrad") and op.layer in (1, 2)]
    start = ops.index("fwd attn m0 c0 l2")
    assert ops[start : start + 10] == [
        "fwd attn m0 c0 l2", "fwd unpermute m1 c0 l1", "fwd attn m1 c0 l2", "fwd dispatch m0 c0 l2",
        "fwd experts m0 c0 l2", "fwd dispatch m1 c0 l2", "fwd combine m0 c0 l2", "fwd experts m1 c0 l2",
        "fwd combine m1 c0 l2", "fwd unpermute m0 c0 l2",
    ]  # fmt: skip


@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_every_all_to_all_but_the_outermost_may_run_beside_compute(microbatches: int) -> None:
    """Neither comes before the other: not in their lanes, and not through anything that they wait for."""
    ops = list(build(MOE, microbatches).ranks[0])
    known = known_of(ops)
    for i, op in enumerate(ops):
        if op.lane == "a2a":
            assert any(
                other.lane == "compute" and other.verb != "release" and known["compute"][i] < j and known["a2a"][j] < i
                for j, other in enumerate(ops)
            ), f"{op} runs beside nothing"


def test_two_halves_share_a_gather() -> None:
    program, apart = build(Layout(("moe",) * 6, ep=2), 2), build(Layout(("moe",) * 6, ep=2), 2, ends=False)
    gathers = [sum(op.verb == "gather" and op.part == "dense" for op in p.ranks[0]) for p in (program, apart)]
    assert gathers[0] <= 11 < gathers[1]  # every layer once forward, and all but the last again backward
    assert all(program.weight_slots[unit] <= slots for unit, slots in apart.weight_slots.items())


def test_gradients_are_reduced_in_order_with_compute_between() -> None:
    """Head and embedding have one gradient slot: between its two writers stands compute that hides the reduce."""
    ops = build(MOE, 4).ranks[0]
    reduced: dict[tuple[str, int], list[int]] = defaultdict(list)
    for op in ops:
        if op.verb == "reduce":
            reduced[op.part, op.layer].append(op.microbatch)
    assert all(found == [0, 1, 2, 3] for found in reduced.values())
    for part in ("head", "embed"):
        first, second = ([str(op) for op in ops].index(f"wgrad {part} m{m} c0 s0") for m in (2, 3))
        between = [op for op in ops[first + 1 : second] if op.lane == "compute" and op.part != "embed"]
        assert any(op.part == part or op.verb == "bwd" for op in between), part


@pytest.mark.parametrize("defer", ["on", "off"])
@pytest.mark.parametrize("kinds", [("moe", "moe"), ("dense", "moe"), ("moe", "dense"), ("dense", "dense")])
def test_programs_with_pairs_keep_every_invariant(kinds: tuple, defer: str) -> None:
    for pp, chunks, group, microbatches in ((1, 1, 0, 3), (2, 1, 0, 5), (2, 2, 4, 6), (3, 2, 0, 7)):
        layout = Layout(kinds * (pp * chunks), pp=pp, chunks=chunks, ep=2)
        assert check(build(layout, microbatches, defer_wgrad=defer, group=group)) == []


def test_the_checker_sees_that_one_half_waits_for_the_other() -> None:
    program = build(MOE, 2)
    dispatch, other = find(program, 0, "fwd dispatch m1 c0 l1"), find(program, 0, "fwd unpermute m0 c0 l0")
    found = check(with_op(program, 0, dispatch, deps=(*program.ranks[0][dispatch].deps, other)))
    assert [violation.invariant for violation in found] == [3]


def test_a_step_of_two_forwards_posts_both_receives_before_it() -> None:
    ops = [str(op) for op in build(Layout(("moe",) * 2, pp=2, ep=2), 5).ranks[0] if op.verb in ("recv", "bwd")]
    first = ops.index("bwd unpermute m3 c0 l0")
    assert max(ops.index("recv grad m3 c0"), ops.index("recv grad m4 c0")) < first
    assert ops.index("recv grad m4 c0") > ops.index("bwd unpermute m1 c0 l0")  # not all at the start


# --- what it gains


EXCHANGES = list(itertools.product(("fwd", "bwd"), ("dispatch", "combine")))


def test_without_a_pipeline_nothing_is_left_exposed() -> None:
    """With all-to-alls half as long as attention and experts, the step takes as long as its compute."""
    head = {("fwd", "head"): Fraction(1), ("bwd", "head"): Fraction(1)}
    costs = Table({**published(Fraction(1)), **head, **dict.fromkeys(EXCHANGES, Fraction(1, 2))})
    for microbatches in (2, 3, 6):
        for ends in (False, True):
            use = simulate(build(MOE, microbatches, ends), costs).ranks[0]
            assert (use.exposed["a2a"] == 0) == ends, (microbatches, use.exposed)


def test_around_a_ring_pairs_need_groups_twice_as_large() -> None:
    """See Note: [Pairs at the ends]."""
    layout = Layout(("moe",) * 8, pp=2, chunks=2, ep=2)
    costs = Table({**published(Fraction(1, 4)), **dict.fromkeys(EXCHANGES, Fraction(3, 4))})
    gain = {
        group: 1 - simulate(build(layout, 8, True, group=group), costs).makespan
        / simulate(build(layout, 8, False, group=group), costs).makespan
        for group in (2, 4)
    }  # fmt: skip
    assert gain[2] < 0 < gain[4], gain


def test_ops_are_the_same_in_another_order() -> None:
    def names(program: Program) -> set[tuple]:
        return {op.key for op in program.ranks[0] if op.verb in ("fwd", "bwd", "wgrad", "reduce")}

    assert names(build(MOE, 4)) == names(build(MOE, 4, ends=False))

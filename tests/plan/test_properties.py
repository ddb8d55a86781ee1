"""Properties of every program that can be built: valid, complete, free of deadlock, bounded in memory."""

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given, settings

from hocket.config.plan import ZERO_BUBBLE
from hocket.program.check import check
from hocket.program.linearize import linearize
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import WHOLE_MATRICES, Layout, Program
from hocket.program.shard import Sharding
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned
from tests.plan.programs import Case, cases


def valid(case: Case, program: Program) -> None:
    assert check(program) == []


def complete(case: Case, program: Program) -> None:
    """Counted apart from the checker: every part of every microbatch, each unit reduced once per microbatch."""
    layout, m = case.layout, case.microbatches
    found = Counter((op.verb, op.part) for _, _, op in program)
    moe, dense = layout.kinds.count("moe"), layout.kinds.count("dense")
    exchanges = moe if layout.ep > 1 else 0
    for part, count in (
        ("embed", 1), ("head", 1), ("attn", moe + dense), ("mlp", dense), ("experts", moe), ("unpermute", moe),
        ("dispatch", moe if layout.makes_rows_later else exchanges), ("combine", exchanges),
    ):  # fmt: skip
        assert found["fwd", part] == found["bwd", part] == m * count
        assert found["wgrad", part] == (m * count if layout.unit(part) else 0)
    p2p = m * (layout.stages - 1) if layout.pp > 1 else 0
    p2p -= m if layout.turning and layout.pp > 1 else 0  # where the last rank hands on to itself
    assert {found[verb, part] for verb in ("send", "recv") for part in ("act", "grad")} == {p2p}
    for unit, layers in (("dense", len(layout.kinds)), ("experts", moe)):
        reduces = 1 if case.sharding.adds_up(unit) else m
        assert found["reduce", unit] == reduces * layers
        assert found["add", unit] == (m - reduces) * layers
    later, both = case.config.overlap.dp.update == "next_step", len(layout.apart)
    assert found["send", "tied"] == found["recv", "tied"] == both
    for unit, count in (("embed", both or 1), ("dense", moe + dense), ("experts", moe), ("head", 1 - layout.tied)):
        assert found["update", unit] == (count if later else 0)
        whole = case.sharding.muon and case.sharding.gathers(unit) and unit in ("dense", "experts")
        assert {found[verb, unit] for verb in WHOLE_MATRICES} == {count if later and whole else 0}
    assert found["step", "norm" if later else "all"] == layout.pp


def free_of_deadlock(case: Case, program: Program) -> None:
    """There is a global order, and it is one of every rank's lanes."""
    for seed in (None, 0, 1):
        order = linearize(program, seed)
        assert sorted(order) == [(rank, position) for rank, position, _ in program]
        last: dict[tuple[int, str], int] = {}
        for rank, position in order:
            lane = (rank, program.ranks[rank][position].lane)
            assert last.get(lane, -1) < position
            last[lane] = position


def rows_come_back_before_the_exchange_after_the_next(case: Case, program: Program) -> None:
    """Counts arrive in two buffers by turns (`runtime/peer_rows.py`), and experts are the last to read them."""
    for ops in program.ranks:
        exchanges = [op for op in ops if op.lane == "a2a" and op.verb == "fwd"]
        back = {op.key[2:]: i for i, op in enumerate(exchanges) if op.part == "combine"}
        there = [(op.key[2:], i) for i, op in enumerate(exchanges) if op.part == "dispatch"]
        assert all(back[key] < after for (key, _), (_, after) in zip(there, there[2:], strict=False))


def memory_is_bounded(case: Case, program: Program) -> None:
    for rank, ops in enumerate(program.ranks):
        assert _in_flight(program, rank) <= program.in_flight[rank]
        weights, gradients = Counter[str](), Counter[str]()
        held: set[tuple] = set()
        for op in ops:
            if op.verb in ("gather", "release"):
                weights[op.part] += 1 if op.verb == "gather" else -1
                assert weights[op.part] <= program.weight_slots[op.part]
            elif op.verb in ("wgrad", "add", "reduce"):
                unit = case.layout.unit(op.part) or op.part
                held.symmetric_difference_update(
                    {(unit, op.slot)} if op.verb != "wgrad" or (unit, op.slot) not in held else ()
                )
                gradients[unit] = sum(name == unit for name, _ in held)
                assert gradients[unit] <= program.grad_slots[unit]
        assert not any(weights.values())
        assert not held


def _in_flight(program: Program, rank: int) -> int:
    """Most chunks at once whose forward has begun and whose backward has not ended."""
    live: set[tuple[int, int]] = set()
    left = Counter((op.microbatch, op.chunk) for op in program.ranks[rank] if op.verb == "bwd" and op.layer >= 0)
    most = 0
    for op in program.ranks[rank]:
        item = (op.microbatch, op.chunk)
        if op.verb == "fwd" and op.layer >= 0:
            live.add(item)
            most = max(most, len(live))
        elif op.verb == "bwd" and op.layer >= 0:
            left[item] -= 1
            if not left[item]:
                live.discard(item)
    return most


AHEAD = 3
"""Received tensors that may be there beyond those in use: one posted ahead, and some not yet known to be read. Where
one step reads two, both are in use, and both are posted ahead."""


def received_values_do_not_pile_up(case: Case, program: Program) -> None:
    """A received activation stays for its chunk's backward, a received gradient is soon dropped."""
    late = (
        2 * case.layout.pp if case.config.plan.order in (*ZERO_BUBBLE, "merged_v") else 0
    )  # weight gradients to come, which read them too
    ahead = AHEAD + 2 * (case.config.overlap.ep.merge_ends == "on")
    for rank, ops in enumerate(program.ranks):
        live = Counter[str]()
        for op in ops:
            if op.verb == "recv":
                live[op.part] += 1
                assert live["act"] <= program.in_flight[rank] + ahead, f"{op} of rank {rank}"
                assert live["grad"] <= ahead + late, f"{op} of rank {rank}"
            for p in op.frees:
                if ops[p].verb == "recv":
                    live[ops[p].part] -= 1


PROPERTIES = (
    valid,
    complete,
    free_of_deadlock,
    rows_come_back_before_the_exchange_after_the_next,
    memory_is_bounded,
    received_values_do_not_pile_up,
)


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_program(case: Case) -> None:
    """Has all properties. In one test, for building a program takes longer than to look at it."""
    program = case.build()
    for has_property in PROPERTIES:
        has_property(case, program)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("merge", ["auto", "off"])
def test_what_is_left_for_the_step_does_not_grow(chunks: int, merge: Literal["auto", "off"]) -> None:
    """Values that no lane knows to be free in time stay until the step: there may be a few, not one per microbatch."""

    def left(microbatches: int) -> list[int]:
        layout = Layout(("dense",) + ("moe",) * 7, pp=2, chunks=chunks, ep=2)
        program = build_program(layout, microbatches, planned(chunks=chunks, merge=merge), Sharding(2, 2))
        return [len(ops[-1].frees) for ops in program.ranks]

    assert left(8) == left(32)


@given(cases(most_ranks=3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_right_in_any_legal_order(case: Case) -> None:
    program = case.build()
    for seed in (None, 1, 2, 3):
        dry_run(program, seed)


@given(cases())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_forward_alone_is_right_too(case: Case) -> None:
    program = build_forward(case.build(), case.config, case.sharding)
    assert check(program, forward_only=True) == []
    for seed in (None, 1):
        dry_run(program, seed, forward_only=True)

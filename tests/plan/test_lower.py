"""The lowering passes: where ops land in the list, what they wait for, when values are dropped."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest

from hocket.program.check import check
from hocket.program.expand import defer_past_send
from hocket.program.layer import MERGED, undeferred
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding, Visit, _page
from tests.helpers.plans import known_of, planned

MOE4 = Layout(("moe",) * 4, ep=2)


def build(layout: Layout, microbatches: int, sharding: Sharding | None = None, **plan: object) -> Program:
    return build_program(layout, microbatches, planned(**plan), sharding or Sharding(2, 2))  # type: ignore[arg-type]


def names(
    program: Program, rank: int = 0, verbs: tuple[str, ...] = ("fwd", "bwd", "wgrad", "send", "recv")
) -> list[str]:
    return [str(op) for op in program.ranks[rank] if op.verb in verbs]


def position(program: Program, name: str, rank: int = 0) -> int:
    return next(i for i, op in enumerate(program.ranks[rank]) if str(op).startswith(name))


def test_merged_layer_step_is_the_template() -> None:
    program = build(Layout(("moe", "moe"), ep=2), 2)
    ops = names(program)
    start = ops.index("fwd attn m1 c0 l0") - 1
    assert [" ".join(name.split()[:3]) for name in ops[start : start + 12]] == [
        "bwd combine m0", "fwd attn m1", "bwd experts m0", "fwd dispatch m1", "wgrad experts m0", "bwd dispatch m0",
        "fwd experts m1", "fwd combine m1", "bwd attn m0", "bwd unpermute m0", "wgrad attn m0", "fwd unpermute m1",
    ]  # fmt: skip


def test_at_once_keeps_each_wgrad_with_its_gradient() -> None:
    for order in MERGED.values():
        found = undeferred(order)
        for letter in "ae":
            assert found.index(("wgrad", letter)) == found.index(("bwd", letter)) + 1


def test_expert_parallel_size_one_needs_no_exchange() -> None:
    program = build(Layout(("moe", "dense")), 2)
    assert not any(op.lane == "a2a" for _, _, op in program)
    assert "fwd unpermute m0 c0 l0" in names(program)


def test_a_receive_waits_at_its_first_reader() -> None:
    program = build(Layout(("dense",) * 4, pp=2, chunks=2), 4)
    for rank, ops in enumerate(program.ranks):
        for i, op in enumerate(ops):
            if op.verb == "recv":
                waiting = [j for j, other in enumerate(ops) if i in other.deps]
                assert waiting, f"no op waits for {op} of rank {rank}"
                assert ops[waiting[0]].layer >= 0


def test_sends_and_receives_alternate_one_step_ahead() -> None:
    program = build(Layout(("dense",) * 2, pp=2), 4)
    lane = [str(op) for op in program.ranks[0] if op.lane == "recv_grad"]
    assert lane == ["recv grad m0 c0", "recv grad m1 c0", "recv grad m2 c0", "recv grad m3 c0"]
    lane = [str(op) for op in program.ranks[1] if op.lane == "recv_act"]
    assert lane == ["recv act m0 c0", "recv act m1 c0", "recv act m2 c0", "recv act m3 c0"]
    ops = program.ranks[1]
    assert position(program, "recv act m1", 1) < position(program, "fwd attn m1", 1)
    assert ops[0].verb == "recv" or any(op.verb == "recv" for op in ops[:3])


def test_a_receive_is_posted_two_steps_ahead_at_most() -> None:
    """Where the next forward is three steps away, its receive waits for the step in between to end."""
    program = build(Layout(("dense",) * 4, pp=2, chunks=2), 2, order="sequential", merge="off")
    ops = [name for name in names(program, 1, ("fwd", "bwd", "recv")) if "mlp" not in name and "head" not in name]
    assert ops[ops.index("fwd attn m0 c1 l3") : ops.index("fwd attn m1 c0 l1")] == [
        "fwd attn m0 c1 l3", "bwd attn m0 c1 l3", "recv grad m0 c0", "recv act m1 c0", "bwd attn m0 c0 l1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "parts"), [(0, "all"), *((n, parts) for n in (1, 2, 4, -1) for parts in ("attn", "all"))]
)
def test_deferral_past_the_send(layers: int, parts: str) -> None:
    attention = "attn" if layers < 0 else f"attn:{layers}"
    program = build(Layout(("moe",) * 8, pp=2, ep=2), 4, defer_layers=layers if parts == "all" else attention)
    ops = program.ranks[1]
    send = position(program, "send grad m1", 1)
    late = [op for op in ops[send:] if op.verb == "wgrad" and op.microbatch == 1]
    count = 4 if layers < 0 else min(layers, 4)
    attn = {op.layer for op in late if op.part == "attn"}
    experts = {op.layer for op in late if op.part == "experts"}
    assert attn == set(range(4, 4 + count))
    assert experts == (set(range(4, 4 + count)) if parts == "all" else set())


def test_deferral_leaves_steps_that_send_nothing() -> None:
    ops = [Op("bwd", "attn", 0, 0, 0), Op("wgrad", "attn", 0, 0, 0)]
    assert defer_past_send(ops, Layout(("dense",)), 1, "all") == ops


@pytest.mark.parametrize("count", [0, 1, 3, 9, -1])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_heads_last_weight_gradients_come_last(count: int, chunks: int) -> None:
    program = build(Layout(("dense",) * 4, pp=2, chunks=chunks), 4, chunks=chunks, defer_head=count)
    compute = [op for op in program.ranks[1] if op.lane == "compute" and op.verb in ("fwd", "bwd", "wgrad")]
    found = [op.microbatch for op in compute if op.verb == "wgrad" and op.part == "head"]
    assert found == [0, 1, 2, 3]
    late = 4 if count < 0 else min(count, 4)
    behind = 0 if not late else len([op for op in compute[-late:] if op.part == "head" and op.verb == "wgrad"])
    assert behind == late
    assert late == 4 or compute[-late - 1].part != "head"
    assert all(op.part != "head" for op in program.ranks[0])


def test_rows_that_experts_keep_as_they_came_live_until_their_weight_gradients() -> None:
    """Their memory belongs to the lane that brought them, which must not use it again before."""
    early = {}
    for placed in (False, True):
        ops = build(Layout(("moe",) * 3, ep=2, placed=placed), 3).ranks[0]
        freed = {ops[p].key: i for i, op in enumerate(ops) for p in op.frees}
        late = [i for i, op in enumerate(ops) if op.verb == "wgrad" and op.part == "experts"]
        kept = [[(v, p, *ops[i].key[2:]) for v, p in (("fwd", "dispatch"), ("bwd", "combine"))] for i in late]
        early[placed] = [key for i, keys in zip(late, kept, strict=True) for key in keys if freed[key] < i]
    assert early[False]
    assert not early[True]


def test_uneven_chunks_run_their_rest_alone() -> None:
    program = build(Layout(("moe",) * 5, pp=1, chunks=2, ep=2, bounds=(0, 4, 5)), 2)
    assert sum(op.verb == "fwd" and op.part == "attn" for op in program.ranks[0]) == 2 * 5


def test_gathers_share_the_two_halves_of_the_middle_layer() -> None:
    """With three layers, forward layer 1 and backward layer 1 meet in one merged step: one gather serves both."""
    program = build(Layout(("moe",) * 3, ep=2), 2)
    gathers = [op for op in program.ranks[0] if op.verb == "gather" and op.part == "dense"]
    passes = 2 * 2 * 3
    assert len(gathers) < passes
    assert program.weight_slots["dense"] == 3


@pytest.mark.parametrize("prefetch", range(5))
def test_gathers_run_so_many_layer_passes_ahead(prefetch: int) -> None:
    program = build(Layout(("dense",) * 6), 1, merge="off", prefetch=prefetch)
    ops = [op for op in program.ranks[0] if op.verb == "gather" or (op.verb, op.part) == ("fwd", "attn")]
    for layer in range(6):
        gather = next(i for i, op in enumerate(ops) if (op.verb, op.part, op.layer) == ("gather", "dense", layer))
        reader = next(op.layer for op in ops[gather:] if op.verb == "fwd")
        assert reader == max(0, layer - prefetch)


@pytest.mark.parametrize("order", MERGED)
@pytest.mark.parametrize("prefetch", range(4))
def test_weights_stay_for_both_halves_of_the_middle_layer(order: str, prefetch: int) -> None:
    """One half may begin before the other and end after it: the unit stays until both have read it."""
    names: tuple[Literal["dense", "moe"], ...] = ("dense", "moe")
    for kinds in product(names, repeat=3):
        program = build(Layout(kinds, ep=2), 4, layer_order=order, prefetch=prefetch)
        assert check(program) == []


def test_last_layer_keeps_its_weights_for_the_backward() -> None:
    program = build(Layout(("dense",) * 6), 1, merge="off")
    dense = [op.layer for op in program.ranks[0] if op.verb == "gather" and op.part == "dense"]
    assert dense == [0, 1, 2, 3, 4, 5, 2, 1, 0]  # three slots: the last three layers are still there


def test_optim_grads_gathers_every_unit_once() -> None:
    program = build(MOE4, 4, Sharding(2, 2, "optim_grads"))
    gathers = [(op.part, op.layer) for op in program.ranks[0] if op.verb == "gather"]
    assert len(gathers) == len(set(gathers)) == 4 + 4 + 2
    assert program.weight_slots["dense"] == 4


def test_optim_reduces_every_unit_once_and_adds_up_before() -> None:
    program = build(MOE4, 4, Sharding(2, 2, "optim"), merge="on")
    ops = program.ranks[0]
    assert sum(op.verb == "gather" for op in ops) == 4 + 4 + 2
    for unit, layer in (("dense", 2), ("experts", 0), ("head", -1)):
        found = [(op.verb, op.microbatch) for op in ops if op.part == unit and op.layer == layer and op.slot >= 0]
        found = [entry for entry in found if entry[0] in ("add", "reduce")]
        assert found == [("add", 0), ("add", 1), ("add", 2), ("reduce", 3)]
    assert {op.lane for op in ops if op.verb == "add"} == {"compute"}
    once = build(MOE4, 1, Sharding(2, 2, "optim"))
    assert not any(op.verb == "add" for _, _, op in once)


def test_no_shard_gathers_nothing_and_reduces_once() -> None:
    program = build(MOE4, 3, Sharding(2, 2, "no_shard"))
    assert not program.weight_slots
    assert not any(op.verb in ("gather", "release") for _, _, op in program)
    assert sum(op.verb == "reduce" for _, _, op in program) == 4 + 4 + 2


def test_units_that_nobody_shares_are_reduced_as_they_come() -> None:
    program = build(MOE4, 3, Sharding(dense=2, experts=1, strategy="optim"))
    found = [(op.verb, op.part) for _, _, op in program if op.verb in ("add", "reduce")]
    assert found.count(("reduce", "experts")) == 3 * 4
    assert found.count(("reduce", "dense")) == 4
    assert ("add", "experts") not in found


def test_groups_of_one_are_never_gathered() -> None:
    program = build(MOE4, 2, Sharding(dense=2, experts=1))
    assert "experts" not in program.weight_slots
    assert not any(op.verb == "gather" and op.part == "experts" for _, _, op in program)


def test_no_dependency_inside_a_lane_and_one_per_other_lane() -> None:
    program = build(Layout(("moe",) * 6, pp=2, chunks=1, ep=2), 4)
    for ops in program.ranks:
        for op in ops:
            lanes = [ops[p].lane for p in op.deps]
            assert op.lane not in lanes
            assert len(lanes) == len(set(lanes))


def test_received_rows_are_dropped_by_the_lane_that_owns_them() -> None:
    program = build(MOE4, 3)
    ops = program.ranks[0]
    for op in ops[:-1]:
        for p in op.frees:
            assert ops[p].lane == op.lane


def test_a_program_says_where_nothing_is_merged() -> None:
    assert "nothing is merged" in build(Layout(("dense",) * 8, pp=4, chunks=2), 1).notes[0]


def test_tied_head_shares_the_embedding_unit() -> None:
    program = build(Layout(("dense", "dense"), tied=True), 2)
    assert "head" not in program.weight_slots
    reduces = [str(op) for op in program.ranks[0] if op.verb == "reduce" and op.part == "embed"]
    assert reduces == ["reduce embed m0 c0 s0", "reduce embed m1 c0 s0"]


def test_a_tied_head_on_another_rank_has_the_embedding_unit_too() -> None:
    program = build(Layout(("dense",) * 4, pp=2, tied=True), 2, defer_head=0)
    assert "head" not in program.weight_slots
    assert program.grad_slots["embed"] == 1
    moved = [[str(op) for op in ops if op.verb == "reduce" and op.part == "embed"] for ops in program.ranks]
    assert moved == [["reduce embed m0 c0 s0", "reduce embed m1 c0 s0"]] * 2
    first, last = ([(str(op), op.lane) for op in ops if op.part == "tied"] for ops in program.ranks)
    assert first == [("recv tied c0", "recv_act"), ("send tied c0", "send_grad")]
    assert last == [("send tied c0", "send_act"), ("recv tied c0", "recv_grad")]
    names = [op.verb for op in program.ranks[0]]
    assert names.index("recv", names.index("bwd")) < len(names) - 1 - names[::-1].index("bwd")  # beside the last one
    assert all(ops[-1].chunk == 0 for ops in program.ranks)


@pytest.mark.parametrize("verb", ["send", "step"])
def test_a_tied_gradient_is_that_of_all_microbatches(verb: str) -> None:
    """What sends it waits for the last reduce, and the step adds it."""
    program = build(Layout(("dense",) * 4, pp=2, tied=True), 2)
    ops = list(program.ranks[0])
    position = next(i for i, op in enumerate(ops) if op.verb == verb and (op.part == "tied" or verb == "step"))
    op = ops[position]
    ops[position] = op._replace(deps=()) if verb == "send" else op._replace(chunk=-1)
    broken = replace(program, ranks=(tuple(ops), *program.ranks[1:]))
    assert any(violation.invariant == 5 for violation in check(broken))


@pytest.mark.parametrize("order", sorted(MERGED))
def test_every_all_to_all_of_a_merged_step_may_run_beside_compute(order: str) -> None:
    """Neither comes before the other: not in their lanes, and not through anything that they wait for."""
    program = build(Layout(("moe",) * 4, ep=2), 4, layer_order=order)
    ops = list(program.ranks[0])
    known = known_of(ops)
    first = position(program, "fwd attn m1")
    last = max(i for i, op in enumerate(ops) if op.verb == "fwd" and op.part == "attn")
    exchanges = [i for i, op in enumerate(ops) if op.lane == "a2a" and first < i < last]
    assert len(exchanges) > 30
    for i in exchanges:
        beside = [
            str(op)
            for j, op in enumerate(ops)
            if op.lane == "compute" and op.verb != "release" and known["compute"][i] < j and known["a2a"][j] < i
        ]
        assert beside, f"{ops[i]} runs beside nothing"


def test_gathers_and_reduces_run_beside_compute() -> None:
    program = build(Layout(("dense",) * 6), 3, merge="off")
    ops = list(program.ranks[0])
    known = known_of(ops)
    exposed = []
    for i, op in enumerate(ops):
        if op.lane in ("gather", "reduce") and op.part == "dense":
            beside = (j for j, other in enumerate(ops) if other.lane == "compute" and known["compute"][i] < j)
            if not any(known[op.lane][j] < i for j in beside):
                exposed.append(str(op))
    assert exposed == [], (
        "only the first gather and the last reduce of a step may be exposed, and embed and head are those"
    )


def fewest_gathers(layers: tuple[int, ...], slots: int) -> int:
    """By trying every choice: how often something must be gathered so that each visit finds its unit."""
    states = {frozenset[int](): 0}
    for layer in layers:
        after: dict[frozenset[int], int] = {}
        for held, count in states.items():
            gone = [frozenset()] if layer in held or len(held) < slots else [frozenset({u}) for u in held]
            for unit in gone:
                now = held - unit | {layer}
                after[now] = min(after.get(now, len(layers)), count + (layer not in held))
        states = after
    return min(states.values())


def test_gathers_are_the_fewest_possible() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        slots, layers = draw.randint(1, 4), tuple(draw.choices(range(6), k=14))
        visits = [Visit(("dense", 0, layer), i, i) for i, layer in enumerate(layers)]
        before: dict[int, list[Op]] = defaultdict(list)
        _page(visits, slots, 0, before, defaultdict(list))
        assert sum(map(len, before.values())) == fewest_gathers(layers, slots)

"""The checker: accepts what is right, and names the broken invariant and the ops of what is not."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from hocket.program import layer
from hocket.program.check import INVARIANTS, assert_valid, check
from hocket.program.expand import expand
from hocket.program.layer import template
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import LANES, Layout, Op, Program, Verb
from hocket.program.pipeline import Step
from hocket.program.shard import Sharding
from tests.helpers.calls import calls
from tests.helpers.plans import planned
from tests.plan.programs import find, moved, sample, short_programs, swapped, with_op, with_rank, without

MIXED = Layout(("dense", "moe", "moe", "moe"), pp=2, ep=2)


def base(microbatches: int = 4, layout: Layout = MIXED, **plan: object) -> Program:
    return build_program(layout, microbatches, planned(**plan), Sharding(2, 2))  # type: ignore[arg-type]


def numbers(program: Program) -> set[int]:
    return {violation.invariant for violation in check(program)}


def test_forward_only_programs_are_valid() -> None:
    """Of those of training, `test_properties` knows."""
    for case in sample(10, seed=2):
        program = build_forward(case.build(), case.config, case.sharding)
        assert not check(program, forward_only=True), case
        assert 4 in numbers(program), "without a word that it is one, it lacks its backward"


def test_a_training_program_is_no_validation() -> None:
    assert {v.invariant for v in check(base(), forward_only=True)} >= {2, 4}


def depends(program: Program, rank: int, name: str, producer: str) -> tuple[int, int]:
    """Positions of an op and of one that it depends on, by the start of their names."""
    ops = program.ranks[rank]
    for position, op in enumerate(ops):
        for d in op.deps:
            if str(op).startswith(name) and str(ops[d]).startswith(producer):
                return position, d
    raise AssertionError(f"no {name} depends on a {producer}")


def cut(name: str, producer: str, rank: int = 0) -> Callable[[Program], Program]:
    """Breaks a program by removing a dependency."""

    def breaks(program: Program) -> Program:
        position, d = depends(program, rank, name, producer)
        deps = tuple(p for p in program.ranks[rank][position].deps if p != d)
        return with_op(program, rank, position, deps=deps)

    return breaks


def send_waits_for_gradient(program: Program) -> Program:
    recv = find(program, 0, "recv grad m0")
    program = moved(with_op(program, 0, recv, deps=()), 0, recv, 0)
    send = find(program, 0, "send act m0")
    return with_op(program, 0, send, deps=(*program.ranks[0][send].deps, 0))


def waits_for_itself(program: Program) -> Program:
    return with_op(program, 0, 5, deps=(5,))


def waits_for_nothing(program: Program) -> Program:
    return with_op(program, 0, 5, deps=(100_000,))


def sends_swapped(program: Program) -> Program:
    return swapped(program, 0, find(program, 0, "send act m0"), find(program, 0, "send act m1"))


def drop(name: str, rank: int = 0) -> Callable[[Program], Program]:
    return lambda program: without(program, rank, find(program, rank, name))


def sent_twice(program: Program) -> Program:
    position = find(program, 0, "send act m1")
    return with_op(program, 0, position, microbatch=0)


def sent_too_far(program: Program) -> Program:
    ops = program.ranks[1]
    return with_rank(program, 1, [*ops[:-1], Op("send", "act", 0, 0, lane="send_act"), ops[-1]])


def halves_joined(program: Program) -> Program:
    ops = program.ranks[1]
    combine = next(
        p
        for p, op in enumerate(ops)
        if (op.verb, op.part) == ("bwd", "combine") and ops[p - 1].verb == "fwd" and ops[p - 1].part == "unpermute"
    )
    attn = next(p for p in reversed(range(combine)) if str(ops[p]).startswith("fwd attn"))
    assert ops[attn].microbatch != ops[combine].microbatch
    return with_op(program, 1, combine, deps=(*ops[combine].deps, attn))


def forward_twice(program: Program) -> Program:
    ops = program.ranks[0]
    return with_rank(program, 0, [*ops[:-1], ops[find(program, 0, "fwd mlp m0")], ops[-1]])


def part_of_another_layer(program: Program) -> Program:
    return with_op(program, 0, find(program, 0, "fwd mlp m0"), layer=2)


def wgrad_first(program: Program) -> Program:
    return moved(program, 0, find(program, 0, "wgrad mlp m0"), find(program, 0, "bwd mlp m0"))


def reduce_first(program: Program) -> Program:
    reduce = find(program, 1, "reduce dense m0")
    layer = program.ranks[1][reduce].layer
    return moved(program, 1, reduce, find(program, 1, f"wgrad attn m0 c0 l{layer}"))


def step_in_the_middle(program: Program) -> Program:
    return moved(program, 0, len(program.ranks[0]) - 1, 40)


def step_ignores_reduces(program: Program) -> Program:
    ops = program.ranks[0]
    deps = tuple(p for p in ops[-1].deps if ops[p].verb != "reduce")
    return with_op(program, 0, len(ops) - 1, deps=deps)


def freed_with(program: Program, rank: int, value: str, freer: str) -> Program:
    """The program in which only `freer` drops what `value` made."""
    p = find(program, rank, value)
    ops = [op._replace(frees=tuple(v for v in op.frees if v != p)) for op in program.ranks[rank]]
    q = find(program, rank, freer)
    ops[q] = ops[q]._replace(frees=(*ops[q].frees, p))
    return with_rank(program, rank, ops)


def freed_early(program: Program) -> Program:
    return freed_with(program, 0, "fwd attn m0 c0 l0", "fwd attn m0 c0 l0")


def freed_while_sent(program: Program) -> Program:
    send = find(program, 0, "send act m0")
    value = str(program.ranks[0][program.ranks[0][send].deps[0]])
    return freed_with(program, 0, value, "fwd embed m1")


def freed_by_another_lane(program: Program) -> Program:
    return freed_with(program, 1, "recv act m0", "bwd attn m3")


def freed_twice(program: Program) -> Program:
    p, q = next((op.frees[0], q) for q, op in enumerate(program.ranks[0]) if op.frees and op.lane == "compute")
    later = next(i for i, op in enumerate(program.ranks[0]) if i > q and op.lane == "compute")
    return with_op(program, 0, later, frees=(*program.ranks[0][later].frees, p))


def freed_without_readers(program: Program) -> Program:
    last = len(program.ranks[0]) - 1
    frees = program.ranks[0][last].frees
    return with_op(program, 0, last, frees=(*frees, find(program, 0, "wgrad")))


def slot_too_high(program: Program) -> Program:
    gather = find(program, 0, "gather dense")
    return with_op(program, 0, gather, slot=program.weight_slots["dense"])


def fewer_slots(program: Program) -> Program:
    return replace(program, weight_slots={**program.weight_slots, "dense": 1})


def gathers_miscounted(program: Program) -> Program:
    """The first residency of a unit, from its gather to its release, counted as the third."""
    for verb in ("gather", "release"):
        program = with_op(program, 0, find(program, 0, f"{verb} dense t0 c0 l0"), microbatch=2)
    return program


def released_early(program: Program) -> Program:
    release = find(program, 0, "release dense")
    layer = program.ranks[0][release].layer
    return moved(program, 0, release, find(program, 0, f"fwd attn m0 c0 l{layer}"))


def gradient_slot_taken(program: Program) -> Program:
    reduce = find(program, 1, "reduce dense m0")
    slot = program.ranks[1][reduce].slot
    late = moved(program, 1, reduce, len(program.ranks[1]) - 1)
    assert any(op.slot == slot for op in late.ranks[1][reduce:] if op.verb == "wgrad" and op.part == "attn")
    return late


def gradient_in_two_slots(program: Program) -> Program:
    wgrad = find(program, 0, "wgrad mlp m0")
    count = program.grad_slots["dense"]
    assert count > 1
    return with_op(program, 0, wgrad, slot=(program.ranks[0][wgrad].slot + 1) % count)


def attention_first(program: Program) -> Program:
    ops = program.ranks[1]
    layer = MIXED.layers(1, 0).stop - 1
    attn, side = find(program, 1, f"bwd attn m0 c0 l{layer}"), find(program, 1, f"bwd unpermute m0 c0 l{layer}")
    return with_op(moved(program, 1, attn, side), 1, side, deps=ops[attn].deps[:0])


def microbatches_swapped(program: Program) -> Program:
    ops = list(program.ranks[0])
    for p, op in enumerate(ops):
        if op.verb in ("wgrad", "reduce") and op.layer == 0 and op.microbatch in (0, 1):
            ops[p] = op._replace(microbatch=1 - op.microbatch)
    return with_rank(program, 0, ops)


def products_swapped(program: Program) -> Program:
    """Reduces keep their order, but what is added up without slots would not."""
    ops = list(program.ranks[0])
    for p, op in enumerate(ops):
        if op.verb == "wgrad" and op.layer == 0 and op.microbatch in (0, 1):
            ops[p] = op._replace(microbatch=1 - op.microbatch)
    return with_rank(program, 0, ops)


def compute_among_exchanges(program: Program) -> Program:
    return with_op(program, 0, find(program, 0, "fwd mlp m1"), lane="a2a")


def exchange_among_compute(program: Program) -> Program:
    return with_op(program, 0, find(program, 0, "fwd dispatch m1"), lane="compute")


def cap_lowered(program: Program) -> Program:
    return replace(program, in_flight=(program.in_flight[0] - 1, *program.in_flight[1:]))


def freed_late(program: Program) -> Program:
    p, q = next((op.frees[0], q) for q, op in enumerate(program.ranks[0]) if op.frees and op.lane == "compute")
    ops = [op._replace(frees=tuple(v for v in op.frees if v != p)) for op in program.ranks[0]]
    later = next(i for i in range(q + 1, len(ops)) if ops[i].lane == "compute")
    return with_op(replace(program, ranks=(tuple(ops), *program.ranks[1:])), 0, later, frees=(*ops[later].frees, p))


def share_kept(program: Program) -> Program:
    return with_op(program, 0, next(q for q, op in enumerate(program.ranks[0]) if op.trims), trims=())


def never_freed(program: Program) -> Program:
    q = next(q for q, op in enumerate(program.ranks[0]) if op.frees)
    return with_op(program, 0, q, frees=())


def never_released(program: Program) -> Program:
    last = max(p for p, op in enumerate(program.ranks[0]) if op.verb == "release")
    return without(program, 0, last)


def never_reduced(program: Program) -> Program:
    last = max(p for p, op in enumerate(program.ranks[0]) if op.verb == "reduce")
    return without(program, 0, last)


BROKEN = [
    (1, send_waits_for_gradient),
    (1, waits_for_itself),
    (1, waits_for_nothing),
    (2, sends_swapped),
    (2, drop("send act m2")),
    (2, drop("recv grad m1")),
    (2, sent_twice),
    (2, sent_too_far),
    (3, halves_joined),
    (4, drop("wgrad mlp m0")),
    (4, drop("fwd dispatch m1", rank=1)),
    (4, drop("bwd embed m3")),
    (4, drop("wgrad head m2", rank=1)),
    (4, forward_twice),
    (4, part_of_another_layer),
    (5, wgrad_first),
    (5, reduce_first),
    (5, cut("reduce dense", "wgrad")),
    (5, step_in_the_middle),
    (5, drop("step")),
    (5, step_ignores_reduces),
    (6, cut("fwd attn", "recv act", rank=1)),
    (6, cut("fwd dispatch", "fwd attn")),
    (6, cut("send grad", "bwd attn", rank=1)),
    (6, cut("bwd unpermute", "recv grad")),
    (6, freed_early),
    (6, freed_while_sent),
    (6, freed_by_another_lane),
    (6, freed_twice),
    (6, freed_without_readers),
    (7, cut("fwd attn", "gather dense")),
    (7, cut("wgrad experts", "reduce experts", rank=1)),
    (7, slot_too_high),
    (7, fewer_slots),
    (7, gathers_miscounted),
    (7, released_early),
    (7, gradient_slot_taken),
    (7, gradient_in_two_slots),
    (8, attention_first),
    (9, microbatches_swapped),
    (9, products_swapped),
    (10, compute_among_exchanges),
    (10, exchange_among_compute),
    (11, cap_lowered),
    (11, cut("recv act m2", "fwd", rank=1)),
    (11, lambda program: replace(program, in_flight=())),
    (12, never_freed),
    (12, never_released),
    (12, cut("step", "send", rank=1)),
    (12, never_reduced),
    (14, freed_late),
    (14, share_kept),
]


@pytest.mark.parametrize(("invariant", "breaks"), BROKEN, ids=lambda value: getattr(value, "__qualname__", str(value)))
def test_broken(invariant: int, breaks: Callable[[Program], Program]) -> None:
    program = base()
    assert not check(program)
    broken = breaks(program)
    found = [violation for violation in check(broken) if violation.invariant == invariant]
    assert found
    for violation in found:
        assert violation.name == INVARIANTS[invariant]
        if violation.ops and "ends with its one step" not in violation.message:
            assert str(broken.ranks[violation.rank][violation.ops[0]]) in violation.message


def test_every_invariant_is_tried() -> None:
    assert {invariant for invariant, _ in BROKEN} | {13} == set(INVARIANTS)


def test_a_slot_waits_for_its_former_tenant() -> None:
    program = base(layout=Layout(("moe",) * 8, ep=2), prefetch=0)
    assert not check(program)
    assert 7 in numbers(cut("gather dense", "release")(program))
    assert 7 in numbers(without(program, 0, find(program, 0, "release dense")))


EDITS: dict[str, tuple] = {
    "verb": get_args(Verb),
    "part": ("embed", "attn", "dispatch", "experts", "combine", "unpermute", "mlp", "head", "act", "dense", "all"),
    "microbatch": (-1, 0, 1, 2, 9),
    "chunk": (-1, 0, 1, 7),
    "layer": (-99, -1, 0, 1, 2, 3, 99),
    "lane": LANES,
    "slot": (-1, 0, 1, 2, 9),
}


@pytest.mark.parametrize("field", EDITS)
def test_an_op_cannot_be_another_op(field: str) -> None:
    """Whatever is changed about an op, something breaks, and the checker copes with it."""
    draw = random.Random(5)
    for case, program in short_programs():
        for _ in range(8):
            rank = draw.randrange(len(program.ranks))
            position = draw.randrange(len(program.ranks[rank]))
            op = program.ranks[rank][position]
            value = draw.choice(EDITS[field])
            without_slot = field == "slot" and op.verb not in ("gather", "release", "wgrad", "reduce")
            released_elsewhere = field == "lane" and op.verb == "release"  # the gather lane would do as well
            if value == getattr(op, field) or without_slot or released_elsewhere or op.verb == "step":
                continue
            assert check(with_op(program, rank, position, **{field: value})), f"{op}: {field}={value}, {case}"


def test_a_rank_is_missing() -> None:
    program = base()
    assert numbers(replace(program, ranks=program.ranks[:1])) == {4}


def test_merging_a_microbatch_with_itself() -> None:
    layout = Layout(("moe", "moe"), ep=2)
    ops = expand(Step(fwd=(0, 0), bwd=(0, 0)), layout, 0, layer.MERGED["literature"], layer.ALONE)
    program = Program(layout, 1, (tuple(ops),), in_flight=(1,))
    (violation,) = [violation for violation in check(program) if violation.invariant == 3]
    assert str(violation) == (
        "invariant 3 (merged halves are independent), rank 0: bwd m0 c0 is merged with fwd m0 c0 of its own microbatch"
    )


def test_the_host_must_have_work_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(("moe",) * 3, ep=2)
    monkeypatch.setitem(layer.MERGED, "literature", template("cB aF dF eB eW dB eF cF aB uB aW uF"))
    program = build_program(layout, 3, planned(), Sharding(2, 2))
    found = check(program)
    # Two merged steps of three layers each; the first exposed wait of a step is allowed.
    assert [v.invariant for v in found] == [13] * 4
    assert "stops the host right after" in found[0].message


def test_a_wait_of_the_host_can_close_a_circle() -> None:
    """The lanes alone would do: the last rank's gradient is ready, but its send is issued behind a blocked host."""
    program = base(microbatches=2, order="sequential", merge="off")
    send, dispatch = find(program, 1, "send grad m0"), find(program, 1, "fwd dispatch m1")
    nobody_waits = [op._replace(deps=tuple(d for d in op.deps if d != send)) for op in program.ranks[1]]
    program = with_rank(program, 1, nobody_waits)
    assert 1 not in numbers(moved(program, 1, send, dispatch))
    found = [v for v in check(moved(program, 1, send, dispatch + 1)) if v.invariant == 1]
    assert found
    assert "circle" in found[0].message


def test_a_circle_is_reported_with_all_its_ops() -> None:
    program = send_waits_for_gradient(base())
    (violation,) = [v for v in check(program) if v.invariant == 1]
    for name in ("send act m0 c0", "send grad m0 c0"):
        assert name in violation.message, violation.message


def test_assert_valid_shows_ten() -> None:
    program = base()
    assert_valid(program)
    bare = with_rank(program, 0, [op._replace(deps=()) for op in program.ranks[0]])
    with pytest.raises(ValueError, match="the program breaks") as caught:
        assert_valid(bare)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[-1].endswith("more")
    assert lines[1].startswith("invariant ")


def test_work_grows_linearly() -> None:
    """No rule is quadratic."""

    def counted(microbatches: int) -> tuple[int, int]:
        layout = Layout(("moe",) * 16, pp=4, chunks=1, ep=2)
        programs = []

        def work() -> None:
            programs.append(build_program(layout, microbatches, planned(), Sharding(2, 2)))
            assert not check(programs[-1])

        spent = calls(work)
        return len(programs[0]), spent

    small, few = counted(8)
    large, many = counted(32)
    assert large > 3 * small
    assert many / few < 1.2 * large / small, f"{small} ops take {few} calls, {large} ops {many}"

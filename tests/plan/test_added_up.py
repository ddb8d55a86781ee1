"""Gradients that are added up on a rank and reduced once a step: what the checker and the dry run refuse."""

from collections.abc import Callable

import pytest

from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned
from tests.plan.programs import find, moved, with_op, with_rank, without

LAYOUT = Layout(("dense", "moe", "moe"), ep=2)


def base() -> Program:
    return build_program(LAYOUT, 3, planned(merge="on"), Sharding(2, 2, "optim"))


def add_first(program: Program) -> Program:
    add = find(program, 0, "add dense m1")
    return moved(program, 0, add, find(program, 0, f"wgrad attn m1 c0 l{program.ranks[0][add].layer}"))


def add_forgotten(program: Program) -> Program:
    return without(program, 0, find(program, 0, "add experts m0"))


def add_on_another_lane(program: Program) -> Program:
    return with_op(program, 0, find(program, 0, "add head m0"), lane="reduce")


def adds_swapped(program: Program) -> Program:
    """Microbatches 0 and 1 of a layer's experts, gradient and sum, in each other's place."""
    ops = list(program.ranks[0])
    for p, op in enumerate(ops):
        if op.part == "experts" and op.verb in ("wgrad", "add") and op.layer == 1 and op.microbatch < 2:
            ops[p] = op._replace(microbatch=1 - op.microbatch)
    return with_rank(program, 0, ops)


def reduced_in_between(program: Program) -> Program:
    """The reduce is the second microbatch's: the third is added to a sum that is gone."""
    ops = list(program.ranks[0])
    second, last = find(program, 0, "add head m1"), find(program, 0, "reduce head m2")
    ops[second] = ops[second]._replace(verb="reduce", lane="reduce", deps=(second - 1,))
    ops[last] = ops[last]._replace(verb="add", lane="compute", deps=())
    return with_rank(program, 0, ops)


def never_reduced(program: Program) -> Program:
    last = find(program, 0, "reduce head m2")
    return with_op(program, 0, last, verb="add", lane="compute", deps=())


def slot_not_waited_for(program: Program) -> Program:
    """An add on a lane of its own, for which the next gradient in its slot does not wait."""
    ops: list[Op] = list(program.ranks[0])
    add = find(program, 0, "add dense m0")
    ops[add] = ops[add]._replace(lane="gather")
    return with_rank(program, 0, ops)


@pytest.mark.parametrize(
    ("invariant", "breaks"),
    [
        (5, add_first), (5, reduced_in_between), (7, slot_not_waited_for), (9, adds_swapped),
        (10, add_on_another_lane), (7, add_forgotten), (12, never_reduced),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_broken(invariant: int, breaks: Callable[[Program], Program]) -> None:
    assert not check(base())
    assert invariant in {violation.invariant for violation in check(breaks(base()))}


@pytest.mark.parametrize("breaks", [add_first, add_forgotten, adds_swapped, reduced_in_between, never_reduced])
def test_a_dry_run_notices_too(breaks: Callable[[Program], Program]) -> None:
    dry_run(base(), seed=3)
    with pytest.raises(ValueError, match="dry run"):
        dry_run(breaks(base()), seed=None)

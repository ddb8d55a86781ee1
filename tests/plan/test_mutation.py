"""Would a forgotten dependency be noticed? Dependencies are removed one at a time from many programs.

A dependency is *needed* if lane order and the other dependencies don't imply it. The checker must notice that a
needed one is gone; the dry run, which only sees the orders that it tries, must notice most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from hocket.program.check import check
from hocket.program.ops import Program
from tests.helpers.dryrun import dry_run
from tests.plan.programs import sample, with_op

PROGRAMS = 60
LONGEST = 450
"""Ops of the longest program that is mutated: short ones have all that long ones have."""
TRIED = 60
SEEDS = 40
SOME = pytest.mark.parametrize("count", [60, pytest.param(250, marks=pytest.mark.full)])
"""How many of all mutants are looked at."""


def needed(program: Program) -> Iterator[tuple[int, int, int]]:
    """(rank, op, dependency) of every dependency that nothing else implies."""
    for rank, ops in enumerate(program.ranks):
        known: list[frozenset[int]] = []  # everything that happens before each op
        latest: dict[str, frozenset[int]] = {}
        for position, op in enumerate(ops):
            lane = latest.get(op.lane, frozenset())
            for d in op.deps:
                others = lane.union(*(known[e] for e in op.deps if e != d))
                if d not in others:
                    yield rank, position, d
            known.append(lane.union([position], *(known[d] for d in op.deps)))
            latest[op.lane] = known[-1]


@cache
def dependencies() -> list[tuple[Program, int, int, int]]:
    """Programs and their needed dependencies."""
    programs = [case.build() for case in sample(PROGRAMS, seed=3, most_ranks=3)]
    return [(program, *found) for program in programs if len(program) <= LONGEST for found in needed(program)]


def name_of(program: Program, rank: int, position: int, d: int) -> str:
    ops = program.ranks[rank]
    return f"{ops[position]} <- {ops[d]}"


def without(program: Program, rank: int, position: int, d: int) -> Program:
    """The program without a dependency."""
    return with_op(program, rank, position, deps=tuple(p for p in program.ranks[rank][position].deps if p != d))


def caught_by_dry_run(program: Program) -> bool:
    for seed in range(SEEDS):
        try:
            dry_run(program, seed)
        except ValueError:
            return True
    return False


@SOME
def test_removed_dependencies_are_caught(count: int) -> None:
    chosen = random.Random(0).sample(dependencies(), 2 * count)
    mutants = [(name_of(*one), without(*one)) for one in chosen]
    missed = [name for name, mutant in mutants if not check(mutant) and not caught_by_dry_run(mutant)]
    rate = 1 - len(missed) / len(chosen)
    print(f"{len(chosen)} of {len(dependencies())} mutants, {rate:.1%} caught")
    assert rate >= 0.95, f"{rate:.1%} caught; missed, for example: {missed[:5]}"


def test_the_dry_run_alone_catches_most() -> None:
    """Of those that are not only there to hold memory back, of which it knows nothing."""
    named = [(name_of(*one), one) for one in dependencies()]
    known = [one for one in named if not one[0].startswith(("recv", "reload")) or "<- offload" in one[0]]
    chosen = random.Random(1).sample(known, TRIED)
    missed = [name for name, one in chosen if not caught_by_dry_run(without(*one))]
    rate = 1 - len(missed) / len(chosen)
    print(
        f"{len(chosen)} mutants, {rate:.1%} caught by the dry run alone in {SEEDS} orders each; missed: {missed[:20]}"
    )
    assert rate >= 0.85, f"{rate:.1%} caught; missed, for example: {missed[:5]}"


@SOME
def test_removed_frees_are_caught(count: int) -> None:
    program = next(case.build() for case in sample(50, seed=4) if case.layout.pp == 2 and case.layout.ep == 2)
    frees = [(rank, i, p) for rank, ops in enumerate(program.ranks) for i, op in enumerate(ops) for p in op.frees]
    for rank, position, p in random.Random(0).sample(frees, min(count // 2, len(frees))):
        kept = tuple(v for v in program.ranks[rank][position].frees if v != p)
        mutant = with_op(program, rank, position, frees=kept)
        assert [violation.invariant for violation in check(mutant)] == [12]
        assert caught_by_dry_run(mutant)


@SOME
def test_removed_and_late_drops_are_caught(count: int) -> None:
    """Whether all of a value or its first reader's share is held too long: memory that no plan has counted."""
    programs = [case.build() for case in sample(30, seed=5, most_ranks=3)]
    drops = [
        (program, rank, position, field, p)
        for program in programs
        if len(program) <= LONGEST
        for rank, ops in enumerate(program.ranks)
        for position, op in enumerate(ops)
        for field in ("frees", "trims")
        for p in getattr(op, field)
    ]
    trims = [drop for drop in drops if drop[3] == "trims"]
    assert len(trims) > 250
    for program, rank, position, field, p in [
        *random.Random(2).sample(trims, min(count // 2, len(trims))),
        *random.Random(3).sample(drops, min(count // 2, len(drops))),
    ]:
        ops = program.ranks[rank]
        op, left = ops[position], tuple(v for v in getattr(ops[position], field) if v != p)
        mutant = with_op(program, rank, position, **{field: left})
        found = {violation.invariant for violation in check(mutant)}
        assert found == ({12} if field == "frees" else {14}), f"{op} without {field} {p}"
        later = next((i for i in range(position + 1, len(ops)) if ops[i].lane == op.lane), -1)
        if later >= 0 and p not in ops[later].frees:
            late = with_op(mutant, rank, later, **{field: (*getattr(ops[later], field), p)})
            assert {violation.invariant for violation in check(late)} == {14}, f"{op} {field} {p}"

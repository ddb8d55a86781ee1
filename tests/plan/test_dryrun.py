"""The dry run finds what is wrong by running; global orders keep every rank's lanes and cannot block."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from hocket.program.linearize import linearize
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Program
from hocket.program.shard import Sharding
from tests.helpers.dryrun import dry_run, reference
from tests.helpers.plans import planned
from tests.plan.programs import find, moved, sample, swapped, with_op, with_rank, without

KINDS = ("dense", "moe", "moe", "moe")
SEEDS = range(30)


def build(pp: int = 2, chunks: int = 1, microbatches: int = 4, ep: int = 2, **plan: object) -> Program:
    layout = Layout(KINDS, pp=pp, chunks=chunks, ep=ep)  # type: ignore[arg-type]
    return build_program(layout, microbatches, planned(chunks=chunks, **plan), Sharding(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("ep", [1, 2])
def test_right_programs_pass_in_many_orders(chunks: int, ep: int) -> None:
    program = build(chunks=chunks, ep=ep)
    for seed in (None, *SEEDS):
        dry_run(program, seed)


def test_the_reference_knows_nothing_of_ranks() -> None:
    whole, split = (reference(Layout(KINDS, pp=pp, chunks=chunks, ep=2), 3) for pp, chunks in ((1, 1), (2, 2)))  # type: ignore[arg-type]
    assert whole == split
    assert sorted(whole.losses) == [0, 1, 2]
    assert [m for m, _ in whole.reduced["dense", 1]] == [0, 1, 2]
    assert set(whole.reduced["dense", 0][0][1]) == {"attn", "mlp"}
    assert ("experts", 0) not in whole.reduced


def test_microbatches_have_tokens_of_their_own() -> None:
    outcome = reference(Layout(("moe",), ep=2), 4)
    assert len(set(outcome.losses.values())) == 4
    assert len({gradients["attn"] for _, gradients in outcome.reduced["dense", 0]}) == 4


def uncut(program: Program, rank: int, name: str, producer: str) -> Program:
    """The program without the first dependency of `name` on `producer`."""
    for position, op in enumerate(program.ranks[rank]):
        for d in op.deps:
            if str(op).startswith(name) and str(program.ranks[rank][d]).startswith(producer):
                return with_op(program, rank, position, deps=tuple(p for p in op.deps if p != d))
    raise AssertionError(f"no {name} depends on a {producer}")


def freed_at_once(program: Program) -> Program:
    """The attention part's output is dropped by its first reader, though unpermute reads it too."""
    value, reader = find(program, 0, "fwd attn m0 c0 l1"), find(program, 0, "fwd mlp m1")
    ops = [
        op._replace(frees=tuple(p for p in op.frees if p != value), trims=tuple(p for p in op.trims if p != value))
        for op in program.ranks[0]
    ]
    early = next(p for p in range(value + 1, reader) if ops[p].lane == "compute")
    ops[early] = ops[early]._replace(frees=(*ops[early].frees, value))
    return with_rank(program, 0, ops)


def gradients_mixed(program: Program) -> Program:
    """The reduce of microbatch 0 comes only after microbatch 1 has written to its slot."""
    reduce = find(program, 1, "reduce dense m0")
    nobody_waits = [op._replace(deps=tuple(d for d in op.deps if d != reduce)) for op in program.ranks[1]]
    return moved(with_rank(program, 1, nobody_waits), 1, reduce, len(program.ranks[1]) - 1)


def never_freed(program: Program) -> Program:
    q = next(q for q, op in enumerate(program.ranks[0]) if op.frees)
    return with_op(program, 0, q, frees=())


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda program: uncut(program, 1, "fwd attn", "recv act"), "needs the value of .*, which is not there"),
        (lambda program: uncut(program, 0, "fwd dispatch", "fwd attn"), "needs the value of"),
        (lambda program: uncut(program, 0, "fwd attn", "gather dense"), "needs the weights of"),
        (lambda program: uncut(program, 1, "reduce dense", "wgrad"), "finds its slot empty|differ from the reference"),
        (lambda program: uncut(program, 1, "wgrad experts", "reduce experts"), "differ|slot empty|left behind"),
        (freed_at_once, "needs the value of"),
        (gradients_mixed, "differ from the reference|slot empty"),
        (never_freed, "values left behind"),
        (lambda program: without(program, 0, find(program, 0, "wgrad mlp m1")), "differ|left behind"),
        (lambda program: without(program, 0, find(program, 0, "fwd mlp m1")), "needs the value of"),
        (
            lambda program: swapped(program, 1, find(program, 1, "bwd attn m0"), find(program, 1, "bwd attn m1")),
            "needs the|no legal order",
        ),
        (lambda program: without(program, 1, find(program, 1, "recv act m1")), "no legal order"),
        (lambda program: without(program, 0, find(program, 0, "send act m1")), "no legal order"),
    ],
)
def test_broken_programs_are_caught(breaks: Callable[[Program], Program], message: str) -> None:
    broken = breaks(build())

    def run_all() -> None:
        for seed in SEEDS:
            dry_run(broken, seed)

    with pytest.raises(ValueError, match=message):
        run_all()


def test_a_slot_overwritten_too_early_shows() -> None:
    layout = Layout(("moe",) * 8, ep=2)
    program = build_program(layout, 2, planned(prefetch=0), Sharding(2, 2))
    for seed in SEEDS:
        dry_run(program, seed)
    broken = uncut(program, 0, "gather dense", "release")

    def run_all() -> None:
        for seed in SEEDS:
            dry_run(broken, seed)

    with pytest.raises(ValueError, match=r"differ|needs the weights"):
        run_all()


def test_one_rank_without_a_seed_runs_its_list() -> None:
    program = build(pp=1)
    assert linearize(program, None) == [(rank, position) for rank, position, _ in program]


def test_orders_differ_by_seed_and_only_by_seed() -> None:
    program = build(chunks=2)
    orders = [linearize(program, seed) for seed in SEEDS]
    assert len({tuple(order) for order in orders}) == len(SEEDS)
    assert linearize(program, 3) == orders[3]


def test_all_processes_agree_on_an_order() -> None:
    """Hashes of strings differ from process to process; orders must not."""
    code = (
        "from hocket.config import Config; from hocket.program.linearize import linearize\n"
        "from hocket.program.lower import build_program; from hocket.program.ops import Layout\n"
        "from hocket.program.shard import Sharding\n"
        "program = build_program(Layout(('moe',) * 4, pp=2, ep=2), 3, Config(), Sharding(2, 2))\n"
        "print(linearize(program, 7))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def blocking_run_ends(program: Program, order: list[tuple[int, int]]) -> bool:
    """Every rank runs its part of the order; a send and its receive end only when both ranks are at them."""
    queues = [[p for r, p in order if r == rank] for rank in range(len(program.ranks))]
    at = [0] * len(queues)
    moved_on = True
    while moved_on:
        moved_on = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                op = program.ranks[rank][queue[at[rank]]]
                if op.verb in ("send", "recv"):
                    peer, key = program.layout.peer(op, rank)
                    if at[peer] == len(queues[peer]) or program.ranks[peer][queues[peer][at[peer]]].key != key:
                        break
                    at[peer] += 1
                at[rank] += 1
                moved_on = True
    return all(done == len(queue) for done, queue in zip(at, queues, strict=True))


def test_blocking_sends_never_deadlock() -> None:
    tried = 0
    for case in sample(40, seed=6):
        if case.layout.pp > 1:
            program = case.build()
            for seed in (None, 0, 1, 2):
                assert blocking_run_ends(program, linearize(program, seed))
                tried += 1
    assert tried > 50


def test_lists_themselves_may_block() -> None:
    """Why a CPU runs a global order and not each rank's list: a list may send what the peer is not ready for."""
    program = build(chunks=2, microbatches=4)
    assert not blocking_run_ends(program, [(rank, position) for rank, position, _ in program])


def test_the_step_comes_last_on_every_rank() -> None:
    program = build()
    order = linearize(program, 5)
    assert [program.ranks[rank][position].verb for rank, position in order[-2:]] == ["step", "step"]


def test_a_program_that_cannot_run_says_where_it_stops() -> None:
    program = build()
    first = find(program, 0, "fwd attn m0")
    stuck = with_op(program, 0, first, deps=(first + 1,))
    with pytest.raises(ValueError, match=r"no legal order: these wait for each other in a circle: .*fwd attn m0"):
        linearize(stuck, 0)

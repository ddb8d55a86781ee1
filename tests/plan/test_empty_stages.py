"""Stages without layers: the first with the embedding alone, the last with the head alone."""

from __future__ import annotations

import pytest

from hocket.config import Config
from hocket.program.check import check
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import Layout, Program, even_bounds
from hocket.program.shard import Sharding
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned
from tests.plan.programs import find, with_op

PLAIN = planned(merge="off", defer_layers=1)
ALONE = Layout(kinds=("dense",), pp=3)
SHARDED = Sharding(dense=2)


def program(layout: Layout = ALONE, config: Config = PLAIN, microbatches: int = 3) -> Program:
    return build_program(layout, microbatches, config, SHARDED)


def names(program: Program, rank: int) -> list[str]:
    """The ops of a rank's first microbatch, in order, without gathers and what belongs to them."""
    shown = ("fwd", "bwd", "wgrad", "send", "recv")
    return [f"{op.verb} {op.part}" for op in program.ranks[rank] if op.verb in shown and op.microbatch == 0]


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [
        (4, 2, (0, 2, 4)),
        (3, 4, (0, 1, 2, 3, 3)),
        (2, 4, (0, 0, 1, 2, 2)),
        (1, 2, (0, 1, 1)),
        (126, 128, (0, *range(127), 126)),
    ],
)
def test_fewer_layers_than_stages_leave_the_ends_alone(layers: int, stages: int, bounds: tuple[int, ...]) -> None:
    assert even_bounds(layers, stages) == bounds
    assert Layout(("dense",) * layers, pp=stages).bounds == bounds


def test_no_other_stage_may_be_without_layers() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 5 virtual stages"):
        Layout(("dense",) * 2, pp=5)
    for bounds in ((0, 1, 1, 2), (0, 2, 1, 2)):
        with pytest.raises(ValueError, match="only the first and the last virtual stage may be without layers"):
            Layout(("dense",) * 2, pp=3, bounds=bounds)
    with pytest.raises(ValueError, match="cannot fill"):
        Layout((), pp=2)


def test_the_ends_send_and_receive_what_layers_would() -> None:
    there = program()
    assert check(there) == []
    assert names(there, 0) == ["fwd embed", "send act", "recv grad", "bwd embed", "wgrad embed"]
    assert names(there, 2) == ["recv act", "fwd head", "bwd head", "send grad", "wgrad head"]


def test_received_values_live_until_the_weight_gradients_of_the_ends() -> None:
    """Embedding and head keep in their queues what came from another rank, whose memory is the receiving lane's."""
    there = program()
    for rank, received, end in ((0, "grad", "embed"), (2, "act", "head")):
        value = find(there, rank, f"recv {received} m0")
        early = with_op(there, rank, find(there, rank, f"bwd {end} m0"), frees=(value,))
        found = [str(violation) for violation in check(early) if violation.invariant == 6]
        assert any(f"wgrad {end} m0 c0" in text and "may still read it" in text for text in found), found


@pytest.mark.parametrize("changes", [{}, {"merge": "on", "merge_ends": "on"}])
@pytest.mark.parametrize("microbatches", [8, 13])
def test_a_deep_pipeline_computes_what_plain_training_computes(changes: dict[str, object], microbatches: int) -> None:
    layout = Layout(("moe", "dense") * 7, pp=4, chunks=4, ep=2)
    config = planned(PLAIN, chunks=4, **changes)
    there = build_program(layout, microbatches, config, Sharding(2, 2))
    assert layout.bounds == (0, *range(15), 14)
    assert check(there) == []
    for seed in range(3):
        dry_run(there, seed)
    forward = build_forward(there, config, Sharding(2, 2))
    assert check(forward, forward_only=True) == []
    dry_run(forward, 0, forward_only=True)

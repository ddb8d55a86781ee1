"""Which op each lane is at, from the ops that are complete; and the culprit of a hang, from all ranks' states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.engine.hang_report import LaneProgress
from hocket.program.ops import Op
from hocket.runtime.hangs import GroupProgress, RankState, culprit

OPS = [
    Op("gather", "dense", lane="gather"),  # 0
    Op("gather", "dense", lane="gather"),  # 1
    Op("recv", "act", lane="recv_act"),  # 2
    Op("fwd", "attn", deps=(0, 2)),  # 3
    Op("fwd", "mlp"),  # 4
    Op("send", "act", lane="send_act", deps=(4,)),  # 5
    Op("fwd", "attn", deps=(1,)),  # 6
    Op("step", "all", deps=(1,)),  # 7
]


def lanes(complete: set[int], unknown: set[int] = frozenset(), issued: int = len(OPS)) -> LaneProgress:  # type: ignore[assignment]
    return LaneProgress(OPS, range(issued), lambda op, position: None if position in unknown else position in complete)


@pytest.mark.parametrize(
    ("complete", "unknown", "at"),
    [
        (set(), set(), {(0,), (2,)}),
        ({2}, set(), {(0,)}),  # not at the gather after it, which no op needs yet
        ({0}, set(), {(2,)}),
        ({0, 2}, {3}, {(3, 4)}),  # ops that leave no event: at one of them
        ({0, 2, 4}, {3}, {(1,)}),  # in order, so every op before a complete one is complete
        ({1, 2, 4}, {5, 6}, {(6, 7)}),  # a send that was not received delays nothing on this rank
        ({1, 2, 4}, {5}, {(6,)}),  # not at the op after it, whose event says nothing yet either
        ({1, 2, 6}, {3, 4, 5}, {(7,)}),
    ],
)
def test_a_lane_is_at_ops_that_wait_for_no_other_lane(
    complete: set[int], unknown: set[int], at: set[tuple[int, ...]]
) -> None:
    assert set(lanes(complete, unknown).at()) == at


def test_the_op_that_is_being_issued_is_never_complete() -> None:
    """Whatever its event says, which may be that of the step before."""
    assert lanes({0, 2, 3}, issued=4).at() == [(3,)]
    assert lanes(set(), issued=0).at() == []


def test_what_a_cpu_has_issued_has_begun_and_it_is_at_the_last() -> None:
    """Sends before it may be on their way still."""
    sends = [Op("send", "act", lane="send_act"), Op("send", "act", lane="send_act")]
    found = LaneProgress(sends, range(2), lambda op, position: False, streams=False)
    assert (found.at(), found.reached(1)) == ([(1,)], True)
    assert LaneProgress(sends, range(2), lambda op, position: False).at() == [(0,)]


def test_an_op_behind_one_that_waits_has_not_begun() -> None:
    found = lanes({1, 2}, {3, 4, 5, 6, 7})
    assert [found.reached(position) for position in range(8)] == [True, True, True, True, True, False, True, True]
    assert [lanes({1, 2}, {5}).reached(position) for position in (3, 4, 6)] == [True, False, False]
    assert [found.open(position) for position in (0, 1, 2, 3)] == [False, False, False, True]
    assert not lanes(set()).reached(3)


def progress(name: str, ranks: tuple[int, ...], done: int, reached: int, **more: object) -> GroupProgress:
    part, key = name.split("_")[-1], ",".join(map(str, ranks))
    edge = name.startswith(("send", "recv"))
    known = GroupProgress(
        name, f"{part if edge else name} {key}", ranks, reached, reached, done, until=done + 1, what="an op"
    )
    return replace(known, **more)  # type: ignore[arg-type]


def state(rank: int, *groups: GroupProgress, waits: int = 1, at: tuple[str, ...] = (), step: int = 3) -> RankState:
    """Of a rank that waits in the first of its groups."""
    keys = tuple(group.key for group in groups[:waits])
    return RankState(rank, step, "stuck for 9 s at op 4: fwd mlp", at, waits=keys, groups=groups)


def verdict(*states: RankState, others: tuple[int, ...] = ()) -> str:
    return culprit({each.rank: RankState.from_line(each.as_line()) for each in states}, others)


def test_a_rank_that_says_nothing_is_what_the_others_wait_for() -> None:
    """Through another one that waits, too."""
    line = verdict(
        state(0, progress("recv_grad", (0, 1), 16, 17)),
        state(1, progress("recv_grad", (1, 2), 2, 3), progress("send_grad", (0, 1), 16, 16)),
        others=(2,),
    )
    assert line == "rank 2 has not sent gradient 3 of edge 1→2 (an op on rank 1), and did not say what it does"


def test_a_rank_that_is_busy_is_what_the_others_wait_for() -> None:
    line = verdict(
        state(0, progress("recv_act", (3, 0), 4, 5)),
        state(3, progress("send_act", (3, 0), 4, 4), waits=0, at=("op 4: fwd mlp",)),
    )
    assert line == (
        "rank 3 has not sent activation 5 of edge 3→0 (an op on rank 0), and is stuck for 9 s at op 4: fwd mlp"
    )
    assert verdict(state(0, waits=0, at=("op 3: fwd attn",))).endswith(
        "op 4: fwd mlp, with the device at op 3: fwd attn"
    )


def test_the_rank_that_is_behind_in_a_group_is_named_and_not_those_that_are_there() -> None:
    ranks = (0, 1, 2)
    there = [state(rank, progress("a2a", ranks, 6, 7)) for rank in (0, 2)]
    line = verdict(*there, state(1, progress("a2a", ranks, 5, 5), waits=0))
    assert line.startswith("rank 1 has not come to exchange 6 of a2a (ranks 0, 1, 2), and is stuck")
    # A rank may be in any of the exchanges of an op, and one that has not come to the last is behind.
    line = verdict(
        state(0, progress("control", (0, 1), 0, 3, until=3)),
        state(1, progress("control", (0, 1), 0, 1, until=1), waits=0),
    )
    assert line.startswith("rank 1 has not come to exchange 2 of control (ranks 0, 1), and is")


def test_words_in_memory_say_more_than_what_was_issued() -> None:
    """All ranks have issued it, and one rank's stream has not reached it."""
    ranks = (4, 5, 6)
    waits = [state(rank, progress("a2a", ranks, 6, 7, absent=(6,))) for rank in (4, 5)]
    line = verdict(*waits, state(6, progress("a2a", ranks, 6, 7), waits=0))
    assert line.startswith("rank 6 has not come to exchange 7 of a2a (ranks 4, 5, 6) (an op on rank 4), and is stuck")


def test_a_rank_in_an_earlier_step_is_behind() -> None:
    """It waits for no rank that has not passed there."""
    late = state(1, progress("gather_dense", (0, 1), 2, 3), step=2)
    assert verdict(state(0, progress("gather_dense", (0, 1), 0, 1)), late).startswith(
        "rank 1 has not come to exchange 1 of g"
    )


def test_ranks_that_wait_for_each_other_are_told_as_a_circle() -> None:
    edges = (0, 1), (1, 0)
    states = (
        state(0, progress("recv_act", edges[1], 1, 2), progress("send_act", edges[0], 0, 0)),
        state(1, progress("recv_act", edges[0], 0, 1), progress("send_act", edges[1], 1, 1)),
        state(2, progress("recv_act", (1, 2), 0, 1)),
    )
    line = (
        "ranks wait in a circle: rank 0 waits for rank 1, which has not sent activation 2 of edge 1→0 (an op on rank 0)"
        "; rank 1 waits for rank 0, which has not sent activation 1 of edge 0→1 (an op on rank 1)"
    )
    assert verdict(*states) == line


def test_a_message_says_that_no_rank_is_known_to_wait() -> None:
    assert verdict(state(0, waits=0), others=(1,)).startswith("rank 1 did not say what it does, and no rank is known")
    assert verdict(state(0, waits=0, at=("op 4",)), state(1, waits=0)).startswith("rank 0 is stuck for 9 s at op 4")
    states = [state(rank, progress("a2a", (0, 1), 1, 2)) for rank in (0, 1)]
    assert verdict(*states) == "no rank is known to be behind another one"
    assert verdict(others=(0, 1)).startswith("rank 0 did not say")

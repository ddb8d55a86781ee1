"""Several ranks: clocks, matched collectives, and waiting for late peers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hocket_trace import load, report
from hocket_trace.data import RankTrace, Report, Share
from tests.trace.build import BASE_NS, Trace

US = 1e-6


def loaded(tmp_path: Path, *traces: Trace) -> tuple[RankTrace, ...]:
    return load([trace.write(tmp_path / f"{i}.json.gz") for i, trace in enumerate(traces)])


def share(found: Report, rank: int, kind: str) -> Share:
    (step,) = [step for step in found.steps if step.rank == rank]
    return step.kinds[kind]  # type: ignore[index]


def close(value: float, microseconds: float) -> bool:
    return math.isclose(value, microseconds * US, abs_tol=3e-9)


def gathers(rank: int, times: list[tuple[float, float]], *, shift: float = 0.0, world: int = 2, **more: str) -> Trace:
    """A rank with collectives at these times of a common clock; its own is `shift` microseconds ahead."""
    made = Trace(rank, world, zero=5e9 + shift, **more).group("gather_dense", tuple(range(world)))  # type: ignore[arg-type]
    for start, end in times:
        made.collective("_allgather_base", "gather_dense", start, end, received=64)
    return made


def test_ranks_come_in_order_and_share_numbers_of_collectives(tmp_path: Path) -> None:
    one, other = loaded(tmp_path, gathers(1, [(5, 20), (30, 40), (50, 60)]), gathers(0, [(0, 20), (32, 40), (50, 60)]))
    assert (one.rank, other.rank) == (0, 1)
    assert (one.match >= 0).all()
    assert one.match.tolist() == other.match.tolist()
    assert len(set(one.match.tolist())) == 3


def test_waiting_is_the_time_before_the_last_rank_starts(tmp_path: Path) -> None:
    found = report(loaded(tmp_path, gathers(0, [(0, 50), (60, 80)]), gathers(1, [(30, 50), (60, 80)])))
    assert close(share(found, 0, "gather").waiting, 30)
    assert close(share(found, 1, "gather").waiting, 0)
    assert close(share(found, 0, "gather").seconds, 70)
    assert math.isclose(share(found, 0, "gather").bandwidth, 2 * 64 / (40 * US), rel_tol=1e-3)


def test_waiting_is_not_known_without_all_ranks_of_the_group(tmp_path: Path) -> None:
    two_of_three = [gathers(rank, [(rank, 50)], world=3) for rank in (0, 1)]
    found = report(loaded(tmp_path, *two_of_three))
    assert np.isnan(share(found, 0, "gather").waiting)
    assert any("2 of 3 ranks were given (missing: rank 2)" in note for note in found.notes)


def test_a_late_third_rank(tmp_path: Path) -> None:
    starts = [0, 10, 40]
    found = report(loaded(tmp_path, *(gathers(rank, [(start, 60)], world=3) for rank, start in enumerate(starts))))
    assert [round(share(found, rank, "gather").waiting / US) for rank in range(3)] == [40, 30, 0]


def point_to_point(rank: int, events: list[tuple[str, float, float]]) -> Trace:
    made = Trace(rank, 2).group("pp_fwd", (0, 1))
    for name, start, end in events:
        arrow = f"nccl:{name} {rank}{'->' if name == 'send' else '<-'}{1 - rank}"
        made.collective(name, "pp_fwd", start, end, sent=32, received=32, op=arrow)
    return made


def test_sends_are_matched_with_the_receives_of_the_peer(tmp_path: Path) -> None:
    first = point_to_point(0, [("send", 10, 30), ("recv", 12, 60), ("send", 70, 80)])
    second = point_to_point(1, [("recv", 0, 30), ("recv", 65, 80), ("send", 40, 60)])
    one, other = loaded(tmp_path, first, second)
    sends, recvs = one.match[[0, 2]], other.match[[0, 2]]
    assert sends.tolist() == recvs.tolist()
    assert one.match[1] == other.match[1]
    found = report((one, other))
    assert close(share(found, 1, "pp").waiting, 10 + 5)
    assert close(share(found, 0, "pp").waiting, 10)  # of 28, 18 are beside a transfer


def test_sends_in_a_group_of_several_ranks_go_where_they_say(tmp_path: Path) -> None:
    made = [Trace(rank, 3).group("pp", (0, 1, 2)) for rank in range(3)]
    for rank, name, arrow, start, end in (
        (0, "send", "0->2", 10, 30),
        (1, "send", "1->2", 40, 60),
        (2, "recv", "2<-0", 0, 30),
        (2, "recv", "2<-1", 35, 60),
    ):
        made[rank].collective(name, "pp", start, end, sent=32, received=32, op=f"nccl:{name} {arrow}")
    first, second, last = (trace.match.tolist() for trace in loaded(tmp_path, *made))
    assert [*first, *second] == last
    assert len({*last} - {-1}) == 2


def test_sends_tell_clocks_too_and_one_odd_collective_does_not_move_them(tmp_path: Path) -> None:
    """One all-reduce ends 105 us apart, as may be; the sends and receives end together."""

    def rank(number: int, odd: float, shift: float = 0.0) -> Trace:
        made = point_to_point(
            number, [(("send", "recv")[number], 1000 * n + shift, 1000 * n + 50 + shift) for n in (1, 2, 3)]
        )
        return made.group("control", (0, 1)).collective("allreduce", "control", 10 + shift, 60 + odd + shift)

    one, other = loaded(tmp_path, rank(0, 0), rank(1, 105))
    np.testing.assert_allclose(one.start, other.start, atol=1e-9)
    assert not any("clock" in note for note in one.notes)
    one, other = loaded(tmp_path, rank(0, 0), rank(1, 0, shift=900))
    np.testing.assert_allclose(one.start, other.start, atol=1e-9)
    said = "moved by -0.900 ms, so that 4 transfers shared with other hosts end together"
    assert any(said in note for note in one.notes)


def test_a_single_collective_is_told_as_one(tmp_path: Path) -> None:
    notes = loaded(tmp_path, gathers(0, [(0, 50)]), gathers(1, [(700, 750)]))[0].notes
    assert any("so that the one transfer shared with other hosts ends together" in note for note in notes)


def test_ranks_that_differ_in_how_often_they_call_are_told(tmp_path: Path) -> None:
    one, other = loaded(tmp_path, gathers(0, [(0, 50), (60, 80)]), gathers(1, [(0, 50)]))
    assert (one.match == -1).all()
    assert (other.match == -1).all()
    said = "step 0: calls of allgather in group gather_dense do not match: 2 on rank 0, 1 on rank 1"
    assert said in one.notes


def test_collectives_are_counted_within_their_step(tmp_path: Path) -> None:
    """The second rank's profiler started a step late: numbers of steps, not positions in the file, decide."""

    def trace(rank: int, steps: range) -> Trace:
        made = Trace(rank, 2).group("gather_dense", (0, 1))
        for step in steps:
            made.annotation(f"hocket step {step}", 100 * step, 100 * step + 90)
            made.collective("_allgather_base", "gather_dense", 100 * step + 10 * rank, 100 * step + 50)
        return made

    one, other = loaded(tmp_path, trace(0, range(1, 4)), trace(1, range(2, 4)))
    assert one.match[1:].tolist() == other.match.tolist()
    assert one.match[0] not in other.match


def test_ranks_that_ran_different_numbers_are_not_matched(tmp_path: Path) -> None:
    traces = loaded(tmp_path, gathers(0, [(0, 10), (20, 30)]), gathers(1, [(0, 10)]))
    assert (traces[0].match == -1).all()
    assert any("2 on rank 0, 1 on rank 1" in note for note in report(traces).notes)


TIMES = [(0.0, 20.0), (30.0, 45.0), (60.0, 90.0), (100.0, 130.0), (150.0, 160.0)]


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    """Even where a rank always ends late: that is no error of the clock."""
    slow = [(start, end + 200) for start, end in TIMES]
    traces = loaded(tmp_path, gathers(0, TIMES, host="a"), gathers(1, slow, host="a"))
    assert close(traces[1].end[0] - traces[0].end[0], 200)
    assert not traces[0].notes[1:]


def test_small_differences_are_no_other_clock(tmp_path: Path) -> None:
    traces = loaded(tmp_path, gathers(0, TIMES), gathers(1, [(start, end + 12) for start, end in TIMES]))
    assert close(traces[1].end[0] - traces[0].end[0], 12)


def test_a_clock_of_another_host_is_moved(tmp_path: Path) -> None:
    starts = [(start + 2 * i, end) for i, (start, end) in enumerate(TIMES)]
    traces = loaded(tmp_path, gathers(0, TIMES, host="a"), gathers(1, starts, shift=3_000, host="b"))
    assert close(traces[1].end[0] - traces[0].end[0], 0)
    assert close(traces[1].steps[0].start - traces[0].steps[0].start, 0)
    assert any("moved by -3.000 ms" in note for note in traces[0].notes)
    assert close(share(report(traces), 0, "gather").waiting, 0 + 2 + 4 + 6 + 8)


def test_a_median_does_not_mind_a_few_odd_ends(tmp_path: Path) -> None:
    odd = [*TIMES[:-1], (150.0, 190.0)]
    traces = loaded(tmp_path, gathers(0, TIMES, host="a"), gathers(1, odd, shift=-5_000, host="b"))
    assert close(traces[1].end[0] - traces[0].end[0], 0)


def test_different_zeros_and_bases_of_files_do_not_matter(tmp_path: Path) -> None:
    late = gathers(1, TIMES, shift=-2e6).metadata(baseTimeNanoseconds=BASE_NS + 2_000_000_000)
    traces = loaded(tmp_path, gathers(0, TIMES), late)
    assert close(traces[1].start[0] - traces[0].start[0], 0)


def test_clocks_reach_ranks_over_others(tmp_path: Path) -> None:
    """Ranks 0 and 2 share no group; 1 shares one with each."""

    def trace(rank: int, groups: dict[str, tuple[int, ...]], shift: float) -> Trace:
        made = Trace(rank, 3, zero=5e9 + shift, host=f"host {rank}")
        for name, ranks in groups.items():
            made.group(name, ranks, name=str(1 + len(name)))
            for start, end in TIMES:
                made.collective("_allgather_base", name, start, end)
        return made

    traces = loaded(
        tmp_path,
        trace(0, {"gather": (0, 1)}, 0),
        trace(1, {"gather": (0, 1), "reduce_x": (1, 2)}, 1_000),
        trace(2, {"reduce_x": (1, 2)}, -7_000),
    )
    for other in traces[1:]:
        assert close(other.end[0] - traces[0].end[0], 0)


def test_clocks_go_over_the_ranks_with_most_in_common(tmp_path: Path) -> None:
    """The one all-gather of ranks 0 and 1 ends 300 us apart; each shares five with rank 2, which end together."""
    shifts = (0.0, 1_000.0, -7_000.0)
    made = [Trace(rank, 3, zero=5e9 + shift, host=f"host {rank}") for rank, shift in enumerate(shifts)]
    shared = {(0, 1): [[(200.0, 210.0)], [(200.0, 510.0)]], (0, 2): [TIMES, TIMES], (1, 2): [TIMES, TIMES]}
    for number, (ranks, times) in enumerate(shared.items(), 1):
        for rank, mine in zip(ranks, times, strict=True):
            made[rank].group(f"gather_{number}", ranks, name=str(number))
            for start, end in mine:
                made[rank].collective("_allgather_base", f"gather_{number}", start, end)
    traces = loaded(tmp_path, *made)
    for other in traces[1:]:
        assert close(other.end[0] - traces[0].end[0], 0)


def test_clocks_of_one_host_that_jump_are_told(tmp_path: Path) -> None:
    notes = loaded(tmp_path, gathers(0, TIMES, host="a"), gathers(1, TIMES, shift=3_600e6, host="a"))[0].notes
    assert any("5 of 5 collectives end on a rank before they start on another, by up to 3599" in note for note in notes)


def test_steps_that_a_rank_lacks_are_told_once(tmp_path: Path) -> None:
    def trace(rank: int, steps: range) -> Trace:
        made = Trace(rank, 2).group("gather_dense", (0, 1)).group("reduce_dense", (0, 1))
        for step in steps:
            made.annotation(f"hocket step {step}", 100 * step, 100 * step + 90)
            made.collective("_allgather_base", "gather_dense", 100 * step, 100 * step + 50)
            made.collective("_reduce_scatter_base", "reduce_dense", 100 * step, 100 * step + 50)
        return made

    notes = loaded(tmp_path, trace(0, range(1, 4)), trace(1, range(3, 4)))[0].notes
    assert [note for note in notes if note.startswith("step")] == ["steps 1, 2: not in the trace of rank 1"]


def test_a_rank_whose_steps_were_replayed_is_told_once(tmp_path: Path) -> None:
    named = Trace(0, 2).group("gather_dense", (0, 1)).annotation("hocket step 1", 0, 90)
    replayed = Trace(1, 2).group("gather_dense", (0, 1)).annotation("hocket step 1", 0, 90)
    for start in (0, 30):
        named.collective("_allgather_base", "gather_dense", start, start + 20)
        replayed.kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", start, start + 20)
    notes = loaded(tmp_path, named, replayed)[0].notes
    assert [note for note in notes if "clock" not in note] == [
        "rank 1: collectives do not tell their groups, as in a replay: who waits for whom is not known"
    ]


def test_clocks_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    traces = [Trace(rank, 2, host=f"host {rank}").kernel("gemm", 0, 10) for rank in (0, 1)]
    assert any("clock of rank 1 could not be compared" in note for note in loaded(tmp_path, *traces)[0].notes)

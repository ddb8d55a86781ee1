"""Exposed time and its company, on traces whose answers are worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket_trace import load, report
from hocket_trace.data import Kind, Report, StepReport
from tests.trace.build import Trace

US = 1e-6


def analysed(tmp_path: Path, *traces: Trace) -> Report:
    return report(load([trace.write(tmp_path / f"{trace.rank}.json") for trace in traces]))


def only_step(tmp_path: Path, trace: Trace) -> StepReport:
    (step,) = analysed(tmp_path, trace).steps
    return step


def grouped(rank: int = 0, world: int = 2, **more: object) -> Trace:
    everyone = tuple(range(world))
    made = Trace(rank, world, **more)  # type: ignore[arg-type]
    return made.group("gather_dense", everyone).group("reduce_dense", everyone).group("a2a", everyone)


def close(value: float, microseconds: float) -> bool:
    return math.isclose(value, microseconds * US, abs_tol=2e-9)


@pytest.mark.parametrize(
    ("start", "end", "exposed"),
    [
        (0, 10, 10),  # before the compute at 20..60
        (0, 20, 20),  # up to its start
        (10, 30, 10),  # over its start
        (30, 50, 0),  # within
        (20, 60, 0),  # the same
        (50, 80, 20),  # over its end
        (60, 80, 20),  # from its end
        (70, 80, 10),  # after it
        (10, 80, 30),  # around it
    ],
)
def test_overlaps_of_every_shape(tmp_path: Path, start: int, end: int, exposed: int) -> None:
    made = grouped().kernel("gemm", 20, 60, op="aten::mm").collective("_allgather_base", "gather_dense", start, end)
    step = only_step(tmp_path, made)
    assert close(step.exposed, exposed)
    assert close(step.kinds["gather"].exposed, exposed)
    assert close(step.exposed_for["gather"], exposed)
    assert close(step.communication, end - start)
    assert close(step.compute, 40)
    assert math.isclose(step.hidden, 1 - exposed / (end - start), abs_tol=1e-6)
    assert math.isclose(step.compute + step.exposed + step.idle, step.seconds, abs_tol=1e-12)


def test_compute_on_several_streams_counts_once(tmp_path: Path) -> None:
    made = (
        grouped()
        .kernel("a", 0, 30, stream=7)
        .kernel("b", 20, 50, stream=8)
        .kernel("c", 60, 70, stream=7)
        .collective("_allgather_base", "gather_dense", 10, 100)
    )
    step = only_step(tmp_path, made)
    assert close(step.compute, 60)
    assert close(step.exposed, 10 + 30)
    assert close(step.idle, 0)
    assert close(step.absent, 40)


def test_exposed_time_goes_to_what_ends_last_and_adds_up(tmp_path: Path) -> None:
    made = (
        grouped()
        .collective("_allgather_base", "gather_dense", 0, 40)
        .collective("_reduce_scatter_base", "reduce_dense", 10, 30)
        .collective("all_to_allv", "a2a", 35, 60)
        .kernel("gemm", 50, 55)
    )
    step = only_step(tmp_path, made)
    # 0..35 gather (the reduce ends before it), 35..60 all-to-all but for 50..55
    assert close(step.exposed, 55)
    assert close(step.exposed_for["gather"], 35)
    assert close(step.exposed_for["reduce"], 0)
    assert close(step.exposed_for["a2a"], 20)
    # by themselves
    assert close(step.kinds["gather"].exposed, 40)
    assert close(step.kinds["reduce"].exposed, 20)
    assert close(step.kinds["a2a"].exposed, 20)


spans = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=7)


KINDS: dict[int, Kind] = {0: "gather", 1: "reduce", 2: "a2a"}
GROUPS = {0: "gather_dense", 1: "reduce_dense", 2: "a2a"}


@given(spans)
def test_attribution_against_brute_force(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[int, int, int]]
) -> None:
    """Microsecond by microsecond. Where several kinds end last at once, any of them may have the time."""
    made = grouped()
    for start, long, which in found:
        if which == 3:
            made.kernel("gemm", start, start + long)
        else:
            made.collective("x", GROUPS[which], start, start + long)
    step = only_step(tmp_path_factory.mktemp("trace"), made)
    certain: Counter[Kind] = Counter()
    exposed = 0
    for cell in range(40):
        running = [(start + long, which) for start, long, which in found if start <= cell < start + long]
        if running and all(which != 3 for _, which in running):
            exposed += 1
            last = {which for end, which in running if end == max(running)[0]}
            certain.update([KINDS[which] for which in last] if len(last) == 1 else [])
    assert math.isclose(step.exposed, exposed * US, abs_tol=2e-8)
    assert math.isclose(sum(step.exposed_for.values()), step.exposed, abs_tol=1e-9)
    for kind, cells in certain.items():
        assert step.exposed_for[kind] >= cells * US - 2e-8


def test_layers_and_kinds_have_their_shares(tmp_path: Path) -> None:
    made = (
        grouped()
        .kernel("gemm", 0, 25)
        .collective(
            "_allgather_base", "gather_dense", 10, 30, received=1000, plan_op="gather dense t0 c0 l4 s0", launched=1
        )
        .collective(
            "_allgather_base", "gather_dense", 30, 40, received=1000, plan_op="gather dense t0 c0 l5 s0", launched=3
        )
        .collective(
            "_reduce_scatter_base", "reduce_dense", 40, 60, sent=3000, plan_op="reduce dense m0 c0 l5 s0", launched=5
        )
    )
    step = only_step(tmp_path, made)
    assert sorted(step.layers) == [4, 5]
    assert sorted(step.layers[5]) == ["gather", "reduce"]
    assert close(step.layers[4]["gather"].exposed, 5)
    assert close(step.layers[5]["gather"].exposed, 10)
    gather = step.kinds["gather"]
    assert (gather.count, gather.bytes) == (2, 2 * 1000)  # two of 2000 bytes, of which one half comes from elsewhere
    assert close(gather.seconds, 30)
    assert math.isclose(gather.bandwidth, 2000 / (30 * US), rel_tol=1e-4)


@pytest.mark.parametrize("transport", ["copy_engine", "null"])
def test_what_brings_a_copied_p2p_to_its_place_belongs_to_the_p2p(transport: str, tmp_path: Path) -> None:
    """Without communication such a copy only stands in for one."""
    made = (
        grouped()
        .metadata(hocket={"rank": 0, "transport": transport})
        .kernel("gemm", 0, 30, op="aten::mm", plan_op="fwd mlp m0 c0 l0")
        .peer_copy(10, 20, 4096, op="aten::copy_", plan_op="send act m0 c0")
    )
    for start in (20, 40):
        made.kernel(
            "Memcpy DtoD (Device -> Device)", start, start + 5, op="aten::copy_", plan_op="recv grad m0 c0",
            stream=32, cat="gpu_memcpy", bytes=4096,
        )  # fmt: skip
    step = only_step(tmp_path, made)
    copied = transport == "copy_engine"
    assert close(step.kinds["pp"].seconds, 20 if copied else 10)
    assert close(step.exposed, 5 if copied else 0)
    assert step.kinds["pp"].bytes == 4096  # counted where it is sent


def test_copy_engine_transfers_are_communication(tmp_path: Path) -> None:
    made = (
        grouped()
        .op("c10d::_allgather_base_", 0, 10)
        .op("record_param_comms", 1, 9, **{"Collective name": "_allgather_base", "Process Group Name": "1"})
        .annotation("nccl:_all_gather_base", 2, 8)
        .peer_copy(20, 40, 4096, launched=3)
        .peer_copy(20, 50, 4096, launched=4, stream=31)
        .kernel("Memcpy DtoD (Device -> Device)", 20, 25, launched=5, stream=32, cat="gpu_memcpy", bytes=4096)
        .kernel("Memcpy DtoD (Device -> Device)", 60, 65, op="aten::copy_", cat="gpu_memcpy", bytes=64)
        .kernel("gemm", 30, 60, launched=15)
    )
    step = only_step(tmp_path, made)
    gather = step.kinds["gather"]
    assert close(gather.seconds, 30)
    assert close(gather.exposed, 10)
    assert gather.bytes == 2 * 4096  # the rank's own part stays at home
    assert gather.count == 1  # one collective, three copies
    assert close(step.classes["copy"], 5)


def test_spinning_before_a_collective_is_an_emulated_link(tmp_path: Path) -> None:
    made = (
        grouped()
        .annotation("gather dense t0 c0 l1 s0", 0, 10)
        .kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 13, 19, launched=12, stream=20)  # of no op
        .kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 20, 60, launched=1, stream=20)
        .kernel("vectorized_elementwise_kernel", 60, 62, launched=3, stream=20)
        .op("record_param_comms", 4, 8, **{"Collective name": "_allgather_base", "Process Group Name": "1"})
        .collective("_allgather_base", "gather_dense", 62, 72, launched=5, received=1000, stream=20)
        .kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 80, 90)  # someone else's delay
        .kernel("gemm", 30, 40)
    )
    step = only_step(tmp_path, made)
    gather = step.kinds["gather"]
    assert (gather.count, gather.bytes) == (1, 1000)
    assert close(gather.seconds, 50)
    assert close(gather.exposed, 40)
    assert close(step.compute, 28)


def test_a_call_of_several_kernels_moves_its_bytes_once(tmp_path: Path) -> None:
    made = (
        grouped()
        .op("record_param_comms", 0, 10)
        .collective("_allgather_base", "gather_dense", 20, 30, launched=2, received=1000)
        .collective("_allgather_base", "gather_dense", 30, 40, launched=5, received=1000)
    )
    gather = only_step(tmp_path, made).kinds["gather"]
    assert (gather.count, gather.bytes) == (1, 1000)


def test_copies_between_gpus_take_their_kind_from_an_annotation(tmp_path: Path) -> None:
    made = Trace(world=2).annotation("FSDP::all_gather (layers.3)", 0, 50).op("aten::copy_", 5, 20)
    step = only_step(tmp_path, made.peer_copy(60, 80, 4096, launched=10))
    assert step.layers[3]["gather"].bytes == 4096


def test_kernels_of_one_graph_share_a_launch(tmp_path: Path) -> None:
    made = Trace().annotation("fwd attn m0 c0 l1", 0, 10).kernel("a", 20, 30, launched=5)
    made.event("kernel", "b", 30, 40, tid=7, correlation=1, stream=7, device=0)
    (trace,) = load([made.write(tmp_path / "a.json")])
    assert trace.text(trace.op) == ["fwd attn m0 c0 l1"] * 2
    assert trace.launched[0] == trace.launched[1]


def test_a_group_of_one_waits_for_nobody(tmp_path: Path) -> None:
    made = Trace(world=1).group("control", (0,)).collective("allreduce", "control", 0, 10)
    assert only_step(tmp_path, made).kinds["control"].waiting == 0


def test_host_bound_time_is_idle_until_the_launch(tmp_path: Path) -> None:
    made = (
        Trace()
        .kernel("a", 10, 20, launched=0)
        .kernel("late", 40, 50, launched=35)  # of 20 idle, 15 before the launch
        .kernel("queued", 60, 70, launched=45)  # launched before the device fell idle
        .kernel("very late", 90, 95, launched=90)
    )
    step = only_step(tmp_path, made)
    assert close(step.idle, 20 + 10 + 20)
    assert close(step.host_bound, 15 + 0 + 20)


def test_a_step_lasts_until_the_next_and_cuts_what_runs_over(tmp_path: Path) -> None:
    made = (
        grouped()
        .annotation("hocket step 1", 0, 10)
        .annotation("hocket step 2", 10, 40)
        .kernel("a", 20, 30, launched=1)
        .collective("_reduce_scatter_base", "reduce_dense", 30, 60, sent=64, launched=5)
        .kernel("b", 40, 50, launched=12)
        .kernel("c", 70, 80, launched=15)
    )
    first, second = analysed(tmp_path, made).steps
    assert (first.step, second.step) == (1, 2)
    assert close(first.seconds, 20)
    assert close(first.exposed, 10)
    assert close(second.seconds, 40)
    assert close(second.exposed, 10)  # 50..60 of the first step's reduce
    assert close(second.idle, 10)
    assert (first.kinds["reduce"].count, second.kinds["reduce"].count) == (1, 0)
    assert second.kinds["reduce"].bytes == 0


def test_what_runs_between_steps_that_do_not_follow_each_other_is_in_none(tmp_path: Path) -> None:
    made = Trace().annotation("hocket step 7", 0, 100).kernel("gemm", 0, 30, op="aten::mm")
    made.annotation("hocket step 9", 200, 300).kernel("gemm", 210, 250, op="aten::mm")
    made.kernel("gemm", 120, 180, op="aten::mm")
    steps = analysed(tmp_path, made).steps
    assert [step.step for step in steps] == [7, 9]
    assert close(steps[0].seconds, 30)
    assert close(steps[1].seconds, 40)


def test_classes_are_sums_not_unions(tmp_path: Path) -> None:
    made = (
        Trace()
        .kernel("nvjet", 0, 30, op="aten::mm")
        .kernel("nvjet", 10, 40, op="aten::mm", stream=8)
        .kernel("vectorized_elementwise_kernel", 40, 45, op="aten::mul")
    )
    step = only_step(tmp_path, made)
    assert close(step.classes["gemm"], 60)
    assert close(step.classes["elementwise"], 5)
    assert list(step.classes) == ["gemm", "elementwise"]


def test_a_report_says_where_it_comes_from(tmp_path: Path) -> None:
    made = grouped(1, world=4).metadata(hocket={"transport": "slow"}).kernel("k", 0, 10)
    found = analysed(tmp_path, made)
    assert (found.device, found.world, found.ranks, found.transport) == ("NVIDIA H200", 4, (1,), "slow")
    assert found.emulated
    assert any("1 of 4 ranks were given (missing: ranks 0, 2, 3)" in note for note in found.notes)
    assert close(found.step_seconds, 10)


def test_a_trace_without_communication(tmp_path: Path) -> None:
    step = only_step(tmp_path, Trace().kernel("k", 0, 10).kernel("k", 20, 30))
    assert (step.communication, step.exposed, step.hidden) == (0, 0, 1)
    assert step.kinds == {}
    assert step.exposed_for == {}
    assert close(step.idle, 10)


def test_a_trace_without_compute(tmp_path: Path) -> None:
    step = only_step(tmp_path, grouped().collective("all_to_allv", "a2a", 0, 10))
    assert step.compute == 0
    assert close(step.exposed, 10)
    assert step.hidden == 0
    assert np.isnan(step.kinds["a2a"].waiting)


def test_waiting_beside_a_transfer_of_its_kind_is_no_time_without_one(tmp_path: Path) -> None:
    """Rank 0 waits from 0 to 40 in one group, moves data from 10 to 30 in another and from 40 to 50 in the first."""

    def trace(rank: int) -> Trace:
        made = Trace(rank, 2).group("gather_dense", (0, 1)).group("gather_experts", (0, 1))
        made.collective("_allgather_base", "gather_dense", 40 * rank, 50, sent=512, received=1024)
        return made.collective("_allgather_base", "gather_experts", 10, 30, sent=512, received=1024)

    gather = report(load([trace(rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)])).steps[0].kinds["gather"]
    assert close(gather.seconds, 50)
    assert close(gather.waiting, 10 + 10)
    assert gather.bandwidth == pytest.approx(2 * 1024 / (30 * US))


def test_waiting_is_exposed_where_nothing_else_moves(tmp_path: Path) -> None:
    """Rank 1 starts the gather 30 us late; 10 of these lie beside compute, in 10 the a2a moves data meanwhile."""

    def trace(rank: int) -> Trace:
        made = grouped(rank).kernel("gemm", 0, 20, op="aten::mm")
        made.collective("_allgather_base", "gather_dense", 10 + 30 * rank, 60)
        return made.collective("all_to_allv", "a2a", 30, 50)

    early, late = analysed(tmp_path, trace(0), trace(1)).steps
    assert close(early.exposed, 40)
    assert close(early.waiting, 20)
    assert close(early.exposed_waiting, 10)
    assert (late.waiting, late.exposed_waiting) == (0, 0)
    alone = analysed(tmp_path, trace(0)).steps[0]
    assert math.isnan(alone.waiting)
    assert math.isnan(alone.exposed_waiting)

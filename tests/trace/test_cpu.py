"""Traces of programs that compute on the CPU and communicate with gloo."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hocket_trace import load, report
from hocket_trace.cpu import UNSEEN
from hocket_trace.data import RankTrace
from hocket_trace.read import read
from tests.trace.build import MAIN, Trace

US = 1e-6
A2A, REDUCE = (201, 202), (301, 302)
"""Threads of two process groups."""


def close(value: float, microseconds: float) -> bool:
    return math.isclose(value, microseconds * US, abs_tol=2e-9)


def cpu(rank: int = 0, world: int = 2) -> Trace:
    made = Trace(rank, world, device="")
    for group in ("gather_dense", "reduce_dense", "a2a", "pp_fwd"):
        made.group(group, tuple(range(world)))
    return made


def rows(trace: RankTrace, name: str) -> list[int]:
    return [i for i, word in enumerate(trace.text(trace.name)) if word == name]


def test_outermost_ops_and_what_runs_around_them_are_rows(tmp_path: Path) -> None:
    made = (
        cpu()
        .op("autograd::engine::evaluate_function: MmBackward0", 0, 100)
        .op("MmBackward0", 4, 96)
        .op("aten::matmul", 20, 60)
        .op("aten::mm", 25, 55)
    )
    trace = read(made.write(tmp_path / "a.json"))
    found = [(name, a, b) for name, a, b in zip(trace.text(trace.name), trace.start / US, trace.end / US, strict=True)]
    assert [name for name, _, _ in found] == ["MmBackward0", "aten::matmul", "MmBackward0"]
    np.testing.assert_allclose([(a, b) for _, a, b in found], [(0, 20), (20, 60), (60, 100)], atol=2e-3)
    assert trace.device == "cpu"
    assert close(report([trace]).steps[0].compute, 100)
    assert close(report([trace]).steps[0].classes["gemm"], 40)


def test_calls_waits_and_gloos_own_copies_are_no_compute(tmp_path: Path) -> None:
    made = (
        cpu()
        .op("Custom", 0, 100)
        .annotation("gather dense t0 c0 l0 s0", 5, 35)
        .op("c10d::_allgather_base_", 10, 30)
        .annotation("wait gather dense t0 c0 l0 s0", 50, 80)
        .annotation("gloo:all_gather", 20, 70, thread=201)
        .op("aten::copy_", 60, 65, thread=201)
    )
    step = report([read(made.write(tmp_path / "a.json"))]).steps[0]
    assert close(step.compute, 10 + 20 + 20)
    assert close(step.communication, 50)
    assert close(step.exposed, 10 + 20)


def test_a_wait_inside_of_an_op_is_no_compute_and_its_transfers_are_of_the_layer(tmp_path: Path) -> None:
    """As in a layer of tensor-parallel ranks without overlap: all of its communication is exposed."""
    made = cpu().group("tp", (0, 1))
    made.tensors = True
    made.annotation("fwd attn m0 c0 l0", 0, 100).op("_Row", 5, 95).op("aten::mm", 10, 30)
    made.gloo("all_to_all", "c10d::alltoall_base_", 32, 70, launched=31).annotation("wait", 33, 70)
    made.gloo("send", "c10d::send", 71, 90, launched=71, thread=MAIN).annotation("wait", 72, 90)
    trace = read(made.write(tmp_path / "a.json"))
    step = report([trace]).steps[0]
    assert set(step.kinds) == {"tp"}
    assert close(step.kinds["tp"].seconds, (70 - 32) + (90 - 71))
    assert close(step.kinds["tp"].exposed, 37 + 0.5 + 18)
    assert set(trace.layer[trace.of_kind("tp")].tolist()) == {0}
    assert {trace.words[i] for i in trace.group[trace.of_kind("tp")]} == {"tp"}


def test_waits_inside_of_an_op_stand_for_transfers_that_are_not_seen(tmp_path: Path) -> None:
    made = cpu()
    made.tensors = True
    made.annotation("fwd attn m0 c0 l0", 0, 100).op("_Row", 5, 95).op("aten::mm", 10, 30).annotation("wait", 40, 90)
    made.annotation("fwd attn m1 c0 l0", 100, 200).op("_Row", 105, 195)
    found = report([read(made.write(tmp_path / "a.json"))])
    (step,) = found.steps
    assert set(step.kinds) == {"tp"}
    assert close(step.kinds["tp"].exposed, 50)
    assert close(step.compute, 40 + 90)
    assert UNSEEN in found.notes


def test_compute_of_all_threads_counts(tmp_path: Path) -> None:
    made = cpu().op("aten::mm", 0, 20).op("aten::add", 10, 40, thread=MAIN + 1)
    trace = read(made.write(tmp_path / "a.json"))
    assert close(report([trace]).steps[0].compute, 40)
    assert sorted(trace.text(trace.lane)) == ["compute", f"thread {MAIN + 1}"]


def test_transfers_belong_to_the_calls_of_their_group(tmp_path: Path) -> None:
    """Two groups call the same collective in turn; the second reduce is held up, and starts after later calls."""
    made = (
        cpu()
        .annotation("reduce dense m0 c0 l1 s0", 0, 20)
        .gloo("all_to_all", "c10d::alltoall_base_", 12, 40, launched=10, thread=REDUCE[0])
        .annotation("reduce dense m0 c0 l0 s1", 20, 40)
        .gloo("all_to_all", "c10d::alltoall_base_", 95, 99, launched=30, thread=REDUCE[0])
        .annotation("fwd dispatch m0 c0 l1", 50, 70)
        .gloo("all_to_all", "c10d::alltoall_base_", 62, 80, launched=60, thread=A2A[0])
        .annotation("fwd combine m0 c0 l1", 80, 90)
        .gloo("all_to_all", "c10d::alltoall_base_", 87, 120, launched=85, thread=A2A[0])
        .op("aten::mm", 90, 130)
    )
    trace = read(made.write(tmp_path / "a.json"))
    transfers = rows(trace, "gloo:all_to_all")
    assert [trace.words[trace.op[i]] for i in transfers] == [
        "reduce dense m0 c0 l1 s0", "fwd dispatch m0 c0 l1", "fwd combine m0 c0 l1", "reduce dense m0 c0 l0 s1",
    ]  # fmt: skip
    assert [trace.words[trace.kind[i]] for i in transfers] == ["reduce", "a2a", "a2a", "reduce"]
    assert [trace.words[trace.group[i]] for i in transfers] == ["reduce_dense", "a2a", "a2a", "reduce_dense"]
    assert [trace.words[trace.lane[i]] for i in transfers] == ["reduce", "a2a", "a2a", "reduce"]
    np.testing.assert_allclose(
        trace.launched[transfers] - trace.launched[transfers[0]], [0, 50e-6, 75e-6, 20e-6], atol=1e-9
    )


def test_sends_that_overlap_ops_of_their_thread_do_not_hide_them(tmp_path: Path) -> None:
    """A send of gloo is shown on the caller's thread until it is waited for, across whatever runs there meanwhile."""
    made = (
        cpu()
        .annotation("send act m0 c0", 0, 20)
        .gloo("send", "c10d::send", 11, 100, launched=10, thread=MAIN)
        .annotation("fwd attn m1 c0 l0", 20, 60)
        .op("aten::mm", 30, 50)
        .annotation("fwd attn m2 c0 l0", 90, 130)
        .op("aten::mm", 95, 120)
    )
    trace = read(made.write(tmp_path / "a.json"))
    first, second = rows(trace, "aten::mm")
    (send,) = rows(trace, "gloo:send")
    assert trace.words[trace.op[first]] == "fwd attn m1 c0 l0"
    assert trace.words[trace.op[second]] == "fwd attn m2 c0 l0"
    assert trace.words[trace.kind[send]] == "pp"
    assert trace.words[trace.op[send]] == "send act m0 c0"
    assert close(report([trace]).steps[0].kinds["pp"].exposed, 89 - 20 - 5)


def test_a_send_ends_with_its_receive_however_late_its_host_waits_for_it(tmp_path: Path) -> None:
    def trace(rank: int) -> Trace:
        verb, end = ("recv", 40) if rank else ("send", 100)
        made = cpu(rank).annotation(f"{verb} act m0 c0", 0, 20).op("aten::mm", 0, 5)
        made.gloo(verb, f"c10d::{verb}_" if rank else "c10d::send", 11, end, launched=10, thread=MAIN)
        return made.op("aten::mm", 120, 130)

    traces = load([trace(rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)])
    sender, receiver = report(traces).steps
    assert close(sender.kinds["pp"].seconds, 29)
    assert close(receiver.kinds["pp"].seconds, 29)
    assert close(report(traces[:1]).steps[0].kinds["pp"].seconds, 29)
    alone = load([tmp_path / "0.json"])
    assert close(report(alone).steps[0].kinds["pp"].seconds, 89)  # who knows


def test_a_transfer_from_before_the_trace_has_no_call(tmp_path: Path) -> None:
    made = (
        cpu()
        .annotation("gloo:all_reduce", 0, 5, thread=201)
        .gloo("all_reduce", "c10d::allreduce_", 12, 20, launched=10, thread=201)
        .op("aten::mm", 0, 30)
    )
    trace = read(made.write(tmp_path / "a.json"))
    early, late = rows(trace, "gloo:all_reduce")
    assert np.isnan(trace.launched[early])
    assert close(trace.launched[late] - trace.start[early], 10)


def test_agreement_outside_the_plan_is_control(tmp_path: Path) -> None:
    made = (
        cpu()
        .annotation("fwd attn m0 c0 l0", 0, 10)
        .op("aten::mm", 1, 9)
        .gloo("all_reduce", "c10d::allreduce_", 22, 30, launched=20)
    )
    assert set(report([read(made.write(tmp_path / "a.json"))]).steps[0].kinds) == {"control"}


def test_all_reduces_of_other_programs_are_gradients(tmp_path: Path) -> None:
    made = cpu().op("aten::mm", 1, 9).gloo("all_reduce", "c10d::allreduce_", 22, 30, launched=20)
    assert set(report([read(made.write(tmp_path / "a.json"))]).steps[0].kinds) == {"reduce"}


def test_other_programs_with_one_group_are_matched_too(tmp_path: Path) -> None:
    """FSDP2 on gloo, whose reduce-scatter runs as an all-reduce."""

    def trace(rank: int) -> Trace:
        made = Trace(rank, 2, device="").group("default_pg", (0, 1)).op("aten::mm", 0, 5)
        made.annotation("FSDP::all_gather (layers.2)", 5, 10)
        made.gloo("all_gather", "c10d::_allgather_base_", 12 + 5 * rank, 30, launched=6)
        made.annotation("FSDP::post_backward_reduce (layers.2)", 40, 50)
        return made.gloo("all_reduce", "c10d::_reduce_scatter_base_", 45 + 10 * rank, 60, launched=42)

    found = report(load([trace(rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)]))
    layer = found.steps[0].layers[2]
    assert close(layer["gather"].waiting, 5)
    assert close(layer["reduce"].waiting, 10)


def test_ranks_are_matched_and_late_ones_waited_for(tmp_path: Path) -> None:
    def trace(rank: int, start: float) -> Trace:
        made = cpu(rank).op("aten::mm", 0, 5).annotation("fwd dispatch m0 c0 l1", 5, 9)
        return made.gloo("all_to_all", "c10d::alltoall_base_", start, 60, launched=6)

    found = report(load([trace(rank, 10 + 20 * rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)]))
    assert close(found.steps[0].kinds["a2a"].waiting, 20)
    assert close(found.steps[1].kinds["a2a"].waiting, 0)


def test_python_between_ops_is_host_bound(tmp_path: Path) -> None:
    made = cpu().op("aten::mm", 0, 10).op("aten::mm", 30, 40)
    step = report([read(made.write(tmp_path / "a.json"))]).steps[0]
    assert close(step.idle, 20)
    assert close(step.host_bound, 20)


def test_waits_stand_for_transfers_that_the_profiler_did_not_see(tmp_path: Path) -> None:
    made = (
        cpu()
        .annotation("fwd attn m0 c0 l3", 0, 40)
        .op("aten::mm", 0, 40)
        .annotation("wait gather dense t0 c0 l4 s1", 50, 80)
        .annotation("wait fwd attn m0 c0 l3", 80, 85)  # of compute: no communication
        .op("aten::mm", 90, 100)
    )
    trace = read(made.write(tmp_path / "a.json"))
    step = report([trace]).steps[0]
    assert set(step.kinds) == {"gather"}
    assert close(step.kinds["gather"].exposed, 30)
    assert close(step.layers[4]["gather"].seconds, 30)
    assert close(step.compute, 50)
    assert np.isnan(step.kinds["gather"].waiting)
    assert any("only waits for them" in note for note in trace.notes)


def test_waits_stand_for_ops_without_a_transfer_beside_ops_that_have_one(tmp_path: Path) -> None:
    """As on an emulated network, where receives and agreements are seen, and sends and collectives are not."""

    def trace(rank: int) -> Trace:
        made = cpu(rank).annotation("recv act m0 c0", 0, 5).gloo("recv", "c10d::recv_", 2, 30, launched=1, thread=MAIN)
        made.annotation("wait recv act m0 c0", 10, 30)
        made.op("Custom", 40, 80).annotation("wait reduce dense m0 c0 l2 s0", 50, 60)
        return made.annotation("wait fwd combine m0 c0 l1", 90, 95 + rank).op("aten::mm", 100, 110)

    traces = load([trace(rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)])
    step = report(traces).steps[1]
    assert {kind: share.count for kind, share in step.kinds.items()} == {"pp": 1, "reduce": 1, "a2a": 1}
    assert close(step.kinds["pp"].seconds, 28)  # the transfer, not the wait for it
    assert close(step.kinds["reduce"].exposed, 10)
    assert close(step.kinds["a2a"].exposed, 6)
    assert close(step.layers[2]["reduce"].seconds, 10)
    assert close(step.compute, 30 + 10)  # an op that waits does not compute meanwhile
    assert np.isnan([step.kinds["reduce"].waiting, step.kinds["a2a"].waiting]).all()
    notes = report(traces).notes
    assert sum("only waits for them" in note for note in notes) == 1
    assert not any("do not match" in note for note in notes), "sends that no host could see"

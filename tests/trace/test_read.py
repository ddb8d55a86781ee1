"""Reading one trace: launches, nested annotations, threads, steps, and files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket_trace import TraceError, load, report
from hocket_trace.data import RankTrace
from hocket_trace.read import read
from tests.trace.build import MAIN, Trace, plan

US = 1e-6
AUTOGRAD = 300


def only(trace: RankTrace, name: str) -> int:
    """The row of the one activity of a name."""
    (row,) = np.flatnonzero([word == name for word in trace.text(trace.name)])
    return int(row)


def word(trace: RankTrace, column: str, name: str) -> str:
    return trace.words[getattr(trace, column)[only(trace, name)]]


def test_times_are_seconds_from_the_first_event(tmp_path: Path) -> None:
    trace = read(Trace(zero=5e9).op("aten::mm", 0, 5).kernel("gemm", 12, 30, launched=2).write(tmp_path / "a.json"))
    np.testing.assert_allclose([trace.start[0], trace.end[0], trace.launched[0]], [12 * US, 30 * US, 2 * US], atol=1e-9)


def test_rows_ascend_by_start(tmp_path: Path) -> None:
    made = Trace().kernel("late", 50, 60, launched=1).kernel("early", 10, 20, launched=2, stream=9)
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.text(trace.name) == ["early", "late"]
    assert trace.text(trace.lane) == ["stream 9", "stream 7"]


def test_gz_and_plain_json_read_the_same(tmp_path: Path) -> None:
    made = Trace().kernel("gemm", 0, 10, op="aten::mm")
    one, other = read(made.write(tmp_path / "a.json")), read(made.write(tmp_path / "a.json.gz"))
    assert one.text(one.launcher) == other.text(other.launcher) == ["aten::mm"]


def test_the_innermost_op_launched_it(tmp_path: Path) -> None:
    made = (
        Trace()
        .op("aten::matmul", 0, 50)
        .op("aten::mm", 10, 30)
        .op("aten::empty", 12, 14)
        .kernel("inside mm", 100, 110, launched=20)
        .kernel("after mm", 110, 120, launched=40)
        .kernel("after all", 120, 130, launched=60)
    )
    trace = read(made.write(tmp_path / "a.json"))
    assert [word(trace, "launcher", name) for name in ("inside mm", "after mm", "after all")] == [
        "aten::mm", "aten::matmul", "",
    ]  # fmt: skip


def test_ops_of_another_thread_launched_nothing(tmp_path: Path) -> None:
    made = Trace().op("aten::mm", 0, 50, thread=AUTOGRAD).kernel("k", 100, 110, launched=20, thread=MAIN)
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.text(trace.launcher) == [""]


def test_annotations_around_the_launch_tell_op_and_layer(tmp_path: Path) -> None:
    made = (
        Trace()
        .annotation("fwd attn m2 c1 l13", 0, 50)
        .op("aten::mm", 10, 20)
        .kernel("gemm", 60, 70, launched=15)
        .annotation("fwd mlp m2 c1 l14", 60, 80)
        .kernel("next", 90, 95, launched=65)
    )
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.text(trace.op) == ["fwd attn m2 c1 l13", "fwd mlp m2 c1 l14"]
    assert trace.layer.tolist() == [13, 14]
    assert trace.text(trace.lane) == ["compute", "compute"]


def test_backward_kernels_belong_to_the_op_open_on_the_main_thread(tmp_path: Path) -> None:
    made = (
        Trace()
        .annotation("bwd attn m0 c0 l3", 0, 50)
        .op("autograd::engine::evaluate_function: MmBackward0", 10, 40, thread=AUTOGRAD)
        .op("aten::mm", 15, 30, thread=AUTOGRAD)
        .kernel("gemm", 60, 70, launched=20, thread=AUTOGRAD)
        .kernel("too late", 80, 90, launched=55, thread=AUTOGRAD)
    )
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.text(trace.op) == ["bwd attn m0 c0 l3", ""]
    assert trace.text(trace.launcher) == ["aten::mm", ""]


def test_without_correlation_nothing_is_invented(tmp_path: Path) -> None:
    trace = read(Trace().op("aten::mm", 0, 50).kernel("gemm", 10, 20, linked=False).write(tmp_path / "a.json"))
    assert trace.text(trace.launcher) == [""]
    assert np.isnan(trace.launched).all()
    assert any("launches of 1 of 1" in note for note in trace.notes)


def test_in_a_replay_kernels_tell_what_they_are_for(tmp_path: Path) -> None:
    barrier = "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int)"
    trace = (
        Trace()
        .metadata(hocket={"plan": plan(["fwd attn m0 c0 l0"])})  # of which nothing is seen
        .annotation("hocket step 1", 0, 9)
        .kernel(barrier, 10, 11, stream=13, launched=5)  # behind nothing
        .kernel("_push_rows", 12, 20, stream=13, launched=5)
        .kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 13, 22, stream=14, launched=5)
        .kernel(barrier, 21, 25, stream=13, launched=5)
        .kernel(barrier, 26, 27, stream=14, launched=5)
        .kernel("_take_rows", 28, 30, stream=13, launched=5)
        .write(tmp_path / "rank0.json")
    )
    found = read(trace)
    assert found.text(found.kind) == ["control", "a2a", "gather", "a2a", "gather", "compute"]


def test_copies_that_come_in_batches_are_for_what_came_before_on_their_lane(tmp_path: Path) -> None:
    """A trace does not have their launches."""
    trace = read(
        Trace(world=2)
        .group("a2a", (0, 1))
        .annotation("hocket step 1", 0, 100)
        .peer_copy(1, 2, 50, stream=20, launched=1, linked=False)  # behind nothing
        .collective("_allgather_base", "a2a", 10, 12, launched=8, plan_op="fwd dispatch m0 c0 l1", stream=20)
        .peer_copy(13, 20, 5_000, stream=20, launched=9, linked=False)
        .kernel("_take_blocks", 21, 25, stream=20, launched=9, plan_op="fwd dispatch m0 c0 l1")
        .write(tmp_path / "rank0.json")
    )
    assert trace.text(trace.kind) == ["other", "a2a", "a2a", "a2a"]
    assert trace.bytes[2] == 5_000


def test_a_layer_can_come_from_a_module_annotation(tmp_path: Path) -> None:
    made = (
        Trace(world=2)
        .group("mesh_dp", (0, 1))
        .annotation("FSDP::pre_backward (model.layers.7)", 0, 100)
        .annotation("FSDP::all_gather (model.layers.6)", 20, 60)
        .collective("_allgather_base", "mesh_dp", 70, 90, launched=30, received=100)
        .collective("_reduce_scatter_base", "mesh_dp", 100, 120, launched=80, sent=100)
    )
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.layer.tolist() == [6, 7]
    assert trace.text(trace.kind) == ["gather", "reduce"]


def test_steps_are_where_kernels_were_launched(tmp_path: Path) -> None:
    made = (
        Trace()
        .kernel("warm up", 0, 5, launched=0)
        .annotation("hocket step 3", 10, 20)
        .annotation("hocket step 4", 20, 40)
        .kernel("of 3", 15, 19, launched=12)
        .kernel("of 3, late", 50, 60, launched=18)
        .kernel("of 4", 60, 80, launched=25)
        .kernel("after all", 90, 95, launched=90)
    )
    trace = read(made.write(tmp_path / "a.json"))
    assert trace.step.tolist() == [-1, 0, 0, 1, -1]
    assert [step.number for step in trace.steps] == [3, 4]
    found = [(step.start, step.end) for step in trace.steps]
    np.testing.assert_allclose(found, [(15 * US, 60 * US), (60 * US, 80 * US)], atol=1e-9)


def test_profiler_steps_count_too(tmp_path: Path) -> None:
    made = Trace().annotation("ProfilerStep#7", 0, 100).kernel("k", 150, 160, launched=50)
    assert [step.number for step in read(made.write(tmp_path / "a.json")).steps] == [7]


def test_a_trace_without_steps_is_one_step(tmp_path: Path) -> None:
    trace = read(Trace().kernel("a", 0, 5).kernel("b", 10, 20).write(tmp_path / "a.json"))
    assert trace.step.tolist() == [0, 0]
    np.testing.assert_allclose(trace.steps[0].end - trace.steps[0].start, 20 * US, atol=1e-9)
    assert any("no step is marked" in note for note in trace.notes)


def test_rank_world_device_and_run(tmp_path: Path) -> None:
    made = Trace(rank=3, world=8, device="NVIDIA H200").metadata(hocket={"version": 1, "transport": "nccl"})
    trace = read(made.kernel("k", 0, 1).write(tmp_path / "a.json"))
    assert (trace.rank, trace.world, trace.device) == (3, 8, "NVIDIA H200")
    assert trace.run["transport"] == "nccl"


def test_a_rank_can_come_from_the_name_of_the_file(tmp_path: Path) -> None:
    document = Trace().kernel("k", 0, 1).document()
    del document["distributedInfo"]
    path = tmp_path / "rank3.json"
    path.write_text(json.dumps(document))
    assert (read(path).rank, read(path).world, report([read(path)]).world) == (3, 0, 4)


def test_groups_that_share_a_description_keep_their_ranks(tmp_path: Path) -> None:
    made = Trace(world=4).kernel("k", 0, 1).document()
    made["distributedInfo"]["pg_config"] = [
        {"pg_name": "1", "pg_desc": "pp_fwd", "ranks": [0, 1]},
        {"pg_name": "2", "pg_desc": "pp_fwd", "ranks": [3, 0]},
        {"pg_name": "3", "pg_desc": "undefined", "ranks": [0, 2]},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(made))
    assert read(path).groups == {"pp_fwd": (0, 1), "pp_fwd #2": (3, 0), "group 3": (0, 2)}


def edited(top: dict[str, Any] | None = None, **values: Any) -> bytes:
    """A trace of a kernel whose last one, or whose metadata, says something else."""
    document = Trace().kernel("k", 0, 1).kernel("l", 2, 3).document()
    document["traceEvents"][-1].update(values)
    return json.dumps(document | (top or {})).encode()


def told(plan: Any) -> bytes:
    """A trace whose program tells such a plan."""
    return edited(top={"hocket": {"plan": plan}})


def turned() -> bytes:
    """A trace whose device clock jumps back by a second between two steps."""
    made = Trace().annotation("hocket step 1", 0, 9).annotation("hocket step 2", 10, 19)
    made.kernel("k", 1, 2).kernel("k", 11 - 1e6, 12 - 1e6, launched=11)
    return json.dumps(made.document()).encode()


WHOLE = json.dumps(Trace().kernel("k", 0, 1, op="aten::mm").document())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.json", b"", "the file is empty"),
        ("cut.json", WHOLE[:-40].encode(), "ends in the middle"),
        ("cut.json.gz", gzip.compress(WHOLE.encode())[:-30], "cut off or broken"),
        ("half.json.gz", gzip.compress(WHOLE[: len(WHOLE) // 2].encode()), "ends in the middle"),
        ("named.json.gz", WHOLE.encode(), "not gzip"),
        ("text.json", b"hello there", "not JSON"),
        ("binary.json", bytes(range(256)), "not JSON"),
        ("list.json", b"[1, 2]", "JSON without traceEvents"),
        ("other.json", b'{"a": 1}', "JSON without traceEvents"),
        ("strange.json", b'{"traceEvents": [1, 2]}', "not as the PyTorch profiler writes it"),
        ("no_name.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}', "not as the PyTorch profiler"),
        ("nothing.json", b'{"traceEvents": []}', "no kernels and no torch ops"),
        ("nan.json", edited(dur=float("nan")), "an event is not as .*its times reach over nan s"),
        ("endless.json", edited(dur=float("inf")), "an event is not as .*its times reach over inf s"),
        ("far.json", edited(ts=1e300), "an event is not as .*its times reach over"),
        ("integer.json", edited(ts=10**400), "an event is not as .* too large"),
        ("number.json", edited(name=5), "an event is not as .*name is 5"),
        ("base.json", edited(top={"baseTimeNanoseconds": None}), r"baseTimeNanoseconds is not as .*\(None\)"),
        ("device.json", edited(top={"deviceProperties": {"name": "x"}}), "deviceProperties is not as"),
        ("rank.json", edited(top={"distributedInfo": {"rank": "a"}}), "distributedInfo is not as"),
        ("before.json", edited(top={"distributedInfo": {"rank": -1}}), "distributedInfo is not as"),
        ("number.json", edited(top={"baseTimeNanoseconds": float("inf")}), r"baseTimeNanoseconds is not as .*\(inf\)"),
        ("long.json", WHOLE.encode().replace(b'"k"', b'"' + 999 * b"k"), "ends in the middle"),
        ("ranks.json", edited(top={"distributedInfo": {"rank": 0, "world_size": 10**12}}), "distributedInfo is not as"),
        ("beyond.json", edited(top={"distributedInfo": {"rank": 2, "world_size": 2}}), "distributedInfo is not as"),
        ("stage.json", edited(top={"hocket": {"pp_rank": "x"}}), "hocket is not as a profiled run writes it"),
        (
            "plan.json",
            edited(top={"hocket": {"plan": []}}),
            r"hocket is not as a profiled run writes it \(plan: TypeError",
        ),
        (
            "lanes.json",
            edited(top={"hocket": {"plan": plan(["fwd attn"]) | {"computing": ["x"]}}}),
            "compute are lanes",
        ),
        (
            "op.json",
            edited(top={"hocket": {"plan": plan([]) | {"ops": {"a b": ["compute", "x", "", 1]}}}}),
            "plan: a b: ",
        ),
        ("turned.json", turned(), "step 1 ends before it starts: a clock jumped"),
        ("group.json", edited(top={"distributedInfo": {"pg_config": [{"ranks": 7}]}}), "distributedInfo is not as"),
    ],
)
def test_files_that_are_no_traces_give_one_clear_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said) as raised:
        load([path])
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    assert str(raised.value).count("; fix: ") == 1


def test_what_other_programs_write_is_read_all_the_same(tmp_path: Path) -> None:
    made = Trace().annotation("hocket step " + "9" * 40, 0, 9).kernel("a\x1b[31m\ud800\n", 0, 1).kernel("b", 5, 6)
    document = made.document()
    document["traceEvents"][-1]["dur"] = -3
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(document).encode())
    trace = read(path)
    assert trace.text(trace.name) == ["a\ufffd[31m\ufffd\ufffd", "b"]
    assert (trace.end - trace.start).tolist() == [pytest.approx(1 * US), 0.0]
    assert len(trace.steps) == 1


@pytest.mark.parametrize("count", ["x", None, -4, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("told", ["Group size", "In msg nelems", "Out msg nelems", "bytes"])
def test_counts_that_cannot_be_are_not_known(tmp_path: Path, told: str, count: object) -> None:
    made = Trace(0, 2).group("gather", (0, 1)).collective("_allgather_base", "gather", 0, 9, sent=8, received=16)
    made.events[-1]["args"][told] = count
    found = report([read(made.write(tmp_path / "a.json"))])
    assert 0 <= found.steps[0].kinds["gather"].bytes <= 32


def test_activities_that_start_before_their_launch_are_told(tmp_path: Path) -> None:
    paths = [Trace().kernel("k", 0, 9, launched=at).write(tmp_path / f"{at}.json") for at in (40, 3000)]
    said = ["before they are launched" in " ".join(read(path).notes) for path in paths]
    assert said == [False, True]


def test_missing_files_and_folders_give_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.json: there is no such file; fix: "):
        load([tmp_path / "absent.json"])
    with pytest.raises(TraceError, match="this is a directory; fix: "):
        load([tmp_path])
    with pytest.raises(TraceError, match="no trace was given; fix: "):
        load([])


def test_the_host_side_alone_of_a_gpu_program_is_refused(tmp_path: Path) -> None:
    path = Trace(world=2).annotation("nccl:all_reduce", 0, 10).op("aten::mm", 0, 5).write(tmp_path / "a.json")
    with pytest.raises(TraceError, match=r"; fix: .*ProfilerActivity\.CUDA"):
        read(path)


def test_traces_of_two_runs_are_refused(tmp_path: Path) -> None:
    def trace(rank: int, world: int, **told: Any) -> Path:
        made = Trace(rank, world).kernel("k", 0, 1).metadata(hocket=told)
        return made.write(tmp_path / f"{rank} {world} {told}.json")

    first = trace(0, 2, settings={"a": 1}, transport="nccl")
    with pytest.raises(TraceError, match=r"of a run of 4 ranks, .* of one of 2; fix: one trace of each rank"):
        load([first, trace(1, 4, settings={"a": 1}, transport="nccl")])
    for told in ({"settings": {"a": 2}, "transport": "nccl"}, {"settings": {"a": 1}, "transport": "null"}):
        with pytest.raises(TraceError, match=r"of a run with other settings than .*fix: one trace of each rank"):
            load([first, trace(1, 2, **told)])
    assert len(load([first, trace(1, 2)])) == 2


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [Trace().kernel("k", 0, 1).write(tmp_path / name) for name in ("a.json", "b.json")]
    with pytest.raises(TraceError, match=r"b\.json: of rank 0, as is .*a\.json; fix: "):
        load(paths)

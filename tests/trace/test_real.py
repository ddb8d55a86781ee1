"""A part of a real trace: four H200, two pipeline ranks by two data-parallel ranks, merged plan, NCCL.

Made by `fixtures/shorten.py`. The overlap is compared with the definition of Holistic Trace Analysis
(`get_comm_comp_overlap`), written here anew from its description.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket_trace import load, report
from hocket_trace.data import RankTrace
from hocket_trace.intervals import intersect, length, union
from tests.trace.build import Trace

FIXTURES = Path(__file__).parent / "fixtures"
PATHS = sorted(FIXTURES.glob("rank*.json.gz"))
KIND_OF_LANE = {"gather": "gather", "reduce": "reduce", "a2a": "a2a"}


@pytest.fixture(scope="module")
def traces() -> tuple[RankTrace, ...]:
    return load(PATHS)


def overlap_by_sweep(events: list[dict[str, Any]], is_communication: Callable[[str], bool]) -> float:
    """Share of communication that runs beside compute, as Holistic Trace Analysis defines it.

    Merged intervals of communication add 1 while they are open, those of compute 2; the time at 3, over the time of
    communication. Copies and memsets are neither.
    """

    def merged(wanted: Callable[[str], bool]) -> list[list[float]]:
        found: list[list[float]] = []
        for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events if wanted(e["name"])):
            if found and start <= found[-1][1]:
                found[-1][1] = max(found[-1][1], end)
            else:
                found.append([start, end])
        return found

    communication = merged(is_communication)
    compute = merged(lambda name: not is_communication(name) and not name.startswith(("Memcpy", "Memset")))
    changes = [(start, weight) for spans, weight in ((communication, 1), (compute, 2)) for start, _ in spans]
    changes += [(end, -weight) for spans, weight in ((communication, 1), (compute, 2)) for _, end in spans]
    running, beside, before = 0, 0.0, 0.0
    for at, by in sorted(changes):
        beside += (at - before) if running == 3 else 0.0
        running, before = running + by, at
    return beside / sum(end - start for start, end in communication)


def overlap_of(trace: RankTrace) -> float:
    """The same from what was read, with intervals."""
    copies = np.array([name.startswith(("Memcpy", "Memset")) for name in trace.text(trace.name)])
    compute = trace.of_kind("compute")
    c, k = ~compute & ~copies, compute & ~copies
    communication = union(trace.start[c], trace.end[c])
    return length(intersect(communication, union(trace.start[k], trace.end[k]))) / length(communication)


def device_events(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_overlap_agrees_with_holistic_trace_analysis(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    expected = overlap_by_sweep(device_events(document), lambda name: name.startswith("nccl"))
    (trace,) = load([path])
    assert 0.1 < expected < 0.99
    assert math.isclose(overlap_of(trace), expected, rel_tol=1e-6)


def test_the_sweep_itself_on_a_trace_done_by_hand(tmp_path: Path) -> None:
    made = (
        Trace(world=2)
        .group("gather_dense", (0, 1))
        .kernel("gemm", 0, 20)
        .kernel("gemm", 10, 30, stream=8)
        .kernel("Memset (Device)", 30, 60, cat="gpu_memset")
        .collective("_allgather_base", "gather_dense", 25, 45)
        .collective("_allgather_base", "gather_dense", 40, 50, stream=21)
        .kernel("gemm", 70, 80)
        .collective("_allgather_base", "gather_dense", 75, 90)
    )
    expected = overlap_by_sweep(device_events(made.document()), lambda name: name.startswith("nccl"))
    assert math.isclose(expected, 10 / 40, rel_tol=1e-6)
    assert math.isclose(overlap_of(load([made.write(tmp_path / "a.json")])[0]), 10 / 40, rel_tol=1e-6)


def test_every_activity_of_the_plan_is_linked_to_its_op(traces: tuple[RankTrace, ...]) -> None:
    """Outside the plan are only the batch's way to the GPU, and the figures that a step prints."""
    for trace in traces:
        assert not np.isnan(trace.launched).any()
        outside = np.array([not op for op in trace.text(trace.op)])
        assert 0 < outside.sum() < 0.02 * len(trace)
        seconds = trace.end - trace.start
        assert seconds[outside & trace.of_kind("compute")].sum() < 0.01 * seconds[trace.of_kind("compute")].sum()
        assert {trace.words[kind] for kind in trace.kind[outside]} == {"compute", "control"}
        assert (trace.launched <= trace.start + 1e-6).mean() > 0.999


def test_communication_is_what_its_op_and_group_say(traces: tuple[RankTrace, ...]) -> None:
    seen = set()
    for trace in traces:
        for kind, group, op in zip(trace.text(trace.kind), trace.text(trace.group), trace.text(trace.op), strict=True):
            if kind == "compute":
                assert not group
            elif not op:  # the ranks agree on losses and such
                assert (kind, group) == ("control", "control")
            elif op.startswith("step"):  # the norm of gradients is summed, too, over the ranks that share an expert
                assert kind == "control"
            else:
                assert kind == KIND_OF_LANE.get(trace.plan.ops[op].lane, "pp"), (kind, op)
                assert group.startswith({"pp": "pp_", "a2a": "a2a"}.get(kind, f"{kind}_")), (kind, group)
                seen.add(kind)
    assert seen == {"gather", "reduce", "a2a", "pp"}


def test_every_collective_is_found_on_all_ranks_of_its_group(traces: tuple[RankTrace, ...]) -> None:
    found: dict[int, dict[int, str]] = {}
    for trace in traces:
        rows = np.flatnonzero(~trace.of_kind("compute"))
        assert (trace.match[rows] >= 0).all()
        for row in rows.tolist():
            found.setdefault(int(trace.match[row]), {})[trace.rank] = trace.words[trace.launcher[row]]
            if trace.words[trace.kind[row]] != "pp":
                assert trace.rank in trace.groups[trace.words[trace.group[row]]]
    groups = {ranks for trace in traces for ranks in trace.groups.values()}
    assert all(tuple(sorted(launchers)) in groups for launchers in found.values())
    pairs = [
        sorted((launcher.split()[0], rank) for rank, launcher in launchers.items())
        for launchers in found.values()
        if any(launcher.startswith(("nccl:send", "nccl:recv")) for launcher in launchers.values())
    ]
    assert len(pairs) == 48
    assert all([verb for verb, _ in pair] == ["nccl:recv", "nccl:send"] for pair in pairs)
    # Forward from pipeline rank 0 (ranks 0 and 1) to pipeline rank 1 (2 and 3), backward the other way.
    assert {(pair[1][1], pair[0][1]) for pair in pairs} == {(0, 2), (1, 3), (2, 0), (3, 1)}


def test_a_rank_waits_for_late_peers_no_longer_than_its_transfers_run(traces: tuple[RankTrace, ...]) -> None:
    found = report(traces)
    for step in found.steps:
        for kind, share in step.kinds.items():
            assert 0 <= share.waiting <= share.seconds, (step.rank, kind)
        assert 0 <= step.exposed_waiting <= step.exposed
    for kind in ("a2a", "reduce", "gather"):  # ranks 2 and 3 share one expert group: one of them comes last
        waits = [share.waiting for step in found.steps[2:] if (share := step.kinds[kind]) is not None]
        assert max(waits) > 2 * min(waits)
    assert not any("clock" in note for note in found.notes)


def test_times_add_up(traces: tuple[RankTrace, ...]) -> None:
    found = report(traces)
    assert len(found.steps) == sum(len(trace.steps) for trace in traces)
    for step in found.steps:
        assert math.isclose(step.compute + step.exposed + step.idle, step.seconds, rel_tol=1e-9)
        assert math.isclose(sum(step.exposed_for.values()), step.exposed, abs_tol=1e-9)
        assert 0 <= step.host_bound <= step.idle
        assert max(share.exposed for share in step.kinds.values()) <= step.exposed
        assert all(step.exposed_for[kind] <= share.exposed + 1e-12 for kind, share in step.kinds.items())


def test_bandwidths_are_those_of_nvlink(traces: tuple[RankTrace, ...]) -> None:
    """An upper limit that a wrong factor or unit would break."""
    for trace in traces:
        moved = trace.bytes > 1e6
        rates = trace.bytes[moved] / (trace.end - trace.start)[moved]
        assert moved.sum() > 20
        assert 1e8 < np.median(rates) < 450e9
        assert rates.max() < 450e9


def test_most_kernels_have_a_class(traces: tuple[RankTrace, ...]) -> None:
    for step in report(traces).steps:
        assert step.classes.get("other", 0.0) < 0.02 * sum(step.classes.values())
        assert {"gemm", "grouped gemm", "attention", "norm", "elementwise", "indexing", "copy"} <= set(step.classes)

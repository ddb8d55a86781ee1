"""Times of plan ops from their kernels: waiting and the host's lateness taken off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.measured import PlanOps, all_plan_ops
from hocket.planning import program_of
from hocket_trace.align import load
from tests.measured.simulated import about, settings_for
from tests.trace.build import Trace

SETTINGS = settings_for(pp=1, splits="host")
PROGRAM = program_of(SETTINGS)
NAMES = {kind: next(str(op) for op in PROGRAM.ranks[0] if str(op).startswith(kind)) for kind in (
    "fwd attn", "fwd dispatch", "fwd experts", "gather dense",
)}  # fmt: skip


def two_ranks(folder: Path, late: float) -> tuple[PlanOps, PlanOps]:
    """The plan's ops of two ranks, the second of which comes `late` microseconds later to its gather and dispatch.

    Microseconds: gather 5-30; attn 10-20, 22-40, 60-70, the last kernel launched at 55; counts 70-80, rows 90-110,
    launched at 88; experts 120-150.
    """
    paths = []
    for rank in (0, 1):
        shift = late * rank
        trace = Trace(rank, 2).group("gather_dense", (0, 1)).group("a2a", (0, 1))
        trace.metadata(hocket={**about(SETTINGS, 0), "rank": rank})
        trace.collective("_allgather_base", "gather_dense", 5 + shift, 30, launched=1, plan_op=NAMES["gather dense"])
        for start, end, launched in ((10, 20, 2), (22, 40, 3), (60, 70, 55)):
            trace.kernel("k", start, end, launched=launched, op="aten::mm", plan_op=NAMES["fwd attn"])
        for start, end, launched in ((70 + shift, 80, 60), (90, 110, 88)):
            trace.collective("all_to_allv", "a2a", start, end, launched=launched, plan_op=NAMES["fwd dispatch"])
        trace.kernel("k", 120, 150, launched=95, op="aten::mm", plan_op=NAMES["fwd experts"])
        trace.annotation("hocket step 1", 0, 200)
        paths.append(trace.write(folder / f"rank{rank}.json"))
    one, other = all_plan_ops(load(paths), PROGRAM)
    return one, other


def seconds(ops: PlanOps) -> dict[str, float]:
    return {f"{op.verb} {op.part}": float(value) * 1e6 for op, value in zip(ops.ops, ops.seconds, strict=True)}


def test_ops_take_their_kernels_and_the_gaps_between_but_not_those_of_the_host(tmp_path: Path) -> None:
    ops, _ = two_ranks(tmp_path, 0.0)
    assert [f"{op.verb} {op.part}" for op in ops.ops] == ["gather dense", "fwd attn", "fwd dispatch", "fwd experts"]
    found = seconds(ops)
    # of attn's 60, 15 (from 40 to the launch at 55) are the host's; the gap of a dispatch is its own
    assert found == pytest.approx({"gather dense": 25, "fwd attn": 45, "fwd dispatch": 40, "fwd experts": 30}, abs=1e-3)
    assert ops.late[1] * 1e6 == pytest.approx(15, abs=1e-3)
    assert ops.first_launch[1] * 1e6 - ops.first_launch[0] * 1e6 == pytest.approx(1, abs=1e-3)
    assert (ops.earlier_launch[2] - ops.first_launch[0]) * 1e6 == pytest.approx(59, abs=1e-3)


def test_waiting_for_a_late_peer_is_taken_off(tmp_path: Path) -> None:
    early, late = two_ranks(tmp_path, 4.0)
    assert early.waiting * 1e6 == pytest.approx([4, 0, 4, 0], abs=1e-3)
    assert late.waiting * 1e6 == pytest.approx([0, 0, 0, 0], abs=1e-3)
    assert seconds(early) == pytest.approx(seconds(late) | {"fwd attn": 45}, abs=1e-3)


def test_waiting_beside_what_else_runs_of_an_op_is_not_taken_off(tmp_path: Path) -> None:
    """Microseconds: a product 10-30; gathers 12-20 beside it, 30-38, and two at once 40-50. Rank 1 is late for all."""
    paths = []
    for rank in (0, 1):
        trace = Trace(rank, 2).group("tp", (0, 1)).metadata(hocket={**about(SETTINGS, 0), "rank": rank})
        trace.kernel("k", 10, 30, op="aten::mm", plan_op=NAMES["fwd attn"])
        for start in (12, 30):
            trace.collective("_allgather_base", "tp", start + 6 * rank, start + 8, plan_op=NAMES["fwd attn"])
        trace.collective("_allgather_base", "tp", 40 + 6 * rank, 50, stream=33, plan_op=NAMES["fwd attn"])
        trace.collective("_allgather_base", "tp", 41 + 6 * rank, 50, stream=34, plan_op=NAMES["fwd attn"])
        paths.append(trace.annotation("hocket step 1", 0, 200).write(tmp_path / f"rank{rank}.json"))
    ops, _ = all_plan_ops(load(paths), PROGRAM)
    assert ops.waiting * 1e6 == pytest.approx([6 + 6], abs=1e-3)  # 30-36 and 40-46
    assert seconds(ops)["fwd attn"] + ops.late[0] * 1e6 == pytest.approx(40 - 12, abs=1e-3)


def test_rows_can_be_taken(tmp_path: Path) -> None:
    ops, _ = two_ranks(tmp_path, 0.0)
    picked = ops.take(np.array([3, 0]))
    assert [str(op) for op in picked.ops] == [NAMES["fwd experts"], NAMES["gather dense"]]
    assert picked.seconds * 1e6 == pytest.approx([30, 25], abs=1e-3)

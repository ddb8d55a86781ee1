"""The tax of two small runs whose numbers are worked out by hand, and pairs that must be refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket_trace.align import load
from hocket_trace.compare import compare, middle_steps
from hocket_trace.data import RankTrace, Report, StepReport
from hocket_trace.exposure import report
from tests.trace.build import Trace

MICRO = 1e-6


def about(transport: str) -> dict[str, Any]:
    """What a program tells about itself."""
    settings = {"model": {"hidden": 128}, "train": {"transport": transport}}
    return {"transport": transport, "pp_rank": 0, "settings": settings, "work": ["model"]}


def run(path: Path, *, null: bool = False, hocket: bool = True, world: int = 1, scale: float = 1.0) -> RankTrace:
    """One step of one rank, in microseconds.

    With communication:    gemm 0-40, attention 50-110, gather 30-60 and 110-130, idle to 140, gemm 140-160
    without:               gemm 0-30, attention 30-80, gemm 80-100
    """
    trace = Trace(0, world).group("gather_dense", range(world))
    if hocket:
        trace.metadata(hocket=about("null" if null else "nccl"))
    gemms, attention = (((0, 30), (80, 100)), (30, 80)) if null else (((0, 40), (140, 160)), (50, 110))
    names = ("fwd mlp m0 c0 l0", "bwd mlp m0 c0 l0")
    for n, (start, end) in enumerate(gemms):
        trace.kernel("nvjet_sm90", start * scale, end * scale, op="aten::mm", plan_op=names[n] if hocket else "")
    start, end = attention
    trace.kernel(
        "flash_fwd_kernel",
        start * scale,
        end * scale,
        op="aten::_scaled_dot_product_flash_attention",
        plan_op="fwd attn m0 c0 l0" if hocket else "",
    )
    if not null:
        for n, (start, end) in enumerate(((30, 60), (110, 130))):
            more: dict[str, Any] = {"plan_op": f"gather dense t{n} c0 l0 s0"} if hocket else {}
            trace.collective("_allgather_base", "gather_dense", start * scale, end * scale, **more)
    trace.annotation("hocket step 3", -1, 200 * scale)
    return load([trace.write(path)])[0]


def pair(folder: Path, **more: Any) -> tuple[RankTrace, RankTrace]:
    return run(folder / "real.json", **more), run(folder / "null.json", null=True, **more)


def test_tax_and_its_parts(tmp_path: Path) -> None:
    real, null = pair(tmp_path)
    tax = compare(report([real]), report([null]), [real], [null])
    assert tax.seconds == pytest.approx(160 * MICRO)
    assert tax.null == pytest.approx(100 * MICRO)
    assert tax.share == pytest.approx(0.6)
    # compute 120 against 100; exposed 40-50 and 110-130; nothing at 130-140, for the gemm was launched when it started
    expected = {"compute": 20, "exposed": 30, "host_bound": 10, "idle": 0}
    assert tax.parts == pytest.approx({name: value * MICRO for name, value in expected.items()}, abs=1e-9)
    assert sum(tax.parts.values()) == pytest.approx(tax.seconds - tax.null)


def test_that_exposed_communication_only_waited_is_told(tmp_path: Path) -> None:
    real, null = (report([trace]) for trace in pair(tmp_path))
    assert not [note for note in compare(real, null).notes if "late peers" in note]
    waited = replace(real, steps=tuple(replace(step, exposed_waiting=20 * MICRO) for step in real.steps))
    (note,) = [note for note in compare(waited, null).notes if "late peers" in note]
    assert note.startswith("0.02 ms of exposed communication only waits for late peers")


def test_slow_downs_per_class_and_per_plan_op(tmp_path: Path) -> None:
    real, null = pair(tmp_path)
    tax = compare(report([real]), report([null]), [real], [null])
    assert {row.name: row.share for row in tax.classes} == pytest.approx({"gemm": 60 / 50 - 1, "attention": 0.2})
    assert [(row.name, round(row.share, 6)) for row in tax.ops] == [
        ("fwd attn", 0.2), ("fwd mlp", round(40 / 30 - 1, 6)), ("bwd mlp", 0.0),
    ]  # fmt: skip
    assert tax.contention.share == pytest.approx(0.2)


def test_kernels_by_name_outside_hocket(tmp_path: Path) -> None:
    real, null = pair(tmp_path, hocket=False)
    tax = compare(report([real]), report([null]), [real], [null])
    assert {row.name: row.share for row in tax.ops} == pytest.approx({"nvjet_sm90": 0.2, "flash_fwd_kernel": 0.2})


def test_a_replay_and_steps_op_by_op_are_compared_by_names_of_kernels(tmp_path: Path) -> None:
    real, null = pair(tmp_path)
    replayed = replace(null, op=np.full(len(null), null.words.index("")))
    tax = compare(report([real]), report([replayed]), [real], [replayed])
    assert {row.name: row.share for row in tax.ops} == pytest.approx({"nvjet_sm90": 0.2, "flash_fwd_kernel": 0.2})
    assert any("as in a replay" in note for note in tax.notes)


def test_the_median_of_the_slowest_ranks_steps_counts() -> None:
    def step(number: int, rank: int, seconds: float) -> StepReport:
        none: Mapping[Any, Any] = {}
        more: dict[str, Any] = {"kinds": none, "exposed_for": none, "layers": none, "classes": none}
        more |= dict.fromkeys(("communication", "exposed", "idle", "host_bound"), 0.0)
        return StepReport(rank=rank, step=number, seconds=seconds, compute=seconds, **more)

    steps = [step(1, 0, 5), step(1, 1, 7), step(2, 0, 9), step(2, 1, 1), step(3, 0, 2), step(3, 1, 3)]
    whole = Report(sources=("x",), device="d", transport="", world=2, steps=tuple(steps))
    assert [(s.step, s.rank) for s in middle_steps(whole)] == [(1, 1)]
    assert whole.step_seconds == 7
    even = replace(whole, steps=tuple(steps[:4]))
    assert [(s.step, s.rank) for s in middle_steps(even)] == [(1, 1), (2, 0)]
    with pytest.raises(ValueError, match="no whole step was recorded"):
        middle_steps(replace(whole, steps=()))


def test_of_ranks_that_end_together_the_one_that_computes_longest_decides() -> None:
    def step(rank: int, seconds: float, compute: float) -> StepReport:
        more: dict[str, Any] = {name: {} for name in ("kinds", "exposed_for", "layers", "classes")}
        more |= dict.fromkeys(("communication", "exposed", "host_bound"), 0.0)
        return StepReport(rank=rank, step=1, seconds=seconds, compute=compute, idle=seconds - compute, **more)

    together = (step(0, 100, 60), step(1, 99.5, 90), step(2, 98, 95))
    (found,) = middle_steps(Report(sources=("x",), device="d", transport="", world=3, steps=together))
    assert (found.rank, found.seconds, found.compute, found.idle) == (1, 100, 90, 10)


def of_rank(trace: RankTrace, rank: int, stage: int, world: int = 4) -> RankTrace:
    """The same trace as if another rank of more had written it."""
    return replace(
        trace, rank=rank, world=world, run={**trace.run, "rank": rank, "pp_rank": stage} if trace.run else {}
    )


def test_the_ranks_given_of_both_are_compared(tmp_path: Path) -> None:
    """Two pipeline ranks by two; the run without communication has one rank, of the first."""
    (tmp_path / "long").mkdir()
    real, null = pair(tmp_path)
    other, other_null = pair(tmp_path / "long", scale=3.0)
    traces = [of_rank(real, 0, 0), of_rank(real, 1, 0), of_rank(other, 2, 1), of_rank(other, 3, 1)]
    first = of_rank(null, 1, 0)
    tax = compare(report(traces), report([first]), traces, [first])
    assert (tax.seconds, tax.null) == pytest.approx((160 * MICRO, 100 * MICRO))
    assert {row.name: row.share for row in tax.classes} == pytest.approx({"gemm": 0.2, "attention": 0.2})
    assert tax.ops[0].seconds == pytest.approx(60 * MICRO)
    assert any("only rank 1 with and without communication" in note for note in tax.notes)
    assert any("only rank 1 of 4" in note for note in tax.notes)
    # Without the traces, too; and with one rank of every stage of both, the slower stage decides.
    assert compare(report(traces), report([first])).classes == tax.classes
    both = [first, of_rank(other_null, 3, 1)]
    assert compare(report(traces), report(both), traces, both).null == pytest.approx(300 * MICRO)
    last = of_rank(null, 3, 1)
    with pytest.raises(ValueError, match=r"of rank 3, not ranks 0, 1 of .*real.json; fix"):
        compare(report(traces[:2]), report([last]), traces[:2], [last])


def test_what_stands_in_for_arriving_rows_is_in_no_class(tmp_path: Path) -> None:
    def trace(null: bool) -> RankTrace:
        made = Trace(0, 1).metadata(hocket=about("null" if null else "nccl"))
        made.kernel("nvjet_sm90", 0, 40, op="aten::mm", plan_op="fwd mlp m0 c0 l0")
        made.kernel("elementwise_kernel", 40, 50, op="aten::copy_", plan_op="fwd attn m0 c0 l1")
        counts = {"cat": "gpu_memcpy", "op": "aten::copy_", "plan_op": "fwd dispatch m0 c0 l1"}
        made.kernel("Memcpy DtoH (Device -> Pageable)", 50, 52, **counts)
        if null:
            made.kernel("elementwise_kernel", 60, 85, op="aten::copy_", plan_op="fwd dispatch m0 c0 l1")
        return load([made.write(tmp_path / f"{null}.json")])[0]

    real, null = report([trace(False)]), report([trace(True)])
    assert null.steps[0].classes == pytest.approx({"gemm": 40 * MICRO, "copy": 12 * MICRO, "stand-in": 25 * MICRO})
    assert null.steps[0].compute == pytest.approx(77 * MICRO)
    tax = compare(real, null, [trace(False)], [trace(True)])
    assert {row.name: row.share for row in tax.classes} == pytest.approx({"gemm": 0, "copy": 0}, abs=1e-9)
    assert {row.name: row.null for row in tax.ops}["fwd dispatch"] == pytest.approx(2 * MICRO)
    assert any("0.03 ms of kernels write what would have arrived" in note for note in tax.notes)


def test_pairs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    real, null = pair(tmp_path)
    a, b = report([real]), report([null])
    for one, other, message in (
        (a, a, "its transport is nccl, not null"),
        (b, b, "its transport is null, too"),
        (a, replace(b, world=8), "8 ranks, the run to compare with has 1"),
        (a, replace(b, device="cpu"), "ran on cpu, the other on NVIDIA H200"),
        (a, replace(b, transport=""), "one of the two is of hocket and the other is not"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(one, other)
    changed = {**null.run["settings"], "model": {**null.run["settings"]["model"], "hidden": 64}}
    wide = replace(null, run={**null.run, "settings": changed})
    with pytest.raises(ValueError, match=r"model.hidden = 64 \(.*null.json\): .*real.json has 128"):
        compare(a, b, [real], [wide])
    foreign = run(tmp_path / "foreign.json", hocket=False)
    with pytest.raises(ValueError, match="its ranks communicate"):
        compare(report([foreign]), report([foreign]))

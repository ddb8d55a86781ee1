"""What communication costs: a run against the same run with the null transport.

    tax = step / step without communication - 1
    slow-down of a class of kernels = their summed seconds / the same without communication - 1

The difference of the two steps is told apart on the slowest rank. There a step is compute + exposed + idle, all of them
lengths of unions; so what each of them grew by adds up to the difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hocket.trace.data import OpRow, RankTrace, Report, Slowdown, StepReport, Tax
from hocket.trace.rebuild import assert_same_work


def compare(
    real: Report, null: Report, real_traces: Sequence[RankTrace] = (), null_traces: Sequence[RankTrace] = ()
) -> Tax:
    """The tax of a run. With the traces of both, hocket's settings are compared, and slow-downs are per plan op.

    Raises ValueError if the two do not belong together.
    """
    _assert_belong(real, null)
    if real_traces and null_traces and real_traces[0].run:
        assert_same_work(real_traces[0], null_traces[0])
    mine, other = middle_steps(real), middle_steps(null)
    parts = {name: _mean(mine, name) - _mean(other, name) for name in ("compute", "exposed", "host_bound", "idle")}
    parts["idle"] -= parts["host_bound"]  # it is a part of idle
    ops = _slowdowns(_by_plan_op(real_traces, real), _by_plan_op(null_traces, null))
    if not ops:
        ops = _slowdowns(_by_name(real.ops), _by_name(null.ops))
    return Tax(
        seconds=_mean(mine, "seconds"),
        null=_mean(other, "seconds"),
        parts=parts,
        classes=_slowdowns(_by_class(real), _by_class(null)),
        ops=ops,
        notes=tuple(_notes(real, null)),
    )


def middle_steps(report: Report) -> list[StepReport]:
    """The slowest rank's part of the median step; of two steps if their number is even."""
    slowest: dict[int, StepReport] = {}
    for step in report.steps:
        if step.step not in slowest or step.seconds > slowest[step.step].seconds:
            slowest[step.step] = step
    ordered = sorted(slowest.values(), key=lambda step: step.seconds)
    if not ordered:
        raise ValueError(f"{', '.join(report.sources)}: no whole step was recorded; fix: record at least one")
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def _assert_belong(real: Report, null: Report) -> None:
    """Raise ValueError if `null` cannot be the same run without communication."""
    where = ", ".join(null.sources[:1])
    if null.transport not in ("null", ""):
        raise ValueError(
            f"{where}: its transport is {null.transport}, not null, so it is no run without communication; fix: a "
            "trace of the same run with --train.transport null"
        )
    if real.transport == "null":
        raise ValueError(
            f"{', '.join(real.sources[:1])}: its transport is null, too; fix: give the run with communication first, "
            "and this one with --null"
        )
    if bool(real.transport) != bool(null.transport):
        raise ValueError(f"{where}: one of the two is of hocket and the other is not; fix: two runs of one program")
    if not null.transport and sum(step.communication for step in null.steps) > 0.05 * sum(
        s.seconds for s in null.steps
    ):
        raise ValueError(
            f"{where}: its ranks communicate, so it is no run without communication; fix: the same run with "
            "collectives that do nothing"
        )
    if real.world != null.world:
        raise ValueError(f"{where}: {null.world} ranks, the run to compare with has {real.world}; fix: as many ranks")
    if real.device != null.device:
        raise ValueError(f"{where}: ran on {null.device}, the other on {real.device}; fix: two runs on one machine")


def _mean(steps: Sequence[StepReport], name: str) -> float:
    return float(np.mean([getattr(step, name) for step in steps]))


def _by_class(report: Report) -> dict[str, float]:
    """Summed kernel seconds by class, per rank and step."""
    found: dict[str, float] = defaultdict(float)
    for step in report.steps:
        for name, seconds in step.classes.items():
            found[name] += seconds / len(report.steps)
    return found


def _by_name(ops: Sequence[OpRow]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in ops:
        if row.kind == "compute":
            found[row.name] += row.seconds
    return found


def _by_plan_op(traces: Sequence[RankTrace], report: Report) -> dict[str, float]:
    """Summed seconds of compute kernels by verb and part of their plan op, per rank and step."""
    found: dict[str, float] = defaultdict(float)
    for trace in traces:
        rows = trace.of_kind("compute") & (trace.step >= 0)
        sums = np.bincount(trace.op[rows], (trace.end - trace.start)[rows], minlength=len(trace.words))
        for word, seconds in zip(trace.words, sums.tolist(), strict=True):
            if seconds and word:
                found[" ".join(word.split()[:2])] += seconds / len(report.steps)
    return found


def _slowdowns(real: Mapping[str, float], null: Mapping[str, float]) -> tuple[Slowdown, ...]:
    rows = [Slowdown(name=name, seconds=real.get(name, 0.0), null=null.get(name, 0.0)) for name in {**real, **null}]
    return tuple(sorted(rows, key=lambda row: (-max(row.seconds, row.null), row.name)))


def _notes(real: Report, null: Report) -> list[str]:
    notes = []
    if real.emulated:
        notes.append("the network is emulated, so is its tax")
    if real.ranks != null.ranks:
        notes.append(f"ranks {_some(real.ranks)} are compared with ranks {_some(null.ranks)}")
    if null.transport:
        notes.append("without communication every rank's routing is even and rows are random")
    return notes


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

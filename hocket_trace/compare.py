"""The cost of communication: a run against the same run with the null transport.

    tax = step / step without communication - 1
    slow-down of a class of kernels = their summed seconds / the same without communication - 1

The difference of the two steps is broken down on the rank for which the others wait. If ranks end together, as after
agreeing on something, this is the one that computes longest. Its step is compute + exposed + idle, all lengths of
unions, so their increases add up to the difference.

Only ranks with traces of both runs are compared. The kernels with which the null transport writes stand-ins for
received data are compute of its step, but of no class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hocket_trace.columns import listed, several
from hocket_trace.data import KernelClass, RankTrace, Report, Slowdown, StepReport, Tax

TOGETHER = 0.01
"""Share of a step within which ranks count as ending together."""
_STAND_IN: KernelClass = "stand-in"


def compare(
    real: Report, null: Report, real_traces: Sequence[RankTrace] = (), null_traces: Sequence[RankTrace] = ()
) -> Tax:
    """The tax of a run. With the traces of both runs, it includes slow-downs per named op or kernel.

    Raises ValueError if the runs can't be compared, as far as reports and traces show.
    """
    _assert_comparable(real, null)
    if real_traces and null_traces:
        assert_same_work(real_traces[0], null_traces[0])
    notes = _notes(real, null)
    if real.ranks and null.ranks and real.ranks != null.ranks:
        ranks = _shared_ranks(real, null)
        real, real_traces = _of_ranks(real, real_traces, ranks)
        null, null_traces = _of_ranks(null, null_traces, ranks)
        notes.append(f"only {listed('rank', real.ranks)} with and without communication: the ranks given of both")
    mine, other = middle_steps(real), middle_steps(null)
    parts = {name: _mean(mine, name) - _mean(other, name) for name in ("compute", "exposed", "host_bound", "idle")}
    parts["idle"] -= parts["host_bound"]  # included in idle
    by_op = _by_word(real_traces, real, "op"), _by_word(null_traces, null, "op")
    if any(by_op) and not all(by_op):
        notes.append(
            "one of the two names its ops and the other not, as in a replay: of the two only one has late hosts"
        )
    if not all(by_op):
        by_op = _by_word(real_traces, real, "name"), _by_word(null_traces, null, "name")
    return Tax(
        seconds=_mean(mine, "seconds"),
        null=_mean(other, "seconds"),
        parts=parts,
        classes=_slowdowns(_by_class(real), _by_class(null)),
        ops=_slowdowns(*by_op),
        notes=(*notes, *_doubts(real, null, mine, other)),
    )


def assert_same_work(real: RankTrace, null: RankTrace) -> None:
    """Raise ValueError if two runs' ops differ in their work, as far as their programs record it.

    `run["settings"]` has a program's nested settings; `run["work"]` names settings and sections that change the work.
    """
    mine, other = (dict(_flat(trace.run.get("settings"), "")) for trace in (real, null))
    work = tuple(f"{name}." for name in real.run.get("work") or ())
    for name in {**mine, **other}:
        if f"{name}.".startswith(work) and mine.get(name) != other.get(name):
            raise ValueError(
                f"{name} = {other.get(name)} ({null.source}): {real.source} has {mine.get(name)}; fix: two runs of the "
                "same sizes"
            )


def _flat(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries, by dotted names."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{name}.{key}" if name else key)


def middle_steps(report: Report) -> list[StepReport]:
    """The median step, on the rank for which the others wait; two steps if the number of steps is even.

    Each is as long as on its slowest rank; the chosen rank is idle until that one ends.
    """
    of_number: dict[int, list[StepReport]] = defaultdict(list)
    for step in report.steps:
        of_number[step.step].append(step)
    decisive = [_slowest(steps) for steps in of_number.values()]
    ordered = sorted(decisive, key=lambda step: step.seconds)
    if not ordered:
        raise ValueError(f"{several(report.sources)}: no whole step was recorded; fix: record at least one")
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def _slowest(steps: Sequence[StepReport]) -> StepReport:
    """The rank that computes longest, of those that end with the slowest one."""
    seconds = max(step.seconds for step in steps)
    last = [step for step in steps if step.seconds >= (1 - TOGETHER) * seconds]
    found = max(last, key=lambda step: step.compute)
    return replace(found, seconds=seconds, idle=found.idle + seconds - found.seconds)


def _assert_comparable(real: Report, null: Report) -> None:
    """Raise ValueError if `null` can't be the same run without communication."""
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


def _shared_ranks(real: Report, null: Report) -> set[int]:
    """Ranks with traces of both runs. Raises ValueError if there are none."""
    shared = set(real.ranks) & set(null.ranks)
    if not shared:
        raise ValueError(
            f"{', '.join(null.sources[:1])}: of {listed('rank', null.ranks)}, not {listed('rank', real.ranks)} of "
            f"{', '.join(real.sources[:1])}; fix: traces of the same ranks"
        )
    return shared


def _of_ranks(whole: Report, traces: Sequence[RankTrace], ranks: set[int]) -> tuple[Report, list[RankTrace]]:
    """A report and its traces, restricted to some ranks."""
    steps = tuple(step for step in whole.steps if step.rank in ranks)
    return replace(whole, steps=steps), [trace for trace in traces if trace.rank in ranks]


def _mean(steps: Sequence[StepReport], name: str) -> float:
    return float(np.mean([getattr(step, name) for step in steps]))


def _by_class(report: Report) -> dict[str, float]:
    """Summed kernel seconds by class, per rank and step."""
    found: dict[str, float] = defaultdict(float)
    for step in report.steps:
        for name, seconds in step.classes.items():
            found[name] += seconds / len(report.steps)
    found.pop(_STAND_IN, None)
    return found


def _by_word(traces: Sequence[RankTrace], report: Report, column: Literal["op", "name"]) -> dict[str, float]:
    """Summed seconds of compute kernels per rank and step, by verb and part of their plan op, or by kernel name."""
    found: dict[str, float] = defaultdict(float)
    for trace in traces:
        known = np.array([word != _STAND_IN for word in trace.words])
        rows = trace.of_kind("compute") & (trace.step >= 0) & known[trace.kernel_class]
        words = getattr(trace, column)[rows]
        sums = np.bincount(words, (trace.end - trace.start)[rows], minlength=len(trace.words))
        for word, seconds in zip(trace.words, sums.tolist(), strict=True):
            if seconds and word:
                found[" ".join(word.split()[:2]) if column == "op" else word] += seconds / len(report.steps)
    return found


def _slowdowns(real: Mapping[str, float], null: Mapping[str, float]) -> tuple[Slowdown, ...]:
    rows = [Slowdown(name=name, seconds=real.get(name, 0.0), null=null.get(name, 0.0)) for name in {**real, **null}]
    return tuple(sorted(rows, key=lambda row: (-max(row.seconds, row.null), row.name)))


def _notes(real: Report, null: Report) -> list[str]:
    notes = []
    if real.emulated:
        notes.append("the network is emulated, so is its tax")
    if null.transport:
        notes.append(
            "without communication every rank's routing is even and rows are random: kernels that work on rows or move "
            "them take other times for that, too"
        )
    return notes


def _doubts(real: Report, null: Report, mine: Sequence[StepReport], other: Sequence[StepReport]) -> list[str]:
    """Notes on uncertainties of the comparison."""
    found = []
    if len(null.ranks) < null.world:
        found.append(
            f"of the run without communication only {listed('rank', null.ranks)} of {null.world}: if another is "
            "slower, the tax is smaller"
        )
    waiting = _mean(mine, "exposed_waiting")
    if waiting > 0:
        found.append(
            f"{1e3 * waiting:.2f} ms of exposed communication only waits for late peers, as when load is uneven: a "
            "faster link would not shorten them"
        )
    a, b = mine[0].rank, other[0].rank
    if real.stages.get(a) != null.stages.get(b):
        found.append(
            f"the others wait for rank {a} with communication and for {b}, of another pipeline stage, without: their "
            "compute and idle time differ for that, too"
        )
    stand_in_seconds = sum(step.classes.get(_STAND_IN, 0.0) for step in null.steps) / len(null.steps)
    if stand_in_seconds:
        found.append(
            f"without communication {1e3 * stand_in_seconds:.2f} ms of kernels write what would have arrived: they are "
            "compute of that step, but of no class and op here, and slow down what runs beside them"
        )
    return found

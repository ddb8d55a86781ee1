"""A hocket run as it was predicted and as it was measured: which ops missed, and where the rest of the step went.

The difference of the two steps is told apart on the rank for which the others wait (see `compare.middle_steps`), where
both are compute + exposed + idle:

    longer compute        compute kernels ran longer than predicted; without the next two
    contention            what compute grew by against the null transport, where that was measured
    optimizer             the optimizer step
    exposed transfer      communication that moved data while nothing computed, beyond the prediction
    waiting and bubble    late peers, imbalance between ranks and pipeline bubble, beyond the predicted bubble
    late host             nothing ran since the host had not launched the next kernel yet

A receive is posted early and its kernel waits. Where the peers' traces are not given, all of its exposed time counts as
waiting, and all of that of collectives as transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hocket.measured.planops import PlanOps, all_plan_ops
from hocket.measured.stored import pipeline_rank, stored_in
from hocket.program.cost import Measurement
from hocket.program.ops import Program
from hocket.program.simulate import CostKey, Timeline, cost_key, simulate
from hocket_trace.compare import middle_steps
from hocket_trace.data import COMMUNICATION, Floats, OpPrediction, Prediction, RankTrace, Report, StepReport, Tax
from hocket_trace.exposure import exposed, last_starts, waits
from hocket_trace.intervals import intersect, length

UNEVEN = 0.02
"""Share by which a rank's compute must exceed the mean to be remarked on."""


def predict(
    traces: Sequence[RankTrace], measured: Report, costs: Measurement | None = None, tax: Tax | None = None
) -> Prediction:
    """What the simulator says about the run that these traces are of, beside what they and their report show.

    `costs` are measured ones; without them those that the run was predicted with. With `tax`, contention is told apart
    from other reasons for longer compute. Raises ValueError if the traces don't say which run they are of.
    """
    stored = stored_in(traces[0])
    program, overheads = stored.program, costs.overheads if costs else stored.overheads
    timeline = simulate(program, stored.costs.measured(costs.seconds) if costs else stored.costs, overheads)
    steps, ops = middle_steps(measured), all_plan_ops(traces, program)
    causes = [_causes(step, traces, timeline, _step_ops(step, traces, ops), program) for step in steps]
    explained = {cause: float(np.mean([each[cause] for each in causes])) for cause in causes[0]}
    notes = list(costs.notes) if costs else []
    if tax is not None and not overheads.contention:
        explained["contention"] = tax.parts["compute"]
        explained["longer compute"] -= tax.parts["compute"]
    waiting = "the costs are those of that one" if costs else "that the others wait for it is not predicted"
    notes += [f"{remark}: uneven routing or a slower device; {waiting}" for remark in _imbalance(traces, measured)]
    if measured.transport == "null":
        notes.append("the transport is null: communication is predicted, but there is none")
    return Prediction(
        costs=costs.source if costs else stored.hardware,
        predicted=float(timeline.makespan),
        measured=float(np.mean([step.seconds for step in steps])),
        ops=_rows(ops, timeline, program),
        explained={cause: seconds for cause, seconds in explained.items() if seconds},
        notes=tuple(notes),
    )


def _imbalance(traces: Sequence[RankTrace], measured: Report) -> list[str]:
    """A remark if ranks that run the same list compute for different times: the others wait for the slowest."""
    compute: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        mine = [step.compute for step in measured.steps if step.rank == trace.rank]
        compute[pipeline_rank(trace)].append(float(np.mean(mine)))
    spread = {rank: max(times) / float(np.mean(times)) - 1 for rank, times in compute.items()}
    worst = max(spread, key=spread.__getitem__)
    if spread[worst] < UNEVEN:
        return []
    return [f"of the ranks of pipeline rank {worst}, one computes {spread[worst]:.0%} longer than their mean"]


def _rows(measured: Sequence[PlanOps], timeline: Timeline, program: Program) -> tuple[OpPrediction, ...]:
    """Every kind of op that takes time, on all ranks that were traced; the greatest misses first."""
    kinds = program.layout.kinds
    found: dict[CostKey, list[tuple[float, float]]] = defaultdict(list)
    steps = 0
    for rows in measured:
        steps += len(np.unique(rows.step))
        planned = zip(program.ranks[rows.pp_rank], timeline.spans[rows.pp_rank], strict=True)
        spans = {op.key: span for op, span in planned}
        for op, seconds in zip(rows.ops, rows.seconds.tolist(), strict=True):
            if op.verb not in ("send", "release"):
                span = spans[op.key]
                found[cost_key(op, kinds)].append((float(span.end - span.start), seconds))
    out = []
    for key, pairs in found.items():
        predicted, seconds = np.mean(pairs, axis=0).tolist()
        name = " ".join(word for word in key if word)
        out.append(OpPrediction(name=name, count=len(pairs) / steps, predicted=predicted, measured=seconds))
    return tuple(sorted(out, key=lambda row: (-abs(row.missed), row.name)))


def _step_ops(step: StepReport, traces: Sequence[RankTrace], ops: Sequence[PlanOps]) -> PlanOps:
    """The plan's ops of a rank in a step."""
    rows = next(rows for rows in ops if rows.rank == step.rank)
    trace = next(trace for trace in traces if trace.rank == step.rank)
    index = next(n for n, found in enumerate(trace.steps) if found.number == step.step)
    return rows.take(np.flatnonzero(rows.step == index))


def _causes(
    step: StepReport, traces: Sequence[RankTrace], timeline: Timeline, ops: PlanOps, program: Program
) -> Mapping[str, float]:
    """Seconds of measured - predicted by cause, on the rank of `step`."""
    at = next(n for n, trace in enumerate(traces) if trace.rank == step.rank)
    trace = traces[at]
    rank = pipeline_rank(trace)
    use = timeline.ranks[rank]
    waited = _exposed_waiting(trace, last_starts(traces)[at], step)
    optimizer = sum(seconds for op, seconds in zip(ops.ops, ops.seconds.tolist(), strict=True) if op.verb == "step")
    spans = zip(program.ranks[rank], timeline.spans[rank], strict=True)
    optimizer -= sum(float(s.end - s.start) for op, s in spans if op.verb == "step")  # updates run beside compute
    return {
        "longer compute": step.compute - float(use.busy) - optimizer,
        "contention": 0.0,
        "optimizer": optimizer,
        "exposed transfer": step.exposed - waited - float(use.exposed_total),
        "waiting and bubble": waited + step.idle - step.host_bound - float(use.idle),
        "late host": step.host_bound,
    }


def _exposed_waiting(trace: RankTrace, last: Floats, step: StepReport) -> float:
    """Of a step's exposed seconds, those in which nothing moved data. `last`: when the last rank of a group started."""
    window = next(found for found in trace.steps if found.number == step.step)
    rows = trace.of_kind(*COMMUNICATION)
    start, end = trace.start[rows], trace.end[rows]
    alone = np.where(trace.of_kind("pp")[rows], end, start)  # of a receive whose sender is not known
    stretches = waits(start, end, np.where(np.isnan(last[rows]), alone, last[rows]))
    return length(intersect(stretches, exposed(trace, window.start, window.end)))

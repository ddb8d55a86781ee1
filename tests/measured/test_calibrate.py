"""Costs measured on traces of simulated runs must be the costs that were simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.config.schema import changed
from hocket.measured import calibrate, stored_in
from hocket.planning import predict, program_of
from hocket.predict.cost import CostTable, Measurement, costs_of, overheads_of
from hocket.predict.hardware import HARDWARE, hardware_of
from hocket.predict.simulate import KIND_OF, Overheads, Timeline, cost_key, simulate
from hocket.program.ops import Program
from hocket.resolve import Settings
from hocket_trace.align import load
from hocket_trace.data import RankTrace
from hocket_trace.exposure import report
from tests.measured.simulated import QUICK, settings_for, traces_of

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"

PLANS: list[dict[str, Any]] = [
    {"merge": "on", "defer_wgrad": "on", "chunks": 2, "defer_layers": "attn:1"},
    {"merge": "off", "defer_wgrad": "off", "chunks": 2},
    {"order": "sequential", "merge": "off", "defer_wgrad": "on", "chunks": 2},
]


def simulated(settings: Settings, overheads: Overheads) -> tuple[Program, Timeline]:
    """A step whose costs are the hardware's, changed a little so that a fall-back to the hardware would show."""
    program = program_of(settings)
    return program, predict(settings, program, hardware_of(settings), true_costs(settings, overheads))


def true_costs(settings: Settings, overheads: Overheads) -> Measurement:
    program = program_of(settings)
    seconds = {}
    plain = predict(settings, program, hardware_of(settings))
    for ops, spans in zip(program.ranks, plain.spans, strict=True):
        for op, span in zip(ops, spans, strict=True):
            if span.end > span.start:
                key = cost_key(op, program.layout.kinds)
                seconds[key] = float(span.end - span.start) * (1.3 if op.lane == "compute" else 1.7)
    return Measurement(source="truth", seconds=seconds, overheads=overheads)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.get("order", plan["merge"]))
def test_costs_come_back_and_predict_the_same_step(plan: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_for(**plan)
    program, timeline = simulated(settings, Overheads())
    measured = calibrate(load(traces_of(settings, timeline, tmp_path, steps=2)))
    truth = true_costs(settings, Overheads()).seconds
    assert measured.seconds.keys() == truth.keys()
    for key, seconds in measured.seconds.items():
        assert seconds == pytest.approx(truth[key], rel=0.01, abs=1e-8), key
    again = predict(settings, program, hardware_of(settings), measured)
    assert float(again.makespan) == pytest.approx(float(timeline.makespan), rel=0.01)


def test_costs_of_one_plan_predict_another(tmp_path: Path) -> None:
    one, other = settings_for(**PLANS[0]), settings_for(microbatches=6, **PLANS[1])
    _, timeline = simulated(one, Overheads())
    measured = calibrate(load(traces_of(one, timeline, tmp_path)))
    program, truth = simulated(other, Overheads())
    guess = predict(other, program, hardware_of(other), measured)
    assert float(guess.makespan) == pytest.approx(float(truth.makespan), rel=0.01)


def test_the_rank_that_computes_longest_decides(tmp_path: Path) -> None:
    """Two data-parallel ranks per pipeline rank: the second has more rows for its experts, and fewer for attention."""
    settings = settings_for(**PLANS[0])
    program = program_of(settings)
    truth = true_costs(settings, Overheads())
    more = {key: 2.0 if key[1] == "experts" else 0.99 for key in truth.seconds if key[0] in ("fwd", "bwd", "wgrad")}
    slow = replace(truth, seconds={key: value * more.get(key, 1.0) for key, value in truth.seconds.items()})
    ranks: list[RankTrace] = []
    for dp_rank, costs in enumerate((truth, slow)):
        timeline = predict(settings, program, hardware_of(settings), costs)
        folder = tmp_path / str(dp_rank)
        folder.mkdir()
        ranks += [replace(trace, rank=trace.rank + dp_rank) for trace in load(traces_of(settings, timeline, folder))]
    for traces in (ranks, ranks[::-1]):
        found = calibrate([replace(trace, match=np.full_like(trace.match, -1)) for trace in traces]).seconds
        for key in more:
            if key[1] not in ("dispatch", "combine"):
                assert found[key] == pytest.approx(slow.seconds[key], rel=0.01), key


def test_costs_are_without_the_contention_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is slowed down by its kinds of communication as the model says has the costs of one that is not."""
    monkeypatch.setitem(HARDWARE, "h200", replace(QUICK, beside_kernels=0.3, beside_copies=0.1))  # type: ignore[arg-type]
    settings = settings_for(microbatches=6, **PLANS[0])
    contention = overheads_of(settings, hardware_of(settings), ()).contention
    assert {"a2a", "pp", "gather", "reduce"} <= contention.keys()
    truth, (program, timeline) = true_costs(settings, Overheads()), simulated(settings, Overheads(contention))
    measured = calibrate(load(traces_of(settings, timeline, tmp_path)))
    assert measured.overheads.contention == contention
    for key, seconds in measured.seconds.items():
        assert seconds == pytest.approx(truth.seconds[key], rel=0.01, abs=1e-8), key
    again = predict(settings, program, hardware_of(settings), measured)
    assert float(again.makespan) == pytest.approx(float(timeline.makespan), rel=0.01)


def test_the_host_comes_back(tmp_path: Path) -> None:
    settings = settings_for(**PLANS[0], splits="host")
    truth = true_costs(settings, Overheads())
    issue = {key: seconds * 1.35 for key, seconds in truth.seconds.items() if key[0] in ("fwd", "bwd", "wgrad")}
    overheads = Overheads(issue=issue, counts=truth.seconds["fwd", "dispatch", "moe"] / 2)
    program, timeline = simulated(settings, overheads)
    measured = calibrate(load(traces_of(settings, timeline, tmp_path, overheads)))
    again = predict(settings, program, hardware_of(settings), measured)
    bound = predict(settings, program, hardware_of(settings), replace(measured, overheads=Overheads()))
    assert float(bound.makespan) < 0.9 * float(timeline.makespan)
    assert float(again.makespan) == pytest.approx(float(timeline.makespan), rel=0.02)


def test_a_host_that_knows_no_counts_does_not_wait_for_them(tmp_path: Path) -> None:
    settings = settings_for(**PLANS[0], splits="device", graphs="off")
    overheads = Overheads(issue={("fwd", "attn", "moe"): 20e-6})
    program, timeline = simulated(settings, overheads)
    measured = calibrate(load(traces_of(settings, timeline, tmp_path, overheads)))
    assert measured.overheads.counts is None
    stops = replace(measured, overheads=replace(measured.overheads, counts=1.0))  # of a run whose hosts do
    for costs in (measured, stops):
        again = predict(settings, program, hardware_of(settings), costs)
        assert float(again.makespan) == pytest.approx(float(timeline.makespan), rel=0.02)


def test_a_replay_does_not_wait_for_the_host_that_was_recorded(tmp_path: Path) -> None:
    replayed = settings_for(**PLANS[0], splits="device", graphs="on")
    op_by_op = changed(replayed, {"plan.graphs": "off"})
    seconds = true_costs(replayed, Overheads()).seconds
    issue = {key: 1.5 * time for key, time in seconds.items() if key[0] in ("fwd", "bwd", "wgrad")}
    late = Overheads(issue=issue)
    program, timeline = simulated(op_by_op, late)
    traces = load(traces_of(replayed, timeline, tmp_path, late))
    measured = calibrate(traces)
    of_replay, of_ops = (predict(one, program, hardware_of(one), measured) for one in (replayed, op_by_op))
    alone = replace(measured, overheads=Overheads(measured.overheads.contention))
    assert of_replay == predict(op_by_op, program, hardware_of(op_by_op), alone)
    assert float(of_replay.makespan) < 0.95 * float(of_ops.makespan)


def test_an_op_that_the_deciding_ranks_trace_lacks_is_not_measured(tmp_path: Path) -> None:
    settings = settings_for(**PLANS[0])
    truth = true_costs(settings, Overheads())
    slow = replace(truth, seconds={key: 2 * seconds for key, seconds in truth.seconds.items()})
    traces: list[RankTrace] = []
    for dp_rank, costs in enumerate((truth, slow)):
        (folder := tmp_path / str(dp_rank)).mkdir()
        timeline = predict(settings, program_of(settings), hardware_of(settings), costs)
        for trace in load(traces_of(settings, timeline, folder)):
            lost = np.array([dp_rank == 1 and word.startswith(("fwd embed", "fwd attn")) for word in trace.words])
            op = np.where(lost[trace.op], trace.words.index(""), trace.op)
            traces.append(replace(trace, rank=trace.rank + dp_rank, op=op, match=np.full_like(trace.match, -1)))
    found = calibrate(traces).seconds
    lost = {key for key in truth.seconds if key[0] == "fwd" and key[1] in ("embed", "attn")}
    assert found.keys() == {key for key in truth.seconds if key not in lost and key[0] != "recv"}
    assert min(found.values()) > 0


def test_costs_of_a_real_run_predict_its_step() -> None:
    """A small model on four GPUs with a late host: the measured step is close to the simulated one."""
    traces = load(sorted(FIXTURES.glob("rank*.json.gz")))
    stored, measured = stored_in(traces[0]), calibrate(traces)
    costs = CostTable(stored.program.layout.kinds, {}).measured(measured.seconds)
    found = simulate(stored.program, costs, measured.overheads)
    assert report(traces).step_seconds == pytest.approx(float(found.makespan), rel=0.15)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankTrace, ...]:
    """Two steps of a run that takes exactly what the hardware's costs say."""
    settings = settings_for(**PLANS[0])
    timeline = predict(settings, program_of(settings), hardware_of(settings))
    return load(traces_of(settings, timeline, tmp_path_factory.mktemp("plain"), steps=2))


def test_the_program_comes_back(traces: tuple[RankTrace, ...]) -> None:
    settings = settings_for(**PLANS[0])
    program, hardware = program_of(settings), hardware_of(settings)
    found = stored_in(traces[1])
    assert found.program == program
    costs = costs_of(settings, hardware)
    assert found.contention == overheads_of(settings, hardware, costs.table).contention
    assert traces[1].plan.ops.keys() == {str(op) for op in program.ranks[1]}
    for op in program.ranks[1]:
        told = traces[1].plan.ops[str(op)]
        assert (told.lane, told.layer) == (op.lane, op.layer)
        assert told.kind == KIND_OF.get(op.lane, "control" if op.verb == "step" else "compute")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: {}, "says nothing about settings"),
        (lambda run: run | {"version": 1}, "has version 1, this hocket reads version 2"),
        (lambda run: run | {"program": run["program"][:40]}, "its program cannot be read .*so it was edited; fix: "),
        (lambda run: run | {"program": 3}, "its program cannot be read"),
        (lambda run: run | {"costs": run["costs"] | {"contention": {"a2a": "much"}}}, "its program cannot be read"),
        (lambda run: {name: run[name] for name in run if name != "costs"}, "its program cannot be read .KeyError"),
        (lambda run: run | {"pp_rank": None}, "has pp_rank None of 2"),
        (lambda run: run | {"pp_rank": -1}, "has pp_rank -1 of 2"),
    ],
)
def test_traces_of_other_programs_and_versions_are_refused(
    traces: tuple[RankTrace, ...], change: Any, message: str
) -> None:
    changed = [replace(trace, run=change(dict(trace.run))) for trace in traces]
    with pytest.raises(ValueError, match=message):
        calibrate(changed)


def test_a_trace_without_the_plans_ops_is_refused(traces: tuple[RankTrace, ...]) -> None:
    bare = [replace(trace, op=np.full(len(trace), trace.words.index(""))) for trace in traces]
    with pytest.raises(ValueError, match="none of the ops of its plan"):
        calibrate(bare)

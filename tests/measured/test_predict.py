"""A run that behaves as simulated is predicted exactly; one that does not is explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.measured.calibrate import calibrate
from hocket.measured.predict import predict
from hocket.measured.stored import pipeline_rank, stored_in
from hocket.planning import predict as predict_step
from hocket.planning import program_of
from hocket.program.cost import overheads_of
from hocket.program.hardware import hardware_of
from hocket.program.simulate import KIND_OF, Overheads, simulate
from hocket.program.stages import costs_of
from hocket_trace.align import load
from hocket_trace.compare import compare, middle_steps
from hocket_trace.data import Prediction, RankTrace
from hocket_trace.exposure import report
from tests.measured.simulated import settings_for, traces_of

PLAN: dict[str, Any] = {"merge": "on", "defer_wgrad": "on", "chunks": 2}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankTrace, ...]:
    """Two steps of a run that takes exactly what the hardware's costs say."""
    settings = settings_for(**PLAN)
    timeline = predict_step(settings, program_of(settings), hardware_of(settings))
    return load(traces_of(settings, timeline, tmp_path_factory.mktemp("plain"), steps=2))


def adds_up(prediction: Prediction) -> bool:
    return sum(prediction.explained.values()) == pytest.approx(prediction.measured - prediction.predicted, abs=1e-7)


def test_the_program_and_its_costs_come_back(traces: tuple[RankTrace, ...]) -> None:
    settings = settings_for(**PLAN)
    program, hardware = program_of(settings), hardware_of(settings)
    found = stored_in(traces[1])
    assert found.program == program
    assert found.hardware == hardware.name
    costs = costs_of(settings, hardware)
    assert {key: cost.seconds for key, cost in found.costs.table.items()} == {
        key: cost.seconds for key, cost in costs.table.items()
    }
    assert found.overheads == overheads_of(settings, hardware, costs.table)
    assert traces[1].plan.ops.keys() == {str(op) for op in program.ranks[1]}
    for op in program.ranks[1]:
        told = traces[1].plan.ops[str(op)]
        assert (told.lane, told.layer) == (op.lane, op.layer)
        assert told.kind == KIND_OF.get(op.lane, "control" if op.verb == "step" else "compute")


def test_a_run_as_simulated_is_predicted(traces: tuple[RankTrace, ...]) -> None:
    found = predict(traces, report(traces))
    assert found.costs == "h200"
    assert found.ratio == pytest.approx(1, abs=0.002)
    assert adds_up(found)
    for row in found.ops:
        assert row.ratio == pytest.approx(1, abs=0.01) or row.measured < 1e-7, row
    per_rank = {row.name: row.count for row in found.ops}
    program = program_of(settings_for(**PLAN))
    experts = sum(op.verb == "fwd" and op.part == "experts" for _, _, op in program)
    assert per_rank["fwd experts moe"] == experts / 2
    assert per_rank["step all"] == 1


def test_updates_at_the_start_of_a_step_are_predicted(tmp_path: Path) -> None:
    settings = settings_for(**PLAN, update="next_step")
    program = program_of(settings)
    timeline = predict_step(settings, program, hardware_of(settings))
    traces = load(traces_of(settings, timeline, tmp_path))
    found = predict(traces, report(traces))
    assert found.ratio == pytest.approx(1, abs=0.002)
    assert adds_up(found)
    assert "optimizer" not in found.explained or abs(found.explained["optimizer"]) < 1e-6
    per_rank = {row.name: row.count for row in found.ops}
    updates = sum(op.verb == "update" and op.part == "experts" for _, _, op in program)
    assert (per_rank["update experts moe"], per_rank["step norm"]) == (updates / 2, 1)


def test_exposed_waiting_is_what_the_report_says_it_is() -> None:
    """A rank that waits in one group while it moves data in another does not wait."""
    traces = load(sorted((Path(__file__).parents[1] / "trace" / "fixtures").glob("rank*.json.gz")))
    measured = report(traces)
    (step,), stored = middle_steps(measured), stored_in(traces[0])
    timeline = simulate(stored.program, stored.costs, stored.overheads)
    idle = step.idle - step.host_bound - float(timeline.ranks[pipeline_rank(traces[step.rank])].idle)
    found = predict(traces, measured)
    assert found.explained["waiting and bubble"] == pytest.approx(step.exposed_waiting + idle, abs=1e-9)
    assert adds_up(found)


def test_contention_is_told_apart_and_the_ops_that_missed_come_first(tmp_path: Path) -> None:
    settings = settings_for(**PLAN)
    program, hardware = program_of(settings), hardware_of(settings)
    plain = predict_step(settings, program, hardware)
    costs = replace(_measured(traces_of(settings, plain, tmp_path)), overheads=Overheads({"a2a": 0.5}))
    slowed = predict_step(settings, program, hardware, costs)
    real = load(traces_of(settings, slowed, tmp_path))
    null = load(traces_of(settings, plain, tmp_path, transport="null"))
    tax = compare(report(real), report(null), real, null)
    found = predict(real, report(real), tax=tax)
    assert adds_up(found)
    assert found.measured == pytest.approx(float(slowed.makespan), rel=1e-3)
    assert found.predicted == pytest.approx(float(plain.makespan), rel=1e-3)
    gained = max(float(a.busy) - float(b.busy) for a, b in zip(slowed.ranks, plain.ranks, strict=True))
    assert found.explained["contention"] == pytest.approx(tax.parts["compute"])
    assert found.explained["longer compute"] + found.explained["contention"] <= gained * 1.01
    missed = [abs(row.missed) for row in found.ops]
    assert missed == sorted(missed, reverse=True)
    assert found.ops[0].ratio > 1.05


def _measured(paths: list[Path]) -> Any:
    return calibrate(load(paths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: {}, "says nothing about settings"),
        (lambda run: run | {"version": 1}, "has version 1, this hocket reads version 2"),
        (lambda run: run | {"program": run["program"][:40]}, "its program cannot be read .*so it was edited; fix: "),
        (lambda run: run | {"program": 3}, "its program cannot be read"),
        (lambda run: run | {"costs": run["costs"] | {"seconds": {"fwd": [1, 0]}}}, "its program cannot be read"),
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
        predict(changed, report(traces))


def test_a_trace_without_the_plans_ops_is_refused(traces: tuple[RankTrace, ...]) -> None:
    bare = [replace(trace, op=np.full(len(trace), trace.words.index(""))) for trace in traces]
    with pytest.raises(ValueError, match="none of the ops of its plan"):
        predict(bare, report(traces))

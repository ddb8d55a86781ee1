"""A run that behaves as simulated is predicted exactly; one that does not is explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.plan.network import hardware_of
from hocket.plan.schedule import Friction
from hocket.planning import predict as predict_step
from hocket.planning import program_of
from hocket.trace.align import load
from hocket.trace.calibrate import calibrate
from hocket.trace.compare import compare, middle_steps
from hocket.trace.data import Prediction, RankTrace
from hocket.trace.exposure import report
from hocket.trace.predict import predict
from hocket.trace.rebuild import pipeline_rank, settings_of
from tests.trace.simulated import settings_for, traces_of

PLAN: dict[str, Any] = {"merge": "on", "defer_wgrad": "on", "chunks": 2}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankTrace, ...]:
    """Two steps of a run that takes exactly what the hardware's costs say."""
    settings = settings_for(**PLAN)
    timeline = predict_step(settings, program_of(settings), hardware_of(settings))
    return load(traces_of(settings, timeline, tmp_path_factory.mktemp("plain"), steps=2))


def adds_up(prediction: Prediction) -> bool:
    return sum(prediction.explained.values()) == pytest.approx(prediction.measured - prediction.predicted, abs=1e-7)


def test_settings_come_back(traces: tuple[RankTrace, ...]) -> None:
    mine = settings_for(**PLAN)
    found = settings_of(traces[1])
    for section in ("model", "mesh", "plan", "data", "train", "run"):
        assert getattr(found, section) == getattr(mine, section)


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
    traces = load(sorted((Path(__file__).parent / "fixtures").glob("rank*.json.gz")))
    measured = report(traces)
    (step,), settings = middle_steps(measured), settings_of(traces[0])
    timeline = predict_step(settings, program_of(settings), hardware_of(settings))
    idle = step.idle - step.host_bound - float(timeline.ranks[pipeline_rank(traces[step.rank])].idle)
    found = predict(traces, measured)
    assert found.explained["waiting and bubble"] == pytest.approx(step.exposed_waiting + idle, abs=1e-9)
    assert adds_up(found)


def test_contention_is_told_apart_and_the_ops_that_missed_come_first(tmp_path: Path) -> None:
    settings = settings_for(**PLAN)
    program, hardware = program_of(settings), hardware_of(settings)
    plain = predict_step(settings, program, hardware)
    costs = replace(_measured(traces_of(settings, plain, tmp_path)), friction=Friction({"a2a": 0.5}))
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
    calibrated = predict(real, report(real), calibrate(real, null))
    assert calibrated.ratio == pytest.approx(1, abs=0.01)


def _measured(paths: list[Path]) -> Any:
    return calibrate(load(paths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: {}, "says nothing about settings"),
        (lambda run: run | {"version": 2}, "has version 2, this hocket reads version 1"),
        (lambda run: run | {"settings": 3}, "has no settings"),
        (lambda run: run | {"settings": run["settings"] | {"network": None}}, r"has no settings\.network; fix: "),
        (lambda run: _with(run, "network", "bandwidth", "5"), r"network\.bandwidth = 5 .*has no unit"),
        (lambda run: _without(run, "mesh", "ep"), "settings.mesh lacks ep, so it was written by another version"),
        (lambda run: _with(run, "mesh", "cp", 2), "settings.mesh has an unknown cp"),
        (lambda run: _with(run, "model", "vocab", None), r"model\.vocab = None .*: not a whole number"),
        (lambda run: _with(run, "mesh", "dp", 0), r"mesh\.dp = 0 .*: out of range"),
        (lambda run: _with(run, "mesh", "ep", 3), r"mesh\.ep = 3 .*; fix: "),
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


def _with(run: dict[str, Any], section: str, name: str, value: Any) -> dict[str, Any]:
    settings = {**run["settings"], section: {**run["settings"][section], name: value}}
    return {**run, "settings": settings}


def _without(run: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    kept = {key: value for key, value in run["settings"][section].items() if key != name}
    return {**run, "settings": {**run["settings"], section: kept}}

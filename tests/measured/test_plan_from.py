"""`hocket plan --from`: the step that traces predict, and traces that cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.commands.plan import resolve_for_plan, run
from hocket.planning import predict, program_of
from hocket.predict.cost import Measurement, overheads_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import cost_key
from hocket.recipes import recipe
from tests.measured.simulated import traces_of


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], float]:
    """Paths of traces of `tiny` on a host that is three times slower than assumed, and its step."""
    settings = resolve_for_plan(recipe("tiny"), {})
    program, hardware, folder = program_of(settings), hardware_of(settings), tmp_path_factory.mktemp("tiny")
    plain = predict(settings, program, hardware)
    seconds = {
        cost_key(op, program.layout.kinds): 3.0 * float(span.end - span.start)
        for ops, spans in zip(program.ranks, plain.spans, strict=True)
        for op, span in zip(ops, spans, strict=True)
    }
    truth = Measurement(source="truth", seconds=seconds, overheads=overheads_of(settings, hardware, ()))
    timeline = predict(settings, program, hardware, truth)
    return [str(path) for path in traces_of(settings, timeline, folder)], float(timeline.makespan)


def test_the_report_names_its_costs(traces: Any, capsys: pytest.CaptureFixture[str]) -> None:
    real, _ = traces
    assert run(["tiny", "--from", *real, "--ops", "0"]) == 0
    printed = capsys.readouterr().out
    assert "PREDICTED STEP  on laptop, fp32, with measured costs" in printed


def test_json_holds_the_step_and_the_costs(traces: Any, capsys: pytest.CaptureFixture[str]) -> None:
    real, step = traces
    assert run(["tiny", "--from", *real, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["step_seconds"] == pytest.approx(step, rel=0.01)
    assert found["measured"]["op_seconds"]["fwd experts moe"] > 0


def test_a_search_begins_with_the_step_that_was_measured(traces: Any, capsys: pytest.CaptureFixture[str]) -> None:
    real, step = traces
    assert run(["tiny", "--search", "--from", *real, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"][0]["step_seconds"] == pytest.approx(step, rel=0.01)
    assert found["words"][0] == "tiny"


def test_settings_that_change_how_ops_work_are_told(traces: Any, capsys: pytest.CaptureFixture[str]) -> None:
    real, _ = traces
    folder = str(Path(real[0]).parent)
    for words, told in (([], False), (["--overlap.dp.strategy", "optim"], True)):
        assert run(["tiny", *words, "--from", folder, "--ops", "0"]) == 0
        said = "overlap.dp.strategy = optim, measured with optim_grads_params: ops that this changes take other times"
        assert (said in capsys.readouterr().out) == told


def test_other_plans_of_the_same_sizes_are_fine_and_other_sizes_are_refused(traces: Any, tmp_path: Path) -> None:
    real, _ = traces
    assert run(["tiny", "--train.microbatches", "6", "--plan.chunks", "1", "--from", *real, "--ops", "0"]) == 0
    with pytest.raises(ValueError, match=r"model.hidden = 256 \(command line, --model.hidden\): .*measured with 128"):
        run(["tiny", "--model.hidden", "256", "--from", *real])
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        run(["tiny", "--from", str(broken)])

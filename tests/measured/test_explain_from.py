"""`hocket explain --from`: what was measured stands beside what is predicted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.commands.explain import run, with_traces
from hocket.commands.plan import resolve_for_plan
from hocket.explain.build import explain
from hocket.planning import predict, program_of
from hocket.predict.hardware import hardware_of
from hocket.recipes import recipe
from tests.measured.simulated import about, traces_of
from tests.trace.build import Trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with traces of `tiny` just as it is predicted."""
    settings = resolve_for_plan(recipe("tiny"), {})
    timeline = predict(settings, program_of(settings), hardware_of(settings))
    folder = tmp_path_factory.mktemp("tiny")
    paths = traces_of(settings, timeline, folder, transport="gloo")
    return str(paths[0].parent)


def test_a_run_just_as_predicted_is_measured_as_predicted(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny", "--from", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    predicted, measured = found["predicted"], found["measured"]
    assert measured["step"] == pytest.approx(predicted["step"], rel=0.02)
    assert measured["compute"] == pytest.approx(predicted["compute"], rel=0.02)
    assert set(measured["kinds"]) == set(predicted["kinds"])
    for kind, times in predicted["kinds"].items():
        assert measured["kinds"][kind]["exposed"] == pytest.approx(times["exposed"], rel=0.05, abs=1e-4), kind


def test_the_table_names_its_traces_and_has_a_row_for_each_kind(folder: str, capsys: Any) -> None:
    assert run(["tiny", "--from", folder]) == 0
    printed = capsys.readouterr().out
    assert "MEASURED STEP" in printed
    assert folder in printed
    for name in ("step", "a2a, exposed", "gather", "reduce, exposed", "pp"):
        assert f"\n  {name} " in printed, name


def test_the_step_is_the_slowest_ranks_and_other_ways_of_working_are_told(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n, path in enumerate(sorted(Path(folder).iterdir())):
        document = json.loads(gzip.decompress(path.read_bytes()))
        for event in document["traceEvents"] if n else ():
            event |= {"ts": 2 * event["ts"] - 5e9, "dur": 2 * event["dur"]}
        document["hocket"]["settings"]["train"]["transport"] = document["hocket"]["transport"] = "null"
        (tmp_path / path.stem).write_text(json.dumps(document))
    assert run(["tiny", "--from", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["step"] == pytest.approx(2 * found["predicted"]["step"], rel=0.02)
    assert found["measured"]["note"].startswith("step 1 of ")
    assert "train.transport = gloo, measured with null" in found["measured"]["note"]


def test_waiting_is_told_since_predictions_have_it_as_bubble(tmp_path: Path) -> None:
    settings = resolve_for_plan(recipe("tiny"), {})
    for rank in (0, 1):
        trace = Trace(rank, 2).group("gather_dense", (0, 1)).annotation("hocket step 1", 0, 90)
        trace.metadata(hocket={**about(settings, 0, "gloo"), "rank": rank}).kernel("k", 0, 10, op="aten::mm")
        trace.collective("_allgather_base", "gather_dense", 10 + 40 * rank, 60).write(tmp_path / f"rank{rank}.json")
    found = with_traces(explain(settings, ()), settings, (str(tmp_path),), {})
    assert found.measured is not None
    assert "rank0.json and 1 more; of what is exposed, 20 µs only waits for late peers" in found.measured.note


def test_traces_without_a_whole_step_are_refused(tmp_path: Path) -> None:
    settings = resolve_for_plan(recipe("tiny"), {})
    made = Trace().metadata(hocket=about(settings, 0, "gloo")).annotation("hocket step 1", 50, 60).kernel("k", 0, 10)
    with pytest.raises(ValueError, match=r"no whole step was recorded; fix: "):
        run(["tiny", "--from", str(made.write(tmp_path / "rank0.json"))])


def test_traces_of_other_work_are_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.hidden = 256 .*measured with 128"):
        run(["tiny", "--model.hidden", "256", "--from", folder])
    with pytest.raises(ValueError, match="no traces in this folder"):
        run(["tiny", "--from", str(tmp_path)])

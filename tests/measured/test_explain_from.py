"""`hocket explain --from` and `--probe`: what was measured stands beside what is predicted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.commands.explain import run, with_traces
from hocket.commands.plan import resolve_for_plan
from hocket.doctor.measure import Measured, Request
from hocket.environment import Gpus
from hocket.explain.beside import CPU_BYTES, beside, request
from hocket.explain.build import explain
from hocket.planning import predict, program_of
from hocket.program.hardware import HARDWARE, hardware_of
from hocket.recipes import recipe
from hocket.settings.schema import changed
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


# Probing


def asked(name: str, gpus: int, **changes: Any) -> Request:
    settings = resolve_for_plan(changed(recipe(name), {k.replace("__", "."): v for k, v in changes.items()}), {})
    return request(settings, gpus)


def test_what_is_probed_is_what_the_run_does_and_no_more_than_the_host_has() -> None:
    on_gpus = asked("moe_8gpu", 4, train__transport="copy_engine")
    assert (on_gpus.world, on_gpus.device, on_gpus.transport, on_gpus.dtype) == (4, "cuda", "copy_engine", "bf16")
    assert {kind for kind, _ in on_gpus.transfers} == {"gather", "reduce", "a2a", "pp"}
    assert (8 * 2048, 2048, (16 + 8) * 128) in on_gpus.products
    assert {kind for kind, _ in asked("llama3_8b", 8).transfers} == {"gather", "reduce"}
    for transport in ("null", "slow"):
        slow = {"train__slow": ("1ms",)} if transport == "slow" else {}
        assert asked("tiny", 0, train__transport=transport, **slow).transport == "gloo"


def test_a_cpu_probes_the_sizes_of_a_large_model_only_in_part() -> None:
    here = asked("llama3_8b", 0)
    assert here.world == 2
    assert all(size <= CPU_BYTES for _, size in here.transfers)
    assert all(2 * m * k * n <= 4e8 for m, k, n in here.products)


def test_measured_times_stand_beside_those_of_the_cost_model() -> None:
    rows = beside(Measured(products={(100, 100, 100): 0.5}, transfers={("a2a", 7 << 20): 0.25}), HARDWARE["laptop"])
    link = HARDWARE["laptop"].links["a2a"]
    assert [(row.what, row.measured) for row in rows] == [("product 100 x 100 x 100", 0.5), ("a2a 7.00 MiB", 0.25)]
    assert rows[0].predicted == pytest.approx(2e6 / HARDWARE["laptop"].gemm_flops)
    assert rows[1].predicted == link.seconds(7 << 20)


def test_the_command_probes_and_shows_both(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(request: Request, env: Any) -> Measured:
        return Measured(
            products=dict.fromkeys(request.products, 1e-3), transfers=dict.fromkeys(request.transfers, 2e-3)
        )

    monkeypatch.setattr("hocket.doctor.measure.run", measured)
    monkeypatch.setattr("hocket.commands.explain.find_gpus", Gpus)
    assert run(["tiny", "--probe"]) == 0
    printed = capsys.readouterr().out
    assert "PROBED\n  on 2 processes on the CPU, gloo; predicted for laptop" in printed
    for words in ("product 512 x 128", "gather 0.", "a2a 0.", "pp 0.25 MiB"):
        assert words in printed

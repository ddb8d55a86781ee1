"""What the benchmarks of predictions do without GPUs: plans are valid, results are what the tables read."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from benchmarks import calibration, prediction, tables
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.hardware import HARDWARE, hardware_of
from hocket.program.check import assert_valid
from hocket.resolve import Settings, resolve
from hocket_trace.align import load
from tests.measured.simulated import QUICK, settings_for, traces_of


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("small", [False, True])
def test_every_plan_of_every_shape_is_valid_and_none_is_twice(world: int, small: bool) -> None:
    for shape in calibration.shapes(world, small).values():
        configs = [shape.config, *(changed(shape.config, changes) for changes in shape.others.values())]
        found = [resolve(config, Host(gpus=0 if small else world)) for config in configs]
        for settings in found:
            assert settings.world == world
            assert_valid(program_of(settings))
        assert len({(each.plan, each.overlap, each.train) for each in found}) == len(found)


def test_the_result_has_what_the_tables_show(tmp_path: Path) -> None:
    merged = settings_for(merge="on", defer_wgrad="on", chunks=2)
    plans = {"as recorded": merged, "interleaved": settings_for(merge="off", defer_wgrad="off", chunks=2)}
    timelines = {name: predict(each, program_of(each), hardware_of(each)) for name, each in plans.items()}
    real, null = (load(traces_of(merged, timelines["as recorded"], tmp_path, transport=t)) for t in ("nccl", "null"))
    times = {name: [float(timeline.makespan)] * 3 for name, timeline in timelines.items()}
    found = calibration.predictions(real, null, plans, times)
    result = {"shapes": {"small": json.loads(json.dumps(found))}}
    for name, row in found["plans"].items():
        assert row["ratio"] == pytest.approx(1.0, rel=0.02), name
    assert "| small, interleaved |" in tables.calibration(result)


def test_kept_traces_predict_what_other_results_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HARDWARE, "h200", QUICK)  # type: ignore[arg-type]
    settings = settings_for(merge="on", defer_wgrad="on", chunks=2, order="interleaved")
    steps = {}
    for name, each in prediction.contenders(settings).items():
        steps[name] = float(predict(cast(Settings, each), program_of(cast(Settings, each)), HARDWARE["h200"]).makespan)
    timeline = predict(settings, program_of(settings), HARDWARE["h200"])
    for transport, kind in (("nccl", "real"), ("null", "null")):
        for path in traces_of(settings, timeline, tmp_path, transport=transport):
            path.rename(tmp_path / f"{kind}_{path.name}")
    config = {section: dataclasses.asdict(getattr(settings, section)) for section in prediction.SIZES}
    origin = {"hardware": "4 x GPU", "versions": {}, "commit": "c", "command": "hocket", "config": config}
    recorded = origin | {"seconds_without_profiler": {"real": steps["merged"]}}
    timed = origin | {"contenders": {name: {"blocks": [[step], [step, step]]} for name, step in steps.items()}}
    for name, result in (("overlap_trace", recorded), ("step_time", timed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found = prediction.predicted(tmp_path, tmp_path)
    assert found["runs"]["recorded"]["hardware"] == "4 x GPU"
    (shape,) = found["shapes"].values()
    assert set(shape["plans"]) == {"as recorded", *steps} - {"bound"}
    for name, row in shape["plans"].items():
        assert row["ratio"] == pytest.approx(1.0, rel=0.02), name
    config["train"]["sequences"] = 3
    (tmp_path / "step_time.json").write_text(json.dumps(timed))
    with pytest.raises(ValueError, match=r"train\.sequences = 8 \(traces\): 3 in the result of `hocket`"):
        prediction.predicted(tmp_path, tmp_path)


def test_a_phase_that_hangs_says_where_and_ends() -> None:
    lines = [
        "import time",
        "from benchmarks import calibration",
        "calibration.PATIENCE = 0.5",
        "clock = calibration.Clock(aloud=True)",
        "with clock.phase('dense: build'): pass",
        "with clock.phase('dense: time'): time.sleep(60)",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert ended.stdout.split() == ["dense:", "build", "0.0", "s"]
    assert "Timeout" in ended.stderr
    assert "in <module>" in ended.stderr

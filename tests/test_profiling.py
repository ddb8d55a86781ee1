"""Recorded windows: what the traces say about themselves, what the run says about them, and that neither ends a run."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.overlap_trace import figures, keep
from benchmarks.tables import overlap_tax, overlap_trace
from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.environment import processes
from hocket.measured import VERSION, trace_summary
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.train.metrics import Metrics
from hocket.train.profiling import WARM_UP, ProfileWindow, Recording, describe, window_of
from hocket.train.signals import StopRequest
from hocket_trace import TraceError, load, report
from tests.helpers.command import ALONE, SMALL, finish, hocket, start, text_in, wait_for
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.ranks.test_lane_orders import microbatches_of
from tests.trace.build import Trace


def trace_of(folder: Path, rank: int, run: str = "tiny") -> dict[str, Any]:
    return json.loads(gzip.decompress((folder / f"runs/{run}/traces/rank{rank}.json.gz").read_bytes()))


def named(trace: dict[str, Any]) -> Counter[str]:
    return Counter(e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation")


def records(folder: Path, run: str = "tiny") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("profile", "done", "steps", "window"),
    [
        ((), 0, 10, []),
        ((3, 2), 0, 10, [3, 4]),
        ((3, 2), 2, 10, [3, 4]),
        ((3, 2), 3, 10, []),
        ((0, 2), 0, 100, [WARM_UP + 1, WARM_UP + 2]),
        ((0, 2), 50, 100, [51 + WARM_UP, 52 + WARM_UP]),
        ((0, 2), 0, 4, [3, 4]),
        ((0, 2), 9, 10, [10]),
        ((0, 2), 10, 10, []),
    ],
)
def test_a_window_lies_behind_the_start_and_before_the_end(profile, done, steps, window):
    assert list(window_of(profile, done, steps)) == window


@pytest.mark.timeout(150)
def test_profile_tells_what_is_exposed_and_all_later_steps_repeat_it(tmp_path):
    stale = tmp_path / "runs/tiny/traces"
    stale.mkdir(parents=True)
    (stale / "rank9.json.gz").write_text("of an earlier run on more ranks")
    (stale / "rank2.json.gz.tmp").write_text("of an earlier run that was killed")
    words = [*SMALL, "--data.paths", text_in(tmp_path), "--profile"]
    process = start(tmp_path, "train", *words, "--train.steps", "100000")
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"exposed"' in metrics.read_text(), "a step that tells the exposed share", 60)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 0, ended
    assert f"trace    runs/tiny/traces: steps {WARM_UP + 1} to {WARM_UP + 2} of 4 ranks" in ended.out
    assert "trace    A step takes" in ended.out
    assert "trace    more: hocket trace runs/tiny" in ended.out
    last = [r for r in records(tmp_path) if "loss" in r][-1]
    assert 0 < last["exposed"] < 1
    assert f"exposed {100 * last['exposed']:.0f} %" in ended.out
    assert "exposed" not in records(tmp_path)[WARM_UP]
    assert sorted(path.name for path in stale.iterdir()) == [f"rank{rank}.json.gz" for rank in range(4)]
    for rank in range(4):
        trace = trace_of(tmp_path, rank)
        seen = named(trace)
        about = trace["hocket"]
        assert about["settings"]["mesh"] == {"pp": 2, "dp": 2, "cp": 1, "ep": 2, "tp": 1, "shard": 0}
        assert about["coordinates"] == {"pp": rank // 2, "dp": rank % 2, "edp": 0, "ep": rank % 2, "tp": 0, "cp": 0}
        assert (about["version"], about["transport"], about["label"], about["rank"]) == (VERSION, "gloo", "", rank)
        assert about["versions"]["torch"] == torch.__version__
        assert about["parameters"] > 1000
        assert sorted(n for n in seen if n.startswith("hocket")) == ["hocket step 4", "hocket step 5"]
        assert seen["step all"] == 2
        assert seen["fwd attn m0 c0 l0"] == (2 if rank < 2 else 0)
        assert seen["wait"], "what an op waits for inside"
        waits = {name.removeprefix("wait ") for name in seen if name.startswith("wait ")}
        assert waits
        assert waits <= seen.keys(), "a wait is for an op of the plan"

    ended = hocket(tmp_path, "train", *words, "--train.steps", "5", "--train.transport", "null")
    assert "NULL TRANSPORT" in ended.out, ended
    assert "hocket trace runs/tiny --null runs/tiny-null" in ended.out
    assert trace_of(tmp_path, 1, "tiny-null")["hocket"]["label"] == "no communication"
    tables_of(tmp_path)


def tables_of(folder: Path) -> None:
    """The benchmark of overlap makes its tables from such a pair of runs."""
    real, null = ([folder / f"runs/{run}/traces/rank{r}.json.gz" for r in range(4)] for run in ("tiny", "tiny-null"))
    seconds = {"real": 0.3, "null": 0.2}
    result = json.loads(json.dumps(figures(load(real), load(null), recipe("tiny"), seconds)))
    lines = [*overlap_trace(result).splitlines(), *overlap_tax(result).splitlines()]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    table = {row[0]: row[1:] for row in rows if row}
    assert {"gather", "reduce", "a2a", "pp", "compute", "whole step"} <= table.keys()
    assert len(table["gather"]) == 6
    assert table["step, without the profiler"] == ["200 ms", "300 ms", "+50%"]
    keep({"real": real, "null": null}, 2, folder / "kept")
    assert len(list((folder / "kept").iterdir())) == 6


@pytest.mark.full
def test_whatever_an_emulated_network_touches_says_so(tmp_path):
    words = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text_in(tmp_path), "--train.steps", "3", "--profile"]
    ended = hocket(tmp_path, "train", *words, "--train.transport", "slow", "--train.slow", "1ms")
    assert "EMULATED NETWORK" in ended.out, ended
    assert "only waits for them" in ended.out
    assert "emulated network: validation loss" in ended.out
    assert trace_of(tmp_path, 1)["hocket"]["label"] == "emulated network"
    assert {(r["transport"], r["label"]) for r in records(tmp_path)} == {("slow", "emulated network")}
    saved = json.loads((tmp_path / "runs/tiny/checkpoints/latest/meta.json").read_text())
    assert saved["network"] == "emulated network"


def test_a_trace_that_cannot_be_made_does_not_end_the_run(tmp_path):
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/traces").write_text("a file where the folder should be")
    ended = hocket(
        tmp_path, "train", *SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.steps", "3", "--profile"
    )
    assert ended.code == 0, ended
    assert "note     the trace of rank 0 was not recorded ([Errno 20] Not a directory" in ended.out
    assert "step 3  loss" in ended.out


def test_an_interrupt_inside_the_window_leaves_no_trace(tmp_path):
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.steps", "100000"]
    process = start(tmp_path, "train", *words, "--train.profile", "2", "99000")
    wait_for(lambda: (tmp_path / "runs/tiny/metrics.jsonl").exists() and len(records(tmp_path)) > 3, "the window")
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 0, ended
    assert "note     the run ended inside the profiled window; there is no trace" in ended.out
    assert not list(tmp_path.glob("runs/tiny/traces/*"))


def test_profile_is_given_once(tmp_path):
    ended = hocket(tmp_path, "train", "tiny", "--profile", "--train.profile", "3", "1")
    assert ended.code == 2
    assert (
        "profile = True (command line, --profile): sets train.profile, and command line, --train.profile" in ended.err
    )


def test_what_cannot_be_read_is_one_line(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_text("nothing")
    with processes(1, {}) as pool, pytest.raises(TraceError, match=re.escape(str(path))) as caught:
        pool.submit(trace_summary, [path]).result(50)
    assert len(str(caught.value).splitlines()) == 1


def one_rank() -> tuple[Engine, Config]:
    config = replace(recipe("tiny"), mesh=replace(recipe("tiny").mesh, pp=1, dp=1, ep=1))
    small = replace(config.model, layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, dense_layers=(0,))
    config = resolve(planned(replace(config, model=small), chunks=1, merge="off", defer_wgrad="off"))
    cpu = torch.device("cpu")
    return Engine(config, 0, cpu), config


def test_a_trace_without_a_whole_step_is_read(tmp_path):
    path = Trace().annotation("hocket step 1", 50, 60).kernel("k", 0, 10).write(tmp_path / "rank0.json")
    with processes(1, {}) as pool:
        assert pool.submit(trace_summary, [path]).result(50) == ("The traces contain no step.", None)


def test_ops_are_named_inside_the_window_only(tmp_path):
    engine, config = one_rank()
    engine.init_weights()
    batch = microbatches_of(engine, config)
    before = [c.run for c in engine.executor._ops]
    recording = Recording(engine, 0)
    recording.start()
    assert all(c.run is not run for c, run in zip(engine.executor._ops, before, strict=True))
    with recording.step(7):
        engine.train_step(batch, 1e-3)
    recording.stop()
    assert all(c.run is run for c, run in zip(engine.executor._ops, before, strict=True))
    engine.train_step(batch, 1e-3)
    recording.write(tmp_path / "rank0.json.gz")
    seen = named(json.loads(gzip.decompress((tmp_path / "rank0.json.gz").read_bytes())))
    assert seen["hocket step 7"] == 1
    assert {str(op) for op in engine.program.ranks[0]} <= seen.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json.gz"]


def tensor_step(rank: int, folder: Path, method: str) -> None:
    """Record a step of two tensor-parallel ranks."""
    sizes = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512}
    mesh = {"pp": 1, "dp": 1, "ep": 1, "tp": 2}
    changes: dict[str, Any] = {f"model.{name}": size for name, size in sizes.items()}
    changes |= {f"mesh.{name}": size for name, size in mesh.items()}
    changes |= {"model.dense_layers": (0, 1), "model.experts": 0, "overlap.tp.method": (method,)}
    config = resolve(planned(changed(recipe("tiny"), changes), chunks=1, merge="off", defer_wgrad="off"))
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    batch = microbatches_of(engine, config)
    engine.train_step(batch, 1e-3)
    recording = Recording(engine, rank)
    recording.start()
    with recording.step(1):
        engine.train_step(batch, 1e-3)
    recording.stop()
    recording.write(folder / f"rank{rank}.json.gz")


@pytest.mark.parametrize("method", ["off", "ring"])
def test_what_layers_of_tensor_parallel_ranks_wait_for_is_exposed(tmp_path, method):
    run_ranks(tensor_step, 2, tmp_path, method)
    found = report(load(sorted(tmp_path.iterdir())))
    for step in found.steps:
        assert {"tp"} <= set(step.kinds) <= {"tp", "control"}, "no send of theirs is a pipeline's"
        if method == "off":
            assert step.kinds["tp"].hidden < 0.5, step


def replaying() -> tuple[Engine, Config]:
    """One rank whose steps are recorded, by making their calls, and replayed, which does nothing."""
    engine, config = one_rank()
    engine.init_weights()
    engine._graphed = engine.graphed_by(lambda run: (run(), lambda: None))
    return engine, config


@pytest.mark.parametrize(
    ("profile", "ways", "told"),
    [
        ((0, 2), {"replayed"}, "steps 6 to 7 of 1 ranks, replayed: kernels carry no names of ops"),
        ((2, 1), {"issued"}, "step 2 of 1 ranks"),
        ((3, 2), {"issued", "recorded"}, "issued and recorded: lines of replayed steps do not tell what is exposed"),
    ],
)
def test_a_window_records_steps_as_they_run(tmp_path, profile, ways, told):
    """Replayed ones stay so, and lines tell an exposed share of steps that were made as the recorded ones were."""
    engine, config = replaying()
    train, run = replace(config.train, profile=profile, steps=9), replace(config.run, folder=str(tmp_path))
    metrics = Mock(spec=Metrics, exposed={})
    settings: Any = replace(config, train=train, run=run)
    seen: list[str] = []
    with ProfileWindow(settings, 0, engine, metrics, StopRequest(), 0) as window:
        for step in range(1, 9):
            window.before(step)
            way = engine.train_step(microbatches_of(engine, config), 1e-3).way
            window.after(step, way)
            seen.append(way)
    assert seen == ["issued"] * 3 + ["recorded"] + ["replayed"] * 4
    assert {seen[step - 1] for step in window.steps} == ways
    assert any(told in call.args[0] for call in metrics.say.call_args_list), metrics.say.call_args_list
    assert set(metrics.exposed) == (ways if len(ways) == 1 else set())


def test_names_that_the_profiler_would_spoil_are_changed(tmp_path):
    engine, config = one_rank()
    odd = replace(config, run=replace(config.run, name='a "b" \\ c\n', folder=str(tmp_path)))
    name = describe(odd, engine, 0)["settings"]["run"]["name"]
    assert name == "a 'b' / c"

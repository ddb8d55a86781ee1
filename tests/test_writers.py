"""Where metrics go beside metrics.jsonl, and the list of runs."""

from __future__ import annotations

import fcntl
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.train import writers as module
from hocket.train.metrics import Metrics, StepRecord
from hocket.train.runs import runs
from hocket.train.writers import WRITERS, Writers, require_writers
from tests.helpers.command import ALONE, SMALL, command, hocket


def settings_in(folder: Path, *names: str) -> Settings:
    config = changed(recipe("tiny"), {"run.folder": str(folder), "run.name": "mine", "train.writers": names})
    return resolve(config, Host())


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self, settings: Settings, done: int) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def report(settings: Settings) -> str:
    out = io.StringIO()
    with Metrics(settings, 3.0, console=Console(file=out, width=200, soft_wrap=True)) as metrics:
        for step in (1, 2, 3):
            metrics.step(
                StepRecord(step, math.nan if step == 2 else 5.0 - step, 0.5, 1e-3, 0.25, epochs={"web": step / 4})
            )
        metrics.validation(3, 2.5, {"web": 2.5})
    return out.getvalue()


def test_every_number_of_a_line_goes_to_every_writer(tmp_path, monkeypatch):
    kept: list[Kept] = []

    def make(*args: Any) -> Kept:
        kept.append(Kept(*args))
        return kept[-1]

    monkeypatch.setitem(WRITERS, "wandb", ("json", make))
    monkeypatch.setitem(WRITERS, "tensorboard", ("json", make))
    report(settings_in(tmp_path, "wandb", "tensorboard"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for writer in kept:
        assert writer.closed
        assert [step for step, _ in writer.got] == [1, 2, 3, 3]
        assert writer.got[0][1]["loss"] == lines[0]["loss"] == 4.0
        assert writer.got[0][1]["epochs.web"] == 0.25
        assert "loss" not in writer.got[1][1]
        assert writer.got[3][1] == {"validation_loss": 2.5, "validation_losses.web": 2.5, "unigram_entropy": 3.0}
    assert len(kept) == 2


def test_a_writer_that_fails_costs_the_run_nothing_else(tmp_path, monkeypatch):
    class Failing(Kept):
        def add(self, step: int, values: Mapping[str, float]) -> None:
            if step == 2:
                raise RuntimeError("no\nnetwork")

    monkeypatch.setitem(WRITERS, "wandb", ("json", Failing))
    text = report(settings_in(tmp_path, "wandb"))
    assert text.count("WARNING  train.writers: wandb has failed and gets no more (RuntimeError: no network)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_writer_that_cannot_begin_is_one_line(tmp_path, monkeypatch):
    def broken(settings: Settings, done: int) -> Any:
        raise OSError("no server")

    monkeypatch.setitem(WRITERS, "wandb", ("json", broken))
    with pytest.raises(ValueError, match=r"train.writers = wandb .*cannot begin \(OSError: no server\); fix: "):
        Writers(settings_in(tmp_path, "wandb"), 0, print)


def test_packages_that_are_missing_are_all_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="2 settings cannot work") as caught:
        require_writers(settings_in(tmp_path, "wandb", "tensorboard"))
    for name in ("wandb", "tensorboard"):
        assert f"train.writers = {name} " in str(caught.value)
        assert f"fix: pip install 'hocket[{name}]', or leave it out" in str(caught.value)


def test_tensorboard_has_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra: pip install hocket[tensorboard]")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    report(settings_in(tmp_path, "tensorboard"))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 4.0), (3, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_losses/web")] == [(3, 2.5)]


def test_wandb_writes_an_offline_run(tmp_path):
    pytest.importorskip("wandb", reason="56 MB on disk, no part of setup: pip install hocket[wandb]")
    assert "WARNING" not in report(settings_in(tmp_path, "wandb"))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"validation_loss" in file.read_bytes()


# -- runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_how_far_they_came(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [*SMALL, *ALONE, "--train.microbatches", "2"]
    (tmp_path / "text.txt").write_text("some text " * 300)
    small += ["--data.paths", "text.txt", "--data.validation", "0.3", "--train.eval_batches", "1"]
    assert hocket(tmp_path, "train", *small, "--train.steps", "2", "--run.name", "one").code == 0
    (tmp_path / "own.toml").write_text('recipe = "tiny"')
    monkeypatch.setattr(sys, "argv", ["hocket"])
    code, out, _ = command(capsys, "runs")
    assert code == 0
    heading, line = out.splitlines()
    assert heading.split() == ["name", "recipe", "step", "loss", "when", "state"]
    assert line.split()[:5] == ["one", "tiny", "2", "of", "2"]
    assert line.endswith("done")


def run_in(folder: Path, name: str, lines: list[dict[str, Any]], steps: int = 5) -> Path:
    path = folder / name
    path.mkdir()
    (path / "explanation.json").write_text(json.dumps({"recipe": "tiny", "steps": steps}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_says_whether_it_runs(tmp_path):
    run_in(tmp_path, "stopped", [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}])
    run_in(tmp_path, "done", [{"step": 5, "loss": 3.0}, {"step": 5, "validation_loss": 2.0}])
    run_in(tmp_path, "early", [])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    (tmp_path / "other").mkdir()
    held = run_in(tmp_path, "running", [{"step": 3, "loss": 2.0}])
    with (held / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {run.name: (run.step, run.steps, run.loss, run.state) for run in runs(tmp_path)}
    assert found == {
        "stopped": (2, 5, 3.0, "stopped"),
        "done": (5, 5, 3.0, "done"),
        "early": (0, 5, None, "failed to start"),
        "old": (7, 0, 1.0, ""),
        "running": (3, 5, 2.0, "running"),
    }


@pytest.mark.parametrize("words", [["no/such"], ["a", "b"], ["--flag"]])
def test_what_is_no_folder_of_runs_is_named(capsys, words):
    code, _, err = command(capsys, "runs", *words)
    assert code == 2
    assert "; fix: " in err
    assert len(err.splitlines()) == 1

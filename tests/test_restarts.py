"""A rank is killed: `hocket train --restarts` and torchrun start all again, and the run goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import ALONE, SMALL, children_of, end_all, finish, hocket, start, text_in, wait_for

STEPS, SAVED = 12, 4
PAIR = [*SMALL, "--model.layers", "2", "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "1"]
PAIR += ["--train.steps", str(STEPS), "--train.save_every", str(SAVED)]
STEP = "hocket.train.trainer:Trainer._step"


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def steps(folder: Path) -> dict[int, float]:
    """Losses of the steps of a run, each of which is there once."""
    lines = map(json.loads, (folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return dict(found)


def has_saved(folder: Path) -> bool:
    return (folder / "runs/tiny/checkpoints/latest").exists()


def workers(pid: int) -> list[int]:
    """Processes of ranks below a command: those without children of their own."""
    below = children_of(pid)
    return [leaf for child in below for leaf in workers(child)] or [pid]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    ended = hocket(folder, "train", *PAIR, "--data.paths", text_in(folder))
    assert ended.code == 0, ended
    return steps(folder)


def test_a_run_starts_again_from_its_checkpoint(tmp_path: Path, whole: dict[int, float]) -> None:
    words = ["kill_once", STEP, "train", *PAIR, "--data.paths", text_in(tmp_path), "--restarts", "2"]
    ended = finish(start(tmp_path, *words, module="tests.helpers.stops"))
    assert ended.code == 0, ended
    assert ended.err.count("was ended by SIGKILL") == 1
    assert ended.err.count("hocket: restart 1 of 2, from the last checkpoint") == 1
    assert re.search(rf"{STEPS} steps, [48] of them done", ended.out), ended
    assert steps(tmp_path) == whole


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    words = ["kill", STEP, "train", *PAIR, "--data.paths", text_in(tmp_path)]
    ended = finish(start(tmp_path, *words, "--restarts", "2", module="tests.helpers.stops"))
    assert ended.code == 1, ended
    assert ended.err.count("was ended by SIGKILL") == 3
    assert [f"restart {attempt} of 2" in ended.err for attempt in (1, 2, 3)] == [True, True, False]


@pytest.mark.full
def test_torchrun_starts_again_too(tmp_path: Path, whole: dict[int, float]) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.helpers.stops", "kill_once"]
    words += [STEP, "train", *PAIR, "--data.paths", text_in(tmp_path)]
    ended = finish(start(tmp_path, *words, module="torch.distributed.run"))
    assert ended.code == 0, ended
    assert steps(tmp_path) == whole


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--restarts", "-1"], "restarts = -1 (command line, --restarts): a number of times; fix: 0 or more"),
        (["--restarts", "1", "--run.resume", "off"], "fix: run.resume = auto"),
    ],
)
def test_restarts_that_make_no_sense_are_refused(tmp_path: Path, words: list[str], fix: str) -> None:
    ended = hocket(tmp_path, "train", *SMALL, *ALONE, "--data.paths", text_in(tmp_path), *words)
    assert ended.code == 2
    assert fix in ended.err


def test_a_run_that_keeps_no_checkpoint_writes_none(tmp_path):
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.keep", "0"]
    ended = hocket(tmp_path, "train", *words, "--train.steps", "2")
    assert (ended.code, len(steps(tmp_path))) == (0, 2), ended
    assert not (tmp_path / "runs/tiny/checkpoints").exists()
    ended = hocket(tmp_path, "train", *words, "--train.steps", "2", "--restarts", "1")
    assert (ended.code, "train.keep = 0, so that no start would find" in ended.err) == (2, True), ended


def test_a_signal_to_every_process_is_one_request(tmp_path: Path) -> None:
    """As systemd and Slurm send it; the launcher passes its own on, so that ranks get two."""
    process = start(tmp_path, "train", *PAIR, "--train.steps", "100000", "--data.paths", text_in(tmp_path))
    wait_for(lambda: has_saved(tmp_path), "a checkpoint")
    for pid in [*workers(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 0, ended
    assert "stopped by signal 15; saved in" in ended.out

"""Checkpoints that are written while training goes on, and which of them are kept."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hocket.config.schema import changed
from hocket.fsdp.saving import background
from hocket.fsdp.saving.atomic_folder import AtomicFolder, checksum
from hocket.fsdp.saving.storage import CheckpointWriter
from hocket.train import checkpoint, trainer
from hocket.train.checkpoint import Moment, SaveFailed, Saves, newest_of
from hocket.train.metrics import Metrics
from tests.helpers.command import SMALL, end_all, hocket, text_in
from tests.helpers.ranks import run_ranks
from tests.ranks.test_skipped import run_of
from tests.test_checkpoint import groups, load_and_compare, settings_in


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def behind_changes(rank: int, folder: Path) -> None:
    """Weights change, and ranks talk, between a save's begin and its first written byte."""
    may_write, live = threading.Event(), groups(5)
    background.thread().submit(may_write.wait, 20)
    saving = checkpoint.save(settings_in(folder), Moment(5, 50), live, background=True)
    for piece in live.values():
        piece.flat.fill_(math.nan)
    dist.barrier()
    assert not saving.done()
    may_write.set()
    assert saving.result(timeout=50).name == "step-00000005"


def test_what_is_written_is_of_the_step_though_training_goes_on(tmp_path: Path) -> None:
    run_ranks(behind_changes, 2, tmp_path)
    assert run_ranks(load_and_compare, 3, tmp_path) == [(5, 50)] * 3


class Told(Metrics):
    """What a run would print and record."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def saved(self, step: int, folder: Path, copy_seconds: float, write_seconds: float) -> None:
        self.lines.append(f"saved {step}")


def test_a_save_waits_for_the_one_before_and_says_so(tmp_path: Path) -> None:
    settings = changed(settings_in(tmp_path), {"train.save_every": 1})
    told, may_write, step = Told(), threading.Event(), 1
    saves = Saves(settings, told, 0, lambda: groups(step), lambda: Moment(step, step))
    background.thread().submit(may_write.wait, 20)
    saves.between(step)
    saves.look()
    assert told.lines == []
    threading.Timer(0.1, may_write.set).start()
    step = 2
    saves.between(step)
    assert told.lines[0].startswith("note     step 2 waits until the checkpoint of step 1 is written: ")
    assert told.lines[1:] == ["saved 1"]
    assert saves.last() == "", "that of step 2 is waited for, and not written twice"
    assert told.lines[2:] == ["saved 2"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001", "step-00000002"]


def test_a_save_that_fails_behind_is_told_and_the_next_one_tried(tmp_path: Path) -> None:
    settings, told, step = changed(settings_in(tmp_path), {"train.save_every": 1}), Told(), 1
    saves = Saves(settings, told, 0, lambda: groups(step), lambda: Moment(step, step))
    (tmp_path / "checkpoints").write_text("in the way")
    saves.between(step)
    saves.wait()
    (line,) = told.lines
    assert line.startswith("WARNING  run.folder = ")
    assert line.endswith("the run goes on, and saves again after step 2")
    with pytest.raises(SaveFailed):
        saves.last()
    (tmp_path / "checkpoints").unlink()
    step = 2
    saves.between(step)
    saves.wait()
    assert told.lines[1:] == ["saved 2"]


def save_over(rank: int, folder: Path, behind: bool, fails: str) -> list[str]:
    """A save with `train.keep` = 1 over two checkpoints, of which a part fails."""
    for step in (1, 2):
        checkpoint.save(settings_in(folder, keep=2), Moment(step, step), groups(step))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {"files": (CheckpointWriter, "write_data"), "name": (AtomicFolder, "publish")}[fails]
    setattr(owner, name, fail)
    with pytest.raises(SaveFailed, match=r"the last one is .*step-00000002"):
        checkpoint.save(settings_in(folder, keep=1), Moment(3, 3), groups(3), behind).result(timeout=50)
    background.wait_for_thread()
    dist.barrier()
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("fails", ["files", "name"])
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_a_save_that_fails_deletes_no_earlier_checkpoint(tmp_path: Path, behind: bool, fails: str) -> None:
    assert run_ranks(save_over, 2, tmp_path, behind, fails) == [["step-00000001", "step-00000002"]] * 2


def unlinkable(rank: int, folder: Path, behind: bool) -> list[str]:
    """A save over two checkpoints, and one more, on a file system that makes no links from now on."""
    for step in (1, 2):
        checkpoint.save(changed(settings_in(folder), {"train.keep": (2,)}), at(step), groups(step))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    changes = {"train.save_every": 1, "train.keep": (1,)}
    settings, told = changed(settings_in(folder), changes), Told()
    saves = Saves(settings, told, 2, lambda: groups(3), lambda: at(3), behind)
    with patch.object(Path, "symlink_to", refuse):
        saves.between(3)
        assert saves.last() == "", "it is saved, and not written again"
    return told.lines


def at(step: int) -> Moment:
    return Moment(step, 10 * step)


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_a_whole_checkpoint_counts_where_no_link_can_be_made(tmp_path: Path, behind: bool) -> None:
    """It is found by its name, older ones go, and no link stands for one that is older."""
    folder = tmp_path / "checkpoints"
    for lines in run_ranks(unlinkable, 2, tmp_path, behind):
        assert lines == ["saved 3"]
    assert sorted(os.listdir(folder)) == ["step-00000003"]
    assert newest_of(tmp_path) == folder / "step-00000003"
    assert run_ranks(load_and_compare, 2, tmp_path) == [(3, 30)] * 2
    checkpoint.save(settings_in(tmp_path, keep=1), Moment(4, 40), groups(4))
    assert (folder / "latest").resolve() == folder / "step-00000004", "a later save makes it, where it can"


def records(folder: Path) -> list[dict[str, float]]:
    """Lines of metrics without what is measured."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "grad_norm", "validation_loss")
    return [{key: line[key] for key in kept if key in line} for line in lines if "saved" not in line]


def test_a_run_saves_behind_its_steps_and_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    words = [*SMALL, "--model.layers", "2", "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "1"]
    words += [
        "--data.paths",
        text_in(tmp_path),
        "--train.steps",
        "6",
        "--train.save_every",
        "2",
        "--train.eval_every",
        "1",
        "--train.keep",
        "every:2",
    ]
    ended = hocket(tmp_path, "train", *words, "--run.name", "behind")
    assert ended.code == 0, ended
    run = tmp_path / "runs/behind"
    assert len(list(run.glob("checkpoints/step-*"))) == 3
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    saved = [line["saved"] for line in lines if "saved" in line]
    assert [each["step"] for each in saved] == [2, 4, 6]
    assert all(each["bytes"] > 0 and each["gb_per_s"] > 0 and each["write_seconds"] > 0 for each in saved)
    assert [each["copy_seconds"] > 0 for each in saved] == [True, True, False]
    ended = hocket(
        tmp_path, "train", *words, "--run.name", "resumed", "--run.resume", str(run / "checkpoints/step-00000002")
    )
    assert ended.code == 0, ended
    again = records(tmp_path / "runs/resumed")
    assert again == records(run)[-len(again) :]
    assert sum("loss" in line for line in again) == 4


def test_the_newest_and_those_of_some_steps_are_kept(tmp_path: Path) -> None:
    settings = changed(settings_in(tmp_path), {"train.keep": (1, "every:40"), "train.save_every": 10})
    for step in range(10, 100, 10):
        checkpoint.save(settings, Moment(step, step), groups(step))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", *(f"step-{step:08d}" for step in (40, 80, 90))]


def test_there_are_no_copies_for_which_the_host_has_no_memory(tmp_path: Path) -> None:
    size = background.copied_bytes({"a": torch.zeros(7), "b": [1, torch.zeros(200)], "c": {"d": torch.zeros(3)}})
    assert size == 64 + 832 + 64
    settings, copies = settings_in(tmp_path), background.copied_bytes(groups(1))
    assert checkpoint.require_memory(settings, 0, copies, 1 << 20) == ""
    remark = checkpoint.require_memory(settings, 0, copies, 1000)
    assert remark.startswith("training waits while checkpoints are written: copies of ")
    assert "copies and offloaded tensors" in checkpoint.require_memory(settings, 1 << 20, copies, 1 << 20)
    assert checkpoint.require_memory(settings, 1 << 20, 0, 1 << 20) == ""
    with pytest.raises(ValueError, match=r"plan.offload = .*offloaded tensors of .* take .*fix: fewer parts"):
        checkpoint.require_memory(settings, 1 << 20, 0, 1000)


def test_a_run_without_memory_for_copies_learns_the_same(tmp_path: Path, monkeypatch, capsys) -> None:
    """It saves between its steps, and says why."""
    found = {}
    for name in ("behind", "between"):
        if name == "between":
            monkeypatch.setattr(trainer, "available_memory", lambda: 1000)
        run_of(tmp_path, name, {})
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        saved = [line["saved"] for line in lines if "saved" in line]
        assert [each["step"] for each in saved] == [4, 8, 12]
        assert [each["copy_seconds"] > 0 for each in saved] == [name == "behind", name == "behind", False]
        assert ("training waits while checkpoints are written" in capsys.readouterr().out) == (name == "between")
        tensors = [checksum(file) for file in sorted((tmp_path / name).glob("checkpoints/step-*/*.distcp"))]
        found[name] = records(tmp_path / name), tensors
    assert found["behind"] == found["between"]

"""Where checkpoints find no place: errors of one rank, hosts that share nothing, full disks, folders half deleted."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hocket.config.schema import changed
from hocket.fsdp.saving import atomic_folder
from hocket.fsdp.saving.storage import CheckpointWriter
from hocket.train import checkpoint
from hocket.train.checkpoint import Moment
from tests.helpers.ranks import run_ranks
from tests.test_checkpoint import SHAPES, groups, load_and_compare, save_steps, settings_in


def fail_on_one_rank(rank: int, folder: Path) -> str:
    blocked = settings_in(Path(os.devnull) / "below" if rank == 0 else folder)
    try:
        checkpoint.save(blocked, Moment(1, 1), groups(1))
    except ValueError as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    first, second = run_ranks(fail_on_one_rank, 2, tmp_path)
    assert first == second
    assert first.startswith("run.folder = ")
    assert "fix:" in first


def slower_than_patience(rank: int, folder: Path, behind: bool) -> str:
    """Rank 1 writes for longer than the other waits for it."""
    hasty, save = dist.new_group(timeout=timedelta(seconds=1)), dcp.save
    settings = settings_in(folder)
    if behind:
        settings = changed(settings, {"train.hang_timeout": 1.0})
    else:
        dcp.save = lambda *args, **more: save(*args, **{**more, "process_group": hasty})
    write = CheckpointWriter.write_data
    if rank == 1:
        CheckpointWriter.write_data = lambda *args: (time.sleep(2), write(*args))[1]  # type: ignore[method-assign]
    try:
        if behind:
            checkpoint.save(settings, Moment(1, 1), groups(1), background=True).result(timeout=50)
        else:
            checkpoint.save(settings, Moment(1, 1), groups(1))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_a_save_that_takes_longer_than_ranks_wait_names_the_setting(tmp_path, behind):
    first, _ = run_ranks(slower_than_patience, 2, tmp_path, behind)
    words = r"a rank has waited longer than that for the others to write the checkpoint of step 1; fix: a longer one"
    assert re.match(rf"train\.hang_timeout = {1 if behind else 300}\.0 \(configuration\): {words}", first), first
    assert not list(checkpoint.checkpoints_of(settings_in(tmp_path)).glob("step-*[0-9]"))


def place_not_shared(rank: int, folder: Path) -> str:
    """Rank 1 is on a host that has another folder under the same name."""
    (folder / "b" / "checkpoints").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match=r"run\.folder = ") as caught:
        checkpoint.make_place(settings_in(folder / "ab"[rank]), groups(1))
    return str(caught.value).partition("): ")[2]


def test_hosts_that_do_not_share_the_folder_are_told_before_the_first_step(tmp_path):
    first, second = run_ranks(place_not_shared, 2, tmp_path)
    assert first == second
    assert re.match(r"no place for checkpoints: rank 1 on .* does not see .*, which rank 0 has created; fix: ", first)


def test_too_little_room_for_the_checkpoints_to_come_is_a_remark(tmp_path, monkeypatch):
    size = sum(8 * math.prod(shape) for shape in SHAPES.values())

    def remarks(nbytes: int, every: int, steps: int = 100) -> list[str]:
        monkeypatch.setattr(checkpoint, "free", lambda _: nbytes)
        settings = changed(settings_in(tmp_path, keep=2), {"train.save_every": every, "train.steps": steps})
        return checkpoint.make_place(settings, groups(1))

    assert remarks(3 * size, 10) == remarks(2 * size, 50) == remarks(size, 0) == []
    (text,) = remarks(3 * size - 1, 10)
    assert "3 more checkpoints will take 3.2 KiB there, and 3.2 KiB are free; fix: make room" in text
    assert "a checkpoint will take 1.1 KiB there" in remarks(size - 1, 0)[0]
    save_steps(0, tmp_path, [10, 20])
    assert remarks(size, 10) == []
    assert os.listdir(tmp_path) == ["checkpoints"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000010", "step-00000020"]


def test_an_empty_folder_of_checkpoints_is_no_earlier_run(tmp_path):
    checkpoint.make_place(settings_in(tmp_path), groups(1))
    assert checkpoint.restore(settings_in(tmp_path), groups(None)) is None
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_half_of_a_deleted_checkpoint_is_none(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1, 2])
    monkeypatch.setattr(atomic_folder.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):  # as if it had been killed
        atomic_folder.remove(tmp_path / "checkpoints" / "step-00000001")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001.tmp", "step-00000002"]
    assert load_and_compare(0, tmp_path)[0] == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000002"]


def test_what_cannot_be_deleted_is_deleted_behind_the_next_save(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1], keep=1)
    folder, rename = tmp_path / "checkpoints", Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save_steps(0, tmp_path, [2], keep=1)
    assert sorted(os.listdir(folder)) == ["latest", "step-00000001", "step-00000002"]
    monkeypatch.undo()
    monkeypatch.setattr(Path, "is_dir", lambda _: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    checkpoint.delete_old(folder, settings_in(tmp_path, keep=1).train)
    monkeypatch.undo()
    save_steps(0, tmp_path, [3], keep=1)
    assert sorted(os.listdir(folder)) == ["latest", "step-00000003"]


def test_a_file_that_cannot_be_deleted_keeps_no_other(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1])
    unlink = os.unlink

    def refuse(path: Any, **more: Any) -> None:
        if str(path).endswith(".metadata"):
            raise OSError(16, "Device or resource busy")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refuse)
    atomic_folder.remove(tmp_path / "checkpoints" / "step-00000001")
    assert os.listdir(tmp_path / "checkpoints" / "step-00000001.tmp") == [".metadata"]


def test_a_folder_that_cannot_be_changed_is_named_when_a_run_begins(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1])
    monkeypatch.setattr(checkpoint, "link", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only")))
    with pytest.raises(ValueError, match=r"run.folder = .*earlier run there cannot be moved \(.*Read-only\); fix: "):
        checkpoint.restore(settings_in(tmp_path), groups(None))


def not_on_disk_on_one_rank(rank: int, folder: Path) -> str:
    """A save of which the disk of the last rank loses what it had taken."""
    if rank == 1:
        os.fsync = _fail
    try:
        checkpoint.save(settings_in(folder), Moment(1, 1), groups(1))
    except ValueError as error:
        return str(error)
    return ""


def _fail(fd: Any) -> None:
    raise OSError(5, "Input/output error")


def test_files_that_do_not_come_to_the_disk_are_an_error_on_all(tmp_path):
    first, second = run_ranks(not_on_disk_on_one_rank, 2, tmp_path, timeout=30)
    assert first == second
    assert "Input/output error" in first
    assert not list(checkpoint.checkpoints_of(settings_in(tmp_path)).iterdir())


def fill_the_disk(rank: int, folder: Path, limit: int) -> str:
    """A save in which the last rank may write no file above `limit` bytes."""
    settings = settings_in(folder)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoint.save(settings, Moment(2, 2), groups(2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_save_without_room_gives_back_what_it_took(tmp_path):
    checkpoint.save(settings_in(tmp_path), Moment(1, 1), groups(1))
    first, second = run_ranks(fill_the_disk, 2, tmp_path, 64)
    assert first == second
    words = r"the checkpoint of step 2 \(1.1 KiB\) cannot be written: rank 1 says OSError: \[Errno 27\].*"
    assert re.match(
        rf"run.folder = .*: {words}; .*iB are free there, and the last one is .*step-00000001; fix: make room.*$",
        first,
    )
    assert sorted(path.name for path in checkpoint.checkpoints_of(settings_in(tmp_path)).iterdir()) == [
        "latest",
        "step-00000001",
    ]

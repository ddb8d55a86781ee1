"""Copies of a run's state in the memory of hosts: what survives a host, what is refused, what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
import torch

from hocket.doctor.look import copies_left_in
from hocket.environment import find_port
from hocket.resolve import Settings
from hocket.runtime import sent_files
from hocket.settings.schema import changed
from hocket.train import checkpoint, memory, room
from hocket.train.checkpoint import Moment
from hocket.train.memory import Memory
from tests.helpers.command import SMALL, Process, end_all, finish, hocket, start, text_in, wait_for
from tests.helpers.ranks import run_ranks
from tests.test_checkpoint import groups, settings_in, value_of


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def on_hosts(folder: Path, rank: int, every: int = 1, ranks: int = 1) -> Settings:
    """Settings of a rank whose host has its memory in a folder of its own, with so many ranks to a host."""
    host = folder / f"host{rank // ranks}"
    host.mkdir(exist_ok=True)
    return changed(settings_in(folder / "run"), {"run.memory": str(host), "train.memory_every": every})


def copy_steps(rank: int, folder: Path, steps: list[int], ranks: int = 1) -> tuple[list[str], list[tuple[int, ...]]]:
    settings = on_hosts(folder, rank, ranks=ranks)
    sent_files.PIECE = 100  # several pieces for a file
    of_run = Memory(settings)
    room.make_place(settings, groups(1))
    notes = of_run.start(groups(1))
    for step in steps:
        of_run.copy(Moment(step, 10 * step), groups(step)).result(timeout=20)
    return notes, of_run.hosts


def go_on(rank: int, folder: Path, ranks: int = 1) -> tuple[int, bool]:
    """The step that a run goes on from, with the values of that step, and whether it was in memory."""
    settings, empty = on_hosts(folder, rank, ranks=ranks), groups(None)
    sent_files.PIECE = 100
    of_run = Memory(settings)
    restored = checkpoint.restore(settings, empty, memory=of_run)
    if restored is None:
        return 0, False
    for kind, found in empty.items():
        for piece in found:
            wanted = value_of(piece.name, kind, restored.step)[piece.lo : piece.hi]
            assert torch.equal(piece.tensor, wanted), (kind, piece.name)
    assert restored.position == 10 * restored.step
    return restored.step, restored.in_memory


def files(folder: Path, host: int) -> list[str]:
    """What a host has in its memory: step and file."""
    return sorted(
        f"{path.parent.name[-1]} {path.name}" for path in (folder / f"host{host}").rglob("*") if path.is_file()
    )


def test_each_file_is_on_two_hosts_of_which_any_may_be_lost(tmp_path: Path) -> None:
    notes, hosts = run_ranks(copy_steps, 3, tmp_path, [1, 2])[0]
    assert hosts == [(0,), (1,), (2,)]
    text = r"copies in memory take up to .*iB of .*host0, of its ranks and of those of the host before, on 3 hosts"
    assert re.fullmatch(text, notes[0])
    assert files(tmp_path, 1) == ["2 .metadata", "2 __0_0.distcp", "2 __1_0.distcp", "2 meta.json"]
    for lost in (0, 2):
        shutil.rmtree(tmp_path / f"host{lost}")
        assert run_ranks(go_on, 3, tmp_path) == [(2, True)] * 3


def test_hosts_that_are_left_go_on_with_fewer_ranks(tmp_path: Path) -> None:
    assert run_ranks(copy_steps, 4, tmp_path, [7], 2)[0][1] == [(0, 1), (2, 3)]
    shutil.rmtree(tmp_path / "host1")
    assert run_ranks(go_on, 2, tmp_path, 2) == [(7, True)] * 2


def test_the_newest_that_is_whole_is_taken_wherever_it_is(tmp_path: Path) -> None:
    copy_steps(0, tmp_path, [3])
    settings = on_hosts(tmp_path, 0)
    checkpoint.save(settings, Moment(2, 20), groups(2))
    assert go_on(0, tmp_path) == (3, True)
    assert (tmp_path / "run/checkpoints/latest").resolve().name == "step-00000002"
    checkpoint.save(settings, Moment(3, 30), groups(3))
    assert go_on(0, tmp_path) == (3, False), "a disk outlives a host"
    (data,) = (tmp_path / "run/checkpoints/step-00000003").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    assert go_on(0, tmp_path) == (3, True)
    assert [path.name for path in checkpoint.newest_first(tmp_path / "run/checkpoints")] == [
        "step-00000003",
        "step-00000002",
    ]
    (data,) = (tmp_path / "host0").rglob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert go_on(0, tmp_path) == (2, False)


def test_copies_of_another_run_are_found_by_nobody(tmp_path: Path) -> None:
    copy_steps(0, tmp_path, [3])
    checkpoints, settings = tmp_path / "run/checkpoints", on_hosts(tmp_path, 0)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    there = changed(settings, {"run.folder": str(tmp_path / "other")})
    assert Memory(there).newest is None, "of a folder that was copied"
    shutil.move(checkpoints, tmp_path / "kept")
    assert go_on(0, tmp_path) == (0, False), "of checkpoints that were deleted"
    shutil.move(tmp_path / "kept", checkpoints)
    over = Memory(changed(settings, {"run.resume": "off"}))
    assert checkpoint.restore(over.settings, groups(None), memory=over) is None
    over.start(groups(1))
    assert go_on(0, tmp_path) == (0, False), "of a run that started over"
    copy_steps(0, tmp_path, [4])
    later = Memory(changed(settings, {"train.memory_every": 0}))
    assert later.newest, "it is no less a copy if there are to be no more"
    place = later.folder_of(later.newest).parent
    assert str(place) in copies_left_in(tmp_path / "host0", time.time() + 10)
    assert copies_left_in(tmp_path / "host0", time.time() - 3600) == {}
    later.end()
    assert not place.exists()
    assert files(tmp_path, 0) == []


def goes_back(rank: int, folder: Path, how: str) -> None:
    """A rank that is left alone goes on from an older checkpoint, and makes a copy of an earlier step."""
    settings = on_hosts(folder, rank)
    of_run = Memory(settings)
    if how == "resume":
        older = changed(settings, {"run.resume": str(checkpoint.newest_first(folder / "run/checkpoints")[0])})
        restored = checkpoint.restore(older, groups(None), memory=of_run)
    else:
        restored = checkpoint.restore(settings, groups(None), memory=of_run)
    assert restored is not None
    of_run.start(groups(1), restored.step if restored.in_memory else None)
    if how == "rewind":
        of_run.begin_anew()
    of_run.copy(Moment(2, 20), groups(2)).result(timeout=20)


@pytest.mark.parametrize("how", ["resume", "rewind"])
def test_a_host_that_comes_back_does_not_bring_what_the_run_went_back_from(tmp_path: Path, how: str) -> None:
    run_ranks(copy_steps, 2, tmp_path, [5])
    checkpoint.save(on_hosts(tmp_path, 0), Moment(1, 10), groups(1))
    goes_back(0, tmp_path, how)
    assert "5 __0_0.distcp" in files(tmp_path, 1), "what the host that was away has"
    assert run_ranks(go_on, 2, tmp_path) == [(2, True)] * 2


def fails_on_one(rank: int, folder: Path) -> str:
    """The last rank's host has no room for what comes from the other."""
    copy_steps(rank, folder, [1])
    settings = on_hosts(folder, rank)
    of_run = Memory(settings)
    if rank == 1:
        sent_files._write = _no_space
    with pytest.raises(checkpoint.SaveFailed) as failed:
        of_run.copy(Moment(2, 20), groups(2)).result(timeout=20)
    return str(failed.value)


def _no_space(file: FileIO, piece: bytearray) -> None:
    raise OSError(28, "No space left on device")


def test_a_copy_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    first, second = run_ranks(fails_on_one, 2, tmp_path)
    words = r"the copy of step 2 cannot be made: \[Errno 28\] No space left on device; .*iB are free; fix: a larger"
    assert re.match(rf"run\.memory = .*host0.*: {words}", first), first
    assert "No space left" in second
    assert files(tmp_path, 0) == ["1 .metadata", "1 __0_0.distcp", "1 __1_0.distcp", "1 meta.json"]
    assert run_ranks(go_on, 2, tmp_path) == [(1, True)] * 2


def test_copies_that_a_host_has_no_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = on_hosts(tmp_path, 0, every=10)
    room.make_place(settings, groups(1))
    assert Memory(settings).start(groups(1))[0].endswith("; there is no other host to have them too")
    for name, text in {
        "free": r"train\.memory_every = 10 .*: copies take 2\.1 KiB of .*host0 on .*, where 1\.0 KiB are free; fix",
        "available_memory": r"copies and snapshots take 3\.6 KiB of the memory of .*, of which 1\.0 KiB are available",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, lambda *_: 1024)
            with pytest.raises(ValueError, match=text):
                Memory(settings).start(groups(1))
    absent = changed(settings, {"run.memory": str(tmp_path / "absent")})
    with pytest.raises(ValueError, match=r"run\.memory = .*absent.*: no place for copies: .*No such file.*; fix: a f"):
        Memory(absent)


# A run of two hosts, of which one is lost.

STEPS = 36
WORDS = [*SMALL, "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "1", "--train.steps", str(STEPS)]
WORDS += ["--network.ranks_per_host", "1", "--train.memory_every", "3"]


def two_hosts(folder: Path) -> list[Process]:
    """A rank on each of two hosts, as torchrun would start them."""
    every = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    every["MASTER_PORT"] = str(find_port())
    ranks = []
    for rank in range(2):
        host = folder / f"host{rank}"
        host.mkdir(exist_ok=True)
        words = [*WORDS, "--data.paths", text_in(folder), "--run.memory", str(host)]
        ranks.append(start(folder, "train", *words, **every, RANK=str(rank)))
    return ranks


def records(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def last(folder: Path) -> object:
    meta = json.loads((folder / f"runs/tiny/checkpoints/step-{STEPS:08d}/meta.json").read_text())
    return {name: entry for name, entry in meta["files"].items() if name.endswith(".distcp")}


def test_a_host_that_is_lost_costs_no_more_than_the_steps_since_a_copy(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    folder.mkdir()
    ended = hocket(whole, "train", *WORDS[:-2], "--data.paths", text_in(whole))
    assert ended.code == 0, ended

    def copied() -> bool:
        metrics = folder / "runs/tiny/metrics.jsonl"
        return metrics.exists() and '"copied"' in metrics.read_text()

    ranks = two_hosts(folder)
    wait_for(copied, "a copy")
    os.kill(ranks[1].pid, signal.SIGKILL)
    for rank in ranks:
        finish(rank)
    assert not (folder / "runs/tiny/checkpoints/latest").exists(), "nothing is on disk"
    shutil.rmtree(folder / "host1")
    first, second = (finish(rank) for rank in two_hosts(folder))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert re.search(r"note +the run goes on from the copy of step \d+ in the memory of its hosts", first.out), first
    assert records(folder) == records(whole)
    assert last(folder) == last(whole)
    for host in ("host0", "host1"):
        assert os.listdir(folder / host) == []

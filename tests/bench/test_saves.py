"""What a checkpoint costs: the command on two CPU ranks, and its arithmetic."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import saves
from tests.bench.test_training import shrunk
from tests.helpers.command import text_in


def test_the_steps_beside_a_write_are_told_from_the_others() -> None:
    slow = {*range(11, 15), *range(21, 24)}
    lines = [{"step": step, "loss": 1.0, "seconds": 2.0 if step in slow else 1.0} for step in range(1, 31)]
    saved = {"step": 20, "bytes": 6e9, "copy_seconds": 0.5, "write_seconds": 6.0, "gb_per_s": 1.0}
    first = {"step": 14, "saved": {**saved, "step": 10, "copy_seconds": 4.0}}
    found = saves.outcome([*lines[:14], first, *lines[14:23], {"step": 23, "saved": saved}, *lines[23:]])
    assert found["first_copy_seconds"] == 4.0
    assert (found["steps_beside"], found["beside_total"], found["beside_seconds"]) == (3, 6.0, 2.0)
    assert found["alone_seconds"] == 1.0
    between = {**found, "steps_beside": 0, "beside_total": 0.0}
    _, _, behind, waited = saves.saves(
        {"folder_gb_per_s": 4.0, "ways": {"behind": found, "between": between}}
    ).splitlines()
    assert "| 25% of 4.0 GB/s |" in behind
    assert behind.endswith("| 3.50 s |"), "the copy, and three steps that took twice as long"
    assert waited.endswith("| 6.00 s |")


@pytest.mark.full
def test_the_command_measures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shrunk("llama3_8b", data__paths=text_in(tmp_path))
    left = {"--train.keep", "--train.steps", "--run.name", "--train.save_every", "--model.layers", "--mesh.dp"}
    left |= {"--data.sequence_length", "--train.microbatches", "--train.eval_every", "--train.eval_batches"}
    pairs = zip(words[1::2], words[2::2], strict=True)
    more = [word for pair in pairs if pair[0] not in left for word in pair]
    options = [
        "--gpus",
        "2",
        "--layers",
        "2",
        "--steps",
        "24",
        "--length",
        "8",
        "--folder",
        str(tmp_path),
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["saves", *options, *more])
    saves.main()
    result = json.loads((tmp_path / "saves.json").read_text())
    ways = result["ways"]
    assert result["folder_gb_per_s"] > 0
    assert {way: found["step"] for way, found in ways.items()} == {"behind": 16}
    assert all(found["bytes"] > 10_000 and found["gb_per_s"] > 0 for found in ways.values())
    assert ways["behind"]["copy_seconds"] > 0


def test_plain_writes_reach_the_disk_with_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last block of a file is a part of one."""
    monkeypatch.setattr(saves, "BLOCK", 1000)
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    assert saves.folder_gb_per_s(tmp_path, saves.THREADS * 2500) > 0
    assert synced == [2500] * saves.THREADS
    assert not list(tmp_path.iterdir()), "nothing is left"

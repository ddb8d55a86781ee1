"""A run that is killed while it saves goes on from a whole checkpoint, whichever process was killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from hocket.train.checkpoint import damage_of
from tests.helpers.command import ALONE, SMALL, alive, children_of, finish, hocket, start, text_in, wait_for


def kill_while_saving(folder: Path, words: list[str], who: slice, delay: float) -> str:
    """Start a run, which goes on from what is there, and kill some of it behind its next checkpoint.

    `who` is of [launcher, rank 0, rank 1]. Returns the name of the newest checkpoint that is left.
    """
    checkpoints = folder / "runs/tiny/checkpoints"

    def newest() -> str:
        return max((path.name for path in checkpoints.glob("step-*") if not path.suffix), default="")

    before = newest()
    process = start(folder, "train", *words, "--train.steps", "100000")
    wait_for(lambda: newest() > before, "a checkpoint")
    pids = [process.pid, *sorted(children_of(process.pid))]
    deadline = time.monotonic() + 20
    while not list(checkpoints.glob("step-*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(delay)
    for pid in pids[who]:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while any(map(alive, pids)):
        assert time.monotonic() - killed < 40, "the others do not end"
        time.sleep(0.01)
    finish(process)
    for path in checkpoints.glob("step-*"):
        assert path.suffix or not damage_of(path), path
    return newest()


def test_a_resume_finds_a_whole_checkpoint_whoever_was_killed(tmp_path):
    words = [
        *SMALL,
        "--model.layers",
        "2",
        *ALONE[:2],
        "--mesh.dp",
        "2",
        "--data.paths",
        text_in(tmp_path),
        "--train.save_every",
        "1",
    ]
    delays = random.Random(1)
    newest = ""
    for who in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        newest = kill_while_saving(tmp_path, words, who, 0.04 * delays.random())
    done = int(newest.removeprefix("step-"))
    ended = hocket(tmp_path, "train", *words, "--train.steps", str(done + 1))
    assert ended.code == 0, ended
    assert f"{done + 1} steps, {done} of them done" in ended.out
    assert "damaged" not in ended.out
    left = sorted(os.listdir(tmp_path / "runs/tiny/checkpoints"))
    assert left == ["latest", newest, f"step-{done + 1:08d}"]

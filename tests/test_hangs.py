"""One rank of a run stops in the middle of a step: what is said about it, and that everything ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import SMALL, Finished, alive, end_all, finish, start, text_in

PIPELINE = ["--mesh.pp", "2", "--mesh.dp", "1", "--mesh.ep", "1"]
ROWS = ["--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "2"]
SEND = "hocket.engine.actions:Actions.send"


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def stopped(folder: Path, kind: str, where: str, *words: str, timeout: float = 50.0) -> Finished:
    """A run of two ranks of which the second stops, to its end. No process of it is left."""
    text = ["--data.paths", text_in(folder), "--train.steps", "100000"]
    command = [kind, where, "train", *SMALL, *text, *words]
    ended = finish(start(folder, *command, module="tests.helpers.stops"), timeout)
    left = re.findall(r"\(process (\d+)\)", ended.err)
    assert not any(alive(int(process)) for process in left), ended
    assert ended.code == 1, ended
    assert sum(line.startswith("hocket: ") for line in ended.err.splitlines()) == 1, ended
    return ended


def test_the_rank_that_has_not_sent_is_named(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "host", SEND, *PIPELINE, "--train.hang_timeout", "2")
    first, *lines = ended.err.splitlines()
    cause = r"rank 1 has not sent activation \d+ of edge 1→0 \(recv act m\d c\d on rank 0\), and is stuck"
    assert re.match(rf"hocket: no progress for 2 s: {cause} for \d+ s at op \d+: send act m\d c\d\. ranks", first), (
        ended
    )
    assert "waited. fix: see runs/tiny/logs" in first
    (waits,) = [line for line in lines if line.startswith("  |   waits for ")]
    assert re.search(r"waits for activation \d+ of edge 1→0, recv act .* ago: as it seems for rank 1$", waits)
    assert not any("hocket: state" in line for line in lines)


def test_rows_that_one_rank_does_not_exchange_are_told(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "host", "hocket.engine.actions:Actions.fwd_dispatch", *ROWS, "--train.hang_timeout", "2")
    cause = (
        r"rank 1 has not come to exchange \d+ of a2a \(ranks 0, 1\) .*, and is stuck for \d+ s at op \d+: fwd dispatch"
    )
    assert re.match(rf"hocket: no progress for 2 s: {cause}", ended.err.splitlines()[0]), ended


def test_a_rank_that_is_killed_in_the_middle_of_a_step_ends_the_run_at_once(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "kill", SEND, *PIPELINE)
    assert re.match(r"hocket: rank 1 \(process \d+\) was ended by SIGKILL", ended.err), ended

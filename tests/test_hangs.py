"""One rank of a run stops in the middle of a step: what is said about it, and that everything ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.launching import parent
from hocket.launching.parent import Child, explain_hang
from hocket.runtime.hangs import HANG_HEADLINE, RankState
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
    assert re.search(r"waits for activation \d+ of edge 1→0, recv act .*: as it seems for rank 1$", waits)
    assert not any("hocket: state" in line for line in lines)


def test_rows_that_one_rank_does_not_exchange_are_told(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "host", "hocket.engine.actions:Actions._split", *ROWS, "--train.hang_timeout", "2")
    cause = (
        r"rank 1 has not come to exchange \d+ of a2a \(ranks 0, 1\) .*, and is stuck for \d+ s at op \d+: fwd dispatch"
    )
    assert re.match(rf"hocket: no progress for 2 s: {cause}", ended.err.splitlines()[0]), ended


def test_a_rank_that_is_killed_in_the_middle_of_a_step_ends_the_run_at_once(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "kill", SEND, *PIPELINE)
    assert re.match(r"hocket: rank 1 \(process \d+\) was ended by SIGKILL", ended.err), ended


def child(folder: Path, rank: int, code: int | None, report: str = "") -> Child:
    """A worker that has ended with a code, or runs, and what it has written to its log."""
    log = folder / f"rank{rank}.log"
    log.write_text(report)
    return Child(rank, 100 + rank, 0, log, "again", status=None if code is None else code << 8)


def test_a_rank_that_ends_otherwise_than_by_its_watchdog_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that a collective's own limit has ended, and one whose report is cut off."""
    state = RankState(0, 3, "stuck for 9 s at op 4: fwd mlp")
    whole = f"noise\n{HANG_HEADLINE} for 9 s\nrank 0: stuck\n{state.as_line()}\n"
    children = [child(tmp_path, 0, 75, whole), child(tmp_path, 1, 75), child(tmp_path, 2, 1), child(tmp_path, 3, 0)]
    assert explain_hang(children, children[3:]) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == (
        f"{HANG_HEADLINE} for 9 s: rank 1 did not say what it does, and no rank is known to wait for another. "
        "ranks 0, 1 waited; rank 3 (process 103) said nothing and was ended; rank 2 (process 102) ended with exit code "
        f"1. fix: see {tmp_path}, or raise train.hang_timeout; again"
    )
    assert lines == ["  | rank 0: stuck", "  | rank 1: its report is missing"]


def test_a_report_whose_last_line_was_not_written_to_its_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = RankState(0, 3, "stuck for 9 s at op 4: fwd mlp").as_line()
    cut = f"{HANG_HEADLINE} for 9 s\nrank 0: stuck\n{line[: len(line) // 2]}"
    assert explain_hang([child(tmp_path, 0, 75, cut)], []) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{HANG_HEADLINE} for 9 s: rank 0 did not say what it does")
    assert lines == ["  | rank 0: stuck"]


def test_nobody_waits_for_ever_for_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the system does not let go, as it gives back what the process has of a GPU."""
    ended = list[int]()
    monkeypatch.setattr(parent, "KILL_TIMEOUT", 0.05)
    monkeypatch.setattr(parent.os, "killpg", lambda pid, number: ended.append(pid))
    monkeypatch.setattr(Child, "poll", lambda child: None)
    stays = child(tmp_path, 1, None)
    parent.kill([child(tmp_path, 0, 75), stays])
    assert ended == [101]
    assert stays.status == 0
    assert capsys.readouterr().err == "hocket: rank 1 (process 101) was killed, and is still there\n"

"""Whose a checkpoint is: another run's, in this run's folder, is refused or told."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hocket.train import checkpoint
from hocket.train.checkpoint import RUN, Moment, Restored, number_for
from hocket.train.runs import identity, note
from tests.helpers.ranks import run_ranks
from tests.test_checkpoint import groups, settings_in


def begin(folder: Path, resume: str = "auto") -> tuple[Restored | None, str]:
    """What a start of a run does: what it goes on from, and its number."""
    settings = settings_in(folder, resume=resume)
    restored = checkpoint.restore(settings, groups(None))
    number = number_for(settings, restored.more.get(RUN, "") if restored and resume == "auto" else "")
    note(settings, number)
    return restored, number


def trained(folder: Path, step: int) -> str:
    """A run of so many steps, and its number."""
    folder.mkdir(exist_ok=True)
    _, number = begin(folder)
    checkpoint.save(settings_in(folder), Moment(step, step, more={RUN: number}), groups(step))
    return number


def test_a_run_goes_on_from_its_own_checkpoints_without_a_word(tmp_path: Path) -> None:
    number = trained(tmp_path / "a", 1)
    restored, again = begin(tmp_path / "a")
    assert restored is not None
    assert (restored.step, restored.notes, again) == (1, (), number)
    (tmp_path / "a").rename(tmp_path / "b")
    restored, again = begin(tmp_path / "b")
    assert restored is not None
    assert (restored.notes, again) == ((), number)


def refused(rank: int, folder: Path) -> None:
    path = folder / "checkpoints/step-00000009"
    words = f"run.resume = auto (configuration): {path} is a checkpoint of another run, which wrote it into "
    with pytest.raises(ValueError, match=rf"^{re.escape(words)}.*/a; fix: .* run.resume = {path} begin a new run"):
        checkpoint.restore(settings_in(folder), groups(None))


@pytest.mark.parametrize("copied", ["checkpoints", "checkpoints/step-00000009"])
def test_checkpoints_of_another_run_are_refused_and_begin_a_new_one(tmp_path: Path, copied: str) -> None:
    theirs, mine = trained(tmp_path / "a", 9), trained(tmp_path / "b", 1)
    assert theirs != mine
    shutil.rmtree(tmp_path / "b" / copied, ignore_errors=True)
    shutil.copytree(tmp_path / "a" / copied, tmp_path / "b" / copied, symlinks=True)
    run_ranks(refused, 2, tmp_path / "b")
    assert (tmp_path / "b/checkpoints/step-00000009").is_dir()
    (tmp_path / "c").mkdir()
    restored, number = begin(tmp_path / "c", resume=str(tmp_path / "b/checkpoints/step-00000009"))
    assert restored is not None
    assert restored.step == 9
    assert number not in ("", theirs, mine)


def test_checkpoints_that_were_moved_into_a_new_folder_are_told_and_taken_over(tmp_path: Path) -> None:
    theirs = trained(tmp_path / "a", 9)
    shutil.copytree(tmp_path / "a/checkpoints", tmp_path / "b/checkpoints", symlinks=True)
    restored, number = begin(tmp_path / "b")
    assert restored is not None
    path = tmp_path / "b/checkpoints/step-00000009"
    assert restored.notes == (f"{path} was written by the run in {tmp_path / 'a'}, and this run continues it",)
    assert number == theirs == identity(tmp_path / "b")
    assert begin(tmp_path / "b")[0] is not None

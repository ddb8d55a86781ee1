"""Folders that are there or are not: what is left when writing or renaming stops anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.fsdp.saving import atomic_folder
from hocket.fsdp.saving.atomic_folder import AtomicFolder, clean_up


def written(final: Path, text: str) -> AtomicFolder:
    folder = AtomicFolder(final)
    folder.begin()
    (folder.temporary / "a").write_text(text)
    return folder


def found(parent: Path) -> dict[str, str]:
    return {path.name: (path / "a").read_text() for path in parent.iterdir()}


def test_a_folder_appears_with_all_of_it(tmp_path: Path) -> None:
    first = written(tmp_path / "x", "first")
    assert found(tmp_path) == {"x.tmp": "first"}
    first.publish()
    assert found(tmp_path) == {"x": "first"}


def test_names_are_on_disk_before_and_after_a_folder_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(atomic_folder, "sync", lambda path: synced.append((path.name, (tmp_path / "x").exists())))
    written(tmp_path / "x", "first").publish()
    assert synced == [("x.tmp", False), (tmp_path.name, True)]


def test_a_place_that_is_taken_is_refused_but_for_an_empty_one(tmp_path: Path) -> None:
    written(tmp_path / "x", "first").publish()
    with pytest.raises(ValueError, match="exists already"):
        AtomicFolder(tmp_path / "x").begin()
    (tmp_path / "y").mkdir()
    written(tmp_path / "y", "into an empty one").publish()
    assert found(tmp_path) == {"x": "first", "y": "into an empty one"}


def test_what_an_interrupted_save_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    written(tmp_path / "x", "interrupted")
    written(tmp_path / "x", "second").publish()
    assert found(tmp_path) == {"x": "second"}


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "x", "first").publish()
    written(tmp_path / "y", "second").give_up()
    assert found(tmp_path) == {"x": "first"}


def test_what_interrupted_saves_have_left_goes(tmp_path: Path) -> None:
    for name in ("x.tmp", "y", "z.tmp", "other.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    clean_up(tmp_path, "[xyz]")
    assert found(tmp_path) == {"y": "y", "other.tmp": "other.tmp"}

"""Folders that are there or are not: what is left when writing or renaming stops anywhere."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hocket.fsdp.saving import whole
from hocket.fsdp.saving.whole import WholeFolder, clean_up


def written(final: Path, text: str, replaces: bool = False) -> WholeFolder:
    folder = WholeFolder(final, replaces)
    folder.begin()
    (folder.temporary / "a").write_text(text)
    return folder


def found(parent: Path) -> dict[str, str]:
    return {path.name: (path / "a").read_text() for path in parent.iterdir()}


def test_a_folder_appears_with_all_of_it_and_takes_the_place_of_another(tmp_path: Path) -> None:
    written(tmp_path / "x", "first").publish()
    assert found(tmp_path) == {"x": "first"}
    second = written(tmp_path / "x", "second", replaces=True)
    assert found(tmp_path) == {"x": "first", "x.tmp": "second"}
    second.publish()
    assert found(tmp_path) == {"x": "second"}


def test_names_are_on_disk_before_and_after_a_folder_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(whole, "sync", lambda path: synced.append((path.name, (tmp_path / "x").exists())))
    written(tmp_path / "x", "first").publish()
    assert synced == [("x.tmp", False), (tmp_path.name, True)]


def test_a_place_that_is_taken_is_refused_but_for_an_empty_one(tmp_path: Path) -> None:
    written(tmp_path / "x", "first").publish()
    with pytest.raises(ValueError, match="exists already"):
        WholeFolder(tmp_path / "x").begin()
    (tmp_path / "y").mkdir()
    written(tmp_path / "y", "into an empty one").publish()
    assert found(tmp_path) == {"x": "first", "y": "into an empty one"}


def test_what_was_to_be_replaced_is_back_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "x", "first").publish()
    second, rename = written(tmp_path / "x", "second", replaces=True), Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError(errno.EIO, "as a disk that breaks")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="breaks"):
        second.publish()
    assert found(tmp_path).keys() == {"x.replaced", "x.tmp"}
    second.give_up()
    assert found(tmp_path) == {"x": "first"}


def test_what_interrupted_saves_have_left_goes_and_what_they_took_comes_back(tmp_path: Path) -> None:
    for name in ("x.tmp", "x.replaced", "y", "y.replaced", "z.tmp", "other.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    clean_up(tmp_path, "[xyz]")
    assert found(tmp_path) == {"x": "x.replaced", "y": "y", "other.tmp": "other.tmp"}

"""Tokenising in pieces: the same bytes from any number of processes, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hocket.config import DataConfig
from hocket.train import corpus as tokenising
from hocket.train.corpus import open_corpus
from hocket.train.documents import documents
from tests.helpers.command import alive, children_of, environment


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tokenising, "cores", lambda: 1)


def texts_in(folder: Path, count: int = 30) -> DataConfig:
    (folder / "text").mkdir()
    for i in range(count):
        (folder / "text" / f"{i:02}.txt").write_text(f"the text of file {i}. " * (i % 7) * 10)
    (folder / "text" / "picture").write_bytes(b"\0\1")
    return DataConfig(paths=(str(folder / "text"),), cache=str(folder / "cache"))


def content(cache: str) -> dict[str, bytes]:
    (folder,) = (path for path in Path(cache).glob("corpus-*") if path.is_dir())
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def with_cache(data: DataConfig, folder: Path, **more: Any) -> DataConfig:
    return replace(data, cache=str(folder), **more)


def test_the_cache_has_the_same_bytes_whatever_makes_it(tmp_path, monkeypatch, small_pieces):
    data = texts_in(tmp_path)
    one = open_corpus(data, {})
    assert one.documents == 25
    assert len(one.skipped) == 1
    monkeypatch.setattr(tokenising, "cores", lambda: 3)
    three = with_cache(data, tmp_path / "three")
    open_corpus(three, {})
    monkeypatch.setattr(tokenising, "PIECE_BYTES", 1 << 30)
    whole = with_cache(data, tmp_path / "whole")
    open_corpus(whole, {})
    assert content(data.cache) == content(three.cache) == content(whole.cache)
    assert not list(Path(three.cache).glob("*.parts"))


def test_a_cache_of_before_is_still_one(tmp_path, monkeypatch):
    """Number of processes and pieces are no part of its key."""
    data = texts_in(tmp_path)
    open_corpus(data, {})
    before = (tmp_path / "cache").stat().st_mtime_ns
    monkeypatch.setattr(tokenising, "cores", lambda: 5)
    open_corpus(data, {})
    assert (tmp_path / "cache").stat().st_mtime_ns == before


def test_finished_pieces_are_kept(tmp_path, monkeypatch, small_pieces):
    data, read, said = texts_in(tmp_path), list[str](), list[str]()
    expected = with_cache(data, tmp_path / "other")
    open_corpus(expected, {})

    def killed(file: Path, *more: Any) -> Iterator[Any]:
        if file.name == "20.txt":
            raise KeyboardInterrupt
        return documents(file, *more)

    monkeypatch.setattr(tokenising, "documents", killed)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(data, {})

    def reads(file: Path, *more: Any) -> Iterator[Any]:
        read.append(file.name)
        return documents(file, *more)

    monkeypatch.setattr(tokenising, "documents", reads)
    open_corpus(data, {}, say=said.append)
    assert "20.txt" in read
    assert "10.txt" not in read
    assert "pieces are there" in said[0]
    assert content(data.cache) == content(expected.cache)


def test_what_a_process_finds_wrong_is_one_message(tmp_path, monkeypatch, small_pieces):
    monkeypatch.setattr(tokenising, "cores", lambda: 2)
    data = texts_in(tmp_path)
    (tmp_path / "text" / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"data\.paths = .*bad\.jsonl has no JSON in line 1 .*; fix: ") as caught:
        open_corpus(data, {})
    assert len(str(caught.value).splitlines()) == 1
    assert not list((tmp_path / "cache").glob("*.parts"))


SCRIPT = """
import sys, time
from hocket.config import DataConfig
from hocket.train import corpus as tokenising
from hocket.train.corpus import open_corpus
tokenising.PIECE_BYTES, tokenising.cores = 20_000, lambda: 2
data = DataConfig(paths=(sys.argv[1],), cache=sys.argv[2])
open_corpus(data, {})
"""


@pytest.mark.full
def test_processes_end_with_their_parent_and_what_they_finished_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "PIECE_BYTES", 20_000)
    data = texts_in(tmp_path)
    for i in range(30):  # enough work to be in the middle of
        (tmp_path / "text" / f"more{i:03}.jsonl").write_text((json.dumps({"text": "x" * 50}) + "\n") * 400)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "text"), data.cache]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    try:
        deadline = time.monotonic() + 40
        while not list(Path(data.cache).glob("*.parts/*.npz")) or not (workers := children_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        while len(list(Path(data.cache).glob("*.parts/0*.npz"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not [path for path in Path(data.cache).glob("corpus-*") if path.is_dir() and not path.suffix]
    done = [file.with_suffix(".bin").name for file in Path(data.cache).glob("*.parts/0*.npz")]
    assert len(done) >= 3
    seen: list[str] = []
    corpus = open_corpus(data, {}, say=seen.append)
    assert f"{len(done)} of " in seen[0]
    fresh = open_corpus(with_cache(data, tmp_path / "fresh"), {})
    assert (fresh.whole.tokens == corpus.whole.tokens).all()

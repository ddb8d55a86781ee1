"""Text to batches: what is read, how it is cached, and that the stream does not depend on the number of ranks."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.config import Config, DataConfig, MeshConfig, TrainConfig
from hocket.config.schema import changed
from hocket.kernels import IGNORED
from hocket.model.documents import documents_of
from hocket.program.documents import as_read
from hocket.resolve import Settings, resolve
from hocket.train import corpus as corpus_module
from hocket.train import documents as documents_module
from hocket.train.corpus import Asked, Corpus, Split, find_files, open_corpus, standard_library
from hocket.train.data import Stream, make_streams
from hocket.train.sources import Quotas, Source, Text, open_text
from tests.helpers.ranks import run_ranks


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def data_in(folder: Path, *paths: str, **more: Any) -> DataConfig:
    return DataConfig(paths=paths, cache=str(folder / "cache"), **more)


# ------------------------------------------------------------------------------------------------------- files


def test_files_folders_and_patterns_are_found_once_and_sorted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a="1", b="2", sub__c="3", sub__deep__d="4", **{".hidden": "5", "sub__.git__e": "6"})
    names = [
        str(path.relative_to(tmp_path)) for path in find_files(Asked("data.paths", ("sub", "a", "sub/*", "a"), {}))
    ]
    assert names == ["a", "sub/c", "sub/deep/d"]
    assert [path.name for path in find_files(Asked("data.paths", ("**/d",), {}))] == ["d"]


def test_links_are_followed_once_and_what_cannot_be_read_is_named(tmp_path):
    write(tmp_path / "text", a="1", sub__b="2")
    write(tmp_path / "elsewhere", c="3")
    (tmp_path / "text" / "all").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "sub" / "up").symlink_to("..")
    names = [
        str(path.relative_to(tmp_path / "text"))
        for path in find_files(Asked("data.paths", (str(tmp_path / "text"),), {}))
    ]
    assert names == ["a", "more/c", "sub/b"]
    for name, words in (("gone", "No such file"), ("itself", "Too many levels"), ("pipe", "is not a file")):
        os.mkfifo(tmp_path / "text" / name) if name == "pipe" else (tmp_path / "text" / name).symlink_to(name)
        with pytest.raises(ValueError, match=rf"data\.paths = .*{name} .*{words if name == 'pipe' else '.*'}.*; fix:"):
            open_corpus(data_in(tmp_path, str(tmp_path / "text")), {})
        (tmp_path / "text" / name).unlink()


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, a="1", sub__b="2")
    listed = os.scandir

    def refuse(path: str) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"data\.paths = .*sub cannot be read \(Permission denied\); fix: make it"):
        find_files(Asked("data.paths", (str(tmp_path),), {}))


def test_a_file_with_magic_characters_in_its_name_is_a_file(tmp_path):
    write(tmp_path, **{"a[1].txt": "x"})
    assert [path.name for path in find_files(Asked("data.paths", (str(tmp_path / "a[1].txt"),), {}))] == ["a[1].txt"]


def test_the_default_corpus_is_the_standard_library_without_tests():
    files = standard_library()
    assert len(files) > 300
    assert "json/decoder.py" in {"/".join(path.parts[-2:]) for path in files}
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


# ------------------------------------------------------------------------------------------------------ corpus


def test_documents_are_shuffled_and_each_ends_with_a_separator(tmp_path):
    texts = {f"f{i}": chr(97 + i) * (i + 1) for i in range(12)}
    write(tmp_path / "text", **texts, empty="")
    corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text")), {})
    pieces = bytes(corpus.whole.tokens).split(b"\0")
    assert pieces.pop() == b""
    assert sorted(pieces) == sorted(text.encode() for text in texts.values())
    assert pieces != sorted(pieces)
    assert (corpus.documents, corpus.skipped, corpus.vocab) == (12, (), 256)
    again = open_corpus(data_in(tmp_path / "other", str(tmp_path / "text")), {})
    assert bytes(again.whole.tokens) == bytes(corpus.whole.tokens), "the same order for every run"


def test_binary_files_are_left_out_and_counted(tmp_path):
    write(tmp_path / "text", a="text", b="bin\0ary")
    corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text")), {})
    assert corpus.documents == 1
    assert f"1 files left out: {tmp_path}/text/b (binary: with bytes 0, as UTF-16 has)" in str(corpus)


def test_the_splits_are_disjoint_and_together_everything(tmp_path):
    write(tmp_path / "text", a="x" * 999)
    corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text"), validation=(0.25,)), {})
    assert len(corpus.train.tokens) == 750
    assert len(corpus.validation.tokens) == 250
    assert not np.shares_memory(corpus.train.tokens, corpus.validation.tokens)


def test_text_is_tokenised_once_until_a_file_changes(tmp_path, monkeypatch):
    write(tmp_path / "text", a="one", b="two")
    data = data_in(tmp_path, str(tmp_path / "text"))
    written: list[Path] = []
    real = corpus_module._write
    monkeypatch.setattr(corpus_module, "_write", lambda *args: (written.append(args[3]), real(*args)))
    for _ in range(3):
        open_corpus(data, {})
    assert len(written) == 1
    write(tmp_path / "text", a="three")
    assert b"three" in bytes(open_corpus(data, {}).whole.tokens)
    os.utime(tmp_path / "text" / "b", ns=(1, 1))
    open_corpus(data, {})
    assert len(set(written)) == 3


def open_and_report(rank: int, folder: Path) -> tuple[int, int]:
    written = []
    real = corpus_module._write
    corpus_module._write = lambda *args: (written.append(1), real(*args))  # type: ignore[assignment]
    tokens = open_corpus(data_in(folder, str(folder / "text")), {}).whole.tokens
    return len(written), int(tokens.sum())


def test_of_several_processes_one_tokenises(tmp_path):
    write(tmp_path / "text", **{f"f{i}": f"document {i} " * 2000 for i in range(50)})
    results = run_ranks(open_and_report, 3, tmp_path)
    assert sum(written for written, _ in results) == 1
    assert len({total for _, total in results}) == 1


def test_a_crash_while_tokenising_leaves_nothing_half_done(tmp_path, monkeypatch):
    write(tmp_path / "text", a="x", b="y")
    data = data_in(tmp_path, str(tmp_path / "text"))
    monkeypatch.setattr(corpus_module.np, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_corpus(data, {})
    monkeypatch.undo()
    assert open_corpus(data, {}).documents == 2


def test_a_full_disk_is_one_message_and_is_left_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "text", a="x", b="y")
    data = data_in(tmp_path, str(tmp_path / "text"))

    def full(file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "sync", full)
    with pytest.raises(ValueError, match=r"data.cache = .*cannot be written \(No space left on device\); fix:"):
        open_corpus(data, {})
    assert not list((tmp_path / "cache").glob("*.tmp"))
    monkeypatch.undo()
    assert open_corpus(data, {}).documents == 2


@pytest.mark.parametrize("name", ["tokens.bin", "starts.npy", "meta.json"])
@pytest.mark.parametrize("kind", ["cut off", "flipped", "zeroed"])
def test_a_damaged_cache_is_named(tmp_path, name, kind):
    write(tmp_path / "text", a="some text", b="y")
    data = data_in(tmp_path, str(tmp_path / "text"))
    open_corpus(data, {})
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    content = file.read_bytes()
    match kind:
        case "cut off":
            file.write_bytes(content[:-1])
        case "flipped":
            file.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        case "zeroed":
            file.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"data.cache = .*corpus-.* is damaged; fix: delete it"):
        open_corpus(data, {})


def test_what_has_no_end_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(ValueError, match=rf"data\.paths = .*: {path} is not a file.*; fix:"):
            open_corpus(data_in(tmp_path, path), {})


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"data\.paths = .*: .*gone cannot be read \(No such file.*\); fix: make it"):
        open_corpus(data_in(tmp_path, str(tmp_path / "gone")), {})
    write(tmp_path, a="some text")

    def vanished(file: Path, *_: Any) -> BinaryIO:
        raise OSError(116, "Stale file handle", str(file))

    monkeypatch.setattr(documents_module, "_opened", vanished)
    with pytest.raises(ValueError, match=r"data\.paths = .*: .*/a cannot be read \(Stale file handle\); fix: make it"):
        open_corpus(data_in(tmp_path, str(tmp_path / "a")), {})
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_text_in_other_encodings_is_refused(tmp_path):
    (tmp_path / "odd").write_bytes("café".encode("latin-1") * 9)
    for path in (tmp_path, tmp_path / "odd"):
        with pytest.raises(ValueError, match=r"odd is not UTF-8 \(byte 0xe9 at offset 3\); fix: save it as UTF-8"):
            open_corpus(data_in(tmp_path, str(path)), {}, without=tmp_path / "cache")
    (tmp_path / "wide").write_bytes("text".encode("utf-16"))
    with pytest.raises(ValueError, match=r"wide holds no text \(binary: with bytes 0, as UTF-16 has\); fix: "):
        open_corpus(data_in(tmp_path, str(tmp_path / "wide")), {})
    (tmp_path / "odd").unlink()
    with pytest.raises(ValueError, match=r"no text in 1 files \(.*wide \(binary: with bytes 0.*; fix: "):
        open_corpus(data_in(tmp_path, str(tmp_path)), {}, without=tmp_path / "cache")


def test_what_a_run_writes_is_not_its_text(tmp_path):
    here = tmp_path / "here"
    write(here, a="some text", runs__tiny__metrics="1")
    data = data_in(tmp_path, str(here / "runs" / ".."))
    assert open_corpus(data, {}, without=here / "runs").documents == 1
    write(here, runs__tiny__more="2")
    assert open_corpus(data, {}, without=here / "runs").documents == 1
    assert open_corpus(data, {}).documents == 3


def test_unigram_entropy_is_the_loss_of_counting(tmp_path):
    tokens = np.array([1, 1, 1, 2, 2, 3, 1, 3], dtype=np.uint8)

    def entropy(tokens: np.ndarray) -> float:
        whole = Split(tokens, np.array([0, len(tokens)]), np.zeros((0, 2), dtype=np.int64))
        corpus = Corpus(whole, vocab=4, documents=1, skipped=(), train_tokens=6)
        return Text((Source("", DataConfig(), {}),), (corpus,), Quotas([(0, [Fraction(1)])]), (1.0,), 1).unigram_entropy

    p = {1: 4 / 10, 3: 2 / 10}  # counts plus one, of 6 + 4
    assert entropy(tokens) == pytest.approx(-(math.log(p[1]) + math.log(p[3])) / 2)
    weights = Counter(tokens[:6].tolist())
    expected = -sum(n * math.log((n + 1) / 10) for n in weights.values()) / 6
    assert entropy(tokens[:6]) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------------ stream


def stream(count: int, length: int, seed: int = 0) -> Stream:
    """A stream whose tokens say where they stand."""
    return Stream(split_of(np.arange(count * length + 1, dtype=np.uint32)), length, seed)


def split_of(tokens: np.ndarray, bounds: np.ndarray | None = None) -> Split:
    ends = np.array([0, len(tokens)])
    return Split(tokens, ends if bounds is None else bounds, np.zeros((0, 2), dtype=np.int64))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 5))
def test_every_epoch_visits_every_sequence_once_in_a_new_order(count, length, epoch):
    s = stream(count, length)
    assert s.sequences == count
    first = [s.window(p) for p in range(epoch * count, (epoch + 1) * count)]
    assert sorted(first) == list(range(count))
    if count >= 12:
        assert first != [s.window(p) for p in range((epoch + 1) * count, (epoch + 2) * count)]
        assert first == [stream(count, length).window(p) for p in range(epoch * count, (epoch + 1) * count)]
        assert first != [stream(count, length, 1).window(p) for p in range(epoch * count, (epoch + 1) * count)]


def test_targets_are_the_next_tokens():
    tokens, targets, _ = stream(10, 4).batch(range(3, 5))
    assert tokens.shape == targets.shape == (2, 4)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert all(int(row[0]) % 4 == 0 for row in tokens)


@given(
    st.sampled_from([(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 2, 4)]), st.integers(0, 100)
)
def test_the_global_batch_is_the_same_on_any_number_of_ranks(shape, position):
    dp, microbatches, sequences = shape
    s = stream(30, 3)
    rows, order = [], as_read(microbatches, dp, sequences)
    for m in range(microbatches):
        for rank in range(dp):
            tokens, *_ = s.batch([position + n for n in order[m][rank]])
            assert tokens.shape == (sequences, 3)
            rows += tokens[:, 0].tolist()
    assert rows == s.batch(range(position, position + 8))[0][:, 0].tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7))
def test_documents_that_share_a_sequence_are_told_apart(lengths, length):
    """Each token knows its document, and no target lies in another one."""
    total = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    s = Stream(split_of(np.arange(total, dtype=np.uint32), np.cumsum([0, *lengths])), length, 0, "on")
    for position in range(s.sequences):
        (ids,), (targets,), numbers = s.batch([position])
        assert numbers is not None
        assert s.lengths(position).tolist() == np.diff(documents_of(numbers).bounds).tolist()
        same = [document[a] == document[b] for a in ids.tolist() for b in ids.tolist()]
        assert same == (numbers[0].unsqueeze(1) == numbers[0]).flatten().tolist()
        for token, target in zip(ids.tolist(), targets.tolist(), strict=True):
            inside = document[token] == document[token + 1]
            assert target == (token + 1 if inside else IGNORED)


def test_packing_finds_the_documents_of_both_splits(tmp_path):
    write(tmp_path / "text", **{f"f{n:02}": "x" * (7 + 5 * n) for n in range(12)})
    data = data_in(tmp_path, str(tmp_path / "text"), sequence_length=16, validation=(0.5,), packing="on")
    settings = resolve(Config(data=data, train=TrainConfig(microbatches=1)))
    text = open_text(settings)
    for split in both_streams(settings):
        for position in range(split.sequences):
            (ids,), (targets,), numbers = split.batch([position])
            assert numbers is not None
            behind_separator = (ids[:-1] == 0).tolist()
            assert behind_separator == (numbers[0].diff() != 0).tolist()
            assert ((targets == IGNORED) <= (ids == 0)).all()
    off = resolve(Config(data=replace(data, packing="off"), train=TrainConfig(microbatches=1)))
    assert make_streams(text, off)[0].batch([0])[2] is None


def both_streams(settings: Settings) -> tuple[Stream, Stream]:
    train, validations = make_streams(open_text(settings), settings)
    return train.streams[0], validations[""]


def streams_of(folder: Path, text: str, microbatches: int, sequences: int) -> tuple[Stream, Stream]:
    write(folder / "text", a=text)
    data = data_in(folder, str(folder / "text"), sequence_length=8, validation=(0.5,))
    settings = resolve(
        Config(data=data, mesh=MeshConfig(dp=2), train=TrainConfig(microbatches=microbatches, sequences=sequences))
    )
    return both_streams(settings)


def test_a_split_must_hold_a_batch(tmp_path):
    train, validation = streams_of(tmp_path, "x" * 131, microbatches=2, sequences=2)
    assert (train.sequences, validation.sequences) == (8, 8)
    with pytest.raises(ValueError, match="training split has 66 tokens, 8 sequences of 8, but a batch takes 12"):
        streams_of(tmp_path, "x" * 131, microbatches=2, sequences=3)


@pytest.mark.parametrize("packing", ["off", "on", "best_fit"])
def test_a_validation_reads_each_sequence_once(tmp_path, packing):
    write(tmp_path / "text", **{f"{i:02}": f"{i:02}" * 8 for i in range(40)})
    more = {"sequence_length": 16, "validation": (0.5,), "packing": packing}
    data = data_in(tmp_path, str(tmp_path / "text"), **more)
    settings = resolve(Config(data=data, train=TrainConfig(microbatches=4, sequences=2)))
    train, validations = make_streams(open_text(settings), settings)
    stream = validations[""]
    assert stream.sequences % 8
    batches = [stream.batch(range(8 * n, 8 * n + 8)) for n in range(stream.batches(8))]
    counting = [ids for ids, targets, _ in batches for ids in ids[(targets != IGNORED).any(1)].tolist()]
    assert sorted(counting) == sorted(stream.row(position)[0].tolist() for position in range(stream.sequences))
    assert all(ids.shape == (8, 16) for ids, _, _ in batches)
    again = train.streams[0].sequences
    assert (train.batch([again])[1] != IGNORED).any(), "training begins anew"


def test_only_a_validation_split_that_is_used_must_hold_a_batch(tmp_path):
    write(tmp_path / "text", a="x" * 200)
    for batches in (0, 1):
        data = data_in(tmp_path, str(tmp_path / "text"), sequence_length=8, validation=(0.05,))
        settings = resolve(Config(data=data, train=TrainConfig(microbatches=4, eval_batches=batches)))
        text = open_text(settings)
        if batches == 0:
            make_streams(text, settings)
        else:
            with pytest.raises(ValueError, match="validation split has 10 tokens"):
                make_streams(text, settings)


def test_a_link_into_another_folder_hides_no_file_that_is_read_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("text " * 400)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    assert [
        file.relative_to(tmp_path).as_posix() for file in find_files(Asked("data.paths", (str(tmp_path),), {}))
    ] == [
        "a/a.txt",
        "b/b.txt",
    ]
    for paths in (tmp_path, tmp_path / "a"):
        settings = resolve(changed(Config(), {"data.paths": (str(paths),), "data.validation": (str(tmp_path / "b"),)}))
        with pytest.raises(ValueError, match=r"b/b\.txt is in data\.paths too"):
            open_text(settings)


@pytest.mark.parametrize("suffix", [".arrow", ".ds"])
def test_files_beside_tokens_that_are_not_read_are_no_text(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"data{suffix}").write_bytes(bytes(64))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is of datasets or datatrove.*to_parquet"):
        find_files(Asked("data.paths", (str(tmp_path),), {}))

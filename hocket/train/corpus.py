"""Files of documents as one long array of tokens, tokenised once and then mapped into memory.

Documents are written in a random order that the seed fixes, each followed by a separator. The last tokens of the
array are the validation split; as the order is random, they come from all over the corpus. The cache holds checksums,
and each process that opens it checks them: a flipped bit is told, and never trained on.

Note: [One process writes]
All ranks of a host open the corpus at the same time. The process that gets the lock on `<key>.lock` tokenises into a
temporary folder and renames it. The others wait for the lock and then find the folder. The system drops the lock of a
process that dies, so no process waits for a dead writer. The next one keeps the pieces that it has finished.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from hocket.config import DataConfig
from hocket.fsdp.saving.atomic_folder import AtomicFolder, sync
from hocket.model.tokenizer import known_tokenizer, tokenizer_files
from hocket.settings.schema import problem
from hocket.train.chat import template_files
from hocket.train.documents import PIECE, beside
from hocket.train.tokenising import POLL, Asked, Say, in_order, tokenise

FORMAT = 5
"""Number of the format. It changes whenever cached data changes its meaning."""
SEED = 0
"""Of the order of documents, the same for all runs: so all have the same text for validation, and share the cache."""

SAMPLE = 1 << 20
"""Tokens at each end by which two hosts find out that they have the same text."""

NAMED = 3
"""Files that a line names of those that are left out."""


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus. `tokens` is a read-only memory map of unsigned integers, one dimension."""

    tokens: np.ndarray
    vocab: int
    """Number of tokens that the tokenizer has."""
    documents: int
    """Documents with text."""
    skipped: tuple[str, ...]
    """Files that were left out because they hold no text: path and reason."""
    train_tokens: int
    """Number of tokens for training, from the first on. The rest is for validation."""
    empty: int = 0
    """Rows without text that were left out."""
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Where each document begins in `tokens`, ascending int64; all is one if nothing else is said."""
    masked: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """Tokens that are read and not learnt: int64 [ranges, 2] of (first, end), ascending and apart."""
    held: Corpus | None = None
    """The text that `data.validation` names. Without it validation has the tokens behind those for training."""

    @property
    def train(self) -> np.ndarray:
        return self.tokens[: self.train_tokens]

    @property
    def validation(self) -> np.ndarray:
        return self.tokens[self.train_tokens :] if self.held is None else self.held.tokens

    @property
    def validation_starts(self) -> np.ndarray:
        """Where documents begin in `validation`; what is before the first of them is the end of one."""
        if self.held is not None:
            return self.held.starts
        return self.starts[self.starts > self.train_tokens] - self.train_tokens

    @property
    def whole_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin that are wholly in `train`, and in `validation`; and where the last of them ends."""
        bounds = np.append(self.starts, len(self.tokens))
        if self.held is not None:
            return bounds, np.append(self.held.starts, len(self.held.tokens))
        return bounds[bounds <= self.train_tokens], bounds[bounds >= self.train_tokens] - self.train_tokens

    @property
    def validation_masked(self) -> np.ndarray:
        """What of `validation` is not learnt, as `masked`."""
        return self.masked - self.train_tokens if self.held is None else self.held.masked

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each token is learnt and validated with, float64 [vocab] each."""
        seen, asked = count(self.train, self.vocab, self.masked), np.zeros(self.vocab)
        return seen, count(self.validation, self.vocab, self.validation_masked) if len(self.validation) else asked

    @cached_property
    def unigram_entropy(self) -> float:
        """Loss of a model that knows only how often each token occurs, in nats per token.

        The cross-entropy of the validation split under the token frequencies of the training split (each count plus
        one, so that no token is impossible); of the training split itself where there is no validation.
        """
        seen, asked = self.counts()
        asked = asked if asked.any() else seen
        log_p = np.log((seen + 1) / (seen + 1).sum())
        return float(-(asked * log_p).sum() / asked.sum())

    @cached_property
    def sample(self) -> int:
        """A checksum of where it begins and ends, below 2**32. The order of documents depends on their paths."""
        before = zlib.crc32(self.masked.tobytes(), 0 if self.held is None else self.held.sample)
        return zlib.crc32(self.tokens[-SAMPLE:].tobytes(), zlib.crc32(self.tokens[:SAMPLE].tobytes(), before))

    @property
    def _unlearnt(self) -> str:
        masked = [self.masked, *([] if self.held is None else [self.held.masked])]
        total = sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in masked)
        return f", of which {total:,} are read and not learnt" if total else ""

    def __str__(self) -> str:
        names = "; ".join([*self.skipped[:NAMED], *(["…"] if len(self.skipped) > NAMED else [])])
        left_out = f", {len(self.skipped)} files left out: {names}" if self.skipped else ""
        empty = self.empty + (0 if self.held is None else self.held.empty)
        left_out += f", {empty:,} rows without text left out" if empty else ""
        return (
            f"{self.documents:,} documents, {len(self.train):,} training and {len(self.validation):,} validation "
            f"tokens{self._unlearnt}{left_out}"
        )


def count(tokens: np.ndarray, vocab: int, masked: np.ndarray) -> np.ndarray:
    """How often each token occurs outside of ranges. Float64 [vocab]."""
    total = np.zeros(vocab)
    for start in range(0, len(tokens), PIECE):
        some = tokens[start : start + PIECE]
        if len(masked):
            some = some[~inside(np.arange(start, start + len(some)), masked)]
        total += np.bincount(some, minlength=vocab)
    return total


def inside(places: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Which places are in one of ascending ranges (first, end): bool, of the shape of `places`."""
    if not len(ranges):
        return np.zeros(places.shape, dtype=bool)
    found = np.searchsorted(ranges[:, 0], places, side="right") - 1
    return (found >= 0) & (places < ranges[found, 1])


def find_files(
    paths: tuple[str, ...], origins: Mapping[str, str], without: Path | None = None, setting: str = "data.paths"
) -> list[Path]:
    """The files that a setting means, sorted and each once. Empty `paths` mean Python's own library.

    A folder stands for all files below it whose path has no hidden part, except those below `without`. Raises
    ValueError for a path that does not exist, a pattern that matches nothing, and a folder without files.
    """
    if not paths:
        return standard_library()
    found: set[Path] = set()
    for given in paths:
        matches = [Path(given)] if os.path.lexists(given) else [Path(p) for p in glob.glob(given, recursive=True)]
        if not matches:
            reason = "the pattern matches nothing" if glob.has_magic(given) else "there is no such file or folder"
            fix = "name existing files, folders or glob patterns"
            raise ValueError(problem(setting, given, origins, reason, fix))
        try:
            files = [file for match in matches for file in _files_below(match)]
        except OSError as error:
            reason, fix = f"{error.filename} cannot be read ({error.strerror})", "make it readable, or leave it out"
            raise ValueError(problem(setting, given, origins, reason, fix)) from None
        files = [file for file in files if without is None or without.resolve() not in file.resolve().parents]
        if not files:
            raise ValueError(problem(setting, given, origins, "no files in it", "name a folder that holds text files"))
        found.update(files)
    return sorted(found)


def _files_below(path: Path) -> Iterator[Path]:
    """All that is no folder, and not hidden. Each folder is read once, those behind links last. Raises OSError."""
    if not path.is_dir():
        yield path.absolute()
        return
    folders, links, seen = [path.absolute()], [], set[tuple[int, int]]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        stat = folder.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            continue
        seen.add((stat.st_dev, stat.st_ino))
        for each in sorted(folder.iterdir()):
            if each.name.startswith("."):
                continue
            if each.is_dir():
                (links if each.is_symlink() else folders).append(each)
            else:
                yield each


def standard_library() -> list[Path]:
    """Source files of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not without & set(path.relative_to(root).parts)]
    if not files:
        raise ValueError(problem("data.paths", (), {}, f"no Python source in {root}", "name files of text"))
    return sorted(files)


def open_corpus(
    data: DataConfig,
    origins: Mapping[str, str],
    timeout: float = 600.0,
    *,
    without: Path | None = None,
    say: Say = lambda words: None,
) -> Corpus:
    """The corpus of a configuration, from the cache or tokenised now.

    `without` is the folder of the run: what it writes there is not its text, and would be another for every rank.
    Waits for another process that is tokenising until that has written nothing for `timeout` seconds. `say` is told,
    every few seconds, how far tokenising is. Raises ValueError for a missing path, a file that cannot be read as what
    its name says, an empty corpus, a missing tokenizer, a cache that is damaged or cannot be written.
    """
    corpus = _open(Asked("data.paths", data.paths, origins), data, timeout, without, say)
    if not data.held_out:
        return corpus
    asked = Asked("data.validation", data.held_out, origins)
    held = _open(asked, data, timeout, without, say)
    return replace(corpus, train_tokens=len(corpus.tokens), held=replace(held, train_tokens=len(held.tokens)))


def known_corpus(data: DataConfig, origins: Mapping[str, str], without: Path | None = None) -> Corpus | None:
    """What the cache has of a corpus for training: its tokens are not checked. None if it is not there.

    Raises ValueError as `open_corpus`.
    """
    _, folder = _place(Asked("data.paths", data.paths, origins), data, without)
    if not folder.exists():
        return None
    corpus = _load(folder, data, origins, check=False)
    return replace(corpus, train_tokens=len(corpus.tokens)) if data.held_out else corpus


def _place(asked: Asked, data: DataConfig, without: Path | None) -> tuple[list[Path], Path]:
    """The files of a corpus, and its folder in the cache."""
    origins = asked.origins
    if data.chat_template and not Path(data.chat_template).is_file():
        reason, fix = "there is no such file", "name a template of Jinja"
        raise ValueError(problem("data.chat_template", data.chat_template, origins, reason, fix))
    files = find_files(asked.given, origins, without, asked.setting)
    belong = {file for main in files for file in beside(main)}
    files = [file for file in files if file not in belong]
    return files, Path(data.cache) / f"corpus-{_key([*files, *sorted(belong)], data, asked)}"


def _open(asked: Asked, data: DataConfig, timeout: float, without: Path | None, say: Say) -> Corpus:
    origins, (files, folder) = asked.origins, _place(asked, data, without)
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock"), timeout):
                if not folder.exists():
                    _write(files, asked, data, folder, say)
        except OSError as error:
            reason, fix = f"cannot be written ({error.strerror})", "name a folder with room that you can write to"
            raise ValueError(problem("data.cache", data.cache, origins, reason, fix)) from None
    return _load(folder, data, origins)


def _load(folder: Path, data: DataConfig, origins: Mapping[str, str], check: bool = True) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        found = meta.pop("check")
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        starts = np.load(folder / "starts.npy")
        masked = np.load(folder / "masked.npy") if meta.get("masked") else np.zeros((0, 2), dtype=np.int64)
        if check and found != _checksum(tokens, starts, masked, meta):
            raise ValueError("changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(problem("data.cache", data.cache, origins, f"{folder} is damaged", "delete it")) from None
    kept = round(len(tokens) * data.kept_back)
    skipped = tuple(meta["skipped"])
    return Corpus(tokens, meta["vocab"], len(starts), skipped, len(tokens) - kept, meta["empty"], starts, masked)


def _checksum(tokens: np.ndarray, starts: np.ndarray, masked: np.ndarray, meta: Mapping[str, Any]) -> int:
    check = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for values in (masked.reshape(-1), starts, tokens):
        for first in range(0, len(values), PIECE):
            check = zlib.crc32(values[first : first + PIECE].data, check)
    return check


def _key(files: list[Path], data: DataConfig, asked: Asked) -> str:
    """Changes with everything that the tokens depend on: files, their sizes and times, tokenizer, seed."""
    text, prompt = data.names
    digest = hashlib.sha256(f"{FORMAT} {data.tokenizer} {text} {SEED}".encode())
    if data.eos or data.bos != "auto":
        digest.update(f" {data.eos!r} {data.bos}".encode())
    if prompt or data.chat_template or data.skip_empty:
        digest.update(f" {prompt} {data.chat_template} {data.skip_empty}".encode())
    for file in dict.fromkeys([*files, *tokenizer_files(data.tokenizer), *template_files(data)]):
        try:
            stat = file.stat()
        except OSError as error:
            raise asked.unreadable(file, error) from None
        if not S_ISREG(stat.st_mode):  # a pipe or a device may have no end
            raise asked.refused(f"{file} is not a file that can be read again", "name files, folders or patterns")
        digest.update(f"\n{file}\t{stat.st_size}\t{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:20]


def _written(lock: Path) -> int:
    """Bytes that somebody who holds a lock has written."""
    total = 0
    for file in [*lock.with_suffix(".pieces").glob("*"), *lock.with_suffix(".tmp").glob("*")]:
        with suppress(FileNotFoundError):  # it may just get its name
            total += file.stat().st_size
    return total


@contextmanager
def _lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock between processes. See Note: [One process writes]."""
    deadline, seen = time.monotonic() + timeout, _written(path)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    deadline, before, seen = time.monotonic() + timeout, seen, _written(path)
                    if seen == before:
                        raise ValueError(
                            f"data.cache: another process has written nothing for {timeout:g} s and holds {path}; "
                            "fix: wait for it, or use another data.cache"
                        ) from None
                time.sleep(POLL)
        yield


def _write(files: list[Path], asked: Asked, data: DataConfig, final: Path, say: Say) -> None:
    """Tokenise into a folder that appears once it is complete."""
    tokenizer = known_tokenizer(data, asked.origins)
    folder, parts = AtomicFolder(final), final.with_suffix(".pieces")
    folder.begin()
    try:
        pieces = tokenise(parts, files, asked, data, say)
        skipped, empty = [line for piece in pieces for line in piece.skipped], sum(piece.empty for piece in pieces)
        if not any(piece.lengths.any() for piece in pieces):
            left_out = f" ({'; '.join(skipped[:NAMED])})" if skipped else ""
            left_out += f", {empty:,} rows without {data.names[0]} left out" if empty else ""
            reason = f"the corpus is empty: no text in {len(files)} files{left_out}"
            raise asked.refused(reason, "name files that hold text")
        tokens, starts, masked = in_order(pieces, folder.temporary / "tokens.bin", tokenizer.separator, SEED)
        np.save(folder.temporary / "starts.npy", starts)
        meta = {"dtype": tokens.dtype.name, "vocab": tokenizer.vocab, "skipped": skipped, "empty": empty}
        if len(masked):
            meta["masked"] = len(masked)
            np.save(folder.temporary / "masked.npy", masked)
        meta["check"] = _checksum(tokens, starts, masked, meta)
        (folder.temporary / "meta.json").write_text(json.dumps(meta))
        for file in folder.temporary.iterdir():
            sync(file)
        folder.publish()
    except (OSError, ValueError):  # such as a full disk: leave it emptier
        folder.give_up()
        shutil.rmtree(parts, ignore_errors=True)
        raise
    shutil.rmtree(parts, ignore_errors=True)

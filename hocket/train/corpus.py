"""Files of documents as one long array of tokens, tokenised once and then mapped into memory.

Documents are written in a random order that the seed fixes, each followed by a separator. The last tokens of the
array are the validation split; as the order is random, they come from all over the corpus. The cache holds checksums,
and each process that opens it checks them: a flipped bit is told, and never trained on.

Note: [One process writes]
All ranks of a host open the corpus at the same time. The process that gets the lock on `<key>.lock` tokenises into a
temporary folder and renames it. The others wait for the lock and then find the folder. The system drops the lock of a
process that dies, so no process waits for a dead writer.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import sysconfig
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

import numpy as np

from hocket.config import BYTES, DataConfig
from hocket.fsdp.saving.whole import WholeFolder, sync
from hocket.model.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from hocket.settings.schema import problem
from hocket.train.documents import PIECE, BadFileError, Document, NoTextError, beside, documents

FORMAT = 4
"""Number of the format. It changes whenever cached data changes its meaning."""

SAMPLE = 1 << 20
"""Tokens at each end by which two hosts find out that they have the same text."""

BATCH = 1 << 22
"""Bytes of text that the tokenizer gets at a time: it works on the documents in parallel."""
NAMED = 3
"""Files that a line names of those that are left out."""
PATIENCE = 10.0
"""Seconds between two lines about how far tokenising is."""

Say = Callable[[str], None]


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
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Where each document begins in `tokens`, ascending int64; all is one if nothing else is said."""

    @property
    def train(self) -> np.ndarray:
        return self.tokens[: self.train_tokens]

    @property
    def validation(self) -> np.ndarray:
        return self.tokens[self.train_tokens :]

    @cached_property
    def unigram_entropy(self) -> float:
        """Loss of a model that knows only how often each token occurs, in nats per token.

        The cross-entropy of the validation split under the token frequencies of the training split (each count plus
        one, so that no token is impossible); of the training split itself where there is no validation.
        """
        seen = count(self.train, self.vocab)
        asked = count(self.validation, self.vocab) if len(self.validation) else seen
        log_p = np.log((seen + 1) / (seen + 1).sum())
        return float(-(asked * log_p).sum() / asked.sum())

    @cached_property
    def sample(self) -> int:
        """A checksum of where it begins and ends, below 2**32. The order of documents depends on their paths."""
        return zlib.crc32(self.tokens[-SAMPLE:].tobytes(), zlib.crc32(self.tokens[:SAMPLE].tobytes()))

    def __str__(self) -> str:
        names = "; ".join([*self.skipped[:NAMED], *(["…"] if len(self.skipped) > NAMED else [])])
        left_out = f", {len(self.skipped)} files left out: {names}" if self.skipped else ""
        return (
            f"{self.documents:,} documents, {len(self.train):,} training and {len(self.validation):,} validation "
            f"tokens{left_out}"
        )


def count(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """How often each token occurs. Float64 [vocab]."""
    total = np.zeros(vocab)
    for start in range(0, len(tokens), 1 << 24):
        total += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab)
    return total


def find_files(paths: tuple[str, ...], origins: Mapping[str, str], without: Path | None = None) -> list[Path]:
    """The files that `data.paths` means, sorted and each once. Empty `paths` mean Python's own library.

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
            raise ValueError(problem("data.paths", given, origins, reason, fix))
        files = [file for match in matches for file in _files_below(match)]
        files = [file for file in files if without is None or without.resolve() not in file.resolve().parents]
        if not files:
            raise ValueError(
                problem("data.paths", given, origins, "no files in it", "name a folder that holds text files")
            )
        found.update(files)
    return sorted(found)


def _files_below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path.absolute()
        return
    for file in path.absolute().rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(path.absolute()).parts)
        if not hidden and file.is_file():
            yield file


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
    Waits at most `timeout` seconds for another process that is tokenising. `say` is told, every few seconds, how far
    tokenising is. Raises ValueError for a missing path, a file that cannot be read as what its name says, an empty
    corpus, a missing tokenizer, a cache that is damaged or cannot be written.
    """
    files = find_files(data.paths, origins, without)
    belong = {file for main in files for file in beside(main)}
    files = [file for file in files if file not in belong]
    folder = Path(data.cache) / f"corpus-{_key([*files, *sorted(belong)], data, origins)}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock"), timeout):
                if not folder.exists():
                    _write(files, data, origins, folder, say)
        except OSError as error:
            reason, fix = f"cannot be written ({error.strerror})", "name a folder with room that you can write to"
            raise ValueError(problem("data.cache", data.cache, origins, reason, fix)) from None
    return _load(folder, data, origins)


def _load(folder: Path, data: DataConfig, origins: Mapping[str, str]) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        found = meta.pop("check")
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        starts = np.load(folder / "starts.npy")
        if found != _checksum(tokens, starts, meta):
            raise ValueError("changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(problem("data.cache", data.cache, origins, f"{folder} is damaged", "delete it")) from None
    kept = round(len(tokens) * data.validation)
    skipped = tuple(meta["skipped"])
    return Corpus(tokens, meta["vocab"], len(starts), skipped, len(tokens) - kept, starts)


def _checksum(tokens: np.ndarray, starts: np.ndarray, meta: Mapping[str, Any]) -> int:
    check = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for values in (starts, tokens):
        for first in range(0, len(values), PIECE):
            check = zlib.crc32(values[first : first + PIECE].data, check)
    return check


def _key(files: list[Path], data: DataConfig, origins: Mapping[str, str]) -> str:
    """Changes with everything that the tokens depend on: files, their sizes and times, tokenizer, seed."""
    digest = hashlib.sha256(f"{FORMAT} {data.tokenizer} {data.text_key} {data.seed}".encode())
    tokenizer = [] if data.tokenizer == BYTES else [tokenizer_file(data.tokenizer)]
    for file in [*files, *tokenizer]:
        try:
            stat = file.stat()
        except OSError as error:
            raise _unreadable(file, error, data, origins) from None
        if not S_ISREG(stat.st_mode):  # a pipe or a device may have no end
            reason, fix = f"{file} is not a file that can be read again", "name files, folders or patterns"
            raise ValueError(problem("data.paths", data.paths, origins, reason, fix))
        digest.update(f"\n{file}\t{stat.st_size}\t{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:20]


@contextmanager
def _lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock between processes. See Note: [One process writes]."""
    deadline = time.monotonic() + timeout
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"data.cache: another process has been tokenising for {timeout:g} s and holds {path}; "
                        "fix: wait for it, or use another data.cache"
                    ) from None
                time.sleep(0.05)
        yield


def _write(files: list[Path], data: DataConfig, origins: Mapping[str, str], final: Path, say: Say) -> None:
    """Tokenise into a folder that appears once it is complete."""
    tokenizer = load_tokenizer(data.tokenizer, origins)
    folder = WholeFolder(final)
    folder.begin()
    try:
        unordered = folder.temporary / "unordered.bin"
        with unordered.open("wb") as out:
            pieces = _Pieces(out, tokenizer)
            skipped = _tokenise(files, data, origins, tokenizer, pieces, say)
        if not any(pieces.lengths):
            left_out = f" ({'; '.join(skipped[:NAMED])})" if skipped else ""
            reason = f"the corpus is empty: no text in {len(files)} files{left_out}"
            raise ValueError(problem("data.paths", data.paths, origins, reason, "name files that hold text"))
        tokens, starts = pieces.in_order(unordered, folder.temporary / "tokens.bin", data.seed)
        unordered.unlink()
        np.save(folder.temporary / "starts.npy", starts)
        meta = {"dtype": tokens.dtype.name, "vocab": tokenizer.vocab, "skipped": skipped}
        meta["check"] = _checksum(tokens, starts, meta)
        (folder.temporary / "meta.json").write_text(json.dumps(meta))
        for file in folder.temporary.iterdir():
            sync(file)
        folder.publish()
    except (OSError, ValueError):  # such as a full disk: leave it emptier
        folder.give_up()
        raise


def _tokenise(
    files: list[Path], data: DataConfig, origins: Mapping[str, str], tokenizer: Tokenizer, pieces: _Pieces, say: Say
) -> list[str]:
    """Write all documents, file by file. Returns what was left out, and why: files without text in a folder."""
    named, skipped, told = {Path(path).absolute() for path in data.paths}, list[str](), time.monotonic()
    for number, file in enumerate(files):
        try:
            for document in documents(file, data.text_key, tokenizer.vocab, tokenizer.separator):
                pieces.add(document)
                if time.monotonic() > told + PATIENCE:
                    told = time.monotonic()
                    say(f"tokenising file {number + 1} of {len(files)}: {pieces.tokens:,} tokens so far")
        except OSError as error:
            raise _unreadable(file, error, data, origins) from None
        except NoTextError as error:
            if file in named:
                reason = f"{file} holds no text ({error})"
                raise ValueError(problem("data.paths", data.paths, origins, reason, "name files of text")) from None
            skipped.append(f"{file} ({error})")
            pieces.add(b"")
        except BadFileError as error:
            raise ValueError(problem("data.paths", data.paths, origins, f"{file} {error}", error.fix)) from None
    pieces.flush()
    return skipped


class _Pieces:
    """Documents' tokens as they come, and then in a random order."""

    def __init__(self, out: BinaryIO, tokenizer: Tokenizer) -> None:
        self._out, self._tokenizer = out, tokenizer
        self._dtype = np.min_scalar_type(tokenizer.vocab - 1)
        self._texts, self._waiting = list[bytes](), 0
        self.lengths = array("q")
        """Tokens of each document; 0 of an empty one."""
        self.tokens = 0

    def add(self, document: Document) -> None:
        """Text waits until a batch is full. Raises BadFileError for tokens that the tokenizer does not have."""
        if isinstance(document, bytes):
            self._texts.append(document)
            self._waiting += len(document)
            if self._waiting >= BATCH:
                self.flush()
            return
        self.flush()
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < self._tokenizer.vocab:
            worst = document.max() if document.min() >= 0 else document.min()
            has = f"has the token {worst}, and data.tokenizer has tokens 0 to {self._tokenizer.vocab - 1}"
            raise BadFileError(has, "data.tokenizer = the tokenizer that made it")
        ended = len(document) and document[-1] == self._tokenizer.separator
        self._append(document[:-1] if ended else document)

    def flush(self) -> None:
        """Tokenise the text that waits."""
        for tokens in self._tokenizer.encode(self._texts):
            self._append(tokens)
        self._texts, self._waiting = [], 0

    def _append(self, tokens: np.ndarray) -> None:
        self._out.write(tokens.astype(self._dtype).tobytes())
        self.lengths.append(len(tokens))
        self.tokens += len(tokens)

    def in_order(self, written: Path, path: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Write the documents in a random order, each with a separator behind it: (all tokens, where each begins)."""
        lengths = np.asarray(self.lengths)
        unordered, firsts = np.memmap(written, dtype=self._dtype, mode="r"), np.cumsum(lengths) - lengths
        order = np.random.default_rng(seed).permutation(len(lengths))
        order = order[lengths[order] > 0]
        with path.open("wb") as out:
            separator = np.array([self._tokenizer.separator], dtype=self._dtype).tobytes()
            for document in order:
                out.write(unordered[firsts[document] : firsts[document] + lengths[document]].tobytes())
                out.write(separator)
        sizes = lengths[order] + 1
        return np.memmap(path, dtype=self._dtype, mode="r"), np.cumsum(sizes) - sizes


def _unreadable(file: Path, error: OSError, data: DataConfig, origins: Mapping[str, str]) -> ValueError:
    reason, fix = f"{file} cannot be read ({error.strerror})", "make it readable, or leave it out"
    return ValueError(problem("data.paths", data.paths, origins, reason, fix))

"""Files of documents as one long array of tokens, tokenised once and then memory-mapped.

Documents are written in a random order that the seed fixes, each followed by a separator. The last tokens of the array
are the validation split; because the order is random, they are drawn from the whole corpus. The cache holds checksums,
which each process verifies when it opens it: a flipped bit is reported, and never trained on.

Note: [One run tokenises]
All ranks of a host open the corpus at the same time. The process that gets the lock on `<key>.lock` tokenises into a
temporary folder and renames it. The others wait for the lock and then find the folder. The operating system releases
the lock of a process that dies, so no process waits for a dead writer.

Note: [Pieces are the same whoever makes them]
Pieces are consecutive files, grouped by their sizes alone, and a piece is tokenised from its first document to its
last. So the cache has the same bytes for any number of processes. A piece is renamed once it is complete on disk, and
the next run with the same text and tokenizer reuses it: after a kill only unfinished pieces are tokenised again.
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
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hocket.config import DataConfig
from hocket.config.rule import problem, show
from hocket.environment import cores, processes
from hocket.fsdp.saving.atomic_folder import AtomicFolder, sync
from hocket.model.tokenizer import Tokenizer, known_tokenizer, load_tokenizer, tokenizer_files
from hocket.train.chat import Chats, template_files
from hocket.train.documents import (
    PIECE,
    BadFileError,
    Document,
    Keys,
    Marked,
    NoTextError,
    documents,
    index_files,
)

FORMAT = 6
"""Version of the format. Increase it whenever cached data changes its meaning."""
SEED = 0
"""Seed of the order of documents. It is the same for all runs, so they share the cache and the validation text."""
SAMPLE = 1 << 20
"""Tokens at each end that hosts compare to detect different text."""
NAMED = 3
"""Number of skipped files that a message names."""
BATCH = 1 << 22
"""Bytes of text per call of the tokenizer, which encodes documents in parallel."""
PIECE_BYTES = 1 << 25
"""A piece of this many bytes takes no more files."""
PATIENCE = 10.0
"""Seconds between two progress messages of tokenising."""
POLL = 0.05

Say = Callable[[str], None]


# -- A tokenised corpus, and its two splits ----------------------------------------------------------------------------


class Split(NamedTuple):
    """The text for training, or for validation."""

    tokens: np.ndarray
    """One dimension; a read-only memory map of unsigned integers."""
    bounds: np.ndarray
    """Ascending int64: where whole documents begin in `tokens`, and where the last one ends. Tokens before the first
    bound and after the last belong to partial documents."""
    masked: np.ndarray
    """Ranges of tokens that are not learnt: int64 [ranges, 2] of (first, end), ascending; a memory map, or a slice."""

    @property
    def unlearnt(self) -> int:
        """Number of tokens that are not learnt."""
        parts = (self.masked[n : n + PIECE].clip(0, len(self.tokens)) for n in range(0, len(self.masked), PIECE))
        return sum(int((part[:, 1] - part[:, 0]).sum()) for part in parts)

    def counts(self, vocab: int) -> np.ndarray:
        """How often each token is learnt. Float64 [vocab]."""
        total = np.zeros(vocab)
        for start in range(0, len(self.tokens), PIECE):
            some = self.tokens[start : start + PIECE]
            if len(self.masked):
                some = some[~inside(np.arange(start, start + len(some)), self.masked)]
            total += np.bincount(some, minlength=vocab)
        return total


def inside(places: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Whether each place is in one of the ascending ranges (first, end): bool, of the shape of `places`."""
    return np.searchsorted(ranges.reshape(-1), places, side="right") % 2 == 1


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus."""

    whole: Split
    vocab: int
    """Vocabulary size of the tokenizer."""
    documents: int
    """Documents with text."""
    skipped: tuple[str, ...]
    """Skipped files without text: path and reason."""
    train_tokens: int
    """Number of training tokens, from the start. The rest is for validation."""
    empty: int = 0
    """Number of skipped rows without text."""
    held_out: Corpus | None = None
    """The text that `data.validation` names. If None, the tokens after the training tokens are for validation."""

    @cached_property
    def train(self) -> Split:
        """The training split."""
        tokens, bounds, masked = self.whole
        return Split(tokens[: self.train_tokens], bounds[bounds <= self.train_tokens], masked)

    @cached_property
    def validation(self) -> Split:
        """The validation split. A document across the border of the two splits is whole in neither."""
        if self.held_out is not None:
            return self.held_out.whole
        (tokens, bounds, masked), first = self.whole, self.train_tokens
        mine = masked[np.searchsorted(masked.reshape(-1), first, side="right") // 2 :]
        return Split(tokens[first:], bounds[bounds >= first] - first, mine - first)

    @cached_property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each token is learnt and validated with, float64 [vocab] each."""
        return self.train.counts(self.vocab), self.validation.counts(self.vocab)

    @cached_property
    def sample(self) -> int:
        """A checksum of its first and last tokens, below 2**32. It also depends on the order of documents."""
        tokens, _, masked = self.whole
        before = zlib.crc32(masked.data, 0 if self.held_out is None else self.held_out.sample)
        return zlib.crc32(tokens[-SAMPLE:].tobytes(), zlib.crc32(tokens[:SAMPLE].tobytes(), before))

    def __str__(self) -> str:
        both = [self, *([] if self.held_out is None else [self.held_out])]
        names = "; ".join([*self.skipped[:NAMED], *(["…"] if len(self.skipped) > NAMED else [])])
        unlearnt = sum(each.whole.unlearnt for each in both)
        empty = sum(each.empty for each in both)
        train, validation = len(self.train.tokens), len(self.validation.tokens)
        text = f"{self.documents:,} documents, {train:,} training and {validation:,} validation tokens"
        text += f", of which {unlearnt:,} are read and not learnt" if unlearnt else ""
        text += f", {len(self.skipped)} files left out: {names}" if self.skipped else ""
        return text + (f", {empty:,} rows without text left out" if empty else "")


# -- Files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The files that a setting names."""

    setting: str
    given: str | tuple[str, ...]
    origins: Mapping[str, str]

    def refused(self, reason: str, fix: str) -> ValueError:
        """The error for a wrong value of the setting."""
        return ValueError(problem(self.setting, self.given, self.origins, reason, fix))

    def unreadable(self, file: object, error: OSError) -> ValueError:
        """The error for a file that cannot be read."""
        return self.refused(f"{file} cannot be read ({error.strerror})", "make it readable, or leave it out")


def find_files(asked: Asked, without: Path | None = None) -> list[Path]:
    """The files that a setting names, sorted and without duplicates. An empty setting means Python's standard library.

    A folder stands for all files below it, except hidden ones and those below `without`. Raises ValueError for a path
    that does not exist, a pattern that matches nothing, and a folder without files.
    """
    if not asked.given:
        return standard_library()
    found: set[Path] = set()
    for given in asked.given:
        one = replace(asked, given=given)
        matches = [Path(given)] if os.path.lexists(given) else [Path(p) for p in glob.glob(given, recursive=True)]
        if not matches:
            reason = "the pattern matches nothing" if glob.has_magic(given) else "there is no such file or folder"
            raise one.refused(reason, "name existing files, folders or glob patterns")
        try:
            files = [file for match in matches for file in _files_below(match)]
        except OSError as error:
            raise one.unreadable(error.filename, error) from None
        files = [file for file in files if without is None or without.resolve() not in file.resolve().parents]
        if not files:
            raise one.refused("no files in it", "name a folder that holds text files")
        if other := next((file for file in files if file.suffix in UNREAD), None):
            reason = f"{other} is of datasets or datatrove, whose files are not read"
            raise one.refused(reason, "Parquet (to_parquet) or tokens of numpy")
        found.update(files)
    return sorted(found)


UNREAD = (".arrow", ".ds")
"""Formats that cannot be read. The other files beside them are only metadata."""


def _files_below(path: Path) -> Iterator[Path]:
    """All files that are not hidden. Each folder is read once, even if links point to it. Raises OSError."""
    if not path.is_dir():
        yield path.absolute()
        return

    def refuse(error: OSError) -> None:
        raise error

    seen, starts = set[str](), [path.absolute()]
    for start in starts:  # links last, so that files are found under the names in their own folder first
        for folder, folders, names in os.walk(start, onerror=refuse):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            shown = sorted(name for name in folders if not name.startswith("."))
            starts += [Path(folder, name) for name in shown if os.path.islink(os.path.join(folder, name))]
            folders[:] = [name for name in shown if not os.path.islink(os.path.join(folder, name))]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def standard_library() -> list[Path]:
    """Source files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not without & set(path.relative_to(root).parts)]
    if not files:
        raise ValueError(problem("data.paths", (), {}, f"no Python source in {root}", "name files of text"))
    return sorted(files)


# -- The cache ---------------------------------------------------------------------------------------------------------


def open_corpus(
    data: DataConfig,
    origins: Mapping[str, str],
    *,
    without: Path | None = None,
    say: Say = lambda words: None,
) -> Corpus:
    """The corpus of a configuration, from the cache or tokenised now.

    `without` is the folder of the run: its files are output, not text, and each rank would see different ones. Waits
    for another process that is tokenising. `say` gets progress messages every few seconds. Raises ValueError for a
    missing path, a file that does not match its extension, an empty corpus, a missing tokenizer, and a cache that is
    damaged or cannot be written.
    """
    corpus = _open(Asked("data.paths", data.paths, origins), data, without, say)
    if not data.held_out:
        return corpus
    held_out = _open(Asked("data.validation", data.held_out, origins), data, without, say)
    return replace(corpus, train_tokens=len(corpus.whole.tokens), held_out=held_out)


def known_corpus(data: DataConfig, origins: Mapping[str, str], without: Path | None = None) -> Corpus | None:
    """The training corpus from the cache, without checking its tokens. None if it is not cached.

    Raises ValueError as `open_corpus` does.
    """
    _, folder = _place(Asked("data.paths", data.paths, origins), data, without)
    if not folder.exists():
        return None
    corpus = _load(folder, data, origins, check=False)
    return replace(corpus, train_tokens=len(corpus.whole.tokens)) if data.held_out else corpus


def _place(asked: Asked, data: DataConfig, without: Path | None) -> tuple[list[Path], Path]:
    """The files of a corpus, and its folder in the cache."""
    origins = asked.origins
    if data.chat_template and not Path(data.chat_template).is_file():
        reason, fix = "there is no such file", "name a template of Jinja"
        raise ValueError(problem("data.chat_template", data.chat_template, origins, reason, fix))
    files = find_files(asked, without)
    belong = {file for main in files for file in index_files(main)}
    files = [file for file in files if file not in belong]
    return files, Path(data.cache) / f"corpus-{_key([*files, *sorted(belong)], data, asked)}"


def _open(asked: Asked, data: DataConfig, without: Path | None, say: Say) -> Corpus:
    origins, (files, folder) = asked.origins, _place(asked, data, without)
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # see Note: [One run tokenises]
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
        none = np.zeros((0, 2), dtype=np.int64)
        masked = np.load(folder / "masked.npy", mmap_mode="r") if meta.get("masked") else none
        if check and found != _checksum(tokens, starts, masked, meta):
            raise ValueError("changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(problem("data.cache", data.cache, origins, f"{folder} is damaged", "delete it")) from None
    whole, kept = Split(tokens, np.append(starts, len(tokens)), masked), round(len(tokens) * data.kept_back)
    return Corpus(whole, meta["vocab"], len(starts), tuple(meta["skipped"]), len(tokens) - kept, meta["empty"])


def _checksum(tokens: np.ndarray, starts: np.ndarray, masked: np.ndarray, meta: Mapping[str, Any]) -> int:
    check = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for values in (masked.reshape(-1), starts, tokens):
        for first in range(0, len(values), PIECE):
            check = zlib.crc32(values[first : first + PIECE].data, check)
    return check


def _key(files: list[Path], data: DataConfig, asked: Asked) -> str:
    """A key that changes with all that the tokens depend on: files, their sizes and times, tokenizer, seed."""
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


class KilledError(ValueError):
    """A tokenising process was killed."""


def _write(files: list[Path], asked: Asked, data: DataConfig, final: Path, say: Say) -> None:
    """Tokenise into a folder that appears once it is complete."""
    tokenizer = known_tokenizer(data, asked.origins)
    folder, parts = AtomicFolder(final), final.with_suffix(".parts")
    folder.begin()
    try:
        pieces = tokenise(parts, files, asked, data, say)
        skipped, empty = [line for piece in pieces for line in piece.skipped], sum(piece.empty for piece in pieces)
        if not any(piece.lengths.any() for piece in pieces):
            left_out = f" ({'; '.join(skipped[:NAMED])})" if skipped else ""
            left_out += f", {empty:,} rows without {data.names[0]} left out" if empty else ""
            reason = f"the corpus is empty: no text in {len(files)} files{left_out}"
            raise asked.refused(reason, "name files that hold text")
        tokens, starts, masked = in_order(pieces, folder.temporary / "tokens.bin", SEED)
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
    except KilledError:  # finished pieces stay for the next run
        folder.give_up()
        raise
    except (OSError, ValueError):  # such as a full disk: free the space
        folder.give_up()
        shutil.rmtree(parts, ignore_errors=True)
        raise
    shutil.rmtree(parts, ignore_errors=True)


# -- Tokenising, piece by piece ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The tokens of some documents, in file order, each with its separator."""

    tokens: np.ndarray
    lengths: np.ndarray
    """Tokens of each document, int64; 0 for an empty one."""
    masked: np.ndarray
    """Ranges of tokens that are not learnt: int64 [2, ranges], their starts and ends. None spans two documents."""
    skipped: list[str]
    """Files without text, with the reason."""
    empty: int
    """Number of skipped rows without text."""

    @classmethod
    def read(cls, folder: Path, number: int, dtype: np.dtype) -> Piece:
        """Load a finished piece: `<number>.bin` has its tokens, `<number>.npz` the rest."""
        path = folder / f"{number:06d}.bin"
        tokens = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
        with np.load(path.with_suffix(".npz")) as found:
            lengths, masked, empty = found["lengths"], found["masked"], int(found["empty"])
            skipped = json.loads(str(found["skipped"]))
        if len(tokens) != lengths.sum():
            raise OSError(None, f"{path} has {len(tokens)} tokens of {lengths.sum()}")
        return cls(tokens, lengths, masked, skipped, empty)


def pieces_of(files: Sequence[Path]) -> list[list[Path]]:
    """Group files into pieces. See Note: [Pieces are the same whoever makes them]."""
    pieces, room = list[list[Path]](), 0
    for file in files:
        if room <= 0:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append(file)
        room -= file.stat().st_size
    return pieces


def tokenise(folder: Path, files: Sequence[Path], asked: Asked, data: DataConfig, say: Say) -> list[Piece]:
    """Tokenise all documents of files into pieces below a folder, which may already hold some.

    No other process may write there. `say` gets progress messages every few seconds. Raises ValueError for files that
    do not match their extension, and OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces, dtype = pieces_of(files), dtype_of(known_tokenizer(data, asked.origins).vocab)
    missing = [(n, some) for n, some in enumerate(pieces) if not (folder / f"{n:06d}.npz").exists()]
    reported, count = time.monotonic(), min(cores(), len(missing))

    def tell() -> None:
        """Report progress if the last message is some time ago."""
        nonlocal reported
        if time.monotonic() > reported + PATIENCE:
            reported = time.monotonic()
            done, begun = (list(folder.glob(f"*.{ending}")) for ending in ("npz", "bin"))
            tokens = sum(file.stat().st_size for file in begun) // dtype.itemsize
            say(f"tokenising: {len(done)} of {len(pieces)} pieces done, about {tokens:,} tokens so far")

    if len(missing) < len(pieces):
        say(f"tokenising goes on: {len(pieces) - len(missing)} of {len(pieces)} pieces are there")
    if count > 1:
        plain = replace(asked, origins=dict(asked.origins))
        with processes(count, {"RAYON_NUM_THREADS": str(max(1, cores() // count))}) as pool:
            running = {pool.submit(_write_pieces, folder, missing[n::count], plain, data) for n in range(count)}
            while running:
                done, running = wait(running, POLL)
                tell()
                try:
                    for each in done:
                        each.result()
                except BrokenExecutor:
                    fix = "more memory if it was short, or fewer cores (taskset), one process for each"
                    reason = "a process that tokenised was killed"
                    raise KilledError(str(asked.refused(reason, f"{fix}; finished pieces are kept"))) from None
    else:
        _write_pieces(folder, missing, asked, data, tell)
    return [Piece.read(folder, number, dtype) for number in range(len(pieces))]


def dtype_of(vocab: int) -> np.dtype:
    """The smallest type that holds all tokens."""
    return np.min_scalar_type(vocab - 1)


def _write_pieces(
    folder: Path,
    pieces: Sequence[tuple[int, Sequence[Path]]],
    asked: Asked,
    data: DataConfig,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write pieces, and call `after` after each. A piece's `.npz` appears once the piece is complete."""
    if not pieces:
        return
    tokenizer = load_tokenizer(data, asked.origins)
    keys = Keys(*data.names, Chats(data).marked, data.skip_empty)
    for number, files in pieces:
        path = folder / f"{number:06d}.bin"
        with path.open("wb") as out:
            writer = _Writer(out, tokenizer)
            skipped = [line for file in files for line in _add(file, writer, keys, asked)]
            writer.flush()
        lengths, done = np.asarray(writer.lengths, np.int64), path.with_suffix(".tmp")
        with done.open("wb") as out:
            np.savez(out, lengths=lengths, masked=writer.masked, skipped=json.dumps(skipped), empty=writer.empty)
        for file in (path, done):
            sync(file)
        done.rename(path.with_suffix(".npz"))
        after()


def _add(file: Path, writer: _Writer, keys: Keys, asked: Asked) -> Iterator[str]:
    """Add the documents of a file. Yields a message about a file without text."""
    try:
        before = len(writer)
        for document in documents(file, keys, writer.tokenizer.separator):
            writer.add(document)
        if len(writer) == before:
            yield f"{file} (empty: no documents)"
    except OSError as error:
        raise asked.unreadable(file, error) from None
    except NoTextError as error:
        if file in {Path(path).absolute() for path in asked.given}:
            raise asked.refused(f"{file} holds no text ({error})", "name files of text") from None
        yield f"{file} ({error})"
        writer.add(b"")
    except BadFileError as error:
        raise asked.refused(f"{show(str(file))} {error}", error.fix) from None


class _Writer:
    """Writes the tokens of documents as they arrive."""

    def __init__(self, out: BinaryIO, tokenizer: Tokenizer) -> None:
        self._out, self.tokenizer = out, tokenizer
        self._dtype = dtype_of(tokenizer.vocab)
        self._texts, self._waiting = list[bytes](), 0
        self.lengths = array("q")
        self._tokens, self._edges = 0, array("q")
        self.empty = 0
        """Rows without text."""

    def __len__(self) -> int:
        """Number of documents so far."""
        return len(self.lengths) + len(self._texts)

    def add(self, document: Document | None) -> None:
        """Text is buffered until a batch is full. Raises BadFileError for tokens outside the tokenizer's vocabulary."""
        if document is None:
            self.empty += 1
            return
        if isinstance(document, bytes):
            self._texts.append(document)
            self._waiting += len(document)
            if self._waiting >= BATCH:
                self.flush()
            return
        self.flush()
        if isinstance(document, Marked):
            self._append_marked(document)
            return
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < self.tokenizer.vocab:
            worst = document.max() if document.min() >= 0 else document.min()
            has = f"has the token {worst}, and data.tokenizer has tokens 0 to {self.tokenizer.vocab - 1}"
            raise BadFileError(has, "data.tokenizer = the tokenizer that made it")
        ended = len(document) and document[-1] == self.tokenizer.separator
        self._append(document[:-1] if ended else document)

    @property
    def masked(self) -> np.ndarray:
        """Starts and ends of the ranges that are not learnt: int64 [2, ranges]."""
        return np.ascontiguousarray(np.asarray(self._edges, np.int64).reshape(-1, 2).T)

    def flush(self) -> None:
        """Tokenise the buffered text."""
        for tokens in self.tokenizer.encode(self._texts):
            self._append(self._with_prefix(tokens))
        self._texts, self._waiting = [], 0

    def _append_marked(self, document: Marked) -> None:
        """A token is learnt if its first character is in a learnt range."""
        tokens, firsts = self.tokenizer.places(document.text)
        learnt = np.zeros(len(tokens) + 1, dtype=bool)
        for first, end in document.learnt:
            learnt[:-1] |= (firsts >= first) & (firsts < end)
        learnt[-1] = document.ends
        if document.ends:  # a chat template writes its own beginning
            tokens = self._with_prefix(tokens)
            learnt = np.pad(learnt, (len(tokens) + 1 - len(learnt), 0))
        if len(tokens):
            edges = np.flatnonzero(np.diff(~learnt, prepend=False, append=False))
            self._edges.frombytes((self._tokens + edges).tobytes())
        self._append(tokens)

    def _with_prefix(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of a text after those that begin every text. An empty text stays empty."""
        begins = self.tokenizer.begins
        return np.concatenate([np.asarray(begins, dtype=tokens.dtype), tokens]) if begins and len(tokens) else tokens

    def _append(self, tokens: np.ndarray) -> None:
        ended = np.append(tokens, self.tokenizer.separator) if len(tokens) else tokens
        self._out.write(ended.astype(self._dtype).tobytes())
        self.lengths.append(len(ended))
        self._tokens += len(ended)


def in_order(pieces: Sequence[Piece], path: Path, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write documents in a random order.

    Returns all tokens, where each document begins, and the ranges of tokens that are not learnt, int64 [ranges, 2].
    """
    lengths = np.concatenate([piece.lengths for piece in pieces])
    owner = np.repeat(np.arange(len(pieces)), [len(piece.lengths) for piece in pieces])
    firsts = np.concatenate([np.cumsum(piece.lengths) - piece.lengths for piece in pieces])
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[lengths[order] > 0]
    starts = np.cumsum(lengths[order]) - lengths[order]
    edges = array("q")
    with path.open("wb") as out:
        for document, start in zip(order, starts, strict=True):
            piece, first, end = pieces[owner[document]], firsts[document], firsts[document] + lengths[document]
            out.write(piece.tokens[first:end].tobytes())
            lo, hi = np.searchsorted(piece.masked[0], [first, end])
            edges.frombytes((piece.masked[:, lo:hi].T + (start - first)).tobytes())
    masked = np.asarray(edges, np.int64).reshape(-1, 2)
    return np.memmap(path, dtype=pieces[0].tokens.dtype, mode="r"), starts, masked

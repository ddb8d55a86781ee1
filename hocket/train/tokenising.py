"""Files to tokens, in pieces: by one process or several, going on where an earlier one was ended.

Note: [Pieces are the same whoever makes them]
Files in their order, and long files of lines or rows, are cut into pieces by their sizes alone, and a piece is
tokenised from its first document to its last. So the cache has the same bytes whatever the number of processes. A
finished piece is renamed when all of it is on disk. What runs next, with the same text and tokenizer, keeps it: after a
kill only unfinished pieces are made again.
Processes take pieces by creating a file beside them, and look at whether their parent still runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hocket.config import DataConfig
from hocket.environment import cores
from hocket.fsdp.saving.atomic_folder import sync
from hocket.model.tokenizer import Tokenizer, known_tokenizer, load_tokenizer
from hocket.settings.schema import problem, show
from hocket.train.chat import Chats
from hocket.train.documents import (
    WHOLE,
    BadFileError,
    Document,
    Keys,
    Marked,
    NoTextError,
    Part,
    documents,
    has_parts,
)

BATCH = 1 << 22
"""Bytes of text that the tokenizer gets at a time: it works on the documents in parallel."""
PIECE_BYTES = 1 << 25
"""Size of files from which on a piece takes no more of them."""
PATIENCE = 10.0
"""Seconds between two lines about how far tokenising is."""
POLL = 0.05

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """Files that a setting means."""

    setting: str
    given: tuple[str, ...]
    origins: Mapping[str, str]

    def refused(self, reason: str, fix: str) -> ValueError:
        """The error for something that is wrong with them."""
        return ValueError(problem(self.setting, self.given, self.origins, reason, fix))

    def unreadable(self, file: Path, error: OSError) -> ValueError:
        """The error for a file that the system does not give."""
        return self.refused(f"{file} cannot be read ({error.strerror})", "make it readable, or leave it out")


@dataclass(frozen=True)
class Piece:
    """The tokens of some documents, in the order of the files, without separators."""

    tokens: np.ndarray
    lengths: np.ndarray
    """Tokens of each document, int64; 0 of an empty one."""
    skipped: list[str]
    """Files without text, and what they have instead."""
    empty: int
    """Rows without text that were left out."""
    masked: np.ndarray
    """Tokens that are read and not learnt: int64 [ranges, 3] of (document, first, end), ascending. The token behind the
    last of a document is its separator."""


Parts = list[tuple[Path, Part]]
"""What a piece is made of: files, or one part of a file."""


def pieces_of(files: Sequence[Path]) -> list[Parts]:
    """Files as pieces. See Note: [Pieces are the same whoever makes them]."""
    pieces, room = list[Parts](), 0
    for file in files:
        size = file.stat().st_size
        if size > PIECE_BYTES and has_parts(file):
            count, room = -(-size // PIECE_BYTES), 0
            pieces += [[(file, (number, count))] for number in range(count)]
            continue
        if room <= 0:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append((file, WHOLE))
        room -= size
    return pieces


def tokenise(folder: Path, files: Sequence[Path], asked: Asked, data: DataConfig, say: Say) -> list[Piece]:
    """All documents of files, as pieces below a folder, which may have some already.

    Nobody else may be working there. `say` is told, every few seconds, how far it is. Raises ValueError for files that
    are not what their names say, and OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = pieces_of(files)
    for claim in folder.glob("*.claim"):
        claim.unlink()
    missing = [number for number in range(len(pieces)) if not _place(folder, number, "json").exists()]
    processes = min(cores(), len(missing))
    progress = _Progress(folder, len(pieces), data, asked.origins, say)
    if len(missing) < len(pieces):
        say(f"tokenising goes on: {len(pieces) - len(missing)} of {len(pieces)} pieces are there")
    if processes > 1:
        _in_processes(folder, pieces, asked, data, processes, progress)
    elif missing:
        _Task(folder, asked, data, load_tokenizer(data, asked.origins), progress.tell).work(pieces)
    return [_read(folder, number, progress.dtype) for number in range(len(pieces))]


def dtype_of(vocab: int) -> np.dtype:
    """The smallest type that holds all tokens."""
    return np.min_scalar_type(vocab - 1)


class _Progress:
    """Says now and then how far tokenising is."""

    def __init__(self, folder: Path, pieces: int, data: DataConfig, origins: Mapping[str, str], say: Say) -> None:
        self._folder, self._pieces, self._say, self._told = folder, pieces, say, time.monotonic()
        self.dtype = dtype_of(known_tokenizer(data, origins).vocab)

    def tell(self) -> None:
        """Say it if nothing was said for a while."""
        if time.monotonic() > self._told + PATIENCE:
            self._told = time.monotonic()
            written = 0
            for file in self._folder.glob("*.bin*"):
                with contextlib.suppress(OSError):  # it may just get its name
                    written += file.stat().st_size
            done = sum(1 for _ in self._folder.glob("*.json"))
            tokens = written // self.dtype.itemsize
            self._say(f"tokenising: {done} of {self._pieces} pieces done, {tokens:,} tokens so far")


def _place(folder: Path, number: int, ending: str) -> Path:
    return folder / f"{number:06d}.{ending}"


def _read(folder: Path, number: int, dtype: np.dtype) -> Piece:
    lengths = np.load(_place(folder, number, "npy"))
    path = _place(folder, number, "bin")
    tokens = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    if len(tokens) != lengths.sum():
        raise OSError(None, f"{path} has {len(tokens)} tokens of {lengths.sum()}")
    skipped, empty = json.loads(_place(folder, number, "json").read_text())
    return Piece(tokens, lengths, skipped, empty, np.load(_place(folder, number, "masked.npy")))


# -- in several processes ----------------------------------------------------------------------------------------------


def _in_processes(
    folder: Path, pieces: list[Parts], asked: Asked, data: DataConfig, count: int, progress: _Progress
) -> None:
    job = pickle.dumps((folder, pieces, dataclasses.replace(asked, origins=dict(asked.origins)), data, os.getpid()))
    threads = max(1, cores() // count)
    variables = [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", f"RAYON_NUM_THREADS={threads}"]
    command = ["env", *variables, sys.executable, "-c", "from hocket.train.tokenising import worker; worker()"]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert running[-1].stdin is not None
            with contextlib.suppress(BrokenPipeError), running[-1].stdin as pipe:
                pipe.write(job)
            running[-1].stdin = None
        while running:
            time.sleep(POLL)
            progress.tell()
            for process in [one for one in running if one.poll() is not None]:
                running.remove(process)
                _require_success(process, asked)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _require_success(process: subprocess.Popen[bytes], asked: Asked) -> None:
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    if process.returncode == 0:
        return
    if process.returncode < 0:
        reason = f"a process that tokenised was killed by signal {-process.returncode}"
        fix = "more memory if it was short, or fewer cores (taskset), one process for each; finished pieces are kept"
    elif said.startswith(pickle.PROTO):
        raise pickle.loads(said)
    else:
        reason = f"a process that tokenised ended with exit code {process.returncode}"
        fix = "taskset -c 0 before the command: one process, which shows what fails"
    raise asked.refused(reason, fix)


def worker() -> None:
    """What a process does: pieces that nobody has taken. The job comes by stdin; what is wrong goes to stdout."""
    folder, pieces, asked, data, parent = pickle.load(sys.stdin.buffer)

    def stop_with_parent() -> None:
        if os.getppid() != parent:
            os._exit(1)

    try:
        _Task(folder, asked, data, load_tokenizer(data, asked.origins), stop_with_parent).work(pieces)
    except (OSError, ValueError) as error:
        sys.stdout.buffer.write(pickle.dumps(error))
        sys.exit(1)


# -- one piece ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What pieces are made with."""

    folder: Path
    asked: Asked
    data: DataConfig
    tokenizer: Tokenizer
    between: Callable[[], None]
    """Is called behind every document."""

    @cached_property
    def keys(self) -> Keys:
        """What is read of rows."""
        return Keys(*self.data.names, Chats(self.data).marked, self.data.skip_empty)

    def work(self, pieces: Sequence[Parts]) -> None:
        """Make the pieces that are missing and that nobody has taken."""
        for number, parts in enumerate(pieces):
            if not _place(self.folder, number, "json").exists() and _claimed(self.folder, number):
                self._make(number, parts)

    def _make(self, number: int, parts: Parts) -> None:
        """Write a piece; its `.json` is there once all of it is."""
        path, lengths, masked = (_place(self.folder, number, ending) for ending in ("bin", "npy", "masked.npy"))
        with path.open("wb") as out:
            writer = _Writer(out, self.tokenizer)
            skipped = [line for file, part in parts for line in self._add(file, part, writer)]
            writer.flush()
        np.save(lengths, np.asarray(writer.lengths, dtype=np.int64))
        np.save(masked, np.asarray(writer.masked, dtype=np.int64).reshape(-1, 3))
        for file in (path, lengths, masked):
            sync(file)
        done = _place(self.folder, number, "tmp")
        done.write_text(json.dumps([skipped, writer.empty]))
        sync(done)
        done.rename(_place(self.folder, number, "json"))

    def _add(self, file: Path, part: Part, writer: _Writer) -> Iterator[str]:
        """Add the documents of a file, or of a part of it. Gives a line about a file without text."""
        asked, tokenizer = self.asked, self.tokenizer
        try:
            before = len(writer)
            for document in documents(file, self.keys, tokenizer.vocab, tokenizer.separator, part):
                writer.add(document)
                self.between()
            if part == WHOLE and len(writer) == before:
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


def _claimed(folder: Path, number: int) -> bool:
    try:
        _place(folder, number, "claim").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class _Writer:
    """Documents' tokens as they come."""

    def __init__(self, out: BinaryIO, tokenizer: Tokenizer) -> None:
        self._out, self._tokenizer = out, tokenizer
        self._dtype = dtype_of(tokenizer.vocab)
        self._texts, self._waiting = list[bytes](), 0
        self.lengths = array("q")
        self.masked = list[tuple[int, int, int]]()
        """(document, first, end) of tokens that are not learnt."""
        self.empty = 0
        """Rows without text."""

    def __len__(self) -> int:
        """Documents so far."""
        return len(self.lengths) + len(self._texts)

    def add(self, document: Document | None) -> None:
        """Text waits until a batch is full. Raises BadFileError for tokens that the tokenizer does not have."""
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
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < self._tokenizer.vocab:
            worst = document.max() if document.min() >= 0 else document.min()
            has = f"has the token {worst}, and data.tokenizer has tokens 0 to {self._tokenizer.vocab - 1}"
            raise BadFileError(has, "data.tokenizer = the tokenizer that made it")
        ended = len(document) and document[-1] == self._tokenizer.separator
        self._append(document[:-1] if ended else document)

    def flush(self) -> None:
        """Tokenise the text that waits."""
        for tokens in self._tokenizer.encode(self._texts):
            self._append(self._begun(tokens))
        self._texts, self._waiting = [], 0

    def _append_marked(self, document: Marked) -> None:
        """A token is learnt if it begins in what is learnt."""
        tokens, firsts = self._tokenizer.places(document.text)
        learnt = np.zeros(len(tokens) + 1, dtype=bool)
        for first, end in document.learnt:
            learnt[:-1] |= (firsts >= first) & (firsts < end)
        learnt[-1] = document.ends
        if document.ends:  # the text of a chat has what its template writes
            tokens = self._begun(tokens)
            learnt = np.pad(learnt, (len(tokens) + 1 - len(learnt), 0))
        edges = np.flatnonzero(np.diff(learnt, prepend=True, append=True))
        self.masked += [(len(self.lengths), int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        self._append(tokens)

    def _begun(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of a text with those that begin one. No text stays none."""
        begins = self._tokenizer.begins
        return np.concatenate([np.asarray(begins, dtype=tokens.dtype), tokens]) if begins and len(tokens) else tokens

    def _append(self, tokens: np.ndarray) -> None:
        self._out.write(tokens.astype(self._dtype).tobytes())
        self.lengths.append(len(tokens))


def in_order(
    pieces: Sequence[Piece], path: Path, separator: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write documents in a random order, each with a separator behind it.

    Returns all tokens, where each document begins, and ranges of tokens that are not learnt, int64 [ranges, 2].
    """
    lengths = np.concatenate([piece.lengths for piece in pieces])
    owner = np.repeat(np.arange(len(pieces)), [len(piece.lengths) for piece in pieces])
    firsts = np.concatenate([np.cumsum(piece.lengths) - piece.lengths for piece in pieces])
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[lengths[order] > 0]
    dtype = pieces[0].tokens.dtype
    with path.open("wb") as out:
        behind = np.array([separator], dtype=dtype).tobytes()
        for document in order:
            first = firsts[document]
            out.write(pieces[owner[document]].tokens[first : first + lengths[document]].tobytes())
            out.write(behind)
    sizes = lengths[order] + 1
    starts = np.cumsum(sizes) - sizes
    return np.memmap(path, dtype=dtype, mode="r"), starts, _masked(pieces, order, starts)


def _masked(pieces: Sequence[Piece], order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Ranges of tokens that are not learnt, ascending, where documents are in an order."""
    counts = [len(piece.lengths) for piece in pieces]
    begins = np.full(sum(counts), -1)
    begins[order] = starts
    before = np.cumsum(counts) - counts
    documents = np.concatenate([piece.masked[:, 0] + first for piece, first in zip(pieces, before, strict=True)])
    begin = begins[documents]
    ranges = np.concatenate([piece.masked[:, 1:] for piece in pieces])[begin >= 0] + begin[begin >= 0, None]
    return ranges[np.argsort(ranges[:, 0])]

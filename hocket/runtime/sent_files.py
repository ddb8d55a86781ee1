"""Files that ranks send each other in pieces, over gloo: hosts that share no file system copy them so."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.runtime.world import begin_receive, begin_send, rank_and_world, together

PIECE = 1 << 24
"""Bytes that are under way at a time, of each file."""


@dataclass(frozen=True)
class Sent:
    """A file that rank `source` has and rank `target` gets."""

    name: str
    source: int
    target: int
    sum: Sequence[int]
    """[size in bytes, CRC-32]."""

    @property
    def size(self) -> int:
        """In bytes."""
        return self.sum[0]


def send_files(every: Sequence[Sent], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Send files from each rank's `folder` to that of others. All ranks of the group call it with the same list.

    A file has its name when all of it is there, with its checksum. Raises OSError or ValueError, on every rank.
    """
    rank, _ = rank_and_world()
    mine = [
        _End(sent, tag, folder, rank == sent.source)
        for tag, sent in enumerate(every)
        if rank in (sent.source, sent.target)
    ]
    try:
        for begin in range(0, max((end.sent.size for end in mine), default=0), PIECE):
            moving = [end for end in mine if begin < end.sent.size]
            for work in [end.begin(min(PIECE, end.sent.size - begin), group) for end in moving]:
                work.wait()
            for end in moving:
                end.took()
    finally:
        for end in mine:
            end.close()
    together(lambda: [end.finish() for end in mine], group)


class _End:
    """One end of a file under way. An error of its file system comes out at last: the other end would wait for ever."""

    def __init__(self, sent: Sent, tag: int, folder: Path, sends: bool) -> None:
        self.sent, self._tag, self._sends = sent, tag, sends
        self._path = folder / sent.name
        self._part = self._path.with_name(f"{sent.name}.part")
        self._piece = bytearray()
        self._crc = 0
        self._error: OSError | None = None
        self._file: FileIO | None = None
        self._try(self._open)

    def begin(self, size: int, group: dist.ProcessGroup | None) -> Any:
        """Send or receive the next bytes. Returns what to wait for."""
        self._piece = bytearray(size)
        if self._sends:
            self._try(lambda: self._file and self._file.readinto(self._piece))
        elements = torch.frombuffer(self._piece, dtype=torch.uint8)
        if self._sends:
            return begin_send(elements, self.sent.target, group, self._tag)
        return begin_receive(elements, self.sent.source, group, self._tag)

    def took(self) -> None:
        """The bytes are here."""
        if not self._sends:
            self._crc = zlib.crc32(self._piece, self._crc)
            self._try(lambda: self._file and _write(self._file, self._piece))

    def close(self) -> None:
        """No more comes."""
        if self._file:
            self._file.close()

    def finish(self) -> None:
        """Give what was received its name. Raises OSError, or ValueError where it is not what was sent."""
        if self._sends:
            if self._error:
                raise self._error
            return
        try:
            if self._error:
                raise self._error
            if self._crc != self.sent.sum[1]:
                raise ValueError(f"what came of {self.sent.name} from rank {self.sent.source} has a wrong checksum")
            self._part.rename(self._path)
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                self._part.unlink(missing_ok=True)
            raise

    def _open(self) -> None:
        self._file = FileIO(self._path) if self._sends else FileIO(self._part, "w")

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._error = self._error or error


def _write(file: FileIO, piece: bytearray) -> None:
    rest = memoryview(piece)
    while rest:  # a file system that is nearly full takes a part
        rest = rest[file.write(rest) or 0 :]

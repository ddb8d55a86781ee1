"""Folders that appear when all of them is written.

Note: [A checkpoint is there or it is not]
What is to be a folder is written into `<folder>.tmp`. When all of it is on disk, the names in it too, it gets its own
name. So a folder with its final name is complete, whenever processes or the machine stop. What an interrupted save has
left has another name: the next save to the same folder removes it, and `clean_up` what is left of all. An error leaves
nothing, for on a full disk no other save would find room. Folders go the same way: they lose their name first. None
takes the place of another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

try:
    from zlib_ng.zlib_ng import crc32  # some ten times as fast
except ImportError:
    from zlib import crc32

FILES = 8
"""How many files of a checkpoint a rank writes, or reads, at once."""


class AtomicFolder:
    """One that is being written. `begin`, write into `temporary`, then `publish`, or `give_up` after an error."""

    def __init__(self, final: Path) -> None:
        self.final, self.temporary = final, _temporary(final)

    def begin(self) -> None:
        """One process: make the folder to write into, without what an interrupted save has left there.

        Raises: ValueError if the place is taken, but for an empty folder, OSError if the folder cannot be made.
        """
        if self.final.exists() and not (self.final.is_dir() and not any(self.final.iterdir())):
            raise ValueError(f"{self.final} exists already; fix: another folder, or remove it first")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.temporary)
        self.temporary.mkdir(parents=True)

    def publish(self) -> None:
        """One process, when all have written and their files are on disk: give the folder its name. Raises OSError."""
        sync(self.temporary)
        self.temporary.rename(self.final)
        sync(self.final.parent)

    def give_up(self) -> None:
        """Any process that has written, after an error: give back the room."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def clean_up(parent: Path, names: str) -> None:
    """Remove what interrupted saves of folders with such names (a pattern) have left; nobody may be writing any."""
    for unfinished in parent.glob(f"{names}.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder as far as possible, so that no half of it is ever taken for a whole one."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder.rename(_temporary(folder)), ignore_errors=True)


def checksum(file: Path, begin: int = 0, length: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, or of as many bytes of it as are there from one on. Raises OSError."""
    size = total = 0
    with file.open("rb", buffering=0) as source:
        source.seek(begin)
        while block := source.read(1 << 23 if length is None else min(1 << 23, length - size)):
            size, total = size + len(block), crc32(block, total)
    return size, total


def free(folder: Path) -> int:
    """Bytes that are free where a folder is, or is to be."""
    above = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("/"))
    return shutil.disk_usage(above).free


def shown(nbytes: int) -> str:
    """A number of bytes, in words."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= s), ("KiB", 2**10))
    return f"{nbytes / size:,.1f} {unit}"


def sync(path: Path) -> None:
    """Wait until a file is on disk, or the names in a folder are. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp")

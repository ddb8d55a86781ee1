"""Folders that appear only when complete.

Note: [A checkpoint is there or it is not]
A folder is written as `<folder>.tmp` and renamed once everything, including directory entries, is on disk. So a folder
with its final name is complete, whenever processes or the machine stop. The next save to the same folder removes an
interrupted one's remains, `clean_up` those of all. After an error they are removed at once, since the disk may be full.
Deleting renames first. A folder never replaces another.
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
"""Files of a checkpoint that a rank writes or reads concurrently."""


class AtomicFolder:
    """A folder being written. `begin`, write into `temporary`, then `publish`, or `give_up` after an error."""

    def __init__(self, final: Path) -> None:
        self.final, self.temporary = final, _temporary(final)

    def begin(self) -> None:
        """On one process: make the temporary folder, removing remains of an interrupted save.

        Raises: ValueError if the final folder exists and is not empty, OSError if the folder can't be made.
        """
        if self.final.exists() and not (self.final.is_dir() and not any(self.final.iterdir())):
            raise ValueError(f"{self.final} exists already; fix: another folder, or remove it first")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.temporary)
        self.temporary.mkdir(parents=True)

    def publish(self) -> None:
        """On one process, when all files are on disk: rename the folder. Raises OSError."""
        sync(self.temporary)
        self.temporary.rename(self.final)
        sync(self.final.parent)

    def give_up(self) -> None:
        """On any process, after an error: delete the temporary folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def clean_up(parent: Path, names: str) -> None:
    """Remove remains of interrupted saves whose names match a pattern; no save may be running."""
    for unfinished in parent.glob(f"{names}.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder, renaming it first so that a partial one is never taken for whole."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder.rename(_temporary(folder)), ignore_errors=True)


def checksum(file: Path, begin: int = 0, length: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, or of up to `length` bytes from `begin`. Raises OSError."""
    size = total = 0
    with file.open("rb", buffering=0) as source:
        source.seek(begin)
        while block := source.read(1 << 23 if length is None else min(1 << 23, length - size)):
            size, total = size + len(block), crc32(block, total)
    return size, total


def free(folder: Path) -> int:
    above = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("/"))
    return shutil.disk_usage(above).free


def shown(nbytes: int) -> str:
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= s), ("KiB", 2**10))
    return f"{nbytes / size:,.1f} {unit}"


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp")

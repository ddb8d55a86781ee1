"""A file of lines that loses none while its disk is full."""

from __future__ import annotations

from pathlib import Path


class Lines:
    """Lines at the end of a file. What finds no room waits in memory, and goes before the next line."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, line: str) -> str:
        """Write a line. Returns why it has to wait, in a few words; nothing if it is written."""
        self._waiting += f"{line}\n".encode()
        try:
            while self._waiting:  # a disk that is getting full takes a part
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    @property
    def missing(self) -> int:
        """How many lines wait."""
        return self._waiting.count(b"\n")

    def close(self) -> None:
        """Close the file; lines that still wait are lost."""
        self._file.close()

"""Files that a user names."""

from __future__ import annotations

import errno
from pathlib import Path
from stat import S_ISDIR, S_ISREG


def finite(path: str | Path) -> Path:
    """The path of a file that has an end. Raises OSError for a pipe or a device, and for what is not there."""
    path = Path(path)
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not S_ISDIR(mode):  # to read a folder fails by itself, with words of its own
        raise OSError(errno.EINVAL, "a pipe or a device, which may have no end")
    return path

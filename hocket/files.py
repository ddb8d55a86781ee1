"""Files that a user names, and files that they refer to."""

from __future__ import annotations

import errno
import json
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any


def regular_file(path: str | Path) -> Path:
    """The path, checked not to be a pipe or device, which may never end. Raises OSError if it is one or is missing."""
    path = Path(path)
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not S_ISDIR(mode):  # reading a folder fails with its own message
        raise OSError(errno.EINVAL, "a pipe or a device, which may have no end")
    return path


def json_in(path: str | Path) -> Any:
    """The content of a JSON file. Raises OSError if it cannot be read, and ValueError if it is not complete JSON."""
    try:
        return json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "brackets are too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is no whole JSON ({reason})") from None


def inside(file: Path, name: str) -> Path:
    """The file in or below the folder of `file` that `file` names. Raises ValueError for a name outside of the folder.

    Symbolic links may point anywhere: the user made them, as the cache of Hugging Face does.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{file} names files that are not in its folder, such as {name!a}")
    return file.parent / path


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `<name>.old`, `.old2`, ...; None if it is missing. One rank only."""
    if not path.exists():
        return None
    names = [path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in range(1, 1000)]
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target

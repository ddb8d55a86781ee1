"""Files that a user names, and files that those name."""

from __future__ import annotations

import errno
import json
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any


def finite(path: str | Path) -> Path:
    """The path of a file that has an end. Raises OSError for a pipe or a device, and for what is not there."""
    path = Path(path)
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not S_ISDIR(mode):  # to read a folder fails by itself, with words of its own
        raise OSError(errno.EINVAL, "a pipe or a device, which may have no end")
    return path


def json_in(path: str | Path) -> Any:
    """What a file of JSON says. Raises OSError where it cannot be read, and ValueError where it is not whole JSON."""
    try:
        return json.loads(finite(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "brackets are too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is no whole JSON ({reason})") from None


def inside(file: Path, name: str) -> Path:
    """The file beside or below `file` that `file` names. Raises ValueError for a name that leads out of its folder.

    Symbolic links may lead anywhere: the user has made them, as the cache of Hugging Face does.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{file} names files that are not in its folder, such as {name!a}")
    return file.parent / path


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `<name>.old`, `.old2`, ...; None if there is none. One rank only."""
    if not path.exists():
        return None
    names = [path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in range(1, 1000)]
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target

"""What a checkpoint on disk should be, by the sizes and checksums in its `meta.json`, and what is wrong with it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hocket.files import inside
from hocket.fsdp.saving.archives import FILES, checksum
from hocket.fsdp.saving.harmless import METADATA
from hocket.runtime.world import everyone, rank_and_world

FORMAT = 1
"""Number of the format. It changes whenever saved data changes its meaning."""

META = "meta.json"
"""The file that hocket adds to those of DCP."""

CHECK = "check"
"""The key in `meta.json` of the checksum of all else that it says."""


def damage_of(path: Path) -> str:
    """The damage of a checkpoint on disk, in a few words; empty if it is complete. The same on all ranks."""
    return next((text for text in everyone(_damage_seen(path)) if text), "")


def _damage_seen(path: Path) -> str:
    """The damage that this rank sees. The ranks share the work of reading everything once."""
    try:
        meta = json.loads((path / META).read_text())
        if not is_complete(meta):
            return f"{path / META} cannot be read"
        if meta["format"] != FORMAT:
            return f"it has format {meta['format']}, and this version of hocket reads format {FORMAT}"
        if not is_sealed(meta):
            return f"the checksum of {path / META} is wrong"
        rank, world = rank_and_world()
        mine = sorted(meta["files"].items())[rank::world]
        with ThreadPoolExecutor(FILES) as pool:
            return next(
                filter(None, pool.map(lambda each: damage_of_file(inside(path / META, each[0]), each[1]), mine)), ""
            )
    except FileNotFoundError:
        return f"{path} is not a checkpoint: it has no {META}" if path.exists() else f"{path} does not exist"
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"{path / META} cannot be read"


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What `meta.json` says, with its own checksum."""
    return {**meta, CHECK: _check(meta)}


def is_sealed(meta: Mapping[str, Any]) -> bool:
    """Whether a `meta.json` says what was written. Those of before there was a checksum are believed."""
    return CHECK not in meta or meta[CHECK] == _check({name: meta[name] for name in meta if name != CHECK})


def _check(meta: Mapping[str, Any]) -> int:
    read_back = json.loads(json.dumps(meta))  # keys that are numbers are text in a file
    return zlib.crc32(json.dumps(read_back, sort_keys=True).encode())


def is_complete(meta: Any) -> bool:
    """Whether a `meta.json` has what a run goes on from. What it lacks altogether raises an error of Python."""
    whole = all(isinstance(meta[name], int) and meta[name] >= 0 for name in ("step", "position"))
    return whole and bool(meta["config"].keys()) and METADATA in meta["files"]


def damage_of_file(file: Path, entry: list[int]) -> str:
    """The same of one file with tensors, which should have this size and checksum. Raises OSError."""
    if not file.exists():
        return f"{file} is missing"
    size = file.stat().st_size
    if size != entry[0]:
        return f"{file} has {size:,} bytes instead of {entry[0]:,}"
    return "" if list(checksum(file)) == entry else f"the checksum of {file} is wrong"

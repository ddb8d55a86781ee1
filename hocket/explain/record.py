"""The explanation of a run, in its folder: written once, by the process that holds the folder, and read again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hocket.explain.build import explain
from hocket.explain.explanation import Explanation
from hocket.files import json_in
from hocket.resolve import Settings
from hocket.settings.schema import problem
from hocket.typed import is_a

FILE = "explanation.json"


def record(settings: Settings, folder: Path) -> None:
    """Write what was decided about a run, and why, as `hocket explain --json` shows it.

    Raises ValueError if it cannot be written.
    """
    found = explain(settings, settings.host.variables)
    temporary = folder / f"{FILE}.tmp"
    try:
        temporary.write_text(json.dumps(found.as_json(), indent=1))
        temporary.replace(folder / FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason, fix = f"cannot be written ({error.strerror})", "make room, or name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None


def read(name: str) -> Explanation:
    """The explanation that a run has written; `name` is that of its folder or of the file.

    Raises ValueError if there is none, or if it is not what this version of hocket writes.
    """
    path = Path(name)
    try:
        path = path / FILE if path.is_dir() else path
        return _built(Explanation, json_in(path), "it")
    except OSError as error:
        reason, fix = f"cannot be read ({error.strerror})", f"the folder of a run, or its {FILE}"
    except (ValueError, RecursionError) as error:
        what = error if isinstance(error, _NotAsWritten) else "no whole JSON"
        reason = f"damaged, or written by another version of hocket ({what})"
        fix = "the hocket that wrote it, or hocket explain with the words that the run was started with"
    raise ValueError(f"{path} (command line): {reason}; fix: {fix}")


class _NotAsWritten(ValueError):
    """A part of an explanation is missing, or is something else."""


def _built(hint: Any, value: Any, where: str) -> Any:
    """A value of a type, from what JSON made of such a value. What is there beyond it is passed over."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return tuple(value) if isinstance(value, list) else value
    if origin is UnionType:  # with None
        return None if value is None else _built(args[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints, parts = get_type_hints(hint), {}
        for field in dataclasses.fields(hint):
            if field.name in value:
                parts[field.name] = _built(hints[field.name], value[field.name], field.name)
            elif field.default is dataclasses.MISSING:
                raise _NotAsWritten(f"{where} lacks {field.name}")
        return hint(**parts)
    if origin is tuple and isinstance(value, list):
        return tuple(_built(args[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _built(args[1], item, where) for key, item in value.items()}
    if origin in (tuple, Mapping) or not is_a(value, hint):
        raise _NotAsWritten(f"{where} is something else")
    return value

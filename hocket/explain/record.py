"""The explanation of a run, in its folder: written once, by the process that holds the folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hocket.explain.build import explain
from hocket.resolve import Settings
from hocket.settings.leaves import problem

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

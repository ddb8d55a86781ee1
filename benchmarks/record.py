"""Writes a result file, with where its figures come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hocket.bench.record import ROOT, provenance


def write(name: str, result: dict[str, Any], folder: Path | None = None, commit: str = "") -> Path:
    """Write `<folder>/<name>.json`, by default into benchmarks/results."""
    path = (folder or ROOT / "benchmarks" / "results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(int(os.environ.get("WORLD_SIZE", "0")), commit)
    path.write_text(json.dumps({**origin, **result}, indent=1) + "\n")
    return path

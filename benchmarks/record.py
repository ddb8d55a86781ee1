"""Writes a result file, with where its figures come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.bench.record import ROOT, provenance, save

RESULTS = ROOT / "benchmarks" / "results"


def write(name: str, result: dict[str, Any], folder: Path | None = None, commit: str = "") -> Path:
    """Write `<folder>/<name>.json`, by default into benchmarks/results."""
    path = (folder or RESULTS) / f"{name}.json"
    save(path, {**provenance(int(os.environ.get("WORLD_SIZE", "0")), commit), **result})
    return path

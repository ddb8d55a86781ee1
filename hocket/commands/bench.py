"""`hocket bench`: measures a step against other programs, with what the folder `benchmarks` of a checkout has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import hocket

CHECKOUT = Path(hocket.__file__).resolve().parents[1]
"""The checkout, where hocket runs from one."""


def run(words: list[str]) -> int:
    """Measure, or list the contenders. Returns the exit code; raises ValueError where the benchmarks are not."""
    if not (CHECKOUT / "benchmarks" / "bench" / "command.py").exists():
        reason = "benchmarks are not installed with hocket"
        raise ValueError(f"bench (command line): {reason}; fix: run it in a checkout, set up by make setup")
    sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.bench.command").run(words)

"""A measurement in a process of its own, on one core, with nothing of another one in its memory."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import arguments

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600.0
"""Seconds that one measurement may take."""


def peak_mib() -> float:
    """The most memory that this program has held. `ru_maxrss` would start at what the parent process held."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def options(about: str | None) -> argparse.Namespace:
    """What a benchmark of such measurements can be told; `one` is what the fresh process is given to measure."""
    parser = arguments(about)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_fresh_process(module: str, one: str, repeats: int) -> dict[str, Any]:
    """What `python -m MODULE --one ONE --repeats N` answers. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", module, "--one", one, "--repeats", str(repeats)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{module} {one}: {done.stderr}")
    return json.loads(done.stdout)


def answer(measure: Callable[[], dict[str, Any]]) -> None:
    """In the fresh process: measure on one core, and print what came out."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    print(json.dumps(measure()))

"""Where a figure comes from: every result carries hardware, versions, commit and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("--out", "--commit", "--keep-traces")
"""Options that only say where what was measured goes, and under which name."""


def provenance(torchrun: int = 0, commit: str = "") -> dict[str, Any]:
    """Hardware, versions, commit and command of this process; `torchrun` is the number of processes it started."""
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    launcher = ["torchrun", "--nproc-per-node", str(torchrun)] if torchrun else ["python"]
    return {
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "nccl": _nccl()},
        "commit": commit or _commit(),
        "command": shlex.join([*launcher, "-m", module, *_arguments()]),
    }


def _arguments() -> list[str]:
    """The command line without what only says where the result goes."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in ELSEWHERE:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in ELSEWHERE)):
            kept.append(word)
    return kept


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"

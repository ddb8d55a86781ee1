"""Where a figure comes from: every result carries hardware, versions, commit, command and day."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("--out", "--commit", "--keep-traces")
"""Options that only say where what was measured goes, and under which name."""


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file in one piece: a process that is killed meanwhile leaves the former file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)


def origins(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `provenance` said of each run behind a result file, which may hold entries of several."""
    own = [workload["origin"] for workload in result.get("workloads", ()) if "origin" in workload]
    found = own or result.get("origins") or [result]
    return [{key: each[key] for key in ORIGIN if key in each} for each in found]


ORIGIN = ("hardware", "versions", "commit", "command", "date")


def provenance(torchrun: int = 0, commit: str = "") -> dict[str, Any]:
    """Where the figures of this process come from; `torchrun` is the number of processes it started."""
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
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
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

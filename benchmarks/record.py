"""Where a figure comes from: every result file carries hardware, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def provenance(commit: str = "") -> dict[str, Any]:
    """Hardware, versions, commit and command of this process."""
    import torch

    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else Path(sys.argv[0]).stem
    world = os.environ.get("WORLD_SIZE")
    launcher = ["torchrun", "--nproc-per-node", world] if world else ["python"]
    command = shlex.join([*launcher, "-m", module, *_arguments()])
    return {
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "nccl": _nccl()},
        "commit": commit or _commit(),
        "command": command,
    }


def write(name: str, result: dict[str, Any], folder: Path | None = None, commit: str = "") -> Path:
    """Write `<folder>/<name>.json`, by default into benchmarks/results."""
    path = (folder or ROOT / "benchmarks" / "results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(commit), **result}, indent=1) + "\n")
    return path


def _arguments() -> list[str]:
    """The command line without what only says where the result goes."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in ("--out", "--commit"):
            next(words, None)
        else:
            kept.append(word)
    return kept


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"

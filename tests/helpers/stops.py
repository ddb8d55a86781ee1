"""`hocket train ...`, in which rank 1 stops in the middle of a step: started by tests of what is said about it then.

    python -m tests.helpers.stops KIND MODULE:CLASS.METHOD train RECIPE --setting value ...

It stops at the second call of the method behind some steps: its `host` does no more, or its `device`, whatever the host
issues, or it is killed; with `kill_once` after a checkpoint, and in the first attempt only.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.cli import main
from hocket.environment import prepare

AFTER = 5
"""Steps that are done before. One of the first is a rehearsal, and the fourth the first that may be replayed."""
KILLED = Path("killed")
"""Is there once a rank was killed."""


def stop(kind: str) -> None:
    if kind == "device":
        torch.cuda._sleep(1 << 46)  # hours
    elif kind in ("kill", "kill_once"):
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Event().wait()


def due(kind: str) -> bool:
    """Whether it is time to stop."""
    if kind == "kill_once" and (KILLED.exists() or not Path("runs/tiny/checkpoints/latest").exists()):
        return False
    return steps_done() >= AFTER


def steps_done() -> int:
    lines = Path("runs/tiny/metrics.jsonl")
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def stopping(kind: str, where: str) -> None:
    """Have rank 1 of this process' workers stop there."""
    module, _, path = where.partition(":")
    owner, name = path.split(".")
    holder = getattr(importlib.import_module(module), owner)
    call, count = getattr(holder, name), 0

    def stops(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal count
        if dist.is_initialized() and dist.get_rank() == 1 and due(kind):
            count += 1
            if count == 2:
                stop(kind)
        return call(self, *args, **more)

    setattr(holder, name, stops)


if __name__ == "__main__":
    prepare(os.environ, 2)
    stopping(*sys.argv[1:3])
    main(sys.argv[3:])

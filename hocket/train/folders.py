"""The folders of a run's checkpoints: their names, which is the newest and the best, and which are deleted."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from hocket.config import TrainConfig
from hocket.fsdp.saving.whole import remove
from hocket.train.damage import META

STEPS = "step-*"
"""Names of checkpoints, as a pattern."""


def name_of(step: int) -> str:
    """The name of a checkpoint of so many steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Folders of checkpoints with their final names, by step. Other names are somebody else's: no copy is deleted."""
    found = (path for path in folder.glob(STEPS) if path.is_dir() and path == path.with_name(name_of(step_of(path))))
    return sorted(found, key=step_of, reverse=True)


def delete_old(checkpoints: Path, train: TrainConfig) -> None:
    """Delete the checkpoints that are not to be kept, behind a save that went well. Runs on rank 0.

    What the file system refuses is no error: the next save tries again.
    """
    with contextlib.suppress(OSError):
        there = newest_first(checkpoints)
        kept = train.kept
        best = best_first(there)[: kept["best"]] if kept["best"] else []
        for old in set(there[kept["newest"] :]) - set(best):
            if not kept["every"] or step_of(old) % kept["every"]:
                remove(old)


def best_first(there: Sequence[Path]) -> list[Path]:
    """Checkpoints with a held-out loss, the lowest first, and of equal ones the earliest."""
    losses = {path: _held_out(path) for path in there}
    return sorted((path for path in there if losses[path] < math.inf), key=lambda path: (losses[path], path.name))


def _held_out(path: Path) -> float:
    """The held-out loss of a checkpoint; infinite if it has none, or cannot be read."""
    try:
        loss = json.loads((path / META).read_text())["more"].get("held_out")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return math.inf
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf


def step_of(path: Path) -> int:
    """How many steps a checkpoint has by its name."""
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def newest_of(run: Path) -> Path:
    """The newest checkpoint in the folder of a run; the folder itself if it has none, for it may be a checkpoint."""
    checkpoints = run / "checkpoints"
    return next((path for path in (*newest_first(checkpoints), checkpoints / "latest") if path.exists()), run)


def link(path: Path, keep_best: int = 0) -> None:
    """Have `latest` stand for a checkpoint, and with `keep_best` the name `best` for the best one beside it.

    A link is for people: runs and commands go by the names of checkpoints. So a file system that refuses one fails no
    save, but no link stays that stands for an earlier checkpoint. `unlinked` says what is missing.
    """
    stands = {"latest": path}
    if keep_best and (best := best_first(newest_first(path.parent))):
        stands["best"] = best[0]
    for name, checkpoint in stands.items():
        if checkpoint.with_name(name).resolve() == checkpoint.resolve():
            continue
        try:
            _link(name, checkpoint)
        except OSError:
            with contextlib.suppress(OSError):
                checkpoint.with_name(name).unlink()


def unlinked(path: Path) -> str:
    """Why the newest checkpoint is not found by its link, in words; nothing if it is."""
    latest = path.with_name("latest")
    if latest.resolve() == path.resolve():
        return ""
    return f"{path} is whole, but the file system takes no link {latest}; give commands the folder of the run"


def _link(name: str, path: Path) -> None:
    if path.with_name(name).is_dir() and not path.with_name(name).is_symlink():
        set_aside(path.with_name(name))  # what a copy of the run's folder without links has made of it
    own = path.with_name(f"{name}.tmp")
    own.unlink(missing_ok=True)
    own.symlink_to(path.name)
    own.replace(path.with_name(name))


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `<name>.old`, `.old2`, ...; None if there is none. One rank only."""
    if not path.exists():
        return None
    names = [path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in range(1, 1000)]
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target

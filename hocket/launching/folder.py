"""The folder of a run, which one run at a time may hold."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.resolve import Settings
from hocket.settings.schema import problem

LOCK_WAIT = 2.0
"""Seconds in which the workers of a run that was just killed are gone."""


@contextlib.contextmanager
def run_folder(settings: Settings) -> Iterator[Path]:
    """Make the run's folder and hold it, so that no second run writes there. Forked workers hold it too.

    The system lets go of it when the last of them has ended. Raises ValueError if it cannot be written or is held.
    """
    folder = Path(settings.run.folder)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        reason, fix = f"cannot be written ({error.strerror})", "name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None
    with lock:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason, fix = "another run is writing there", "another run.name, or end that run"
                    raise ValueError(
                        problem("run.folder", settings.run.folder, settings.origins, reason, fix)
                    ) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        refuse_training(settings, folder)
        yield folder


def refuse_training(settings: Settings, folder: Path) -> None:
    """Raise ValueError if a run without communication would write where a training run has left something."""
    if settings.train.transport != "null":
        return
    metrics = folder / "metrics.jsonl"
    try:
        with metrics.open() as file:
            trained = '"transport": "null"' not in file.readline()
    except OSError:
        trained = False
    if trained or (folder / "checkpoints").exists():
        reason = "a training run has left its metrics or checkpoints there, and this run would be no training"
        fix = "leave run.folder out, which means another folder than the training run's, or name an empty one"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix))

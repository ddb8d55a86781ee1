"""The runs of a folder: their settings, progress and state; and how a run's settings have changed."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from hocket.config import Config
from hocket.config.rule import leaf, show
from hocket.config.schema import flat
from hocket.explain.explanation import FILE

# -- The runs of a folder ----------------------------------------------------------------------------------------------

METRICS = "metrics.jsonl"
TAIL = 1 << 16
"""Bytes at the end of the metrics that are read."""


@dataclass(frozen=True)
class Run:
    """One run."""

    name: str
    recipe: str
    """The recipe it was started with; empty if unknown."""
    step: int
    steps: int
    """Steps of the whole run; 0 if unknown."""
    loss: float | None
    """Loss of the last step."""
    when: datetime | None
    """Time of its last line of metrics."""
    state: str
    """running, done, stopped (before its last step), or failed to start (has no step)."""


def runs(folder: Path) -> list[Run]:
    """All runs directly below a folder, the latest last. Raises OSError if it cannot be read."""
    found = [run_of(path) for path in folder.iterdir() if (path / METRICS).exists() or (path / FILE).exists()]
    return sorted(found, key=lambda run: (run.when is not None, run.when and run.when.timestamp(), run.name))


def run_of(path: Path) -> Run:
    """The run of a folder."""
    said = json_of((path / FILE).read_bytes()) if (path / FILE).exists() else {}
    metrics = path / METRICS
    step, loss, when = 0, None, None
    if metrics.exists():
        when = datetime.fromtimestamp(metrics.stat().st_mtime).astimezone()
        for line in _last_lines(metrics):
            step = max(step, int(line.get("step", 0)))
            loss = line.get("loss", loss)
    steps = int(said.get("steps", 0))
    if _is_locked(path / "lock"):
        state = "running"
    elif not step:
        state = "failed to start"
    else:
        state = "done" if steps and step >= steps else "stopped" if steps else ""
    return Run(path.resolve().name, str(said.get("recipe", "")), step, steps, loss, when, state)


def _last_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL))
        for line in stream.read().splitlines():
            if found := json_of(line):
                yield found


def json_of(text: str | bytes) -> dict[str, Any]:
    """The object in a line of JSON; empty if the line was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_locked(lock: Path) -> bool:
    """Whether a run holds its folder's lock. Checking takes the lock for a moment; a starting run waits for it."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# -- Changes between the settings of a checkpoint and those of the run that continues from it --------------------------

TRAINED_BY = ("seed", "steps", "lr", "min_lr", "warmup", "schedule", "weight_decay", "betas", "eps", "clip")
REPORTED = ("model.", "data.", "precision.", "optimizer.", *(f"train.{name} " for name in TRAINED_BY))
"""Prefixes of settings that change results. A resumed run reports changes of these."""
CUT = ("data.sequence_length", "data.packing")
"""Settings that decide where the text is cut into sequences."""
BATCH = ("mesh.dp", "train.microbatches", "train.sequences")

Stored = Mapping[str, Any]
"""Settings as nested dictionaries, as JSON stores them."""


def stored(config: Config) -> dict[str, Any]:
    """All settings, in the form that is stored."""
    return {field.name: asdict(getattr(config, field.name)) for field in fields(Config)}


def changes(saved: Stored, config: Config) -> list[str]:
    """Settings whose value differs from the stored one."""
    then, now = flat(saved), flat(json.loads(json.dumps(stored(config))))
    differ = (name for name, value in now.items() if name in then and then[name] != value)
    return [f"{name} was {_said(then[name])} and is {_said(now[name])}" for name in differ]


def reported_changes(saved: Stored, config: Config) -> Iterator[str]:
    """Messages about the changes that affect results, as few as possible."""
    found = [x for x in changes(saved, config) if x.startswith(REPORTED) and not x.startswith("data.cache ")]
    if found:
        yield "; ".join(found)
    then = flat(saved)
    before, now = [then.get(name, 1) for name in BATCH], [leaf(config, name) for name in BATCH]
    if math.prod(before) != math.prod(now):  # only the product matters, not how ranks and microbatches share it
        was, is_ = (f"{math.prod(sizes)} ({' x '.join(map(str, sizes))})" for sizes in (before, now))
        yield f"the sequences of a step were {was} and are {is_}: {' x '.join(BATCH)}"
    if cut := [name for name in CUT if name in then and _cut_as(name, then[name]) != _cut_as(name, leaf(config, name))]:
        yield (
            f"the text is cut into other sequences ({' and '.join(cut)}), and the run's position is a number of "
            "sequences: some of the text will be read again, some never"
        )


def _cut_as(name: str, value: Any) -> Any:
    """The part of a setting that decides where sequences begin: of data.packing only best_fit differs."""
    return value == "best_fit" if name == "data.packing" else value


def _said(value: Any) -> str:
    return show(tuple(value) if isinstance(value, list) else value)

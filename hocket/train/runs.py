"""The runs of a folder: what each one is, how far it came, and whether it runs; how its settings have changed."""

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

# -- The runs of a folder: what each one is, how far it came, and whether it runs --------------------------------------

METRICS = "metrics.jsonl"
TAIL = 1 << 16
"""Bytes at the end of metrics that are looked at."""


@dataclass(frozen=True)
class Run:
    """One run."""

    name: str
    recipe: str
    """What it was started with; empty if it does not say."""
    step: int
    steps: int
    """Of the whole run; 0 if it does not say."""
    loss: float | None
    """Of the last step."""
    when: datetime | None
    """Of its last line of metrics."""
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
    if _held(path / "lock"):
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
    """What a line has; nothing if it was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _held(lock: Path) -> bool:
    """Whether a run holds its folder. To ask takes the lock for a moment, which a run that starts waits for."""
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
TOLD = ("model.", "data.", "precision.", "optimizer.", *(f"train.{name} " for name in TRAINED_BY))
"""Beginnings of the names of settings that change results. A continued run reports their changes."""
CUT = ("data.sequence_length", "data.packing")
"""Settings on which it depends where a sequence of the text begins."""
BATCH = ("mesh.dp", "train.microbatches", "train.sequences")

Stored = Mapping[str, Any]
"""Settings as nested dictionaries, of JSON."""


def stored(config: Config) -> dict[str, Any]:
    """All settings, to be written."""
    return {field.name: asdict(getattr(config, field.name)) for field in fields(Config)}


def changes(saved: Stored, config: Config) -> list[str]:
    """Settings with another value than in the stored ones."""
    then, now = flat(saved), flat(json.loads(json.dumps(stored(config))))
    differ = (name for name, value in now.items() if name in then and then[name] != value)
    return [f"{name} was {_said(then[name])} and is {_said(now[name])}" for name in differ]


def told(saved: Stored, config: Config) -> Iterator[str]:
    """The changes that change results, in as few lines as possible."""
    found = [text for text in changes(saved, config) if text.startswith(TOLD) and not text.startswith("data.cache ")]
    if found:
        yield "; ".join(found)
    then = flat(saved)
    before, now = [then.get(name, 1) for name in BATCH], [leaf(config, name) for name in BATCH]
    if math.prod(before) != math.prod(now):  # how ranks and microbatches share them changes nothing
        was, is_ = (f"{math.prod(sizes)} ({' x '.join(map(str, sizes))})" for sizes in (before, now))
        yield f"the sequences of a step were {was} and are {is_}: {' x '.join(BATCH)}"
    if cut := [name for name in CUT if name in then and _cut_as(name, then[name]) != _cut_as(name, leaf(config, name))]:
        yield (
            f"the text is cut into other sequences ({' and '.join(cut)}), and the run's position is a number of "
            "sequences: some of the text will be read again, some never"
        )


def _cut_as(name: str, value: Any) -> Any:
    """What of a setting decides where sequences begin: only best_fit packs them otherwise."""
    return value == "best_fit" if name == "data.packing" else value


def _said(value: Any) -> str:
    return show(tuple(value) if isinstance(value, list) else value)

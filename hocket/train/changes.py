"""Changes between the settings of a checkpoint and those of the run that continues from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from hocket.config import Config
from hocket.settings.schema import flat, leaf, show

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

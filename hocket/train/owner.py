"""Whose a checkpoint is.

Note: [A run has a number]
A run's folder has a random number, in `about.json`, and so has each checkpoint of the run. A folder of checkpoints that
somebody has copied from another run's folder would continue that run under this one's name, behind its metrics. So
`run.resume = auto` refuses a checkpoint with another number. A folder without a number takes that of the checkpoint:
somebody has moved it there, and the run says so. Checkpoints of before there were numbers have none.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.resolve import Settings
from hocket.runtime.world import everyone
from hocket.settings.schema import problem
from hocket.train.runs import identity

RUN = "run"
"""The key of a run's number in what a checkpoint holds beside tensors."""


def whose(settings: Settings, path: Path, meta: Mapping[str, Any]) -> list[str]:
    """What to say of whose checkpoint `run.resume = auto` has found; `meta` is its `meta.json`.

    Raises ValueError, on every rank, if it is another run's.
    """
    if settings.run.resume != "auto":
        return []
    mine, its = _number(settings), meta.get("more", {}).get(RUN, "")
    there = meta["config"].get("run", {}).get("folder", "")
    if mine and its and mine != its:
        reason = f"{path} is a checkpoint of another run, which wrote it into {there}"
        fix = f"move it away; another run.name and run.resume = {path} begin a new run with it"
        raise ValueError(problem("run.resume", "auto", settings.origins, reason, fix))
    known = bool(mine and its) or there == settings.run.folder
    return [] if known else [f"{path} was written by the run in {there}, and this run continues it"]


def number_for(settings: Settings, found: str) -> str:
    """The number of a run that begins or continues, the same on every rank; `found` is that of what it continues."""
    return _number(settings) or found or everyone(secrets.token_hex(8))[0]


def _number(settings: Settings) -> str:
    return everyone(identity(Path(settings.run.folder)))[0]

"""Section `run`: name and folder of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hocket.config.rule import FILLED, OnlyWith, Rule


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and folder of a run."""

    name: str = "run"
    """Name of the run. By default that of its file or recipe."""
    folder: str = ""
    """Folder of metrics, logs and checkpoints; empty means `runs/<name>`, or `runs/<name>-null`."""
    resume: Annotated[
        str,
        FILLED,
        OnlyWith(
            "train.transport other than null",
            idle=("auto", "off"),
        ),
    ] = "auto"
    """auto continues from the newest complete checkpoint of the folder. off starts over. A path loads that
    checkpoint."""
    elastic: bool = False
    """If torchrun started fewer processes than the mesh has ranks, as `--nnodes 1:2` may, hocket takes a smaller mesh.
    A step has the same sequences."""


RUN_RULES = (
    Rule(
        ("run.name",),
        lambda c, h: not c.run.name.strip() or "/" in c.run.name or c.run.name in (".", ".."),
        "a run's name is a folder's name",
        "a run.name without slashes (run.folder names another place)",
    ),
)

"""Copy engines that were chosen are tried before a job begins; where they fail, all ranks take NCCL and say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hocket.program.mesh import Purpose
from hocket.resolve import Settings, without_copies
from hocket.runtime.trial import LIMIT, why_no_copies
from hocket.tune.transport_choice import TRANSPORT, chose_copies


def tried(settings: Settings, rank: int, device: Any, trial: Callable[..., str] = why_no_copies) -> Settings:
    """The settings by which all ranks go: as they are, or on NCCL where copy engines were chosen and do not serve.

    All ranks call it at the same point, with the same settings.
    """
    if not chose_copies(settings, settings.decisions):
        return settings
    reason = trial(_purposes(settings), device, min(LIMIT, settings.train.hang_timeout))
    if not reason:
        return settings
    settled = without_copies(settings, reason)
    if rank == 0:
        said = next(decision for decision in settled.decisions if decision.setting == TRANSPORT)
        sys.stdout.write(f"hocket: {said}\n")
    return settled


def _purposes(settings: Settings) -> list[Purpose]:
    """A group that NCCL leaves to copy engines, and one whose ranks copy into each other's memory, where needed."""
    mesh = settings.mesh
    needed: tuple[tuple[Purpose, bool], ...] = (("gather_dense", mesh.data > 1), ("a2a", mesh.ep > 1 or mesh.pp > 1))
    return [purpose for purpose, there in needed if there]

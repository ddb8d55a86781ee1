"""Checks that all ranks of a run have the same settings, before any of them begins.

Each process that torchrun or Slurm starts resolves the configuration by itself. If commands, files or hosts differ,
processes may get different plans, and would wait for each other until a watchdog ends them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hocket.config.rule import leaf, problem, show
from hocket.config.schema import types
from hocket.program.mesh import Purpose
from hocket.resolve import Settings, without_copies
from hocket.runtime.trial import LIMIT, why_no_copies
from hocket.runtime.world import everyone
from hocket.tune.rules import TRANSPORT, chose_copies

_PER_HOST = ("run.", "data.paths", "data.validation", "data.tokenizer", "data.cache")
"""Prefixes of settings that name files, which may differ between hosts. The trainer compares the text itself."""


def require_same(settings: Settings, rank: int) -> None:
    """Raise ValueError, on every rank, unless all ranks have the same settings. Collective."""
    mine = {name: leaf(settings, name) for name in types() if not name.startswith(_PER_HOST)}
    first, *others = everyone(mine)
    # A rank that differs from rank 0 names rank 0. Ranks that agree with rank 0 name the first one that differs.
    other = next((number for number, found in enumerate(others, 1) if found != first), None)
    if other is None:
        return
    against, theirs = (0, first) if mine != first else (other, others[other - 1])
    name, *more = (name for name, value in mine.items() if theirs[name] != value)
    reason = f"rank {against} has {show(theirs[name])}"
    reason += f", and other values of {', '.join(more[:3])}{' and more' if more[3:] else ''}" if more else ""
    fix = "the same command and files on all hosts; where hosts are unlike, a value instead of auto"
    raise ValueError(problem(name, mine[name], settings.origins, reason, fix))


# -- Chosen copy engines are tested before a job begins. If the test fails, all ranks use NCCL and say so --------------


def copies_tested(settings: Settings, rank: int, device: Any, trial: Callable[..., str] = why_no_copies) -> Settings:
    """The settings for all ranks: unchanged, or with NCCL if hocket chose copy engines and they fail the test.

    Collective, with the same settings on all ranks.
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
    """The purposes to test, if used: a group with copy-engine collectives, and one with peer copies."""
    mesh = settings.mesh
    needed: tuple[tuple[Purpose, bool], ...] = (("gather_dense", mesh.data > 1), ("a2a", mesh.ep > 1 or mesh.pp > 1))
    return [purpose for purpose, there in needed if there]

"""Checks that all ranks of a run have the same settings, before any of them begins.

Each process that torchrun or Slurm started resolves the configuration for itself. If commands, files or hosts differ,
processes may arrive at different plans, and would wait for each other until a watchdog ends them.
"""

from __future__ import annotations

from hocket.resolve import Settings
from hocket.runtime.world import everyone
from hocket.settings.schema import leaf, problem, show, types

_OWN = ("run.", "data.paths", "data.sources", "data.validation_paths", "data.tokenizer", "data.cache")
"""Beginnings of the names of settings for places of files. They may differ between hosts. The trainer compares the
text."""


def require_same(settings: Settings, rank: int) -> None:
    """Raise ValueError, on every rank, unless all ranks have the same settings. All of them call this."""
    mine = {name: leaf(settings, name) for name in types() if not name.startswith(_OWN)}
    first = everyone({} if rank else mine)[0]
    differences = everyone({name: value for name, value in mine.items() if first[name] != value})
    other = next((number for number, found in enumerate(differences) if found), None)
    if other is None:
        return
    # Every rank that differs from rank 0 names rank 0. The ranks that agree with rank 0 name the first one that
    # differs.
    against, theirs = (0, first) if differences[rank] else (other, {**first, **differences[other]})
    name, *more = (name for name, value in mine.items() if theirs[name] != value)
    reason = f"rank {against} has {show(theirs[name])}"
    reason += f", and other values of {', '.join(more[:3])}{' and more' if more[3:] else ''}" if more else ""
    fix = "the same command and files on all hosts; where hosts are unlike, a value instead of auto"
    raise ValueError(problem(name, mine[name], settings.origins, reason, fix))

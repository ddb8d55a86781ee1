"""Whether there is room for what a run will save, asked before there is anything to lose.

All functions here are collective, as those of `train/checkpoint.py`.
"""

from __future__ import annotations

import math
import platform
import time
from pathlib import Path

from hocket.config import TrainConfig
from hocket.fsdp.saving.host_memory import copied_bytes
from hocket.fsdp.saving.whole import free, shown
from hocket.resolve import Settings
from hocket.runtime.world import by_first, everyone, rank_and_world, together
from hocket.settings.schema import problem
from hocket.train.checkpoint import Groups, checkpoints_of, problem_of, size_of, state_of
from hocket.train.folders import newest_first


def make_place(settings: Settings, groups: Groups) -> list[str]:
    """Make the folder of a run's checkpoints, before there is anything to lose.

    Returns a remark if there is less room than its checkpoints will need. Raises ValueError if the folder cannot be
    written, or if the ranks' hosts do not share it.
    """
    folder = checkpoints_of(settings)
    # Named like a checkpoint that is being written, so that what is left of it is removed like one.
    here = folder / everyone(f"step-here-{platform.node()}-{time.time_ns()}.tmp")[0]
    try:
        by_first(lambda: here.mkdir(parents=True))
        together(lambda: _require_shared(here))
        by_first(here.rmdir)
    except (OSError, ValueError) as error:
        fix = "name a folder that you can write to, on a file system that all hosts share"
        raise ValueError(problem_of(settings, f"no place for checkpoints: {error}", fix)) from None
    size, there, available = size_of(state_of(groups)), len(newest_first(folder)), free(folder)
    more = max(1, min(_most(settings.train), there + _saves(settings.train)) - there)
    if more * size <= available:
        return []
    what = f"{more} more checkpoints" if more > 1 else "a checkpoint"
    text = f"{what} will take {shown(more * size)} there, and {shown(available)} are free"
    return [problem_of(settings, text, "make room before the first one")]


def _saves(train: TrainConfig) -> int:
    """Checkpoints that a whole run writes."""
    return -(-train.steps // train.save_every) if train.save_every else 1


def _most(train: TrainConfig) -> int:
    """Most checkpoints that are there at a time, with the one that is being written."""
    kept = train.kept
    for_good = train.steps // math.lcm(kept["every"], train.save_every or train.steps) if kept["every"] else 0
    return kept["newest"] + kept["best"] + for_good + 1


def require_memory(settings: Settings, offloaded: int, copies: int, available: int) -> str:
    """Refuse what a host's ranks have no memory for, of which `available` bytes are left.

    `offloaded` and `copies` are the bytes of this rank: what steps offload, and copies of what is saved behind steps.
    Returns a remark where the host has no memory for the copies, the same on every rank: then there must be none.
    Raises ValueError, on every rank, where it has none for what is offloaded.
    """
    ranks, without = everyone((platform.node(), offloaded, copies, available)), ""
    for host in dict.fromkeys(name for name, *_ in ranks):
        of_host = [rank for rank in ranks if rank[0] == host]
        away, copied = sum(rank[1] for rank in of_host), sum(rank[2] for rank in of_host)
        room = min(rank[3] for rank in of_host)
        left = f"{shown(room)} of its memory are available"
        if away > room:
            reason = f"offloaded tensors of {host}'s ranks take {shown(away)}, and {left}"
            fix = "fewer parts or layers, such as attn:2, or plan.recompute"
            raise ValueError(problem("plan.offload", settings.plan.offload, settings.origins, reason, fix))
        if copied and away + copied > room:
            what = "copies and offloaded tensors" if away else "copies"
            without = (
                f"training waits while checkpoints are written: {what} of {host}'s ranks, with which it would go on, "
                f"take {shown(away + copied)}, and {left}"
            )
    return without


def copies_of(groups: Groups) -> int:
    """Bytes that this rank's copies take while they are written behind steps."""
    return copied_bytes(state_of(groups))


def _require_shared(here: Path) -> None:
    if not here.exists():
        rank, _ = rank_and_world()
        raise ValueError(f"rank {rank} on {platform.node()} does not see {here}, which rank 0 has created")

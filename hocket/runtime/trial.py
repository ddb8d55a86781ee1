"""Tests whether copy engines work between these ranks, before they are used.

The host's own limits (`shared_memory.problem`) are known before workers start, but a container may forbid mapping
memory of other processes. So if copy engines were chosen by default, all ranks make small groups of the kinds needed,
and use NCCL if that fails. Ranks exchange errors after each group, so all reach the same answer. A failure of one rank
alone ends in the group's timeout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from hocket.program.mesh import Purpose
from hocket.runtime.comm import CommOptions, Group, make_group
from hocket.runtime.shared_memory import apart, place, problem
from hocket.runtime.world import everyone

LIMIT = 60.0
"""Timeout of a trial in seconds."""
_ROOM = 1 << 20
"""Bytes of arrival buffers."""
NUMBERS = 1 << 19
"""Elements gathered from each rank, in several pieces."""

Ranks = tuple[int, ...]
MakeGroup = Callable[[Purpose, Ranks, torch.device, CommOptions], Group | None]


def copied(purpose: Purpose, ranks: Ranks, device: torch.device, options: CommOptions) -> Group | None:
    """A group on copy engines that has passed a test. Raises RuntimeError if results are wrong."""
    group = make_group(purpose, ranks, torch.distributed.get_rank(), device, "copy_engine", options)
    if group is None or not purpose.startswith(("gather", "reduce")):
        return group
    whole = torch.arange(group.size * NUMBERS, device=device, dtype=torch.float32)  # integers, so sums are exact
    mine = whole.view(group.size, NUMBERS)[group.rank]
    if purpose.startswith("gather"):
        found, wanted = torch.empty_like(whole), whole
        group.all_gather(found, mine.clone()).wait()
    else:
        small = whole % 1000
        found, wanted = torch.empty_like(mine), group.size * (mine % 1000)
        group.reduce_sum(small, found, 1.0, add=False).wait()
    if not torch.equal(found, wanted):
        raise RuntimeError("GPUs do not find in each other's memory what was written there")
    return group


def why_no_copies(
    purposes: Sequence[Purpose],
    device: torch.device,
    timeout: float,
    look: Callable[[], str] = problem,
    make: MakeGroup = copied,
    groups: Sequence[Ranks] = (),
) -> str:
    """Why copy engines cannot serve groups for these purposes; the same on all ranks, empty if they can.

    All ranks of the world call this at the same point. `groups` defaults to one of all ranks. `look` returns what is
    wrong with this rank's GPUs; `make` makes and uses a group, which is destroyed on success.
    """
    places = everyone(place(look()))
    groups = groups or [tuple(range(len(places)))]
    reasons = {apart([places[rank] for rank in ranks]) for ranks in groups} - {""}
    if reasons:
        return sorted(reasons)[0]
    for purpose, ranks in itertools.product(purposes, groups):
        group, failed = None, ""
        try:
            group = make(purpose, ranks, device, CommOptions(timeout=timeout, arrival=_ROOM, half=_ROOM))
        except Exception as error:  # fall back to NCCL whatever it is
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        reasons = sorted(set(everyone(failed)) - {""})
        if reasons:
            return f"a trial failed ({'; '.join(reasons)})"
        if group is not None:
            group.transport.destroy()
    return ""

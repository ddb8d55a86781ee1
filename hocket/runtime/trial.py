"""Whether copy engines serve these ranks: tried, before anything is built on it.

What a host says of itself (`shared_memory.problem`) is known before workers start. Whether memory can be mapped into
other processes is not: a container may forbid it. So where copy engines were chosen, and nobody asked for them, all
ranks make small groups of the kinds that they would use, and take NCCL if that fails.

Note: [All ranks try alike]
The ranks tell each other what went wrong behind each group, so they come to one answer. What a host or a container
forbids it forbids all of them, so none waits for another one in the middle of a group; if one ever does, the group's
time limit ends the run with an error, as it would later.
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
"""Seconds that a rank waits for others, at most."""
_ROOM = 1 << 20
"""Bytes of arrival buffers."""
NUMBERS = 1 << 19
"""What a trial gathers of each rank, in several pieces."""

Ranks = tuple[int, ...]
MakeGroup = Callable[[Purpose, Ranks, torch.device, CommOptions], Group | None]


def copied(purpose: Purpose, ranks: Ranks, device: torch.device, options: CommOptions) -> Group | None:
    """A group on copy engines, which has moved some numbers. Raises RuntimeError if they are not what arrived."""
    group = make_group(purpose, ranks, torch.distributed.get_rank(), device, "copy_engine", options)
    if group is None or not purpose.startswith(("gather", "reduce")):
        return group
    whole = torch.arange(group.size * NUMBERS, device=device, dtype=torch.float32)  # whole numbers, so sums are exact
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
    """Why copy engines cannot serve groups for these purposes, the same on all ranks; empty if they can.

    All ranks of the world call it at the same point. The groups are of all ranks, or `groups`. `look` says what is
    wrong with this rank's GPUs; `make` makes a group and uses it. Nothing of the groups is left if all goes well.
    `timeout` is in seconds.
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
        except Exception as error:  # whatever it is, NCCL can do without
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        reasons = sorted(set(everyone(failed)) - {""})
        if reasons:
            return f"a trial failed ({'; '.join(reasons)})"
        if group is not None:
            group.transport.destroy()
    return ""

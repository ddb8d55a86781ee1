"""Whether copy engines serve these ranks: tried, before anything is built on it.

What a host says of itself (`copy_engine.problem`) is known before workers start. Whether memory can be mapped into
other processes is not: a container may forbid it. So where copy engines were chosen, and nobody asked for them, all
ranks make small groups of the kinds that they would use, and take NCCL if that fails.

Note: [All ranks try alike]
The ranks tell each other what went wrong behind each group, so they come to one answer. What a host or a container
forbids it forbids all of them, so none waits for another one in the middle of a group; if one ever does, the group's
time limit ends the run with an error, as it would later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hocket.program.mesh import Purpose
from hocket.runtime.comm import CommOptions, Group, make_group
from hocket.runtime.copy_engine import problem
from hocket.runtime.peer_access import apart, place
from hocket.runtime.world import everyone

LIMIT = 60.0
"""Seconds that a rank waits for others, at most."""
_ROOM = 1 << 20
"""Bytes of arrival buffers."""

MakeGroup = Callable[[Purpose, torch.device, CommOptions], Group | None]


def of_all(purpose: Purpose, device: torch.device, options: CommOptions) -> Group | None:
    """A group of all ranks on copy engines."""
    world = tuple(range(torch.distributed.get_world_size()))
    return make_group(purpose, world, torch.distributed.get_rank(), device, "copy_engine", options)


def why_no_copies(
    purposes: Sequence[Purpose],
    device: torch.device,
    timeout: float,
    look: Callable[[], str] = problem,
    make: MakeGroup = of_all,
) -> str:
    """Why copy engines cannot serve groups for these purposes, the same on all ranks; empty if they can.

    All ranks of the world call it at the same point. `look` says what is wrong with this rank's GPUs; `make` makes a
    group and uses it. Nothing of the groups is left if all goes well. `timeout` is in seconds.
    """
    if reason := apart(everyone(place(look()))):
        return reason
    for purpose in purposes:
        group, failed = None, ""
        try:
            group = make(purpose, device, CommOptions(timeout=timeout, arrival=_ROOM))
        except Exception as error:  # whatever it is, NCCL can do without
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        reasons = sorted(set(everyone(failed)) - {""})
        if reasons:
            return f"a trial failed ({'; '.join(reasons)})"
        if group is not None:
            group.transport.destroy()
    return ""

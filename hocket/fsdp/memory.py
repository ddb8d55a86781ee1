"""Where the full-size tensors of a sharded module lie: gathered weights, and gradients before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.fsdp.buffers import FullBuffer, StagingMemory
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.param_group import ParamGroup


def place_weights(units: Sequence[Unit]) -> None:
    """Give every group memory for gathered weights, and bind its parameters to it."""
    for unit in units:
        for group in unit.groups:
            if group.whole:
                group.bind(group.weight)
            else:
                unit.use(group, FullBuffer(group.layout.total, group.compute_dtype, group.device))


def place_gradients(units: Sequence[Unit], count: int, caller: Callable[[], int]) -> dict[ParamGroup, StagingMemory]:
    """The staging memory of each trainable group, shared by all units that send over the same ranks.

    Not by units that contain others: they collect gradients for as long as these run, and would take a buffer away from
    them.
    """
    trainable = [(unit, group) for unit in units for group in unit.groups if group.trainable]
    users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
    for unit, group in trainable:
        key = unit if unit.contains_units else None, group.groups.reduce, group.formats.wire
        users.setdefault(key, []).append((unit, group))
    staging: dict[ParamGroup, StagingMemory] = {}
    for alike in users.values():
        unit, group = alike[0]
        number = len(alike) if unit.contains_units else count
        memory = StagingMemory(number, group.formats.wire, group.device, caller)
        staging.update(dict.fromkeys((one for _, one in alike), memory))
    return staging

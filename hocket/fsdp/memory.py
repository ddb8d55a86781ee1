"""Where the full-size tensors of a sharded module lie: gathered weights, and gradients before they are reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hocket.fsdp.buffers import FullBuffer, Staging, StagingMemory, StagingRing
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.residency import FixedSlots


def place_weights(units: Sequence[Unit], slots: FixedSlots | None, fixed: bool) -> int:
    """Give every group memory for gathered weights, and bind its parameters to it.

    Units of one of the `slots` share memory; others have their own, which stays if `fixed`. Returns the bytes that
    stay.
    """
    every = [(unit, group) for unit in units for group in unit.groups]
    shared = _shared(slots, every) if slots is not None else []
    apart = [[one] for one in every if not any(one in users for users in shared)]
    return sum(_place(users, fixed) for users in [*shared, *apart])


def _shared(slots: FixedSlots, mine: Sequence[tuple[Unit, ParamGroup]]) -> list[list[tuple[Unit, ParamGroup]]]:
    """Which groups take turns in one buffer: the n-th of their dtype and ranks in units of one slot."""
    users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
    seen: Counter[object] = Counter()
    for unit, group in mine:
        if group.whole or unit not in slots:
            continue
        alike = group.compute_dtype, group.groups.gather
        seen[unit, alike] += 1
        users.setdefault((slots.slot_of(unit), alike, seen[unit, alike]), []).append((unit, group))
    return list(users.values())


def _place(users: Sequence[tuple[Unit, ParamGroup]], fixed: bool) -> int:
    """Bind groups to one buffer as long as the largest of them. Returns its bytes if it stays."""
    unit, group = max(users, key=lambda user: user[1].layout.total)
    if group.whole:
        group.bind(group.weight)
        return 0
    make = FullBuffer.fixed if fixed else FullBuffer.dynamic
    buffer = make(group.layout.total, group.compute_dtype, group.device)
    for unit, group in users:
        unit.use(group, buffer)
    return buffer.nbytes if fixed else 0


def place_gradients(
    units: Sequence[Unit], count: int, fixed: bool, caller: Callable[[], int]
) -> dict[ParamGroup, Staging]:
    """The staging memory of each trainable group, shared by all units that send over the same ranks.

    Not by units that contain others: they collect gradients for as long as these run, and would take a buffer away from
    them.
    """
    trainable = [(unit, group) for unit in units for group in unit.groups if group.trainable]
    users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
    for unit, group in trainable:
        key = unit if unit.contains_units else None, group.groups.reduce, group.formats.wire
        users.setdefault(key, []).append((unit, group))
    staging: dict[ParamGroup, Staging] = {}
    for alike in users.values():
        unit, group = max(alike, key=lambda user: user[1].layout.total)
        number = len(alike) if unit.contains_units else count
        memory = (
            StagingRing(number, group.layout.total, group.formats.wire, group.device)
            if fixed
            else StagingMemory(number, group.formats.wire, group.device, caller)
        )
        staging.update(dict.fromkeys((one for _, one in alike), memory))
    return staging

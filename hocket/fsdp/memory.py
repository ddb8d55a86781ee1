"""Where the full-size tensors of a sharded module lie: gathered weights, and gradients before they are reduced.

Everything that a collective touches is allocated here, group by group, inside the group's window (`Group.window`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hocket.fsdp.buffers import FullBuffer, Staging, StagingMemory, StagingRing
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.residency import FixedSlots
from hocket.runtime.comm import Window

T = TypeVar("T")


def place_weights(units: Sequence[Unit], slots: FixedSlots | None, fixed: bool) -> tuple[int, list[Window]]:
    """Give every group memory for gathered weights, and bind its parameters to it.

    Units of one of the `slots` share memory; others have their own, which stays if `fixed`. Returns the bytes that
    stay, and the windows in which they lie.
    """
    total, windows = 0, list[Window]()
    groups = [group for unit in units for group in unit.groups]
    for gather in _distinct(group.groups.gather for group in groups):
        mine = [(unit, group) for unit in units for group in unit.groups if group.groups.gather is gather]
        with gather.window() as window:
            shared = _shared(slots, mine) if slots is not None else []
            for users in [*shared, *([one] for one in mine if not any(one in users for users in shared))]:
                total += _place(users, fixed)
        windows.append(window)
    return total, windows


def _shared(slots: FixedSlots, mine: Sequence[tuple[Unit, ParamGroup]]) -> list[list[tuple[Unit, ParamGroup]]]:
    """Which groups take turns in one buffer: the n-th of their dtype in units of one slot."""
    users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
    seen: Counter[object] = Counter()
    for unit, group in mine:
        if group.whole or unit not in slots:
            continue
        seen[unit, group.compute_dtype] += 1
        key = slots.slot_of(unit), group.compute_dtype, seen[unit, group.compute_dtype]
        users.setdefault(key, []).append((unit, group))
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
) -> tuple[dict[ParamGroup, Staging], list[Window]]:
    """The staging memory of each trainable group, shared by all units that send over the same ranks; its windows.

    Not by units that contain others: they collect gradients for as long as these run, and would take a buffer away from
    them.
    """
    trainable = [(unit, group) for unit in units for group in unit.groups if group.trainable]
    users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
    for unit, group in trainable:
        key = unit if unit.contains_units else None, group.groups.reduce, group.formats.wire
        users.setdefault(key, []).append((unit, group))
    staging: dict[ParamGroup, Staging] = {}
    rings: dict[ParamGroup, StagingRing] = {}
    windows: list[Window] = []
    for alike in users.values():
        unit, group = max(alike, key=lambda user: user[1].layout.total)
        number = len(alike) if unit.contains_units else count
        if not fixed:
            memory = StagingMemory(number, group.formats.wire, group.device, caller)
            staging.update(dict.fromkeys((one for _, one in alike), memory))
            continue
        ring = StagingRing(number, group.layout.total, group.formats.wire, group.device)
        rings.update(dict.fromkeys((one for _, one in alike), ring))
    for reduce in _distinct(group.groups.reduce for _, group in trainable):
        if reduce.has_windows:
            mine = _distinct(ring for group, ring in rings.items() if group.groups.reduce is reduce)
            with reduce.window(reduced=max(ring.numel * ring.dtype.itemsize for ring in mine)) as window:
                for ring in mine:
                    ring.allocate()
            windows.append(window)
    return staging | rings, windows


def _distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))

"""Parameters that are frozen, or trained again, after the model was sharded.

Parameters of a unit are in one group if they were alike when it was sharded, so a group may have frozen ones beside
others: these have no gradient, and zeros are sent for them. A group of frozen ones alone sends nothing. One in which
nothing was trained gets memory for gradients when that changes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hocket.fsdp.module_unit import Unit
from hocket.fsdp.param_group import ParamGroup


def watch(unit: Unit, hook: Callable[[nn.Parameter], None]) -> None:
    """Let the shards of a unit be frozen and trained again.

    `hook` has a driver see the gradients of a parameter.
    """
    for group in unit.groups:
        group.changed_by = _changer(unit, group, hook)


def _changer(unit: Unit, group: ParamGroup, hook: Callable[[nn.Parameter], None]) -> Callable[[int, bool], None]:
    def change(index: int, trains: bool) -> None:
        name = group.members[index].name
        unit.context.forget_old_forwards()
        if unit.claims or unit.open:
            raise ValueError(
                f"requires_grad of {name} is set between a forward and its backward: set it before the forward"
            )
        if trains and not group.trainable:
            group.trainable = True
            unit.context.stage_anew()
        group.train(index, trains)
        if trains:
            hook(group.members[index].param)

    return change

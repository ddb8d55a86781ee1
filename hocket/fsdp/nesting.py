"""Sharded modules that become parts of a larger model: `fully_shard` of blocks first, then of what is around them.

Each call shards its module at once, and makes a model of it that could run by itself. The call around it takes the
units of these models over, with the names that their parameters have in the larger one. So a model is complete with its
first forward, as with FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hocket.fsdp.members import UNIT, View, watch_reads
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.weights import sink_of


def nested_in(modules: Sequence[nn.Module]) -> list[ShardContext]:
    """The models that were sharded inside of some modules, in the order of the tree."""
    found: dict[ShardContext, None] = {}
    for module in modules:
        for one in module.modules():
            unit = one.__dict__.get(UNIT)
            if unit is not None and isinstance(unit.context, ShardContext):
                found[unit.context] = None
    return list(found)


def refuse_nested(module: nn.Module, nested: Sequence[ShardContext], around: bool) -> None:
    """Refuse a module of which something is sharded already, unless the call may go `around` whole models."""
    for context in nested:
        inside = {one for one in module.modules() if one is not module}
        whole = all(one in inside for unit in context.units if not unit.name for one in unit.modules)
        names = {one: name for name, one in module.named_modules()}
        name = next((names[one] for unit in context.units for one in unit.modules if one in names), "")
        what = f"its {name!r} belongs" if name else "it belongs"
        if not whole or not around or not context.nests:
            raise ValueError(
                f"the {type(module).__name__} can't be sharded: {what} to a sharded model already. Shard a model once, "
                f"with units= naming the modules that are gathered as one, or blocks first and then the module around "
                f"them, without units=, strategy=, precision=, place= and options="
            )
        if context.forwards:
            raise ValueError(
                f"the {type(module).__name__} can't be sharded: {what} to a sharded model that has run a forward. Call "
                f"fully_shard on all modules before the first forward"
            )


def take_over(root: nn.Module, nested: Sequence[ShardContext]) -> list[Unit]:
    """The units of nested models, with the names that they have in `root`, which may hold their parameters, too."""
    names = {module: name for name, module in root.named_modules()}
    units = [unit for context in nested for unit in context.units]
    for unit in units:
        unit.evict()
        first, last = (names[module] for module in (unit.modules[0], unit.modules[-1]))
        unit.name = first if len(unit.modules) == 1 else f"{first}..{last}"
        for group in unit.groups:
            for i, member in enumerate(group.members):
                owner, key = member.owners[0]
                group.rename(i, f"{names[owner]}.{key}")
    _adopt(root, units)
    place = {module: i for i, module in enumerate(names)}
    return sorted(units, key=lambda unit: place[unit.modules[0]])


def _adopt(root: nn.Module, units: Sequence[Unit]) -> None:
    """Tied weights: modules outside of a unit that hold its full parameters get the shards, too."""
    holders: dict[nn.Parameter | None, tuple[Unit, ParamGroup, int]] = {
        member.given: (unit, group, i)
        for unit in units
        for group in unit.groups
        for i, member in enumerate(group.members)
    }
    for module in root.modules():
        for key, param in list(module._parameters.items()):
            if param is not None and param in holders and sink_of(param) is not None:
                unit, group, i = holders[param]
                group.rename(i, group.members[i].name, (module, key))
                unit.views.append(View(module, key, group.members[i]))
                module._parameters[key] = group.shards[i]
                watch_reads(module)
                module.__dict__.setdefault(UNIT, unit)

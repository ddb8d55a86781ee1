"""How `fully_shard` builds a sharded model: groups of parameters, shards in modules, hooks, and the context.

Note: [Blocks first, then the model]
Each call shards its module at once, into a model that could run by itself. A later call on an enclosing module takes
over the units of these models and renames their parameters. So a model is complete at its first forward, as with FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.optimizer import Optimizer

from hocket.fsdp import hooks
from hocket.fsdp.checks import IGNORED, Fingerprints, refuse_foreign, refuse_strange, refuse_uncalled, take_first_rank
from hocket.fsdp.dtensors import divided, mesh_of, ranks_of, refuse_overlap, spec_of
from hocket.fsdp.extensions import ExtendedGroup, extended, on_mesh
from hocket.fsdp.fsdp2 import FSDPModule, Place, ShardRequest
from hocket.fsdp.members import (
    UNIT,
    Member,
    Named,
    Rule,
    assign,
    found_parameters,
    guard_saving,
    make_buckets,
    mark_full,
    watch_reads,
)
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.options import Formats, Precision, ShardOptions, UnitOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.same_order import order_over
from hocket.fsdp.shard_groups import Placement, shard_groups_for
from hocket.fsdp.sharded_parameter import make_parameter


def materialize(params: Sequence[Member], device: torch.device, options: ShardOptions) -> list[Member]:
    """Move parameters to `device`. Those on the meta device get memory there, and values after sharding.

    With `offload`, CPU parameters stay on the CPU.
    """
    found = []
    for one in params:
        param = one.param
        stays = options.offload != "none" and param.device.type == "cpu"
        if param.is_meta:
            param = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            for owner, key in one.owners:
                owner._parameters[key] = param
        elif not stays and param.device != device:
            param.data = param.data.to(device)
        found.append(replace(one, param=param))
    return found


def nested_in(modules: Sequence[nn.Module]) -> list[ShardContext]:
    found: dict[ShardContext, None] = {}
    for module in modules:
        for one in module.modules():
            unit = one.__dict__.get(UNIT)
            if unit is not None and isinstance(unit.context, ShardContext):
                found[unit.context] = None
    return list(found)


def refuse_nested(module: nn.Module, nested: Sequence[ShardContext], around: bool) -> None:
    """Refuse a module that is sharded already, in part or whole, unless the call goes `around` whole models."""
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
    """The units of nested models, renamed for `root`, which may share their parameters."""
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
    """Tied weights: give shards to modules outside of a unit that hold its full parameters."""
    holders: dict[nn.Parameter | None, tuple[Unit, ParamGroup, int]] = {
        member.given: (unit, group, i)
        for unit in units
        for group in unit.groups
        for i, member in enumerate(group.members)
    }
    for module in root.modules():
        for key, param in list(module._parameters.items()):
            if param is not None and param in holders:
                unit, group, i = holders[param]
                group.rename(i, group.members[i].name, (module, key))
                module._parameters[key] = group.shards[i]
                watch_reads(module)
                module.__dict__.setdefault(UNIT, unit)


contexts: WeakSet[ShardContext] = WeakSet()
checked: WeakSet[Optimizer] = WeakSet()
"""Optimizers checked since the last sharding."""


def shard_model(module: nn.Module, units: Rule, request: ShardRequest) -> ShardContext:
    refuse_nested(module, nested_in([module]), around=False)
    refuse_foreign(module, ())
    params = _params(module, request)
    refuse_strange(module, params)
    buckets = make_buckets(module, units, request.options.bucket)
    return _shard(module, [module], buckets, params, [], request)


def shard_one(modules: Sequence[nn.Module], request: ShardRequest) -> ShardContext:
    """Make one unit of the parameters of modules that are in no unit yet, and one model of all units."""
    nested = nested_in(modules)
    for module in modules:
        refuse_uncalled(module)
        refuse_nested(module, nested_in([module]), around=True)
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    refuse_foreign(tree, {id(param) for context in nested for unit in context.units for param in unit.parameters})
    params = _params(tree, request)
    if params or not nested:
        refuse_strange(tree, params)
    if request.options.device is not None:
        _move_buffers(modules, torch.device(request.options.device))
    return _shard(tree, modules, [], params, nested, request)


def _params(tree: nn.Module, request: ShardRequest) -> list[Member]:
    """The parameters to shard. Ignored ones are marked."""
    ignored = {id(param) for param in request.ignored}
    params = found_parameters(tree)
    for found in params:
        if id(found.param) in ignored:
            setattr(found.param, IGNORED, True)
    return [extended(divided(found, request.spmd)) for found in params if id(found.param) not in ignored]


def _shard(
    tree: nn.Module,
    modules: Sequence[nn.Module],
    buckets: Sequence[Sequence[Named]],
    params: Sequence[Member],
    nested: Sequence[ShardContext],
    request: ShardRequest,
) -> ShardContext:
    """Make units of the buckets, and one of the rest of `tree`, the tree of `modules`."""
    options, strategy = request.options, request.strategy
    device = _device(params, options, request.nests) if params else nested[0].device
    _refuse_pinned(options, device)
    placements, default = _placements(params, request.place), Placement(request.mesh, options.divide)
    tensors = _refuse_divided(params, placements, default, nested)
    everyone = shard_groups_for(default, strategy, options, device)
    owned = assign(tree, [one for bucket in buckets for _, one in bucket], params)
    made, fingerprints = list[Unit](), Fingerprints()
    policy = MixedPrecisionPolicy(request.precision.compute, request.precision.wire)
    for bucket in [None, *buckets]:
        members = [found for one in ([tree] if bucket is None else [one for _, one in bucket]) for found in owned[one]]
        mine = materialize(members, device, options)
        valueless = {new.param for old, new in zip(members, mine, strict=True) if old.param.is_meta}
        groups = []
        for (place, *_), alike in _alike(mine, placements, default, request.precision).items():
            where = shard_groups_for(place, strategy, options, device)
            make = ParamGroup
            if alike[0].extension is not None:
                make, where = partial(ExtendedGroup, policy=policy), on_mesh(where, place, device)
            here = [member for member in alike if member.param not in valueless]
            if request.first_rank:
                take_first_rank([member.param for member in here], where, device)
            fingerprints.add(here, where, device)
            group = make(alike, where, request.precision, device, options.offload)
            group.shards = [make_parameter(group, i, spec_of(group, i, tensors)) for i in range(len(alike))]
            groups.append(group)
            groups[-1].late = groups[-1].valueless = len(here) < len(alike)
        made.append(_unit(bucket or [("", one) for one in modules], groups, request.unit))
        for old, new in zip(members, mine, strict=True):
            if old.param.is_meta:  # its value is in the shards: a model larger than a GPU is built unit by unit
                new.param.untyped_storage().resize_(0)
    if request.first_rank:
        take_first_rank([x for one in modules for x in one.buffers() if not x.is_meta], everyone, device)
    fingerprints.compare()
    contexts.difference_update(nested)
    units = [*made, *take_over(tree, nested)] if nested else made
    order = order_over(request.mesh) if options.transport != "null" else None
    context = ShardContext(units, strategy, options, everyone, device, order, request.nests)
    _install(context, made, manual=options.driver == "manual")
    return context


def _unit(bucket: Sequence[Named], groups: Sequence[ParamGroup], options: UnitOptions) -> Unit:
    (first, _), (last, _) = bucket[0], bucket[-1]
    name = first if first == last else f"{first}..{last}"
    return Unit(name, [module for _, module in bucket], groups, options)


def _placements(params: Sequence[Member], place: Place | None) -> dict[str, Placement | None]:
    """Where `place` puts each parameter, by name; None is the default mesh."""
    placements = {found.name: place(found.name, found.param) if place else None for found in params}
    for name, placement in placements.items():
        if placement is not None and not isinstance(placement, Placement):
            raise ValueError(f"place returned {placement!r} for {name}: return a hocket.sharding.Placement, or None")
    return placements


def _refuse_divided(
    params: Sequence[Member],
    placements: Mapping[str, Placement | None],
    default: Placement,
    nested: Sequence[ShardContext],
) -> DeviceMesh | None:
    """Refuse DTensors that can't be sharded on their mesh. Returns the tensor-parallel mesh, if any."""
    named = [(one.name, one.dtensor) for one in params]
    tensors = mesh_of(named, [context.tensor_mesh for context in nested], ranks_of(default.mesh))
    for one in (m for context in nested for group in context.param_groups for m in group.members):
        if one.dtensor is not None and one.dtensor.part is None:
            refuse_overlap(one.name, one.dtensor, default.mesh)
    for name, layout in named:
        if layout is None:
            continue
        place = placements[name] or default
        refuse_overlap(name, layout, place.mesh)
        if layout.part is None:  # experts must differ between ranks
            refuse_overlap(name, layout, default.mesh)
        if place.part[1] > 1:
            raise ValueError(
                f"parameter {name} is a DTensor, and place says that it is part {place.part} of one: give one of both"
            )
    return tensors


def _alike(
    params: Sequence[Member],
    placements: Mapping[str, Placement | None],
    default: Placement,
    precision: Precision,
) -> dict[tuple[Placement, Formats, bool, bool], list[Member]]:
    groups: dict[tuple[Placement, Formats, bool, bool], list[Member]] = {}
    for found in params:
        where = placements[found.name] or default
        key = where, precision.of(found.param.dtype), found.param.requires_grad, found.extension is not None
        groups.setdefault(key, []).append(found)
    return groups


def _install(context: ShardContext, made: Sequence[Unit], manual: bool) -> None:
    inner = {module for unit in context.units if unit.name for module in unit.modules}
    for unit in context.units:
        inside = {m for one in unit.modules for m in one.modules() if m is not one}
        unit.contains_units = bool(inside & inner)
        for one in unit.modules:
            one.__dict__[UNIT] = unit
    context.place(made)
    for unit in made:
        for group in unit.groups:
            for member, shard in zip(group.members, group.shards, strict=True):
                shard.read_on_demand = _reader(unit, member)
                if (given := member.given) is not None:
                    mark_full(given)
                for owner, key in member.owners:
                    dict.__setitem__(owner._parameters, key, shard)  # not through `Managed`, which refuses
                    watch_reads(owner)
                    owner.__dict__.setdefault(UNIT, unit)
        for one in unit.modules:  # also without own parameters: must refuse copies
            watch_reads(one, FSDPModule)
            for model in one.modules():
                guard_saving(model)
        if not manual:
            hooks.drive(unit)
    contexts.add(context)
    checked.clear()  # an optimizer may hold parameters just sharded


def _reader(unit: Unit, member: Member) -> Callable[[], Tensor | None]:
    return lambda: member.shown() if unit.context.read_on_demand(unit) else None


def _device(params: Sequence[Member], options: ShardOptions, nests: bool) -> torch.device:
    devices = {found.param.device for found in params if not found.param.is_meta}
    if options.device is not None:
        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={options.device!r}, but this machine has no GPU that torch can use: use 'cpu'")
        return device
    if not devices and nests:
        return torch.device("cpu")  # like a mesh of all ranks without GPUs
    if not devices:
        raise ValueError("all parameters are on the meta device: say where they go with ShardOptions(device=...)")
    if len(devices) > 1:
        first = next(found for found in params if found.param.device == sorted(devices, key=str)[1])
        raise ValueError(
            f"parameters are on several devices: {', '.join(sorted(map(str, devices)))} ({first.name} is on "
            f"{first.param.device}); move the model to one, or set ShardOptions(device=...)"
        )
    device = devices.pop()
    if options.offload != "none" and device.type == "cpu" and dist.is_initialized() and "nccl" in dist.get_backend():
        raise ValueError(
            f"offload={options.offload!r} of a model on the CPU: say which device computes, as by "
            f"ShardOptions(device='cuda', offload={options.offload!r})"
        )
    return device


def _refuse_pinned(options: ShardOptions, device: torch.device) -> None:
    if options.offload == "pinned" and device.type == "cpu":
        raise ValueError(
            "offload='pinned' of a model that computes on the CPU, for which no memory is pinned: leave it out, or say "
            "offload='pageable', which is CPUOffloadPolicy(pin_memory=False) of FSDP2"
        )


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for one in module.modules():
            for key, buffer in one._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    one._buffers[key] = buffer.to(device)

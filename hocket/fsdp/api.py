"""`fully_shard`: shard the parameters of any module over ranks, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hocket.fsdp import hooks
from hocket.fsdp.agreement import Fingerprints
from hocket.fsdp.buckets import Named, make_buckets, parse_bucket
from hocket.fsdp.checks import (
    UNIT,
    is_full,
    refuse_early,
    refuse_matrices,
    refuse_newcomers,
    refuse_sharded,
    refuse_strange,
    refuse_types,
)
from hocket.fsdp.grad_norm import squares_of
from hocket.fsdp.materialize import materialize
from hocket.fsdp.members import Found, Rule, assign, found_parameters, watch_reads
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.options import ShardOptions
from hocket.fsdp.param_group import Member, ParamGroup
from hocket.fsdp.precision import Precision
from hocket.fsdp.same_order import order_over
from hocket.fsdp.shard_groups import Placement, shard_groups_for
from hocket.fsdp.strategy import Prefetch, policy_of
from hocket.fsdp.torch_functions import install

Place = Callable[[str, nn.Parameter], Placement | None]

_contexts: WeakSet[ShardContext] = WeakSet()
_checked: WeakSet[Optimizer] = WeakSet()
install(_contexts)


def fully_shard(
    module: nn.Module,
    *,
    units: Rule = None,
    mesh: DeviceMesh | None = None,
    strategy: str = "optim_grads_params",
    precision: Precision | None = None,
    place: Place | None = None,
    options: ShardOptions | None = None,
) -> ShardContext:
    """Shard a module's parameters, their gradients and the optimizer's state over the ranks of a mesh.

    Every rank keeps a part of each parameter; `module.parameters()` yields these parts from now on, with the shape of
    the whole one, for any elementwise optimizer, which must be built afterwards. Training code stays as it is:
    `loss.backward()`, `optimizer.step()`. Gradients are averaged over the ranks of the mesh.

    Args:
        module: holds the same weights on all ranks (or is on the meta device; see `ShardOptions.init`).
        units: what is gathered as one: a class of modules, a tuple of them, a predicate of (name, module), or modules
            of the model; None: see `ShardOptions.bucket`. What no unit holds is a unit too, of the module itself.
        mesh: ranks to shard over; with two axes (outer, shard), see `ShardOptions.outer`. None: all ranks.
        strategy: `no_shard`, `optim`, `optim_grads` or `optim_grads_params`: what is kept in parts.
        precision: dtypes of the main weights, of compute, of gradients on the wire, and of their sum.
        place: (name, parameter) -> where this parameter goes instead of `mesh`, such as experts; None: to `mesh`.
        options: see `ShardOptions`.

    Raises: ValueError for settings that don't fit the module, the mesh or the machine, on every rank, before anything
        is changed.

    """
    refuse_types(module, mesh, precision, place, options)
    precision, options = precision or Precision(), options or ShardOptions()
    policy = policy_of(strategy, options.slot_count, options.staging, options.unified)
    refuse_sharded(module)
    params = found_parameters(module)
    refuse_strange(module, params)
    buckets = make_buckets(module, units, parse_bucket(options.bucket), precision)
    inner = [one for bucket in buckets for _, one in bucket]
    device, placements = _device(params, options), _placements(params, place)
    owned = assign(module, inner, params)
    default = Placement(mesh, options.divide)
    made, fingerprints = list[Unit](), Fingerprints()
    for bucket in [[("", module)], *buckets]:
        members = [found for _, one in bucket for found in owned[one]]
        mine = materialize(members, device, options.init)
        groups = []
        for key, alike in _alike(mine, placements, default, precision).items():
            where = shard_groups_for(key[0], strategy, options, device)
            fingerprints.add(alike, where)
            groups.append(ParamGroup(alike, where, precision, options.granularity, device))
        made.append(_unit(bucket, groups))
        for old, new in zip(members, mine, strict=True):
            if old.param.is_meta:  # its value lies in the shards: a model that fits no GPU is made unit by unit
                new.param.untyped_storage().resize_(0)
    fingerprints.compare()
    prefetch, everyone = Prefetch.parse(options.prefetch), shard_groups_for(default, strategy, options, device)
    order = order_over(mesh) if options.transport != "null" else None
    context = ShardContext(made, policy, prefetch, everyone, device, order)
    _install(context, set(inner), manual=options.driver == "manual")
    return context


def _unit(bucket: Sequence[Named], groups: Sequence[ParamGroup]) -> Unit:
    (first, _), (last, _) = bucket[0], bucket[-1]
    return Unit(first if len(bucket) == 1 else f"{first}..{last}", [module for _, module in bucket], groups)


def _placements(params: Sequence[Found], place: Place | None) -> dict[str, Placement | None]:
    """Where `place` puts each parameter, by name; None is the mesh of the others."""
    placements = {found.name: place(found.name, found.param) if place else None for found in params}
    for name, placement in placements.items():
        if placement is not None and not isinstance(placement, Placement):
            raise ValueError(f"place returned {placement!r} for {name}: return a hocket.sharding.Placement, or None")
    return placements


def _alike(
    params: Sequence[Found],
    placements: Mapping[str, Placement | None],
    default: Placement,
    precision: Precision,
) -> dict[tuple[Placement, torch.dtype, bool], list[Member]]:
    """The parameters of a unit that can share buffers and collectives."""
    groups: dict[tuple[Placement, torch.dtype, bool], list[Member]] = {}
    for found in params:
        where = placements[found.name] or default
        key = where, precision.compute or found.param.dtype, found.param.requires_grad
        groups.setdefault(key, []).append(Member(found.name, found.param, list(found.owners)))
    return groups


def _install(context: ShardContext, inner: set[nn.Module], manual: bool) -> None:
    """Put shards in the place of parameters, and the driver on the modules."""
    for unit in context.units:
        inside = {m for one in unit.modules for m in one.modules() if m is not one}
        unit.contains_units = bool(inside & inner)
        for one in unit.modules:
            one.__dict__[UNIT] = unit
    context.place()
    for unit in context.units:
        for group in unit.groups:
            for member, shard in zip(group.members, group.shards, strict=True):
                shard.read_outside = _reader(context, unit, member.param)
                for owner, key in member.owners:
                    dict.__setitem__(owner._parameters, key, shard)  # of a module with another shard it refuses
                    watch_reads(owner)
                    owner.__dict__.setdefault(UNIT, unit)
        for one in unit.modules:  # may hold no parameter itself, and must refuse copies all the same
            watch_reads(one)
        if not manual:
            hooks.drive(unit, context)
    _contexts.add(context)
    _checked.clear()  # an optimizer may hold what has just been sharded


def _reader(context: ShardContext, unit: Unit, full: nn.Parameter) -> Callable[[], nn.Parameter | None]:
    return lambda: full if context.read_outside(unit) else None


def _device(params: Sequence[Found], options: ShardOptions) -> torch.device:
    """Where the shards go."""
    devices = {found.param.device for found in params if not found.param.is_meta}
    if options.device is not None:
        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={options.device!r}, but this machine has no GPU that torch can use: use 'cpu'")
        return device
    if not devices:
        raise ValueError("all parameters are on the meta device: say where they go with ShardOptions(device=...)")
    if len(devices) > 1:
        first = next(found for found in params if found.param.device == sorted(devices, key=str)[1])
        raise ValueError(
            f"parameters are on several devices: {', '.join(sorted(map(str, devices)))} ({first.name} is on "
            f"{first.param.device}); move the model to one, or set ShardOptions(device=...)"
        )
    return devices.pop()


def refuse_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Raise ValueError for an optimizer that would update wrongly or nothing, or if a model has newcomers."""
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if is_full(param):
                raise ValueError(
                    f"the {type(optimizer).__name__} was built before hocket.fully_shard, so it would update nothing: "
                    f"build it from module.parameters() afterwards"
                )
    refuse_matrices(optimizer)
    for context in _contexts:
        refuse_newcomers(context.root)
    _checked.add(optimizer)


register_optimizer_step_pre_hook(refuse_optimizer)


def unit_of(module: nn.Module) -> Unit:
    """The unit that a module is, or that holds its parameters."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module!r} is no module: give a sharded model, or a module of one")
    if UNIT not in module.__dict__:
        raise ValueError(f"this {type(module).__name__} is no unit of a sharded model and holds none of its parameters")
    return module.__dict__[UNIT]


def context_of(module: nn.Module | ShardContext) -> ShardContext:
    """The context of a sharded module."""
    found = module if isinstance(module, ShardContext) else unit_of(module).context
    assert isinstance(found, ShardContext)
    return found


def param_groups(module: nn.Module, rule: Callable[[str, tuple[int, ...]], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: `rule(name, whole shape)` gives settings, such as weight decay."""
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for unit in context_of(module).units:
        for group in unit.groups:
            for member, shard in zip(group.members, group.shards, strict=True):
                if member.param.requires_grad:
                    settings = tuple(sorted(rule(member.name, tuple(member.param.shape)).items()))
                    groups.setdefault(settings, []).append(shard)
    return [{"params": params, **dict(settings)} for settings, params in groups.items()]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module | ShardContext, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`. Returns the norm before, fp64.

    Every rank calls this, after backward. It counts every element of every gradient once, whichever meshes the
    parameters are on, if the mesh given to `fully_shard` has all ranks that hold them.
    """
    context = context_of(module)
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm!r} must be a number, 0 or above")
    refuse_early(context, "clip_grad_norm_")
    context.finish_step()
    groups = [group for unit in context.units for group in unit.groups if group.trainable and group.has_grad]
    square = torch.zeros(1, dtype=torch.float64, device=context.device)
    for group in groups:
        group.tidy()
    squares = squares_of([group.main_grad for group in groups]) if groups else ()
    for group, mine in zip(groups, squares, strict=True):
        square += mine / group.groups.replicas
    context.over_ranks(square, "sum")
    norm = square.sqrt().squeeze(0)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in groups:
        group.main_grad.mul_(factor.to(group.main_grad.dtype))
    return norm

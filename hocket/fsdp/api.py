"""`fully_shard`: shard the parameters of any module over ranks, and what goes with it.

Note: [A step between two collectives]
An optimizer's step stands between the last reduction of a step and the first gather of the next one, and neither has
compute of the model beside it. The update of a unit needs that unit's gradients alone, and its gather needs that
unit's update alone. So units are updated one after the other, and each is gathered behind its own update:

    reduce    ... layer 0 | embed
    update        head | layer 3 | layer 2 | embed | layer 0 | layer 1
    gather                                         | embed   | layer 0 ...

Gathers stand in the order in which the forward needs them. Updates do, too, if all gradients are here: when their norm
was taken, which needs all of them. Otherwise the second half of the model comes first, from its end, for backward has
begun there and its reductions are done: those of the first half are on the wire meanwhile.

An elementwise optimizer gives the same bits in any order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hocket.fsdp import hooks
from hocket.fsdp.checks import is_full, refuse_early, refuse_matrices, refuse_newcomers, refuse_types
from hocket.fsdp.dtensors import copies
from hocket.fsdp.fsdp2 import Fsdp2Arguments, FSDPModule, Place, request_of
from hocket.fsdp.members import UNIT, Rule
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.options import Precision, ShardOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard import checked, contexts, shard_model, shard_one
from hocket.fsdp.shard_grads import squares_of

M = TypeVar("M", nn.Module, list[nn.Module])


@overload
def fully_shard(module: M, *, mesh: DeviceMesh | None = None, **fsdp2: Unpack[Fsdp2Arguments]) -> M: ...


@overload
def fully_shard(
    module: nn.Module,
    *,
    units: Rule = None,
    mesh: DeviceMesh | None = None,
    strategy: str | None = None,
    precision: Precision | None = None,
    place: Place | None = None,
    options: ShardOptions | None = None,
    **fsdp2: Unpack[Fsdp2Arguments],
) -> ShardContext: ...


def fully_shard(
    module: Any,
    *,
    units: Rule = None,
    mesh: DeviceMesh | None = None,
    strategy: str | None = None,
    precision: Precision | None = None,
    place: Place | None = None,
    options: ShardOptions | None = None,
    **fsdp2: Unpack[Fsdp2Arguments],
) -> Any:
    """Shard a module's parameters, their gradients and the optimizer's state over the ranks of a mesh.

    Every rank keeps a part of each parameter; `module.parameters()` yields these parts from now on, with the shape of
    the whole one, for any elementwise optimizer, which must be built afterwards. Training code stays as it is:
    `loss.backward()`, `optimizer.step()`. Gradients are averaged over the ranks of the mesh.

    With one of hocket's own arguments, those but `mesh`, a call shards a whole model and returns its `ShardContext`.
    Without, it is FSDP2's function: it makes one unit of what the module, or a list of them, holds outside of units
    made before, so blocks come first and the model last. It returns its argument, which has FSDP2's methods.

    Args:
        module: holds the same weights on all ranks (or is on the meta device; see `ShardOptions.init`).
        units: what is gathered as one: a class of modules, a tuple of them, a predicate of (name, module), or modules
            of the model; None: see `ShardOptions.bucket`. What no unit holds is a unit too, of the module itself.
        mesh: ranks to shard over; with two axes (outer, shard), see `ShardOptions.outer`. None: all ranks.
        strategy: `no_shard`, `optim`, `optim_grads` or `optim_grads_params`, which is None: what is kept in parts.
        precision: dtypes of the main weights, of compute, of gradients on the wire, and of their sum.
        place: (name, parameter) -> where this parameter goes instead of `mesh`, such as experts; None: to `mesh`.
        options: see `ShardOptions`.
        **fsdp2: see `Fsdp2Arguments`.

    Raises: ValueError for settings that don't fit the module, the mesh or the machine, on every rank, before anything
        is changed.

    """
    own = {"units": units, "strategy": strategy, "precision": precision, "place": place, "options": options}
    nests = all(value is None for value in own.values())
    modules = list(module) if nests and isinstance(module, list | tuple) else [module]
    refuse_types(modules, mesh, precision, place, options)
    request = request_of(mesh, own, fsdp2, nests)
    if nests:
        shard_one(modules, request)
        return module
    return shard_model(module, units, request)


def refuse_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Raise ValueError for an optimizer that would update wrongly or nothing, or if a model has newcomers."""
    if optimizer in checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if is_full(param):
                raise ValueError(
                    f"the {type(optimizer).__name__} was built before hocket.fully_shard, so it would update nothing: "
                    f"build it from module.parameters() afterwards"
                )
    refuse_matrices(optimizer)
    for context in contexts:
        refuse_newcomers(context.root)
    checked.add(optimizer)


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
    return module if isinstance(module, ShardContext) else hooks.context_of(unit_of(module))


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


def _counted(group: ParamGroup, mesh: DeviceMesh | None) -> list[tuple[Tensor, int]]:
    """Gradients of a group, and how many ranks have the same: those of a model's tensor-parallel `mesh` too."""
    if mesh is None:
        return [(group.main_grad, group.groups.replicas)]
    views = zip(group.grads.views(), group.shards, strict=True)
    return [(view, group.groups.replicas * copies(mesh, shard.span.part)) for view, shard in views]


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
    groups = [group for group in context.param_groups if group.trainable and group.has_grad]
    square = torch.zeros(1, dtype=torch.float64, device=context.device)
    for group in groups:
        group.tidy()
    grads = [pair for group in groups for pair in _counted(group, context.tensor_mesh)]
    squares = squares_of([grad for grad, _ in grads]) if grads else ()
    for (_, holders), mine in zip(grads, squares, strict=True):
        square += mine.to(square.device) / holders
    context.over_ranks(square, "sum")
    norm = square.sqrt().squeeze(0)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in groups:
        group.main_grad.mul_(factor.to(group.main_grad))
    return norm


class instead_of_fsdp2(contextlib.ContextDecorator):
    """Inside, what looks up `torch.distributed.fsdp.fully_shard` finds hocket's: accelerate and `Trainer` do.

    They look when they prepare a model, so that belongs inside; what follows may come after. Weights that the first
    rank alone has loaded (accelerate's `cpu_ram_efficient_loading`) reach the shards of the others, too. It may be
    entered again, also inside of itself.
    """

    def __enter__(self) -> None:
        global _inside
        with _lock:
            if not _inside:
                _replace()
            _inside += 1

    def __exit__(self, *_: object) -> None:
        global _inside
        with _lock:
            _inside -= 1
            if not _inside:
                _replaced.close()


_lock, _inside = threading.Lock(), 0  # how many contexts there are, of all threads: the last one undoes it
_replaced = contextlib.ExitStack()


def _replace() -> None:
    with contextlib.ExitStack() as undone:
        undone.enter_context(patch.object(fsdp, "fully_shard", fully_shard))
        if importlib.util.find_spec("accelerate") is not None:
            theirs = importlib.import_module("accelerate.utils.fsdp_utils")
            if hasattr(theirs, "fsdp2_load_full_state_dict"):  # older ones know nothing of FSDP2
                load = functools.partial(_load_from_first_rank, theirs.fsdp2_load_full_state_dict)
                undone.enter_context(patch.object(theirs, "fsdp2_load_full_state_dict", load))
        _replaced.push(undone.pop_all())


def _load_from_first_rank(theirs: Callable[..., Any], accelerator: Any, model: Any, full_sd: Any, **more: Any) -> Any:
    """What accelerate has as `fsdp2_load_full_state_dict`, which cuts DTensors itself, for a model on meta."""
    if not isinstance(model, FSDPModule):
        return theirs(accelerator, model, full_sd, **more)
    model.to_empty(device=accelerator.device)  # pyrefly: ignore[missing-attribute]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_sd, options=options)  # pyrefly: ignore[bad-argument-type]
    return model


def step_and_gather(module: nn.Module | ShardContext, optimizer: Optimizer) -> None:
    """Call `optimizer.step()` unit by unit, and start the gather of each unit's weights as soon as they are new.

    The same as `optimizer.step()`, bit for bit; see Note: [A step between two collectives]. As many units are gathered
    as the strategy keeps, and `prefetch` allows. Step hooks of the optimizer run once per unit. Every rank calls this.

    Raises: ValueError inside of a backward.
    """
    context = context_of(module)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{optimizer!r} is no torch optimizer: give the one that holds the model's parameters")
    if context.in_backward:
        raise ValueError(
            "step_and_gather is called inside of a backward: call it afterwards; after a backward that ended with an "
            "exception, call abort() of the ShardContext on all ranks"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"the step of {type(optimizer).__name__} takes a closure, which computes gradients of the whole model in "
            f"its midst: call optimizer.step(closure)"
        )
    if isinstance(optimizer, torch.optim.Muon):
        raise ValueError(
            "step_and_gather updates units while others are still reduced, and Muon communicates on the same groups: "
            "call optimizer.step()"
        )
    refuse_optimizer(optimizer)  # all of it, before the first unit is updated
    order = context.ahead.order_of_use()
    ahead = context.ahead.to_gather_first(order)
    update = _updates(optimizer, order)
    with context.gradients_arrive() as under_way:
        updated = set[Unit]()
        for unit in _by_arrival(order) if under_way else order:
            unit.wait_reduced()
            update(unit)
            updated.add(unit)
            while ahead and ahead[0] in updated:
                ahead.pop(0).prefetch()
    update(None)


def _by_arrival(order: Sequence[Unit]) -> list[Unit]:
    """The half of the units whose gradients come first, by their bytes, then the others in the order of use."""
    sizes = [sum(group.main.nbytes for group in unit.groups) for unit in order]
    half = next(n for n in range(len(order) + 1) if 2 * sum(sizes[:n]) >= sum(sizes))
    return [*reversed(order[half:]), *order[:half]]


def _updates(optimizer: Optimizer, units: Sequence[Unit]) -> Callable[[Unit | None], None]:
    """Updates the parameters of one unit; of None, those that are in no unit."""
    unit_of = {id(shard): unit for unit in units for group in unit.groups for shard in group.shards}
    chosen: dict[Unit | None, list[list[nn.Parameter]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            empty: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
            chosen.setdefault(unit_of.get(id(param)), empty)[number].append(param)

    def update(unit: Unit | None) -> None:
        if unit in chosen:
            with _holding(optimizer, chosen[unit]):
                optimizer.step()

    return update


@contextmanager
def _holding(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """Inside, the optimizer holds these parameters alone, group by group."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group, some in zip(groups, params, strict=True):
        group["params"] = some
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, before in zip(groups, whole, strict=True):
            group["params"] = before

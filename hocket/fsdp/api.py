"""`fully_shard`: shards the parameters of any module over ranks; gradient clipping and stepping of sharded models.

Note: [A step between two collectives]
An optimizer step runs between the last reduce-scatter of one step and the first all-gather of the next, and neither
overlaps with compute. But a unit's update needs only its own gradients, and its gather only its own update. So units
are updated one by one, each followed by its gather:

    reduce    ... layer 0 | embed
    update        head | layer 3 | layer 2 | embed | layer 0 | layer 1
    gather                                         | embed   | layer 0 ...

Gathers follow the order of the forward. So do updates if all gradients are there, as after clipping. Otherwise the
second half of the model is updated first, last layer first: backward began there, and the first half is still being
reduced. An elementwise optimizer gives the same bits in any order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hocket.fsdp.buffers import squares_of
from hocket.fsdp.checks import refuse_early, refuse_newcomers
from hocket.fsdp.dtensors import copies
from hocket.fsdp.fsdp2 import Fsdp2Arguments, FSDPModule, Place, request_of
from hocket.fsdp.members import UNIT, Rule, is_full
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.options import Precision, ShardOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard import checked, contexts, shard_model, shard_one

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

    Every rank keeps rows of each parameter. `module.parameters()` then yields DTensors of them, for an optimizer built
    afterwards. The training loop stays the same: `loss.backward()`,
    `optimizer.step()`. Gradients are averaged over the ranks of the mesh.

    With any of hocket's own arguments except `mesh`, a call shards a whole model and returns its `ShardContext`.
    Without, it acts as FSDP2's function: it makes one unit of the parameters of a module, or of a list of modules, that
    are in no unit yet, so call it on blocks first and the model last. It returns its argument, which has FSDP2's
    methods.

    Args:
        module: has the same weights on all ranks, or is on the meta device: then call `module.to_empty(device=...)` and
            give initial values, or load a state dict.
        units: what is gathered together: a class of modules, a tuple of them, a predicate of (name, module), or modules
            of the model; None: see `ShardOptions.bucket`. Remaining parameters form a unit of the module itself.
        mesh: ranks to shard over; with two axes, (replicate, shard), the first one holds replicas. None: all ranks.
        strategy: what is sharded: `no_shard`, `optim`, `optim_grads` or `optim_grads_params`, the default.
        precision: dtypes of the main weights, of compute, of gradients on the wire, and of their sum.
        place: (name, parameter) -> where to shard this parameter, such as experts; None: over `mesh`.
        options: see `ShardOptions`.
        **fsdp2: see `Fsdp2Arguments`.

    Raises: ValueError for settings that don't fit the module, the mesh or the machine, on every rank, before anything
    is changed.

    """
    own = {"units": units, "strategy": strategy, "precision": precision, "place": place, "options": options}
    nests = all(value is None for value in own.values())
    modules = list(module) if nests and isinstance(module, list | tuple) else [module]
    request = request_of(modules, mesh, own, fsdp2, nests)
    if nests:
        shard_one(modules, request)
        return module
    return shard_model(module, units, request)


def refuse_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Raise ValueError for an optimizer that would update wrongly or nothing, or if a model has new parameters."""
    if optimizer in checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if is_full(param):
                raise ValueError(
                    f"the {type(optimizer).__name__} was built before hocket.fully_shard, so it would update nothing: "
                    f"build it from module.parameters() afterwards"
                )
    for context in contexts:
        refuse_newcomers(context.root)
    checked.add(optimizer)


register_optimizer_step_pre_hook(refuse_optimizer)


def unit_of(module: nn.Module) -> Unit:
    """The unit of a module, or of its parameters."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module!r} is no module: give a sharded model, or a module of one")
    if UNIT not in module.__dict__:
        raise ValueError(f"this {type(module).__name__} is no unit of a sharded model and holds none of its parameters")
    return module.__dict__[UNIT]


def context_of(module: nn.Module | ShardContext) -> ShardContext:
    """The context of a sharded module."""
    return module if isinstance(module, ShardContext) else unit_of(module).context


def _counted(group: ParamGroup, mesh: DeviceMesh | None) -> list[tuple[Tensor, int]]:
    """Gradients of a group, and how many ranks hold the same elements, including the tensor-parallel `mesh`."""
    if mesh is None and all(entry.shape for entry in group.layout.entries):
        return [(group.main_grad, group.groups.replicas)]
    views = enumerate(group.grads.views())
    return [(view, group.holders(i) * copies(mesh, group.members[i].dtensor)) for i, view in views]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module | ShardContext, max_norm: float) -> Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`. Returns the norm before, fp64.

    Every rank calls this, after backward. Every element of every gradient counts once, on whichever mesh it is sharded,
    if the mesh given to `fully_shard` has all ranks that hold parameters.
    """
    context = context_of(module)
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm!r} must be a number, 0 or above")
    refuse_early(context, "clip_grad_norm_")
    context.finish_step()
    groups = [group for group in context.param_groups if group.has_grad]
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
    """Inside, `torch.distributed.fsdp.fully_shard` is hocket's, as for accelerate and `Trainer`.

    They look it up when they prepare a model, so that call belongs inside. Weights loaded by the first rank alone
    (accelerate's `cpu_ram_efficient_loading`) reach all shards. Reentrant.
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


_lock, _inside = threading.Lock(), 0  # contexts entered, over all threads; the last one undoes it
_replaced = contextlib.ExitStack()


def _replace() -> None:
    with contextlib.ExitStack() as undone:
        undone.enter_context(patch.object(fsdp, "fully_shard", fully_shard))
        if importlib.util.find_spec("accelerate") is not None:
            theirs = importlib.import_module("accelerate.utils.fsdp_utils")
            if hasattr(theirs, "fsdp2_load_full_state_dict"):  # older versions lack FSDP2
                load = functools.partial(_load_from_first_rank, theirs.fsdp2_load_full_state_dict)
                undone.enter_context(patch.object(theirs, "fsdp2_load_full_state_dict", load))
        _replaced.push(undone.pop_all())


def _load_from_first_rank(theirs: Callable[..., Any], accelerator: Any, model: Any, full_sd: Any, **more: Any) -> Any:
    """Replaces accelerate's `fsdp2_load_full_state_dict`, which shards DTensors itself, for a model on meta."""
    if not isinstance(model, FSDPModule):
        return theirs(accelerator, model, full_sd, **more)
    model.to_empty(device=accelerator.device)  # pyrefly: ignore[missing-attribute]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_sd, options=options)  # pyrefly: ignore[bad-argument-type]
    return model


def step_and_gather(module: nn.Module | ShardContext, optimizer: Optimizer) -> None:
    """Call `optimizer.step()` unit by unit, and start each unit's gather right after its update.

    Bitwise the same as `optimizer.step()`; see Note: [A step between two collectives]. It gathers as many units as the
    strategy keeps and `prefetch` allows. Step hooks of the optimizer run once per unit. Every rank calls this.

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
    refuse_optimizer(optimizer)  # before the first unit is updated
    order = context.ahead.order_of_use()
    extended = {unit for unit in order for group in unit.groups if group.extended}  # their scales may come after this
    ahead = context.ahead.to_gather_first([unit for unit in order if unit not in extended])
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
    """First the later half of the units, by bytes, in reverse order of use; then the earlier half in order."""
    sizes = [sum(group.main.nbytes for group in unit.groups) for unit in order]
    half = next(n for n in range(len(order) + 1) if 2 * sum(sizes[:n]) >= sum(sizes))
    return [*reversed(order[half:]), *order[:half]]


def _updates(optimizer: Optimizer, units: Sequence[Unit]) -> Callable[[Unit | None], None]:
    """A function that updates the parameters of one unit, or with None those in no unit."""
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
    """Inside, the optimizer holds only these parameters, group by group."""
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

"""An optimizer's step unit by unit, with communication on both sides of it: `step_and_gather`.

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

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.fsdp.api import context_of, refuse_optimizer
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit


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

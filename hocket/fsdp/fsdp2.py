"""What PyTorch's FSDP2 calls its arguments, policies and methods, in terms of units.

A module that is a unit, or one of a unit's, gets the methods of FSDP2's `FSDPModule`, and is an instance of it: other
code tells sharded modules by that. Methods for what hocket does anyway do nothing. What it has no counterpart for
is an error that names the fix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from torch import nn
from torch.distributed.fsdp import (
    FSDPModule as TorchFSDPModule,
)
from torch.distributed.fsdp import (
    UnshardHandle,
)

from hocket.fsdp.hooks import context_of
from hocket.fsdp.members import UNIT
from hocket.fsdp.module_unit import Claim, Unit
from hocket.fsdp.shard_groups import Placement


class _Handle(UnshardHandle):
    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims

    def wait(self) -> None:
        for claim in self._claims:
            claim.wait()
        self._claims = ()


class _State:
    """What torch's own `register_fsdp_forward_method` calls, and all that its `share_comm_ctx` writes to."""

    _fsdp_param_groups = ()
    _comm_ctx = None

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._pre_forward, self._after = before, after

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._after(module, args, {}, output)


class FSDPModule(TorchFSDPModule):
    """The methods of a module that is a unit. `recurse` is for the units inside of it, too."""

    _hocket_original: ClassVar[type[nn.Module]]
    """The class of the module before it was sharded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module of the same class, as slices of an `nn.Sequential` are."""
        plain = cls._hocket_original.__new__(cls._hocket_original, *args, **kwargs)
        plain.__init__(*args, **kwargs)  # not an instance of `cls`, so Python leaves it to us
        return plain

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the weights and show them, until `reshard`, the module's next forward, or until they change."""
        unit = _unit(self)
        context = context_of(unit)
        context.forget_old_forwards()  # now, and not in a forward that reads these weights
        handle = _Handle([context.outside.unshard(unit)])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give up the gathered weights, unless a forward or backward uses them."""
        unit = _unit(self)
        context_of(unit).outside.reshard(unit)
        unit.reshard()

    def reset_iter_state(self) -> None:
        """After an exception inside of a step: forget its claims and gradients. See `ShardContext.abort`."""
        context_of(_unit(self)).abort()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or only adds them up on this rank, until it does or they are read."""
        _set(self, recurse, "set_requires_gradient_sync", sync=requires_gradient_sync)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether replicas exchange what backward has reduced, or leave it to a later backward."""
        _set(self, recurse, "set_requires_all_reduce", all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered weights go between forward and backward. Not while they are in use."""
        units = _units(self, recurse)
        busy = [unit for unit in units if unit.claims]
        if busy:
            raise ValueError(
                f"set_reshard_after_forward while {busy[0]} is in use: call it before a forward or after a backward"
            )
        for unit in units:
            unit.reshard()  # who may stay is settled by whoever gathers it next
        _set(self, recurse, "set_reshard_after_forward", reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether weights that stay after forward go when backward is over."""
        _set(self, recurse, "set_reshard_after_backward", reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the module's backward needs its weights. That of an embedding does not."""
        _set(self, False, "set_unshard_in_backward", unshard_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this unit by `factor`, instead of by the number of ranks."""
        Placement(None, factor)  # which refuses what is no number to divide by
        for group in _unit(self).groups:
            group.divide = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these when the forward of this module begins, instead of what was needed next the last time."""
        unit = _unit(self)
        context_of(unit).prefetch_of(unit, _all_units(modules, "set_modules_to_forward_prefetch"), backward=False)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these when the backward of this module begins, instead of what was needed next the last time."""
        unit = _unit(self)
        context_of(unit).prefetch_of(unit, _all_units(modules, "set_modules_to_backward_prefetch"), backward=True)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to do: the end of a backward waits for nothing, in no case."""

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing to do: gathers come behind all that was issued when the forward begins, so behind this event."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to do: ranks' gradients are summed, then divided."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing to do: a unit is reduced whole, and ranks may use other parameters of it."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing to do: reductions have a group of their own."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to do: gathers never wait."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units of the model may have gradients on their way; two, without this."""
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers={max_input_buffers!r} must be a number of buffers, at least 1")
        context_of(_unit(self)).staging_count(max_input_buffers)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refuse."""
        _refuse("set_custom_all_gather", "choose how bytes move with ShardOptions(transport=...)")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refuse."""
        _refuse("set_custom_reduce_scatter", "choose how bytes move with ShardOptions(transport=...)")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Refuse."""
        _refuse("set_all_reduce_hook", "give a mesh of two axes, (replicate, shard), or change .grad after backward")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse."""
        _refuse("set_allocate_memory_from_process_group_for_comm", 'use ShardOptions(transport="copy_engine")')

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse."""
        _refuse("set_symm_mem_for_comm", 'use ShardOptions(transport="copy_engine")')

    def _get_fsdp_state(self) -> Any:
        module: Any = self
        return _State(*_unit(module).calls[module])


def _refuse(what: str, fix: str) -> NoReturn:
    raise ValueError(f"{what} does not work on a module that hocket.fully_shard has sharded: {fix}")


def _unit(module: Any) -> Unit:
    return module.__dict__[UNIT]


def _units(module: Any, recurse: bool) -> list[Unit]:
    """The unit that a module is; with `recurse` also those inside of it."""
    mine = _unit(module)
    inside = {one for one in module.modules() if isinstance(one, FSDPModule)} if recurse else set()
    return [unit for unit in context_of(mine).units if unit is mine or any(one in inside for one in unit.modules)]


def _all_units(modules: Any, what: str) -> list[Unit]:
    strange = [one for one in modules if not isinstance(one, FSDPModule)]
    if strange:
        raise ValueError(f"{what} got a {type(strange[0]).__name__}, which is no unit: give modules that are sharded")
    return list(dict.fromkeys(_unit(one) for one in modules))


def _set(module: Any, recurse: bool, what: str, **changes: Any) -> None:
    for value in changes.values():
        if not isinstance(value, bool):
            raise ValueError(f"{what}({value!r}): give True or False")
    for unit in _units(module, recurse):
        unit.options = replace(unit.options, **changes)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method gather the weights of the unit that `module` is, as its forward does. Of others: nothing."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"a {module._hocket_original.__name__} has no method {method_name!r}: name one that it has")
    before, after = _unit(module).calls[module]
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            after(module, args, kwargs, None)
            raise
        return after(module, args, kwargs, output)

    setattr(module, method_name, wrapped)

"""A parameter's local elements, as an optimizer sees them.

Note: [Reading a gradient waits for it]
Gradients are reduced into a group's `main_grad` during backward, without waiting. Reading `grad` first orders the
reader's work after the open reductions (`ParamGroup.settle`). So optimizers, clipping and logging need no hooks, and
nothing waits between microbatches.

Note: [Changes of weights are noticed]
In-place changes of shards, which are views of `main`, show in its version counter; `data` shares the counter too,
unlike torch's. Fused optimizers don't count, so each step of a torch optimizer invalidates the groups of its shards.
Reading alone changes nothing: one rank may do it by itself, and all ranks must gather alike.

Note: [Autograd never sees a shard]
Modules compute with full parameters. A loss computed from shards, say a penalty on `module.parameters()`, would use one
rank's elements and lose its gradient. So a gradient that arrives at a shard is an error, as are hooks that would never
run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hocket.fsdp.part import Part, Place, WholeSize, alongside, call, no_address, plain, whole_of
from hocket.layers.slices import Span


class ShardedParameter(WholeSize, nn.Parameter):  # pyrefly: ignore[inconsistent-inheritance]
    """Elements `span` of a whole parameter, flattened; may be none. Note: [A part has the shape of its whole]."""

    full_name: str
    """In the root module."""
    full_shape: torch.Size | None
    """None: a copy, which has the shape of its elements."""
    span: Span
    """Its elements, within the whole parameter."""
    position: int
    read_on_demand: Callable[[], Tensor | None] | None
    """Returns what a read as module attribute gives; None is the shard itself."""
    place: Place | None
    """Its elements, if other ranks hold others. See Note: [A part knows its whole]."""
    _group: weakref.ref[Any] | None
    """Its `ParamGroup`."""
    is_sparse = False  # optimizers read it often

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See Note: [A part knows its whole]."""
        return call(func, args, kwargs or {})

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> ShardedParameter:
        """Shares memory and version counter with `data`."""
        shard = torch.Tensor._make_subclass(cls, data, requires_grad)
        shard._group = shard.read_on_demand = shard.place = shard.full_shape = None
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        copy = memo[id(self)] = ShardedParameter(self.to_local().clone(), self.requires_grad)
        copy.place = self.place
        return copy

    def join(self, group: Any) -> None:
        """Join a group. See Note: [Autograd never sees a shard]."""
        self._group = weakref.ref(group)
        if self.requires_grad:
            super().register_post_accumulate_grad_hook(_refuse_gradient)

    @property
    def group(self) -> Any:
        """Its `ParamGroup`; None for a copy."""
        return None if self._group is None else self._group()

    @property
    def keeps_all(self) -> bool:
        return self.group is not None and self.group.keeps_all

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        if self.group is None:
            return super().__repr__()
        return (
            f"ShardedParameter({self.full_name}: elements {self.lo} to {self.hi} of {tuple(self.shape)}, {self.dtype})"
        )

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the whole parameter."""
        return self.to_local().shape if self.full_shape is None else self.full_shape

    @property
    def lo(self) -> int:
        """First element here, within what this rank has while the unit is in use."""
        return self.span.lo

    @property
    def hi(self) -> int:
        """One after the last element here."""
        return self.span.hi

    def __getitem__(self, index: Any) -> Tensor:
        """With a number, of a matrix: the local elements of that row, writable."""
        if type(index) is not int or self.ndim < 2 or self.full_shape is None or self.span.part is not None:
            return super().__getitem__(index)
        length = self.shape[1:].numel()
        first = range(self.shape[0])[index] * length  # raises IndexError
        row = self.to_local()[max(first - self.lo, 0) : max(first + length - self.lo, 0)]
        if self.place is None:
            return row
        lo, hi = (min(max(at - first, 0), length) for at in (self.lo, self.hi))
        span = Span(tuple(self.shape[1:]), lo, hi)
        return Part.of(row, Place(f"{self.full_name}[{index}]", span, self.place.reduce))

    def __setitem__(self, index: Any, value: Any) -> None:
        """With a number, of a matrix: fill that row with a value."""
        if type(index) is int and isinstance(value, int | float | complex) and self.ndim > 1 and self.full_shape:
            with torch.no_grad():
                self[index].fill_(value)
        else:
            super().__setitem__(index, value)

    def to_local(self) -> Tensor:
        """The local elements, 1-D, without autograd; shares memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def full_tensor(self) -> Tensor:
        """The whole weight, in the main dtype, as a plain tensor. All ranks of the model call this."""
        if self.place is None:
            return self.to_local().view(self.shape).clone()
        return whole_of(self, self.place)

    def elements(self, what: str, value: Tensor) -> Tensor:
        """The local elements of a whole tensor; a plain tensor or part of these elements as it is.

        Raises ValueError for a part with different elements.
        """
        if self.place is not None:
            value = alongside(what, (self, value))[1]
        elif value.shape == self.full_shape:
            value = self.span.of(value)
        return plain(value)

    def data_ptr(self) -> int:
        """Raises ValueError, except for a copy."""
        if self.full_shape is None:
            return super().data_ptr()
        raise no_address(self.full_name, self.hi - self.lo, self.numel())

    # Tensor.grad is a descriptor in C, which a property may replace.
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, in the dtype of the shard. See Note: [Reading a gradient waits for it]."""
        group = self.group
        if group is None:
            return _GRAD.__get__(self)
        return group.grad_of(self.position)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        group = self.group
        if group is None:
            _GRAD.__set__(self, value)
        elif value is None:
            group.forget(self.position)
        elif not isinstance(value, Tensor):
            raise ValueError(f"grad={value!r} of {self.full_name} is no tensor: set one like the shard, or None")
        else:
            group.set_grad(self.position, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values, without autograd. See Note: [Changes of weights are noticed]."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        group, local = self.group, self.to_local()
        value = plain(value.detach()) if group is None else self.elements("data", value.detach())
        if group is None:
            _DATA.__set__(self, value)
        elif value.shape != local.shape:
            raise ValueError(
                f"data of shape {tuple(value.shape)} does not fit the shard of {self.full_name} on this rank, which "
                f"has {tuple(local.shape)}: write whole weights inside of ctx.gathered(changed=True)"
            )
        elif value.data_ptr() != local.data_ptr() or value.dtype != local.dtype:
            local.copy_(value)  # the group gathers from this memory

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether it is trained."""
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Refuse a hook that would never run."""
        self._refuse_hook("register_hook")
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Refuse a hook that would never run."""
        self._refuse_hook("register_post_accumulate_grad_hook")
        return super().register_post_accumulate_grad_hook(hook)

    def _refuse_hook(self, what: str) -> None:
        if self.group is not None:
            raise ValueError(
                f"{what} on {self.full_name}: such a hook would never run, since a sharded parameter is not what "
                f"autograd sees; change .grad after backward, or put a hook on the module"
            )

    # The stub of torch calls the argument `mode`.
    # pyrefly: ignore[bad-override-param-name]
    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Freeze the parameter or train it again: between steps, on all ranks alike."""
        if self.group is not None and requires_grad != self.requires_grad:
            self.group.change(self.position, requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
            if self.group is not None and requires_grad and not self._post_accumulate_grad_hooks:
                super().register_post_accumulate_grad_hook(_refuse_gradient)
        return self


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data  # pyrefly: ignore[missing-attribute]
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad  # pyrefly: ignore[missing-attribute]
"""Torch's descriptors."""


def _refuse_gradient(shard: Tensor) -> None:
    assert isinstance(shard, ShardedParameter)
    _GRAD.__set__(shard, None)
    raise ValueError(
        f"a gradient reached the shard of {shard.full_name}: the loss was computed with what module.parameters() has "
        f"on this rank, which is a part of the weight. Read weights as attributes of modules, inside of a forward, or "
        f"leave a penalty to the optimizer's weight_decay"
    )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ShardedParameter) and param.group is not None:
                param.group.invalidate()


register_optimizer_step_post_hook(_note_step)  # see Note: [Changes of weights are noticed]

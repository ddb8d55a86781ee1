"""The parameters of a sharded model: DTensors of torch, of which each rank holds rows.

Note: [Reading a gradient waits for it]
Gradients are reduced into a group's `main_grad` during backward, without waiting. Reading `grad` first orders the
reader's work after the open reductions (`ParamGroup.settle`). So optimizers, clipping and logging need no hooks, and
nothing waits between microbatches.

Note: [Changes of weights are noticed]
A gather moves what the weights are now, so changes must be known. In-place changes of local tensors, which are views of
`main`, show in its version counter. DTensor's dispatch computes below that counter, so `Watched` tells its group of
each op that writes to it or to a view of it. Fused optimizers change no counter, so each step of a torch optimizer
invalidates the groups of its parameters. Reading alone changes nothing: one rank may do it by itself, and all ranks
must gather alike.

Note: [How ops are seen]
torch 2.11 computes ops of DTensors in C++ and asks no subclass. So a subclass sees a function when Python calls it
(`__torch_function__`), and its ops by a dispatch mode meanwhile.

Note: [Autograd never sees a shard]
Modules compute with full parameters. A loss computed from shards, say a penalty on `module.parameters()`, would lose
its gradient. So a gradient that arrives at a shard is an error, as are hooks that would never run.

Note: [Random numbers are drawn whole]
Each rank draws the numbers of the whole parameter and keeps its own. So a model from the meta device that is
initialized after sharding, by `reset_parameters()`, `torch.nn.init` or `weight.data.normal_()`, has the values of an
unsharded one with the same seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hocket.layers.slices import Span


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an op of torch changes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)


@cache
def _draws(func: Any) -> bool:
    """Whether an op fills a tensor with random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags and bool(_writes(func))


@cache
def _by_element(func: Any) -> bool:
    """Whether an op changes tensors element by element, so that each rank can do it with its rows."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_fused_") or name == "index_put_" or (name.startswith("_foreach_") and name.endswith("_"))


class Summed(DTensor):
    """A DTensor computed from parameters or gradients. What is summed over rows has its final value at once.

    So programs may read norms and other numbers by `item()`, which of a plain DTensor is one rank's, and go by them.
    """

    @cached_property
    def _plain(self) -> DTensor:
        """The same local tensor as DTensor of torch, which ops compute with."""
        return around(self._local_tensor, self._spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = self._plain.clone()
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._plain.__reduce_ex__(proto)

    def data_ptr(self) -> int:
        """Raises ValueError: a kernel that goes by shape would write beyond this rank's rows."""
        raise ValueError(
            f"data_ptr() of a DTensor of shape {tuple(self.shape)}, of which this rank has "
            f"{tuple(self._local_tensor.shape)}: use to_local(), or an optimizer of torch's"
        )

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See Note: [How ops are seen]."""
        name = func.__name__
        quiet = name in _QUIET or (name == "__get__" and func.__self__.__name__ not in _VIEWS)
        with torch._C.DisableTorchFunctionSubclass(), nullcontext() if quiet else _Rows():
            return func(*args, **(kwargs or {}))


_QUIET = frozenset({
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_complex", "is_floating_point", "is_contiguous",
    "get_device", "__len__", "__set__", "is_same_size", "requires_grad_",
})  # fmt: skip
"""Functions that read or write no element."""
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are tensors."""


class _Rows(TorchDispatchMode):
    """Computes with the rows of parameters and gradients. See Note: [How ops are seen]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        mine = _rows_of(args) if _by_element(func) else None
        if mine is not None:  # an optimizer's ops on long lists: DTensor would look at each
            found = func(*mine, **kwargs)
        elif not any(isinstance(x, Summed) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        elif isinstance(first, Watched) and first._cut is not None and _draws(func):
            first._draw(func, args[1:], kwargs)
            return first
        elif func is torch.ops.aten._local_scalar_dense.default:
            return func(first.full_tensor())
        else:
            found = func(*tree_map(_plain_of, args), **tree_map(_plain_of, kwargs))
        for position, name in _writes(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, Watched):
                    one._wrote()
                if (
                    isinstance(found, Tensor)
                    and isinstance(one, Summed)
                    and (found is one._plain or found is one._local_tensor)
                ):
                    return one
        if func.is_view and isinstance(first, Watched):
            return tree_map_only(DTensor, first._seen_as, found)
        if not isinstance(found, DTensor):  # norms in a list are summed over ranks later, as one
            return found
        if any(placement.is_partial() for placement in found.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in found.placements]
            found = found.redistribute(placements=whole)
        return around(found._local_tensor, found._spec, Summed)


class Watched(Summed):
    """A DTensor that shares memory with weights or gradients, and tells when it is written to."""

    _wrote: Callable[[], None]
    _cut: Callable[[Tensor], Tensor] | None
    """This rank's elements, 1-D, of a whole tensor; None for views of some elements."""

    @classmethod
    def over(
        cls,
        local: Tensor,
        spec: DTensorSpec,
        wrote: Callable[[], None],
        cut: Callable[[Tensor], Tensor] | None = None,
        requires_grad: bool = False,
    ) -> Any:
        made = around(local, spec, cls, requires_grad)
        made._wrote, made._cut = wrote, cut
        return made

    def _seen_as(self, view: DTensor) -> Any:
        cut = self._cut if view.numel() == self.numel() else None
        return Watched.over(view._local_tensor, view._spec, self._wrote, cut)

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """See Note: [Random numbers are drawn whole]."""
        assert self._cut is not None
        local = self._plain._local_tensor
        whole = torch.empty(self.shape, dtype=local.dtype, device=local.device)
        func(whole, *args, **kwargs)
        local.copy_(self._cut(whole).view(local.shape))
        self._wrote()


def around(local: Tensor, spec: DTensorSpec, cls: type[DTensor] = DTensor, requires_grad: bool = False) -> Any:
    """A DTensor around a local tensor. It must not take over a storage offset, with which it can't be pickled."""
    made: Any = DTensor.__new__(cls, local.new_empty(0), spec, requires_grad=requires_grad)
    made._local_tensor = local
    return made


def _plain_of(x: Any) -> Any:
    return x._plain if isinstance(x, Summed) else x


def _rows_of(args: Sequence[Any]) -> list[Any] | None:
    """Arguments with local tensors in place of DTensors; None unless all have the same rows at each place of a list."""
    found, like = list[Any](), list[DTensorSpec]()
    for one in args:
        several = one if isinstance(one, list | tuple) else (one,)
        specs = [x._spec for x in several if isinstance(x, DTensor)]
        if not specs:
            found.append(one)
            continue
        like = like or specs
        if len(specs) != len(several) or len(specs) != len(like):
            return None
        for a, b in zip(specs, like, strict=True):
            if a is not b and (a.placements != b.placements or a.shape != b.shape):
                return None
        local = [vars(x).get("_plain", x)._local_tensor for x in several]
        found.append(local if several is one else local[0])
    return found if like else None


if TYPE_CHECKING:
    _Tensor = nn.Parameter
else:
    _Tensor = object


class ShardedParameter(_Tensor):
    """What `module.parameters()` yields: a parameter whose `grad` and values are in the memory of a group.

    A DTensor, or a plain tensor where this rank keeps the whole.
    """

    if TYPE_CHECKING:

        def to_local(self) -> Tensor: ...
        def full_tensor(self) -> Tensor: ...
        def like(self, flat: Tensor) -> Any:
            """Elements here, 1-D, as a tensor like the parameter."""

        def _shown(self, grad: Tensor) -> Tensor:
            """A gradient, 1-D, as readers see it."""

    position: int
    read_on_demand: Callable[[], Tensor | None] | None
    """Returns what a read as module attribute gives; None is the shard itself."""
    _group: weakref.ref[Any]
    is_sparse = False  # optimizers read it often

    @property
    def group(self) -> Any:
        """Its `ParamGroup`."""
        return self._group()

    @property
    def full_name(self) -> str:
        """Its name in the root module."""
        return self.group.members[self.position].name

    # Tensor.grad is a descriptor in C, which a property may replace.
    @property
    def grad(self) -> Tensor | None:
        """The gradient, in the dtype of the shard. See Note: [Reading a gradient waits for it]."""
        group, position = self.group, self.position
        view = None if group is None else group.grad_of(position)
        if view is None:
            return None
        if position not in group.shown_grads or group.shown_grads[position][0] is not view:
            group.shown_grads[position] = view, self._shown(view)
        return group.shown_grads[position][1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.group.forget(self.position)
        elif not isinstance(value, Tensor):
            raise ValueError(f"grad={value!r} of {self.full_name} is no tensor: set one like the shard, or None")
        else:
            self.group.set_grad(self.position, self._elements("a gradient", value))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self: Any) -> Tensor:
        """The values, without autograd. See Note: [Changes of weights are noticed]."""
        return self.detach()

    @data.setter
    def data(self: Any, value: Tensor) -> None:
        group, value = self.group, self._elements("data", value.detach())
        local = group.locals[self.position]
        if value.data_ptr() != local.data_ptr() or value.dtype != local.dtype:
            local.copy_(value)  # the group gathers from this memory

    def _elements(self: Any, what: str, value: Tensor) -> Tensor:
        """The elements here, 1-D, of a whole tensor or of a DTensor with the same rows."""
        span: Span = self.group.spans[self.position]
        local = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(value, DTensor) and value.shape == self.shape:
            return span.of(value)
        if local.numel() != len(span) or value.shape not in (self.shape, (len(span),)):
            raise ValueError(
                f"{what} of shape {tuple(value.shape)} does not fit {self.full_name}, which is {tuple(self.shape)} and "
                f"of which this rank has {len(span)} elements: give a DTensor like the parameter, or a whole tensor"
            )
        return local.reshape(-1)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    # The stub of torch calls the argument `mode`.
    # pyrefly: ignore[bad-override-param-name]
    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        """Freeze the parameter or train it again: between steps, on all ranks alike."""
        if requires_grad != self.requires_grad:
            self.group.change(self.position, requires_grad)
        _REQUIRES_GRAD.__set__(self, requires_grad)
        return self

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Refuse a hook that would never run."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Refuse a hook that would never run."""
        self._refuse_hook("register_post_accumulate_grad_hook")

    def _refuse_hook(self, what: str) -> None:
        raise ValueError(
            f"{what} on {self.full_name}: such a hook would never run, since a sharded parameter is not what "
            f"autograd sees; change .grad after backward, or put a hook on the module"
        )


def make_parameter(group: Any, position: int, spec: DTensorSpec | None) -> Any:
    """Member `position` of a group."""
    shard: Any
    local, trains = group.locals[position], group.members[position].param.requires_grad
    if spec is None:
        shard = torch.Tensor._make_subclass(_Whole, local.view(group.members[position].shape), trains)
    else:
        rows = _in_rows(group, position, local)
        shard = _Divided.over(rows, spec, *_notes(group, position), trains)
        shard._is_param = True
        extension = group.members[position].extension
        if extension is not None:  # ops compute with `_plain`
            shard._plain, shard._local_tensor = around(rows, spec), extension.wrap(rows)
    shard._group, shard.position, shard.read_on_demand = weakref.ref(group), position, None
    hook_gradients(shard, _refuse_gradient)
    return shard


def hook_gradients(param: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Run `hook` after each gradient of a parameter, also of a frozen one that is trained later."""
    if param.is_floating_point() or param.is_complex():
        trains = param.requires_grad
        _REQUIRES_GRAD.__set__(param, True)  # torch takes no such hook of a frozen parameter
        torch.Tensor.register_post_accumulate_grad_hook(param, hook)
        _REQUIRES_GRAD.__set__(param, trains)


def _in_rows(group: Any, position: int, local: Tensor) -> Tensor:
    """Elements here of a member, 1-D, in the shape of its rows."""
    shape = group.members[position].param.shape
    if not shape:
        return local.view(())
    return local.view(-1, *shape[1:]) if local.numel() else local.new_empty((0, *shape[1:]))


def _notes(group: Any, position: int) -> tuple[Callable[[], None], Callable[[Tensor], Tensor]]:
    """What `Watched` calls, without keeping the group alive."""
    span, group_of = group.spans[position], weakref.ref(group)

    def wrote() -> None:
        mine = group_of()
        if mine is not None:
            mine.invalidate()

    return wrote, span.of


class _Divided(ShardedParameter, Watched):  # pyrefly: ignore[inconsistent-inheritance]
    """A parameter of which ranks have different rows."""

    def like(self, flat: Tensor) -> Any:
        return around(_in_rows(self.group, self.position, flat), self._spec)

    def _shown(self, grad: Tensor) -> Tensor:
        group = self.group
        return Watched.over(_in_rows(group, self.position, grad), self._spec, group.grads.wrote, self._cut)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        local, placements = tuple(self._local_tensor.shape), self._spec.placements
        return f"ShardedParameter({self.full_name}: {local} of {tuple(self.shape)}, {placements}, {self.dtype})"


class _Whole(ShardedParameter, nn.Parameter):  # pyrefly: ignore[inconsistent-inheritance]
    """A parameter that this rank keeps whole."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    def like(self, flat: Tensor) -> Any:
        return flat.view(self.shape)

    def _shown(self, grad: Tensor) -> Tensor:
        return grad.view(self.shape)

    def to_local(self) -> Tensor:
        """The values, as of a DTensor."""
        return self.detach()

    def full_tensor(self) -> Tensor:
        """A copy of the values, as of a DTensor."""
        return self.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"ShardedParameter({self.full_name}: whole {tuple(self.shape)}, {self.dtype})"


for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types.extend((Summed, Watched, _Divided, _Whole))  # as torch does for DTensor: else optimizers go one by one


_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad  # pyrefly: ignore[missing-attribute]
"""Torch's descriptors."""


def _refuse_gradient(shard: Any) -> None:
    _GRAD.__set__(shard, None)
    raise ValueError(
        f"a gradient reached the shard of {shard.full_name}: the loss was computed with what module.parameters() has "
        f"on this rank, which is a part of the weight. Read weights as attributes of modules, inside of a forward, or "
        f"leave a penalty to the optimizer's weight_decay"
    )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ShardedParameter):
                param.group.invalidate()


register_optimizer_step_post_hook(_note_step)  # see Note: [Changes of weights are noticed]

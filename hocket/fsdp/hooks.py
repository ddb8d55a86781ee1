"""The default driver of a sharded module: hooks on its units make the five calls of `module_unit.py`.

Note: [When backward of a unit is over]
Forward wraps a unit's inputs in an identity, whose backward marks the end: autograd runs ready nodes latest-created
first, and leaf gradients before all others. Every node between the loss and this unit's parameters was made after the
identity, so these have their gradients, or get them from another open invocation. Then weights are released, and
gradients reduced if no invocation of the same forward is left. A bucket, whose modules end one by one, is reduced when
each of its parameters has contributed; so is a unit none of whose inputs needs a gradient. The end of backward flushes
the rest: unused parameters, and outputs that the loss does not reach.

A forward inside of a backward is recomputation, with a backward of its own only in a reentrant checkpoint. Forward
can't tell, so it opens an invocation, which the end of backward drops if unused.

Note: [Side outputs of a forward]
A unit gathers its weights for backward when the first gradient of any of its outputs arrives. Besides return values,
models append losses or hidden states to a list or dict argument, or keep them as attributes, and transformers collects
`output_attentions=True` and the like by hooks. So these places are searched before and after a forward, and new tensors
are hooked like outputs. A gradient that comes only from tensors left elsewhere is an error.

Inputs get the identity, and may be cast or moved. Lists and dicts are changed in place and restored after the forward,
since modules may write to them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hocket.fsdp.members import UNIT
from hocket.fsdp.module_context import Invocation, current_backward
from hocket.fsdp.module_unit import Claim, Unit
from hocket.fsdp.sharded_parameter import hook_gradients


class Substitution:
    """Replaces tensors in arguments, until `undo`. See Note: [Side outputs of a forward]."""

    def __init__(self) -> None:
        self._changed: list[tuple[list[Any] | dict[Any, Any], dict[int, tuple[Any, Any]]]] = []

    def apply(self, value: Any, new_of: Callable[[Any], Any]) -> Any:
        """Apply `new_of` to each leaf: lists and dicts are changed in place, tuples rebuilt."""
        if isinstance(value, Tensor | NoneType | bool | int | float | str):
            return new_of(value)
        if isinstance(value, list | dict):
            items = enumerate(list(value)) if isinstance(value, list) else list(value.items())
            made: dict[int, tuple[Any, Any]] = {}
            for key, old in items:
                new = self.apply(old, new_of)
                if new is not old:
                    made[id(new)] = old, new
                    value[key] = new
            if made:
                self._changed.append((value, made))
            return value
        if isinstance(value, tuple):
            if type(value) is tuple:
                parts, made_of = value, tuple
            else:  # a named tuple
                parts, spec = tree_flatten(value, is_leaf=lambda one: one is not value)
                if spec.is_leaf():  # it can't be rebuilt
                    return new_of(value)
                made_of = partial(tree_unflatten, treespec=spec)
            new = [self.apply(part, new_of) for part in parts]
            return value if all(map(is_, new, parts)) else made_of(new)
        return new_of(value)

    def undo(self) -> None:
        for container, made in reversed(self._changed):
            for key, one in enumerate(list(container)) if isinstance(container, list) else list(container.items()):
                if id(one) in made:
                    container[key] = made[id(one)][0]
        self._changed.clear()


Seen = dict[int, weakref.ref[Tensor]]


class SideOutputs:
    """Finds tensors that a forward leaves in arguments or attributes, compared with those there before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Iterable[nn.Module]) -> None:
        self._given = [one for one in (*args, *kwargs.values(), _collector()) if not isinstance(one, _PLAIN)]
        self._modules = modules
        self._before: Seen = {id(one): weakref.ref(one) for one in self._found()}

    def _found(self) -> list[Tensor]:
        found = _kept_in(self._modules)
        if self._given:
            found += _reached(self._given)
        return found

    def new(self) -> list[Tensor]:
        return [one for one in self._found() if (seen := self._before.get(id(one))) is None or seen() is not one]


def _collector() -> object:
    """The dict in which a running transformers model collects hidden states, attentions and router logits.

    Hooks on inner modules fill it; it is no argument of a layer.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(capturing, "_active_collector", None)
    return None if active is None else active.get()


_PLAIN = (Tensor, NoneType, bool, int, float, str, torch.dtype, torch.device)
_AT_MOST = 4096
_DEPTH = 4


def _reached(given: Iterable[object]) -> list[Tensor]:
    """Tensors with a graph in arguments, as far as `_DEPTH` and `_AT_MOST` go."""
    return [x for x in _search(given, _DEPTH, _inside) if x.grad_fn is not None]


def _search(given: Iterable[object], deepest: float, inside: Callable[[Any], list[object]]) -> list[Tensor]:
    """The tensors in containers, which `inside` opens, and in attributes of objects."""
    found: list[Tensor] = []
    seen = set[int]()
    left = [(one, 0) for one in given]
    while left:
        one, depth = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif depth <= deepest and id(one) not in seen and not isinstance(one, _WITHOUT_TENSORS):
            seen.add(id(one))
            left += [(item, depth + 1) for item in [*inside(one), *_attributes(one)]]
    return found


def _inside(one: Any) -> list[object]:
    if isinstance(one, Mapping):
        return list(one.values())[:_AT_MOST]
    return list(one)[:_AT_MOST] if isinstance(one, list | tuple | set | deque) else []


_OWN = frozenset(nn.Module().__dict__)


def _kept_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    found: list[Tensor] = []
    for module in modules:
        own = module.__dict__.items()
        for key, value in [item for item in own if _may_hold(type(item[1])) and item[0] not in _OWN]:
            if isinstance(value, Tensor):
                if value.grad_fn is not None and key not in module._parameters:
                    found.append(value)
            elif value:
                found += _reached([value])
        for buffer in module._buffers.values() if module._buffers else ():
            if buffer is not None and buffer.grad_fn is not None:
                found.append(buffer)
    return found


@functools.cache
def _may_hold(kind: type) -> bool:
    return issubclass(kind, Tensor) or kind in (list, dict, tuple, set, deque)


def modules_of(unit: Unit, module: nn.Module) -> list[nn.Module]:
    """Modules whose attributes a unit's forward may set: those in it, except other units."""
    found, left = [], [module]
    while left:
        found.append(left.pop())
        for child in found[-1].children():
            other = child.__dict__.get(UNIT)
            if other is None or other is unit or child not in other.modules:
                left.append(child)
    return found


def tensors_in(output: Any, unit: Unit, all_of_them: bool = True) -> list[Tensor]:
    """The tensors in a module's output, including containers and attributes of objects, such as a KV cache.

    Raises: ValueError for an object that can't be searched, if `all_of_them` are needed: backward would use freed
    weights.
    """
    if isinstance(output, Tensor):
        return [output]

    def inside(one: Any) -> list[object]:
        if isinstance(one, Mapping):
            return tree_leaves(dict(one))
        if isinstance(one, Collection):
            return tree_leaves(list(one))
        if isinstance(one, FunctionType):
            return list(inspect.getclosurevars(one).nonlocals.values())
        if isinstance(one, MethodType):
            return [one.__self__, one.__func__]
        if isinstance(one, partial):
            return tree_leaves([one.func, one.args, one.keywords])
        opaque = not (hasattr(one, "__dict__") or hasattr(type(one), "__slots__"))
        if all_of_them and (isinstance(one, Iterator) or opaque):
            raise ValueError(
                f"{unit} returned a {type(one).__name__}, in which tensors can't be found: return tensors, containers "
                f"of them or objects that have them as attributes, or register the class with torch.utils._pytree"
            )
        return []

    return _search(tree_leaves(output), math.inf, inside)


def levels(x: Tensor) -> list[Tensor]:
    """A tensor and, inside of `torch.func.vmap`, those that it wraps: an outer backward runs their graph."""
    levels = [x]
    while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


_WITHOUT_TENSORS = (
    *(bool, int, float, complex, str, bytes, range, NoneType, Enum, np.ndarray, np.generic),
    *(type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device, torch.Generator, nn.Module, Logger),
)
"""Not searched; modules above all, whose parameters are no outputs."""


def _attributes(one: object) -> list[object]:
    slots = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)]


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, invocation: Invocation, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.invocation = invocation
        ctx.set_materialize_grads(False)  # keep None gradients
        # Detached, since an input returned as it is could not be modified in place by the module.
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.invocation.finish()
        return None, *grads


@dataclass
class _Call:
    claim: Claim | None = None
    invocation: Invocation | None = None
    writes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Versions of the unit's weights before the call."""
    given: list[Substitution] = dataclasses.field(default_factory=list)
    side_outputs: SideOutputs | None = None

    def other_tensors(self) -> Substitution:
        self.given.append(Substitution())
        return self.given[-1]


def drive(unit: Unit) -> None:
    for module in unit.modules:
        _drive(unit, module)
    for param in unit.parameters:
        hook_gradients(param, _on_gradient(unit))


def _drive(unit: Unit, module: nn.Module) -> None:
    calls: list[_Call] = []
    inside: list[nn.Module] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call, context = _Call(), unit.context
        calls.append(call)
        if torch._C._are_functorch_transforms_active():
            _refuse_derivatives(unit)
        call.claim = context.need_forward(unit)
        call.writes = unit.writes()
        if context.nests and context.outermost and context.device.type == "cuda":
            args, kwargs = call.other_tensors().apply((args, kwargs), partial(_moved, device=context.device))
        if torch.is_grad_enabled():
            inside[:] = inside or modules_of(unit, module)
            call.side_outputs = SideOutputs(args, kwargs, inside)
        if unit.options.cast_inputs is not None:
            cast = partial(_cast, dtype=unit.options.cast_inputs, made={})
            args, kwargs = call.other_tensors().apply((args, kwargs), cast)
        if call.side_outputs is None:
            return args, kwargs
        call.invocation = Invocation(unit, context)
        return _around_inputs(call.invocation, call.other_tensors(), args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = calls.pop()
        for given in reversed(call.given):
            given.undo()
        if call.claim is not None:
            _refuse_writes(unit, call.writes)
        tensors = tensors_in(output, unit, all_of_them=call.invocation is not None)
        tensors += call.side_outputs.new() if call.side_outputs is not None else []
        if call.invocation is not None:
            # Returned parameters have no graph and are no outputs.
            outputs = [x for tensor in tensors for x in levels(tensor) if x.grad_fn is not None]
            if outputs:
                call.invocation.open()
                register_multi_grad_hook(outputs, call.invocation.start, mode="any")
        if call.claim is not None:
            _leave(unit, call.claim, lent=unit.lends(tensors))
        if unit.options.cast_outputs is not None:
            output = _cast(output, unit.options.cast_outputs)
        return output

    # torch.compile compiles the body between the hooks.
    module.register_forward_pre_hook(_outside_compile(before), with_kwargs=True, prepend=True)
    # Always called: recomputation stops early with an exception.
    module.register_forward_hook(_outside_compile(after), with_kwargs=True, always_call=True)
    unit.on_abort.append(calls.clear)
    unit.calls[module] = before, after


def _leave(unit: Unit, claim: Claim, lent: bool) -> None:
    """End a forward of the unit. `lent`: it returned weights to the caller."""
    context = unit.context
    if not lent:
        claim.release()
    context.leave_forward(unit)
    if lent:
        context.held_claims.hold(claim)
    if current_backward() == -1:
        context.held_claims.reshard(unit)
        if unit.contains_units and unit.options.reshard_after_forward:
            unit.reshard()


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | PackedSequence) else value


def _cast(value: Any, dtype: torch.dtype, made: dict[int, tuple[Tensor, Tensor]] | None = None) -> Any:
    """A tree with its floating-point tensors in another dtype; the same object if nothing changes.

    Tensors passed several times stay one, also across calls that share `made`.
    """
    known = {} if made is None else made
    changed = False

    def cast(x: Tensor) -> Tensor:
        nonlocal changed
        if x.dtype == dtype or not x.is_floating_point():
            return x
        changed = True
        if id(x) not in known:
            known[id(x)] = x, x.to(dtype)
        return known[id(x)][1]

    new = cast(value) if isinstance(value, Tensor) else _apply_to_tensors(cast, value)
    return new if changed else value


def _refuse_writes(unit: Unit, before: list[tuple[int, int]]) -> None:
    if before != unit.writes():
        unit.rebind()
        raise ValueError(
            f"a weight of {unit} was written in its forward (as nn.Embedding(max_norm=...) does), and would be lost "
            f"with the gathered weights: write weights after backward, through module.parameters() or inside of "
            f"ctx.gathered(changed=True)"
        )


def _on_gradient(unit: Unit) -> Callable[[Tensor], None]:
    # A weak reference: the garbage collector can't see what such a hook refers to, and the unit refers to the
    # parameter.
    reference = weakref.ref(unit)

    def ready(param: Tensor) -> None:
        unit = reference()
        assert isinstance(param, nn.Parameter)
        assert unit is not None, "a backward of a sharded model that is gone"
        context = unit.context
        context.follow_backward()
        if param.grad is not None:
            unit.refuse_unexpected()
        unit.grad_ready(param)
        if unit.complete:
            for invocation in [one for one in context.started if one.unit is unit and one.ends_with_gradients]:
                invocation.finish()

    return ready


def _around_inputs(
    invocation: Invocation, given: Substitution, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # fast path: a tree costs 20 us
        if not args[0].requires_grad:
            return args, kwargs
        invocation.has_inputs = True
        return _Inputs.apply(invocation, args[0]), kwargs
    # Keep tensors that are passed several times identical: attention tests for that.
    distinct: dict[int, Tensor] = {}

    def note(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            distinct[id(x)] = x
        return x

    given.apply((args, kwargs), note)
    if not distinct:
        return args, kwargs
    invocation.has_inputs = True
    new = dict(zip(distinct, _Inputs.apply(invocation, *distinct.values()), strict=True))
    return given.apply((args, kwargs), lambda x: new.get(id(x), x))


def _refuse_derivatives(unit: Unit) -> None:
    """Refuse transforms of `torch.func` except `vmap`: weights can't be gathered inside of them."""
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    if kinds - {torch._C._functorch.TransformType.Vmap}:
        raise ValueError(
            f"{unit} was called inside of torch.func.grad, vjp, jvp or a Jacobian, where weights can't be gathered: "
            f"take derivatives with torch.autograd.grad(..., create_graph=True)"
        )


def _outside_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(hook, recursive=True)

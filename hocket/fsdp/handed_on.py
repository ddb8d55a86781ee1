"""Tensors that a forward hands on: in what it returns, in its arguments, and in attributes of its modules.

Note: [What a forward leaves behind]
A unit's weights are needed again when the first gradient of anything arrives that its forward has made. Most of that is
what it returns. Models also collect second losses or hidden states in a list or dict that they were called with, or
keep them as attributes until the loop adds them to the loss, and transformers collects by hooks what
`output_attentions=True` and the like ask for. So these are searched before and after a forward, and what is new gets
the hook that outputs have. What is kept elsewhere, such as in a list that is no argument, can't be found. A gradient
that comes from there alone arrives for a unit whose backward has not begun, which is an error.

Inputs get an identity (`hooks.py`), and may be cast or moved. In lists and dicts that is done in place, and undone when
the forward is over: what a module writes to them is written to those of its caller.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hocket.fsdp.members import UNIT
from hocket.fsdp.module_unit import Unit


class Substitution:
    """Other tensors in the place of those in arguments, until `undo`. See Note: [What a forward leaves behind]."""

    def __init__(self) -> None:
        self._changed: list[tuple[list[Any] | dict[Any, Any], dict[int, tuple[Any, Any]]]] = []

    def apply(self, value: Any, new_of: Callable[[Any], Any]) -> Any:
        """Arguments with what `new_of` makes of each leaf: lists and dicts are changed, tuples made anew."""
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
            else:  # one with names
                parts, spec = tree_flatten(value, is_leaf=lambda one: one is not value)
                if spec.is_leaf():  # nobody knows how to make another one
                    return new_of(value)
                made_of = partial(tree_unflatten, treespec=spec)
            new = [self.apply(part, new_of) for part in parts]
            return value if all(map(is_, new, parts)) else made_of(new)
        return new_of(value)

    def undo(self) -> None:
        """Put back what is still there."""
        for container, made in reversed(self._changed):
            for key, one in enumerate(list(container)) if isinstance(container, list) else list(container.items()):
                if id(one) in made:
                    container[key] = made[id(one)][0]
        self._changed.clear()


Seen = dict[int, weakref.ref[Tensor]]


class HandedOn:
    """What a forward of a unit's module can leave tensors in, and which are there before it."""

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
        """The tensors with a graph that were not there before."""
        return [one for one in self._found() if (seen := self._before.get(id(one))) is None or seen() is not one]


def _collector() -> object:
    """Where a model of transformers that runs now collects hidden states, attentions and router logits of its layers.

    It is no argument of a layer: hooks on modules of the layer fill it.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(capturing, "_active_collector", None)
    return None if active is None else active.get()


_PLAIN = (Tensor, NoneType, bool, int, float, str, torch.dtype, torch.device)
_AT_MOST = 4096
"""Entries of a container that is searched."""
_DEPTH = 4


def _reached(given: Iterable[object]) -> list[Tensor]:
    """Tensors with a graph in arguments: in containers, and attributes of objects."""
    found: list[Tensor] = []
    seen = set[int]()
    left = [(one, 0) for one in given]
    while left:
        one, depth = left.pop()
        if isinstance(one, Tensor):
            if one.grad_fn is not None:
                found.append(one)
            continue
        if depth > _DEPTH or id(one) in seen or isinstance(one, _WITHOUT_TENSORS):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping | list | tuple | set | deque):
            inside = list(one.values()) if isinstance(one, Mapping) else list(one)
            left += [(item, depth + 1) for item in inside[:_AT_MOST]]
        left += [(item, depth + 1) for item in _attributes(one)]
    return found


_OWN = frozenset(nn.Module().__dict__)


def _kept_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Tensors with a graph that are attributes of modules, or in lists and the like that are."""
    found: list[Tensor] = []
    for module in modules:
        own = module.__dict__.items()
        for key, value in [item for item in own if _MAY_HOLD[type(item[1])] and item[0] not in _OWN]:
            if isinstance(value, Tensor):
                if value.grad_fn is not None and key not in module._parameters:
                    found.append(value)
            elif value:
                found += _reached([value])
        for buffer in module._buffers.values() if module._buffers else ():
            if buffer is not None and buffer.grad_fn is not None:
                found.append(buffer)
    return found


class _MayHold(dict[type, bool]):
    """Whether an attribute of some type is a tensor, or a container of which some may be."""

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = issubclass(kind, Tensor) or kind in (list, dict, tuple, set, deque)
        return found


_MAY_HOLD = _MayHold()


def modules_of(unit: Unit, module: nn.Module) -> list[nn.Module]:
    """The modules whose attributes a forward of a unit's module may set: those in it, but for other units."""
    found, left = [], [module]
    while left:
        found.append(left.pop())
        for child in found[-1].children():
            other = child.__dict__.get(UNIT)
            if other is None or other is unit or child not in other.modules:
                left.append(child)
    return found


def tensors_in(output: Any, unit: Unit, all_of_them: bool = True) -> list[Tensor]:
    """The tensors of what a module returned, in containers and attributes of objects too, such as a cache of keys.

    Raises: ValueError for an object in which none can be looked for, if all have to be found: backward would read
        weights that are not there.
    """
    if isinstance(output, Tensor):
        return [output]
    found: list[Tensor] = []
    seen = set[int]()
    left = tree_leaves(output)
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
            continue
        if id(one) in seen or isinstance(one, _WITHOUT_TENSORS):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            left += tree_leaves(dict(one))
        elif isinstance(one, Collection):
            left += tree_leaves(list(one))
        elif isinstance(one, FunctionType):
            left += inspect.getclosurevars(one).nonlocals.values()
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, partial):
            left += tree_leaves([one.func, one.args, one.keywords])
        elif all_of_them and (isinstance(one, Iterator) or not _has_attributes(one)):
            raise ValueError(
                f"{unit} returned a {type(one).__name__}, in which tensors can't be found: return tensors, containers "
                f"of them or objects that have them as attributes, or register the class with torch.utils._pytree"
            )
        left += _attributes(one)
    return found


def levels(x: Tensor) -> list[Tensor]:
    """A tensor and, inside of `torch.func.vmap`, those that it wraps: a backward outside runs their graph."""
    levels = [x]
    while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


_WITHOUT_TENSORS = (
    *(bool, int, float, complex, str, bytes, range, NoneType, Enum, np.ndarray, np.generic),
    *(type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device, torch.Generator, nn.Module, Logger),
)
"""What is not looked into: above all modules, whose parameters no forward has computed."""


def _has_attributes(one: object) -> bool:
    return hasattr(one, "__dict__") or hasattr(type(one), "__slots__")


def _attributes(one: object) -> list[object]:
    slots = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)]

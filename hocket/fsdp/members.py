"""Assignment of parameters to units, and what modules show of them.

Note: [Two faces of a parameter]
`module._parameters["weight"]` always holds the *shard*, a parameter with this rank's elements, for optimizers,
`state_dict` and `zero_grad`. The *full* parameter is the module's original object; its `.data` is a view of the unit's
full buffer. While the unit is in use, `module.__dict__["weight"]` holds it: Python looks there before it calls
`nn.Module.__getattr__`. So showing and hiding weights is one dict write per parameter, and modules that keep parameters
in own lists (`nn.LSTM`) see the same objects.

Reads while the unit is not in use reach `__getattr__`. Modules with parameters get a subclass whose `__getattr__`
claims the unit on demand inside of a forward, and returns the shard outside.

A replacement of a shard would never be shown in use, so `_parameters` of such modules refuses it.

Note: [Buckets]
A *bucket* is a unit of several modules that are gathered and reduced together. For small modules, starting a collective
costs more than its bytes; a bucket starts one for all. For large ones it gains nothing, and exposes more at both ends
of a step. Buckets are filled from the end of the model, where backward begins, up to a size. So the smallest is the
first, whose gather and reduction are exposed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hocket.fsdp.dtensors import DTensorLayout
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import Span

Rule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | Iterable[nn.Module] | None


UNIT = "_hocket_unit"
"""The module attribute that holds its unit. Not a global table: units refer to their modules, which would never be
freed."""

_FULL = "_hocket_full"


def mark_full(param: nn.Parameter) -> None:
    """Mark a full parameter of a sharded model, which another call or an optimizer must not take for a plain one."""
    setattr(param, _FULL, True)


def is_full(param: Tensor | None) -> bool:
    """Whether it is a full parameter of a sharded model."""
    return hasattr(param, _FULL)


_FIRST = 2**64 - 1
"""The number of nodes that autograd runs as soon as they are ready, like gradients of leaves."""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a module tree: its first name, and all (module, attribute) pairs that hold it."""

    name: str
    param: nn.Parameter
    """What this rank has of it before sharding: the module's original object, unless it has `faces`."""
    owners: tuple[tuple[nn.Module, str], ...] = ()
    dtensor: DTensorLayout | None = None
    extension: Any = None
    """Its `Extension`, if it says itself how it is gathered."""
    faces: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What makes of `param`, one after the other, what modules compute with."""
    source: weakref.ref[nn.Parameter] | None = None
    """The original object of a member with faces; freed when the module gets a shard instead."""

    @property
    def given(self) -> nn.Parameter | None:
        """The module's original object, if it is still alive."""
        return self.param if self.source is None else self.source()

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.param.shape if self.dtensor is None else self.dtensor.shape

    def span(self, lo: int, hi: int) -> Span:
        """Elements of this rank's part, within the whole parameter."""
        return Span(tuple(self.shape), lo, hi, None if self.dtensor is None else self.dtensor.part)

    def shown(self) -> Tensor:
        """What modules compute with."""
        shown: Tensor = self.param
        for face in self.faces:
            shown = face(shown)
            node: Any = shown.grad_fn
            if node is not None:  # gradients come before the end of a unit: see `hooks.py`
                node._set_sequence_nr(_FIRST)
        return shown


class Managed(dict[str, nn.Parameter | None]):
    """A module's `_parameters`, in which shards can't be replaced. See Note: [Two faces of a parameter]."""

    def __setitem__(self, key: str, value: nn.Parameter | None) -> None:
        if value is not self.get(key):
            self._refuse(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._refuse(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._refuse(key)
        return super().pop(key, *default)

    def _refuse(self, key: str) -> None:
        shard = self.get(key)
        if isinstance(shard, ShardedParameter):
            raise ValueError(
                f"{shard.full_name} is sharded, and can't be replaced or removed, as by torch.func.functional_call, a "
                f"new parametrization or a new nn.Parameter: do that before hocket.fully_shard, or write new values "
                f"inside of ctx.gathered(changed=True)"
            )


def chosen_units(root: nn.Module, rule: Rule) -> list[tuple[str, nn.Module]]:
    """The modules chosen as units, in tree order, without the root.

    Raises: ValueError if the rule chooses nothing, or a module that is never called.
    """
    given: tuple[Any, ...] = rule if isinstance(rule, tuple) else (rule,)
    takes: Any = rule
    if all(isinstance(one, type) for one in given):
        takes = lambda name, module: isinstance(module, given)  # noqa: E731
    elif not callable(rule) or isinstance(rule, nn.Module):
        if isinstance(rule, str | nn.Module) or not isinstance(rule, Iterable):
            raise ValueError(f"units={rule!r} is no class, predicate or list of modules: give one of these, or None")
        wanted, known = list(rule), {id(module) for module in root.modules()} - {id(root)}
        for one in wanted:
            if not isinstance(one, nn.Module):
                raise ValueError(
                    f"units has {one!r}, which is no module: give a class, a predicate, or modules of the model"
                )
            if id(one) not in known:
                raise ValueError(f"units has a {type(one).__name__} that is no part of the {type(root).__name__}")
        takes = lambda name, module: any(module is one for one in wanted)  # noqa: E731
    chosen = [(name, module) for name, module in root.named_modules() if module is not root and takes(name, module)]
    if not chosen:
        raise ValueError(f"units={rule!r} chooses nothing of the {type(root).__name__}")
    for name, module in chosen:
        if not is_called(module):
            raise ValueError(
                f"units has {name!r}, a {type(module).__name__}, which is never called itself: choose the modules in it"
            )
    return chosen


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, so that its hooks run."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def found_parameters(root: nn.Module) -> list[Member]:
    """Every parameter of a module tree once, in order of first appearance, except those in units. DTensors as they
    are.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is not None and not isinstance(param, ShardedParameter) and not is_full(param):
                names.setdefault(param, f"{prefix}.{key}" if prefix else key)
                owners.setdefault(param, []).append((module, key))
    return [Member(names[param], param, tuple(places)) for param, places in owners.items()]


def assign(
    root: nn.Module, unit_modules: Iterable[nn.Module], params: Iterable[Member]
) -> dict[nn.Module, list[Member]]:
    """Unit -> its parameters: each belongs to the innermost unit around all modules that hold it.

    So a parameter shared by two units is gathered whenever either runs.
    """
    units = {root, *unit_modules}
    above: dict[nn.Module, list[tuple[nn.Module, ...]]] = {}
    _paths(root, (), units, above)
    owned: dict[nn.Module, list[Member]] = {unit: [] for unit in units}
    for found in params:
        chains = [chain for module, _ in found.owners for chain in above[module]]
        shared = [unit for unit in chains[0] if all(unit in chain for chain in chains)]
        owned[shared[-1]].append(found)
    return owned


def _paths(
    module: nn.Module,
    chain: tuple[nn.Module, ...],
    units: set[nn.Module],
    above: dict[nn.Module, list[tuple[nn.Module, ...]]],
) -> None:
    """Note the chains of units around every module, outermost first; a module in two places has two."""
    chain = (*chain, module) if module in units else chain
    if chain in above.setdefault(module, []):
        return
    above[module].append(chain)
    for child in module.children():
        _paths(child, chain, units, above)


def _load(shard: ShardedParameter, value: Tensor, name: str) -> None:
    span, local = shard.group.span_of(shard.position), shard.group.locals[shard.position]
    divided, here = hasattr(value, "_local_tensor"), _local(value)
    if not divided and value.shape == span.shape:
        here = span.of(here)
    elif not divided or value.shape != shard.shape or here.numel() != local.numel():
        raise ValueError(
            f"{name} is {tuple(value.shape)} in the state dict, and neither the weight, which is {span.shape}, nor a "
            f"DTensor with the {len(span)} elements that this rank keeps of it: load a state dict of the same model, "
            f"or a checkpoint with hocket.checkpoint.load"
        )
    with torch.no_grad():
        local.copy_(here.reshape(-1))
    shard.group.valueless = False


def _local(value: Tensor) -> Tensor:
    """The local tensor of a DTensor, or another tensor, without its graph."""
    return getattr(value, "_local_tensor", value).detach()


def watch_reads(module: nn.Module, methods: type | None = None) -> None:
    """Give a module with managed parameters the subclass of Note: [Two faces of a parameter].

    `methods` is a class with the methods of a unit's module.
    """
    if any(isinstance(param, ShardedParameter) for param in module._parameters.values()):
        module.__dict__["_parameters"] = Managed(module._parameters)
    cls = vars(type(module)).get("_hocket_original")
    if cls is None or (methods is not None and not isinstance(module, methods)):
        module.__class__ = _subclass(cls or type(module), methods)


@functools.cache
def _subclass(cls: type[nn.Module], methods: type | None) -> type[nn.Module]:
    # The name stays: transformers looks classes up by it.
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_hocket_original": cls}
    return type(cls.__name__, (_Sharded, cls) if methods is None else (_Sharded, methods, cls), body)


class _Sharded(nn.Module):
    """What a module with managed parameters, or of a unit, does otherwise than its class."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        read = getattr(found, "read_on_demand", None) if isinstance(found, nn.Parameter) else None
        full = None if read is None else read()
        return found if full is None else full

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"a sharded {type(self).__name__} can't be pickled or copied, since this rank holds a part of each weight "
            f"only: save it with hocket.checkpoint.save, or copy the model before it is sharded"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for key, shard in self._parameters.items():
            if isinstance(shard, ShardedParameter):
                group = shard.group
                part = group.locals[shard.position]
                new = fn(part)
                if group.late and (new.dtype, new.device) == (part.dtype, part.device):
                    group.valueless = False  # to_empty(): initial values follow
                elif new.dtype != part.dtype or new.data_ptr() != part.data_ptr():
                    raise ValueError(
                        f"a sharded {type(self).__name__} can't be moved or converted ({key} from {part.dtype} on "
                        f"{part.device} to {new.dtype} on {new.device}): do that before hocket.fully_shard, where "
                        f"dtypes are Precision(...)"
                    )
        # Torch would put new parameters in place of DTensors.
        kept = self._parameters
        self.__dict__["_parameters"] = {k: v for k, v in kept.items() if not isinstance(v, ShardedParameter)}
        try:
            return super()._apply(fn, recurse)
        finally:
            dict.update(kept, self._parameters)
            self.__dict__["_parameters"] = kept

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, shard in self._parameters.items():
            if isinstance(shard, ShardedParameter) and not keep_vars:
                full = self.__dict__.get(key)
                gathered = full is not None and self.__dict__[UNIT].context.is_gathered  # will be freed
                kept = shard.like(shard.group.locals[shard.position])
                destination[prefix + key] = full.detach().clone() if gathered else kept

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # pyrefly: ignore[bad-override]
        state = dict(state_dict)
        for key, shard in self._parameters.items():
            found = state.get(prefix + key)
            if isinstance(shard, ShardedParameter) and isinstance(found, Tensor) and found is not shard:
                _load(shard, found, prefix + key)
                state[prefix + key] = shard
        super()._load_from_state_dict(state, prefix, *rest)


def guard_saving(module: nn.Module) -> None:
    """Make `save_pretrained` of transformers, peft and diffusers refuse to write shards."""
    if hasattr(type(module), "save_pretrained"):
        module.__dict__["save_pretrained"] = MethodType(_save_pretrained, module)


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    units = [module.__dict__[UNIT] for module in self.modules() if UNIT in module.__dict__]
    if kwargs.get("state_dict") is None and not all(getattr(unit.context, "is_gathered", False) for unit in units):
        raise ValueError(
            f"save_pretrained of a sharded {type(self).__name__} would write this rank's parts as if they "
            f"were weights: call it inside of context_of(model).gathered() on all ranks, or give it a whole state_dict="
        )
    return type(self).save_pretrained(self, *args, **kwargs)


# Buckets: which modules make a unit together, by size

DEFAULT = 2**27

Named = tuple[str, nn.Module]


def make_buckets(root: nn.Module, rule: Rule, most: int | None) -> list[list[Named]]:
    """The modules of each unit of a model, in tree order, without what is left to the root.

    `rule` chooses modules, of which neighbours are joined up to `most` parameters, if given. Without a rule, modules as
    large as fit are taken. Raises: ValueError for a rule that chooses nothing, or a module that is never called.
    """
    if rule is not None and most is None:
        return [[one] for one in chosen_units(root, rule)]
    size = most or DEFAULT
    chosen = _pieces("", root, size) if rule is None else chosen_units(root, rule)
    if rule is None and [module for _, module in chosen] == [root]:
        return []
    return _join(chosen, size)


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _pieces(name: str, module: nn.Module, most: int) -> list[Named]:
    """The largest called modules that fit into a bucket; those without children whatever their size. Parameters of
    divided modules stay with the root.
    """
    children = dict.fromkeys(module.children())
    if is_called(module) and (_size(module) <= most or not children):
        return [(name, module)] if _size(module) else []
    found: list[Named] = []
    for key, child in module.named_children():  # named_children yields shared modules once
        found += _pieces(f"{name}.{key}" if name else key, child, most)
    return found


def _join(chosen: Sequence[Named], most: int) -> list[list[Named]]:
    """Join neighbours as far as they fit. A module that contains another chosen one stays alone."""
    modules = {module for _, module in chosen}
    found: list[list[Named]] = []
    room = -1  # room in the current bucket; none yet
    for name, module in reversed(chosen):
        inside = any(one in modules for one in module.modules() if one is not module)
        need = _size(module)
        if inside:
            found.append([(name, module)])
            room = -1
        elif need <= room:
            found[-1].insert(0, (name, module))
            room -= need
        else:
            found.append([(name, module)])
            room = most - need
    return found[::-1]

"""Which parameters belong to which unit, and what a module shows of them.

Note: [Two faces of a parameter]
`module._parameters["weight"]` holds the *shard*, a 1-D parameter with the elements that this rank keeps: what
optimizers, `state_dict` and `zero_grad` see, always. The *full* parameter is the very object that the module was built
with; its `.data` is bound for good to a view of the unit's full buffer. While the unit is in use, and only then,
`module.__dict__["weight"]` holds it, and Python finds an instance's own attributes before it asks
`nn.Module.__getattr__` for parameters. So showing and hiding the weights of a unit is one write to a dict per
parameter, and modules that keep their parameters in lists of their own (`nn.LSTM` does) see the same objects.

A weight that is read while its unit is not in use is found by `__getattr__` alone. Modules that hold parameters get a
subclass of their class with a `__getattr__` that, inside a forward of the model, claims the unit on demand; outside,
what is read is the shard.

What takes the place of a shard would be shown in use only, or never: so `_parameters` of such a module refuses it.

Note: [Buckets]
A *bucket* is a unit of several modules: their weights are gathered as one and their gradients reduced as one. Where
modules are small, every collective costs more time to begin than to move its bytes; a bucket begins once for all of
them. Where one is large enough by itself nothing is gained, and more is exposed at either end of a step.

Buckets are filled from the end of the model, where backward begins, and none is larger than it may be unless a single
module is. So what is left over is the first bucket: the one whose gather nothing hides, and whose reduction comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hocket.fsdp.dtensors import DTensorLayout, dtensor_layout_of
from hocket.fsdp.options import Precision
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.functional import embedding_forward, linear_forward
from hocket.layers.slices import Span
from hocket.runtime.weights import sink_of
from hocket.sizes import Size, parse_size

Rule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | Iterable[nn.Module] | None
"""How a user says which modules are units."""


UNIT = "_hocket_unit"
"""Where a module keeps its unit. Not in a table of this file: a unit refers to its module, which then never went."""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a module tree: its first name, and all (module, attribute) pairs that hold it."""

    name: str
    param: nn.Parameter
    """What this rank has of it, before it is sharded: the object that the module was built with, unless `layout`."""
    owners: tuple[tuple[nn.Module, str], ...] = ()
    dtensor: DTensorLayout | None = None
    """How tensor-parallel ranks divide it."""

    @property
    def given(self) -> nn.Parameter | None:
        """The object that the module was built with, if somebody still has it."""
        return self.param if self.dtensor is None else self.dtensor.given()

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.param.shape if self.dtensor is None else self.dtensor.shape

    def span(self, lo: int, hi: int) -> Span:
        """Some elements of what this rank has, in the whole."""
        return Span(tuple(self.shape), lo, hi, None if self.dtensor is None else self.dtensor.part)

    def shown(self) -> Tensor:
        """What modules compute with."""
        return self.param if self.dtensor is None else self.dtensor.shown(self.param)


class Managed(dict[str, nn.Parameter | None]):
    """The parameters of a module, of which shards stay where they are. See Note: [Two faces of a parameter]."""

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


class View:
    """One attribute of a module behind which a managed parameter is."""

    __slots__ = ("_attributes", "_key", "_member")

    def __init__(self, owner: nn.Module, key: str, member: Member) -> None:
        self._attributes, self._key, self._member = owner.__dict__, key, member

    def show(self) -> None:
        """Let the module see the full parameter."""
        self._attributes[self._key] = self._member.shown()

    def hide(self) -> None:
        """Let the module see the shard."""
        self._attributes.pop(self._key, None)


def chosen_units(root: nn.Module, rule: Rule) -> list[tuple[str, nn.Module]]:
    """The modules that are to be units, in the order of the tree, the root last left out.

    Raises: ValueError if the rule chooses nothing, or a module that is never called.
    """
    inner = [(name, module) for name, module in root.named_modules() if module is not root]
    if rule is None:
        return []
    given: tuple[object, ...] = rule if isinstance(rule, tuple) else (rule,)
    classes = tuple(one for one in given if isinstance(one, type))
    if len(classes) == len(given):
        chosen = [(name, module) for name, module in inner if isinstance(module, classes)]
        what = " or ".join(one.__name__ for one in classes) or "module of an empty tuple"
    elif callable(rule) and not isinstance(rule, nn.Module):
        chosen = [(name, module) for name, module in inner if rule(name, module)]
        what = "a module for which the rule is true"
    else:
        if isinstance(rule, str | nn.Module) or not isinstance(rule, Iterable):
            raise ValueError(f"units={rule!r} is no class, predicate or list of modules: give one of these, or None")
        wanted = list(rule)
        odd = next((one for one in wanted if not isinstance(one, nn.Module)), None)
        if odd is not None:
            raise ValueError(
                f"units has {odd!r}, which is no module: give a class, a predicate, or modules of the model"
            )
        known = {id(module) for _, module in inner}
        foreign = next((one for one in wanted if id(one) not in known), None)
        if foreign is not None:
            raise ValueError(f"units has a {type(foreign).__name__} that is no part of the {type(root).__name__}")
        chosen = [(name, module) for name, module in inner if any(module is one for one in wanted)]
        what = "module of an empty list"
    if not chosen:
        raise ValueError(f"units={rule!r} chooses nothing: the {type(root).__name__} contains no {what}")
    for name, module in chosen:
        if not is_called(module):
            raise ValueError(
                f"units has {name!r}, a {type(module).__name__}, which is never called itself: choose the modules in it"
            )
    return chosen


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, so that hooks on it run."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def found_parameters(root: nn.Module) -> list[Member]:
    """Every parameter of a module tree once, in the order of its first appearance, but those of units in it.

    They are as they are; `divided` says which of them tensor-parallel ranks divide.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is not None and not isinstance(param, ShardedParameter) and sink_of(param) is None:
                names.setdefault(param, f"{prefix}.{key}" if prefix else key)
                owners.setdefault(param, []).append((module, key))
    return [Member(names[param], param, tuple(places)) for param, places in owners.items()]


def divided(members: Iterable[Member]) -> list[Member]:
    """The same parameters, as this rank has them. Raises ValueError for DTensors in a layout that is not to be had."""
    return [
        replace(one, param=param, dtensor=layout)
        for one in members
        for param, layout in [dtensor_layout_of(one.name, one.param)]
    ]


def assign(
    root: nn.Module, unit_modules: Iterable[nn.Module], params: Iterable[Member]
) -> dict[nn.Module, list[Member]]:
    """Unit -> its parameters: each belongs to the innermost unit that contains all modules which hold it.

    So a parameter shared by two units belongs to the unit around both, and is there whenever either runs.
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
    """Note for every module the units around it, outermost first; a module in two places has two such chains."""
    chain = (*chain, module) if module in units else chain
    if chain in above.setdefault(module, []):
        return
    above[module].append(chain)
    for child in module.children():
        _paths(child, chain, units, above)


FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Linear: linear_forward, nn.Embedding: embedding_forward}
"""The forward that replaces the one of a class of modules in a sharded unit."""


def forward_of(cls: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The replacement for a class of `FORWARDS` or a subclass that runs its forward unchanged, None for others."""
    return next((new for base, new in FORWARDS.items() if cls.forward is base.forward), None)


def _load(shard: ShardedParameter, value: Tensor, name: str) -> None:
    """Take a whole weight, or what `state_dict` has of this shard."""
    assert shard.group is not None
    span, local = shard.group.span_of(shard), shard.to_local()
    if value.shape == span.shape:
        value = span.of(value.detach())
    elif value.shape != local.shape:
        raise ValueError(
            f"{name} is {tuple(value.shape)} in the state dict, and neither the weight, which is {span.shape}, nor "
            f"what this rank keeps of it, {len(local)} elements: load a state dict of the same model, or a "
            f"checkpoint with hocket.checkpoint.load"
        )
    with torch.no_grad():
        local.copy_(value)
    shard.group.valueless = False


_subclasses: dict[tuple[type[nn.Module], type | None], type[nn.Module]] = {}
_originals: dict[type[nn.Module], type[nn.Module]] = {}


def watch_reads(module: nn.Module, methods: type | None = None) -> None:
    """Give a module that holds managed parameters the subclass of Note: [Two faces of a parameter].

    Where there is a forward that writes weight gradients itself (`FORWARDS`), it gets that too. `methods` is a class
    with those of a module that is a unit.
    """
    if any(isinstance(param, ShardedParameter) for param in module._parameters.values()):
        module.__dict__["_parameters"] = Managed(module._parameters)
    cls = type(module)
    if cls in _originals and (methods is None or issubclass(cls, methods)):
        return
    cls = _originals.get(cls, cls)
    if (cls, methods) not in _subclasses:
        new = _subclasses[cls, methods] = _subclass(cls, forward_of(cls), methods)
        _originals[new] = cls
    module.__class__ = _subclasses[cls, methods]


def _subclass(cls: type[nn.Module], forward: Callable[..., Any] | None, methods: type | None) -> type[nn.Module]:
    def getattr_(self: nn.Module, name: str) -> Any:
        found = cls.__getattr__(self, name)
        read = getattr(found, "read_on_demand", None) if isinstance(found, nn.Parameter) else None
        full = None if read is None else read()
        return found if full is None else full

    def reduce(self: nn.Module, protocol: int) -> Any:
        raise ValueError(
            f"a sharded {cls.__name__} can't be pickled or copied, since this rank holds a part of each weight only: "
            f"save it with hocket.checkpoint.save, or copy the model before it is sharded"
        )

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for key, shard in self._parameters.items():
            if isinstance(shard, ShardedParameter):
                part, group = shard.to_local(), shard.group
                new = fn(part)
                if group is not None and group.late and (new.dtype, new.device) == (part.dtype, part.device):
                    group.valueless = False  # to_empty(), after which somebody gives values
                elif new.dtype != part.dtype or new.data_ptr() != part.data_ptr():
                    raise ValueError(
                        f"a sharded {cls.__name__} can't be moved or converted ({key} from {part.dtype} on "
                        f"{part.device} to {new.dtype} on {new.device}): do that before hocket.fully_shard, where "
                        f"dtypes are Precision(...)"
                    )
        return cls._apply(self, fn, recurse)

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        cls._save_to_state_dict(self, destination, prefix, keep_vars)
        for key, shard in self._parameters.items():
            if isinstance(shard, ShardedParameter) and not keep_vars:
                full = self.__dict__.get(key)
                gathered = full is not None and self.__dict__[UNIT].context.is_gathered  # the memory goes
                destination[prefix + key] = full.detach().clone() if gathered else shard.to_local()

    def load(self: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        state = dict(state)
        for key, shard in self._parameters.items():
            found = state.get(prefix + key)
            if isinstance(shard, ShardedParameter) and isinstance(found, Tensor) and found is not shard:
                _load(shard, found, prefix + key)
                state[prefix + key] = shard
        cls._load_from_state_dict(self, state, prefix, *rest)

    # Other code looks classes up by name: transformers does to find what a model can record. So the name stays.
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_hocket_original": cls}
    body |= {"__getattr__": getattr_, "__reduce_ex__": reduce}
    body |= {"_apply": apply, "_load_from_state_dict": load, "_save_to_state_dict": save}
    if forward is not None:
        body["forward"] = forward
    return type(cls.__name__, (cls,) if methods is None else (methods, cls), body)


def guard_saving(module: nn.Module) -> None:
    """Have `save_pretrained` of a model of transformers, peft or diffusers write whole weights, or nothing."""
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

DEFAULT = parse_size("128Mi params")
"""How large a bucket may be where nobody says, and no units are named."""

Named = tuple[str, nn.Module]
Measure = Callable[[nn.Module], int]


def make_buckets(root: nn.Module, rule: Rule, most: Size | None, precision: Precision) -> list[list[Named]]:
    """The modules of each unit of a model, in the order of its tree, without what is left to the root.

    `rule` chooses modules, of which neighbours share a bucket if `most` is given. Without it modules are taken as large
    as they fit into a bucket. Sizes in bytes are those of gathered weights, in the dtype that `precision` gives them.

    Raises: ValueError for a rule that chooses nothing, or a module that is never called.
    """
    if rule is not None and most is None:
        return [[one] for one in chosen_units(root, rule)]
    size = most or DEFAULT

    def measure(module: nn.Module) -> int:
        if size.unit == "params":
            return sum(param.numel() for param in module.parameters())
        return sum(param.numel() * precision.of(param.dtype).compute.itemsize for param in module.parameters())

    chosen = _pieces("", root, size.value, measure) if rule is None else chosen_units(root, rule)
    if rule is None and [module for _, module in chosen] == [root]:
        return []
    return _join(chosen, size.value, measure)


def _pieces(name: str, module: nn.Module, most: int, measure: Measure) -> list[Named]:
    """The largest modules below one that fit into a bucket and are called; those without children as they are.

    Parameters of a module that is divided stay with the root.
    """
    children = dict.fromkeys(module.children())
    if is_called(module) and (measure(module) <= most or not children):
        return [(name, module)] if measure(module) else []
    found: list[Named] = []
    for key, child in module.named_children():  # a module that is there twice comes once
        found += _pieces(f"{name}.{key}" if name else key, child, most, measure)
    return found


def _join(chosen: Sequence[Named], most: int, measure: Measure) -> list[list[Named]]:
    """Neighbours together, as many as fit. A module that contains another one of them stays alone."""
    modules = {module for _, module in chosen}
    found: list[list[Named]] = []
    room = -1  # in the bucket that is being filled; none yet
    for name, module in reversed(chosen):
        inside = any(one in modules for one in module.modules() if one is not module)
        need = measure(module)
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

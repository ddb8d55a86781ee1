"""State dicts of a sharded model and its optimizer, by the plain module's names.

Values are DTensors, or `Boxes` of what others hold more of, so `torch.distributed.checkpoint` (DCP) saves and loads
them for any number of ranks and strategy, and for plain modules. Weights are the main weights. Nothing communicates or
is copied: dicts hold live tensors, into which DCP loads. A parameter shared by several modules is one entry, under its
first name.

Optimizer state has torch's layouts by name, as `torch.distributed.checkpoint.state_dict` reads and writes them:

    {"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}

or flat, `{"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}`. Torch's own functions serve too, but make a
step of an optimizer without state, and round state to the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hocket.fsdp.piece import Piece
from hocket.fsdp.saving.boxes import is_whole, local_of
from hocket.fsdp.saving.inventory import Inventory

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of checkpoints."""

EXTRA = "_extra_state"
"""Suffix of a module's extra state, of any form."""

SHOWN = 4


def model_state(context: ShardContext | nn.Module) -> dict[str, Any]:
    """Main weights, and the other entries of the module's `state_dict`, such as buffers.

    The same names on all ranks. Raises: ValueError for a parameter of which ranks hold different values under one name.
    """
    return Inventory(context).entries()


@torch.no_grad()
def load_model_state(context: ShardContext | nn.Module, state: Mapping[str, Any]) -> None:
    """Take weights and buffers from `model_state`'s dict after DCP has loaded into it, or from whole tensors on every
    rank.

    Raises: ValueError if names or shapes don't fit; then nothing has changed.
    """
    own = Inventory(context)
    found = {own.others.get(name, name): value for name, value in state.items()}
    wrong = differences(found, own.entries())
    if wrong:
        raise ValueError(f"the state dict doesn't fit the {own.kind}: {wrong}")
    for name, one in own.shards.items():
        value = one.here(found[name])
        if value.data_ptr() != one.main.data_ptr() or value.dtype != one.main.dtype:
            one.main.copy_(value)
    # Buffers and extra state load as in any module.
    own.root.load_state_dict({original: found[name] for name, original in own.plain.items()}, strict=False)
    for group in own.context.param_groups:
        group.valueless = False
    own.context.weights_updated()


def differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Why `found` can't be loaded, by names and shapes; empty if it can."""
    both = [name for name in own if name in found and not name.endswith(EXTRA)]
    shapes = [(name, _shape(found[name]), _shape(own[name])) for name in both]
    texts = [
        listed("it lacks {}", [name for name in own if name not in found]),
        listed("it has {}, which the module lacks", [name for name in found if name not in own]),
        listed("{}", [f"{name} is {a} in it and {b} in the module" for name, a, b in shapes if a != b]),
    ]
    return "; ".join(filter(None, texts))


def listed(text: str, items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return text.format(", ".join(items[:SHOWN]) + more) if items else ""


def _shape(value: Any) -> str:
    shape = value if isinstance(value, torch.Size) else getattr(value, "shape", None)
    return "no tensor" if shape is None else " x ".join(map(str, shape)) or "a single number"


# The optimizer's state


Values = dict[str, dict[str, Any]]
"""Parameter name -> key -> value."""

NOT_SETTINGS = ("params", "param_names")
"""Entries of a parameter group that are no settings."""

STEP = "step"
"""A number of each parameter, whatever the parameter's shape."""

SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Settings added by torch's learning rate schedulers."""


def optimizer_state(
    context: ShardContext | nn.Module, optimizer: Optimizer, *, flatten: bool = False
) -> dict[str, Any]:
    """The optimizer's state by name, in a layout of this file's docstring.

    The flat one suits ranks with different parameters, such as pipeline stages. Raises: ValueError for a parameter that
    isn't the module's, and for state that is neither elementwise nor a single number.
    """
    return state_of_optimizer(Inventory(context), optimizer, flatten)


def state_of_optimizer(
    own: Inventory, optimizer: Optimizer, flatten: bool, without: Container[str] = ()
) -> dict[str, Any]:
    """The same, `without` the state of some parameters."""
    params, packed = _numbered(own, optimizer), optimizer.state_dict()
    state: Values = {name: {} for name, _ in params}  # empty for parameters never updated
    for number, items in packed["state"].items():
        name, _ = params[number]
        if name not in without:
            state[name] = {key: _wrapped(own.shards.get(name), key, value) for key, value in items.items()}
    groups = [{**group, "params": [params[n][0] for n in group["params"]]} for group in packed["param_groups"]]
    if not flatten:
        return {"state": state, "param_groups": groups}
    sections = {"state": state, "param_groups": _settings(groups)}
    return {
        f"{section}.{name}.{key}": value
        for section, values in sections.items()
        for name, items in values.items()
        for key, value in items.items()
    }


def _numbered(own: Inventory, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter), in the numbering of `Optimizer.state_dict`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in own.name_of:
            raise ValueError(
                f"the {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that isn't part of "
                f"the sharded {own.kind}: build it from module.parameters() after fully_shard"
            )
    return [(own.name_of[id(param)], param) for param in params]


def _wrapped(one: Piece | None, key: str, value: Any) -> Any:
    if one is None or not any(isinstance(item, Tensor) for item in tree_leaves(value)):
        return value
    if isinstance(value, Tensor) and key != STEP and one.is_like(value):
        return one.saved(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    what = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
    raise ValueError(
        f"the optimizer's {key} of {one.name} {what}, which is neither a tensor like the parameter nor a single "
        f"number, and is not saved: save the model with optimizer=None"
    )


def _settings(groups: Iterable[Mapping[str, Any]]) -> Values:
    return {name: {k: v for k, v in g.items() if k not in NOT_SETTINGS} for g in groups for name in g["params"]}


def optimizer_state_like(own: Inventory, optimizer: Optimizer, metadata: Metadata) -> dict[str, Any]:
    """A dict to load the optimizer's state of a checkpoint into, in the checkpoint's layout.

    It has the checkpoint's entries for this optimizer's parameters. Existing state tensors are used, others made: in
    the checkpoint's dtype or, if the weights had the same, in the dtype of weights here. `take_optimizer_state` takes
    the dict after DCP has loaded into it; until then the optimizer is unchanged.
    """
    params = dict(_numbered(own, optimizer))
    known = {**{name: name for name in params}, **{other: n for other, n in own.others.items() if n in params}}
    stored, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    state: dict[str, Any] = {}
    for key, entry in stored.items():
        if not key.startswith(f"{OPTIMIZER}."):
            continue
        section, name, item = split(key.removeprefix(f"{OPTIMIZER}."), known)
        path = paths.get(key, (OPTIMIZER, key.removeprefix(f"{OPTIMIZER}.")))[1:]
        if section == "state":
            one, present = own.shards.get(known[name]), optimizer.state.get(params[known[name]], {}).get(item)
            if one is None or not isinstance(entry, TensorStorageMetadata) or not _by_element(one, item, entry.size):
                put(state, path, room_for(entry, present))
            elif isinstance(present, Tensor) and one.is_like(present):
                put(state, path, one.saved(present))
            else:
                weight = stored.get(f"{MODEL}.{name}")
                follows = (
                    isinstance(weight, TensorStorageMetadata) and weight.properties.dtype == entry.properties.dtype
                )
                dtype = one.main.dtype if follows else entry.properties.dtype
                put(state, path, one.saved(one.param.like(torch.zeros_like(one.main, dtype=dtype))))
        elif name or path[0] == "param_groups":
            put(state, path, room_for(entry))
    return state


def _by_element(one: Piece | None, key: str, shape: Sequence[int]) -> bool:
    """Whether state of a shape, in the whole model, has a number for each element of a parameter."""
    return one is not None and key != STEP and tuple(shape) == one.shape


def split(key: str, names: Container[str]) -> tuple[str, str, str]:
    """`state.layers.0.w.exp_avg` -> `("state", "layers.0.w", "exp_avg")`; three empty strings for other names."""
    section, *parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:end])) in names:
            return section, name, ".".join(parts[end:])
    return "", "", ""


def room_for(entry: Any, present: Any = None) -> Any:
    """The target of a checkpoint entry that ranks have alike: `present` if it fits, else a new tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    fits = isinstance(present, Tensor) and present.shape == entry.size
    return present.detach() if fits else torch.zeros(entry.size, dtype=entry.properties.dtype)


def put(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    place: Any = state
    for at, key in enumerate(path):
        if isinstance(place, list) and isinstance(key, int):
            place.extend([None] * (key + 1 - len(place)))
        if at == len(path) - 1:
            place[key] = value
        elif isinstance(place, dict):
            place = place.setdefault(key, [] if isinstance(path[at + 1], int) else {})
        else:
            place[key] = place[key] or ([] if isinstance(path[at + 1], int) else {})
            place = place[key]


def load_optimizer_state(context: ShardContext | nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state and settings (learning rate, ...) from a dict in one of torch's layouts by name.

    Takes dicts of `optimizer_state`, after DCP has loaded into them, and whole tensors on every rank. Parameters
    without an entry start without state. Settings go by parameter name, so groups may differ from the saved ones.
    Raises: ValueError, before anything has changed, if a parameter is missing, if parameters of one group had different
    settings, or if the state is of another kind of optimizer.
    """
    take_optimizer_state(Inventory(context), optimizer, state, copy=True)


@torch.no_grad()
def take_optimizer_state(own: Inventory, optimizer: Optimizer, state: Mapping[str, Any], copy: bool = False) -> None:
    """The same; without `copy` the tensors become the optimizer's."""
    params = _numbered(own, optimizer)
    values, settings = _by_name(own, state, {name for name, _ in params})
    groups, number = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(number, number := number + len(group["params"])))
        agreed = _agreed(optimizer, group, [params[n][0] for n in numbers], settings)
        groups.append({**group, **agreed, "params": numbers})

    def taken(one: Piece | None, param: nn.Parameter, key: str, value: Any) -> Any:
        """A value as the optimizer stores it."""
        if not isinstance(value, Tensor):
            return value
        present = optimizer.state.get(param, {}).get(key)
        mine = isinstance(present, Tensor) and local_of(present).data_ptr() == local_of(value).data_ptr()
        apart = copy and is_whole(value) and not mine
        if one is None or not (_by_element(one, key, value.shape) or (key != STEP and one.is_like(value))):
            return value.clone() if apart else value
        here = one.here(value)
        return one.param.like(here.to(one.main, copy=True) if apart else here)

    packed = {
        n: {key: taken(own.shards.get(name), param, key, value) for key, value in values[name].items()}
        for n, (name, param) in enumerate(params)
        if values.get(name)
    }
    _replace(optimizer, {"state": packed, "param_groups": groups})
    for n, items in packed.items():  # torch casts to the parameter's dtype, which may lose digits
        param = params[n][1]
        for key, value in items.items():
            if isinstance(value, Tensor) and optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value.to(param.device)


def _replace(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, but tensor settings stay the same tensors, which a captured graph may read."""
    before = [{k: v for k, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, tensors in zip(optimizer.param_groups, before, strict=True):
        for key, tensor in tensors.items():
            group[key] = tensor.copy_(torch.as_tensor(group[key]))


def _by_name(own: Inventory, state: Mapping[str, Any], mine: Container[str]) -> tuple[Values, Values]:
    """State and settings by first names of parameters, from one of torch's layouts."""
    values: Values
    settings: Values
    if "state" in state or "param_groups" in state:
        values, settings = dict(state.get("state", {})), _settings(state.get("param_groups", []))
    else:
        sections: dict[str, Values] = {"state": {}, "param_groups": {}, "": {}}
        known = {**{name: name for name in own.name_of.values() if name in mine}, **own.others}
        for key, value in state.items():
            section, name, item = split(key, known)
            sections[section].setdefault(name, {})[item] = value
        values, settings = sections["state"], sections["param_groups"]
    for other, name in own.others.items():
        for found in (values, settings):
            if other in found:
                found.setdefault(name, found[other])
    return values, settings


def _agreed(optimizer: Optimizer, group: Mapping[str, Any], names: list[str], settings: Values) -> dict[str, Any]:
    if not names:
        return {}
    kind = type(optimizer).__name__
    missing = listed("{}", [name for name in names if name not in settings])
    if missing:
        raise ValueError(f"the state has no settings for {missing}: it is of an optimizer without these parameters")
    first = settings[names[0]]
    lacking = sorted(group.keys() - first.keys() - SCHEDULERS - {*NOT_SETTINGS})
    foreign = sorted(first.keys() - group.keys() - SCHEDULERS)
    if lacking and foreign:  # one alone may come from another torch version
        raise ValueError(
            f"the state is not that of {kind}: it has {', '.join(foreign)}, and lacks {', '.join(lacking)}; build the "
            f"kind of optimizer that was saved, or load the weights alone"
        )
    for name in names[1:]:
        for key, value in first.items():
            other = settings[name].get(key)
            if other is not value and not bool(other == value):
                raise ValueError(
                    f"{names[0]} and {name} are in one group of the {kind}, but the state has {key}={value} for the "
                    f"one and {key}={other} for the other: put them into different groups"
                )
    return first

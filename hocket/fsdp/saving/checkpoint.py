"""Checkpoints of sharded models: atomic, readable by any number of ranks and by torch.

A checkpoint is a folder in the format of `torch.distributed.checkpoint` (DCP), with the keys `model` and `optimizer`.
All functions are collective: every rank calls them with the same arguments, and an error of one rank is raised on all.

Names are the plain module's, and a parameter shared by several modules is one entry, under its first name. Weights are
the main weights. DCP writes and reads live tensors: DTensors, or `Boxes` of what ranks beside a DTensor's mesh have
more of. Optimizer state has torch's layouts by name, as `torch.distributed.checkpoint.state_dict` has them:

    {"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}

or flat, `{"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}`. Torch's functions would make a step of an
optimizer without state, and round state to the dtype of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hocket.fsdp.checks import refuse_newcomers
from hocket.fsdp.members import UNIT
from hocket.fsdp.piece import Boxes, Piece
from hocket.fsdp.saving.storage import MODEL, OPTIMIZER, CheckpointReader, differences, entries_of, listed, save_state
from hocket.runtime.world import everyone, together

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

EXTRA = "_extra_state"
"""Suffix of a module's extra state, of any form."""

STEP = "step"
"""Optimizer state that is a number, whatever the parameter's shape."""

NOT_SETTINGS = ("params", "param_names")
"""Entries of a parameter group that are no settings."""

SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Settings added by torch's learning rate schedulers."""

Values = dict[str, dict[str, Any]]
"""Parameter name -> key -> value."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Name parts added by torch.compile and activation checkpointing, removed in checkpoints."""


class Inventory:
    """What a sharded module has, by name.

    Raises: ValueError for a parameter of which ranks hold different values under one name.
    """

    def __init__(self, context: ShardContext | nn.Module) -> None:
        self.context = context = context_given(context)
        self.root: nn.Module = context.root
        refuse_newcomers(self.root)
        self.state: dict[str, Any] = dict(self.root.state_dict(keep_vars=True))
        """The module's own `state_dict`, under its own names, with shards."""
        names: dict[int, list[str]] = {}
        for name, value in self.state.items():
            names.setdefault(id(value), []).append(plain_name(name))
        kept: dict[int, Piece] = {}
        for group in context.param_groups:
            for i, shard in enumerate(group.shards):
                first = names.setdefault(id(shard), [plain_name(shard.full_name)])[0]  # a hook may omit it
                kept[id(shard)] = Piece(first, group, i, group.span_of(i))
        self.shards: dict[str, Piece] = {found[0]: kept[key] for key, found in names.items() if key in kept}
        """By first name, in the module's order."""
        self.others = {other: found[0] for key, found in names.items() if key in kept for other in found[1:]}
        """Further names of shared parameters -> first name."""
        self.plain: dict[str, str] = {
            plain_name(name): name for name, value in self.state.items() if id(value) not in kept
        }
        """Unsharded entries, mostly buffers: name -> the module's own name."""
        self.name_of: dict[int, str] = {key: found[0] for key, found in names.items()}
        """id of an object in the module's state -> its first name."""
        self._refuse_different_values()

    @property
    def kind(self) -> str:
        return type(self.root).__name__

    def entries(self) -> dict[str, Any]:
        """Main weights as checkpoints describe them, and buffers: live tensors."""
        found: dict[str, Any] = {name: one.saved(one.param) for name, one in self.shards.items()}
        for name, original in self.plain.items():
            value = self.state[original]
            found[name] = value.detach() if isinstance(value, Tensor) else value
        return found

    def written_elsewhere(self) -> set[str]:
        """Parameters that a replica of this rank saves.

        Replicas (HSDP, `no_shard`) hold the same elements. All go through the parameters in the same order and give
        each to the replica with the fewest bytes so far. DCP would choose one too, but after a copy of all.
        """
        given: dict[tuple[int, ...], list[int]] = {}
        found = set()
        for name, one in self.shards.items():
            same = one.group.groups.same
            loads = given.setdefault(same.ranks, [0] * same.size)
            writer = loads.index(min(loads))
            loads[writer] += one.main.nbytes
            if writer != same.rank:
                found.add(name)
        return found

    def _refuse_different_values(self) -> None:
        groups = self.context.param_groups
        sizes = [group.groups.reduce.size * group.groups.outer.size for group in groups]
        for group, size in zip(groups, sizes, strict=True):
            # Parts of each whole parameter before sharding.
            layouts = [member.dtensor for member in group.members]
            tensors = min(1 if layout is None or layout.part is None else layout.mesh.size() for layout in layouts)
            if size * max(group.groups.part[1], tensors) < max(sizes):
                raise ValueError(
                    f"{group.members[0].name} is placed on {size} of {max(sizes)} ranks, so others hold different "
                    f"values under the same name: say which part of dimension 0 each has, with "
                    f"Placement(part=(position, {max(sizes) // size}))"
                )


def context_given(given: ShardContext | nn.Module) -> ShardContext:
    """The context of a sharded model, or the context itself."""
    unit = given.__dict__.get(UNIT) if isinstance(given, nn.Module) else None
    context: Any = given if unit is None else unit.context
    if not hasattr(context, "units") or (unit is not None and context.root is not given):
        raise ValueError(
            f"{type(given).__name__} is neither a ShardContext nor a whole sharded model: give what "
            f"hocket.fully_shard returned for the model"
        )
    return context


def plain_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def save(
    context: ShardContext | nn.Module,
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    asynchronously: bool = False,
    flatten: bool = False,
) -> Future[Path]:
    """Save the main weights, the buffers, and the optimizer's state to a new folder.

    `folder` must not exist, or be empty, on a file system that all ranks share; it appears when complete, see Note: [A
    checkpoint is there or it is not]. With `optimizer` None only weights and buffers are saved.

    With `asynchronously` this returns once weights may change; `result()` of the return value waits for the folder and
    raises errors, which otherwise become warnings, see Note: [No error of a save is lost]. It needs host memory for
    what this rank writes, and first waits for an earlier save. Otherwise the save is complete on return.

    `flatten` saves the optimizer in torch's flat layout, for ranks with different parameters such as pipeline stages.

    Raises: ValueError if the folder is in use or not shared, for a parameter of the optimizer that isn't the module's,
    and for optimizer state that is neither like the parameter nor a single number; OSError if it can't be written.
    """
    own = Inventory(context)
    elsewhere = own.written_elsewhere()
    state: dict[str, Any] = {MODEL: {name: value for name, value in own.entries().items() if name not in elsewhere}}
    if optimizer is not None:
        state[OPTIMIZER] = _optimizer_entries(own, optimizer, flatten, elsewhere)
    return save_state(Path(folder), state, own.others, asynchronously=asynchronously)


def _optimizer_entries(
    own: Inventory, optimizer: Optimizer, flatten: bool, elsewhere: Container[str]
) -> dict[str, Any]:
    """Live optimizer state in a layout of this file's docstring, without that of parameters saved elsewhere."""
    params = _params(own, optimizer)
    state: Values = {name: {} for name in params}  # empty for parameters never updated
    for name, param in params.items():
        if name not in elsewhere:
            items = optimizer.state.get(param, {})
            state[name] = {key: _entry(own.shards.get(name), key, value) for key, value in items.items()}
    groups = [{**group, "params": [own.name_of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    if not flatten:
        return {"state": state, "param_groups": groups}
    return {
        f"{section}.{name}.{key}": value
        for section, values in {"state": state, "param_groups": _settings(groups)}.items()
        for name, items in values.items()
        for key, value in items.items()
    }


def _params(own: Inventory, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in its order."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in own.name_of:
            raise ValueError(
                f"the {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that isn't part of "
                f"the sharded {own.kind}: build it from module.parameters() after fully_shard"
            )
    return {own.name_of[id(param)]: param for param in params}


def _entry(one: Piece | None, key: str, value: Any) -> Any:
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


# Loading


@torch.no_grad()
def load(context: ShardContext | nn.Module, optimizer: Optimizer | None, folder: str | os.PathLike[str]) -> None:
    """Load weights, buffers, and the optimizer's state from a folder written by `save` or from a plain module.

    The number of ranks, strategy, mesh and parameter groups may differ from those of the save, and the optimizer need
    not have made a step. With `optimizer` None only weights and buffers are loaded. Each rank reads only what it keeps.
    State keeps the checkpoint's dtype or, if the weights had the same, gets the dtype of weights here.

    Raises: ValueError, on all ranks and before anything has changed, if the folder is no complete checkpoint, if names
    or shapes differ from the module's, or if data that a rank reads is damaged. Also if the optimizer's settings don't
    fit; then weights may have been loaded.
    """
    path, own = Path(folder), Inventory(context)
    reader = CheckpointReader(path)
    metadata, found = reader.stored(), dict[str, Any]()
    together(lambda: found.update(_targets(own, optimizer, metadata, path)))
    _refuse_unknown(own, optimizer, metadata, path)
    reader.load(found)
    # Tensors are live; other state, and what modules do with it, goes through the module.
    others = _nested(metadata, MODEL, found)
    own.root.load_state_dict({original: others[name] for name, original in own.plain.items()}, strict=False)
    for group in own.context.param_groups:
        group.valueless = False
    own.context.weights_updated()
    if optimizer is not None:
        try:
            _take(own, optimizer, metadata, found)
        except ValueError as error:
            raise ValueError(f"checkpoint {path} doesn't fit: {error}") from None


def _targets(own: Inventory, optimizer: Optimizer | None, metadata: Metadata, folder: Path) -> dict[str, Any]:
    """What this rank loads into, by the checkpoint's keys."""
    if not metadata.state_dict_metadata:
        raise ValueError(f"{folder} is no complete checkpoint: it has no .metadata")
    saved, wanted = _saved(metadata), own.entries()
    for other, name in own.others.items():
        if name in wanted and name not in saved and other in saved:
            wanted[other] = wanted.pop(name)
    if wrong := differences({name: saved[name] for name in wanted if name in saved}, wanted, EXTRA):
        raise ValueError(f"checkpoint {folder} doesn't fit the {own.kind}: {wrong}")
    found = {f"{MODEL}.{name}": value for name, value in wanted.items() if not name.endswith(EXTRA)}
    for path, name, entry in entries_of(metadata, MODEL):
        if _is_extra(path) and path[0] in wanted:  # in its saved form
            found[f"{MODEL}.{name}"] = _room(entry)
    if optimizer is None:
        return found
    if not any(entries_of(metadata, OPTIMIZER)):
        raise ValueError(f"checkpoint {folder} has no state of an optimizer: load the weights alone, optimizer=None")
    return found | _optimizer_targets(own, optimizer, metadata)


def _is_extra(path: Sequence[str | int]) -> bool:
    return str(path[0]).endswith(EXTRA)


def _saved(metadata: Metadata) -> dict[str, Any]:
    """A checkpoint's weights and buffers: name -> shape, or an entry without one."""
    found: dict[str, Any] = {}
    for path, name, entry in entries_of(metadata, MODEL):
        shape = torch.Size(entry.size) if isinstance(entry, TensorStorageMetadata) else entry
        found[str(path[0]) if _is_extra(path) else name] = shape
    return found


def _optimizer_targets(own: Inventory, optimizer: Optimizer, metadata: Metadata) -> dict[str, Any]:
    """State tensors that are there are used, others made: the optimizer gets them in `_take`."""
    params, found = _params(own, optimizer), dict[str, Any]()
    known = _first_names(own, params)
    entries = [(*split(key, known), path, key, entry) for path, key, entry in entries_of(metadata, OPTIMIZER)]
    # Of a parameter that is a single number, state is like it or a number of its own: as for other parameters.
    shapes = [
        (item, own.shards[known[name]].shape, e) for _, name, item, *_, e in entries if known.get(name) in own.shards
    ]
    numbers = {STEP, *(item for item, shape, e in shapes if shape and getattr(e, "size", None) == torch.Size())}
    for section, name, item, path, key, entry in entries:
        if section == "state":
            one, present = own.shards.get(known[name]), optimizer.state.get(params[known[name]], {}).get(item)
            value = _room(entry, present)
            tensor = isinstance(entry, TensorStorageMetadata) and item not in numbers
            if one is not None and tensor and tuple(entry.size) == one.shape:
                if not (isinstance(present, Tensor) and one.is_like(present)):
                    weight, dtype = metadata.state_dict_metadata.get(f"{MODEL}.{name}"), entry.properties.dtype
                    if isinstance(weight, TensorStorageMetadata) and weight.properties.dtype == dtype:
                        dtype = one.main.dtype
                    present = one.param.like(torch.zeros_like(one.main, dtype=dtype))
                value = one.saved(present)
            found[f"{OPTIMIZER}.{key}"] = value
        elif name or path[0] == "param_groups":
            found[f"{OPTIMIZER}.{key}"] = _room(entry)
    return found


def _first_names(own: Inventory, params: Container[str]) -> dict[str, str]:
    """Each name of some parameters -> the first one."""
    names = {**{name: name for name in own.name_of.values()}, **own.others}
    return {name: first for name, first in names.items() if first in params}


def _room(entry: Any, present: Any = None) -> Any:
    """The target of a checkpoint entry that ranks have alike: `present` if it fits, else a new tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    fits = isinstance(present, Tensor) and present.shape == entry.size
    return present.detach() if fits else torch.zeros(entry.size, dtype=entry.properties.dtype)


def split(key: str, names: Container[str]) -> tuple[str, str, str]:
    """`state.layers.0.w.exp_avg` -> `("state", "layers.0.w", "exp_avg")`; three empty strings for other names."""
    section, *parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:end])) in names:
            return section, name, ".".join(parts[end:])
    return "", "", ""


def _refuse_unknown(own: Inventory, optimizer: Optimizer | None, metadata: Metadata, folder: Path) -> None:
    """Refuse a checkpoint with entries that no rank needs."""
    held = [] if optimizer is None else [param for one in optimizer.param_groups for param in one["params"]]
    mine = {*own.shards, *own.others, *own.plain}, {*own.others, *(own.name_of[id(param)] for param in held)}
    known, params = (set[str]().union(*sets) for sets in zip(*everyone(mine), strict=True))
    wrong = listed("it has {}, which the module lacks", [name for name in _saved(metadata) if name not in known])
    if not wrong and optimizer is not None:
        state = [name for _, name, _ in entries_of(metadata, OPTIMIZER) if name.startswith("state.")]
        foreign = [f"{OPTIMIZER}.{name}" for name in state if not split(name, params)[0]]
        wrong = listed("it has {}, which are of no parameter of the optimizer", foreign)
    if wrong:
        raise ValueError(f"checkpoint {folder} doesn't fit the {own.kind}: {wrong}")


def _nested(metadata: Metadata, section: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What was loaded of a section of the checkpoint, in the form that was saved."""
    state: dict[str, Any] = {}
    for path, name, _ in entries_of(metadata, section):
        if f"{section}.{name}" in found:
            _put(state, path, found[f"{section}.{name}"])
    return state


def _put(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
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


def _take(own: Inventory, optimizer: Optimizer, metadata: Metadata, found: Mapping[str, Any]) -> None:
    """Give an optimizer the loaded state and settings (learning rate, ...).

    Parameters without an entry start without state. Settings go by parameter name, so groups may differ from the saved
    ones. Raises: ValueError, before anything has changed, if a parameter is missing, if parameters of one group had
    different settings, or if the state is of another kind of optimizer.
    """
    params = _params(own, optimizer)
    known, number = _first_names(own, params), {name: n for n, name in enumerate(params)}
    groups = _nested(metadata, OPTIMIZER, found).get("param_groups", ())
    settings = {known.get(name, name): one for name, one in _settings(groups).items()}
    state: dict[int, dict[str, Any]] = {}
    for _, key, _ in entries_of(metadata, OPTIMIZER):
        section, name, item = split(key, known)
        if section == "state":
            value, one = found[f"{OPTIMIZER}.{key}"], own.shards.get(known[name])
            like = one is not None and isinstance(value, Boxes)
            state.setdefault(number[known[name]], {})[item] = one.param.like(value.flat) if one and like else value
        elif section == "param_groups":
            settings.setdefault(known[name], {})[item] = found[f"{OPTIMIZER}.{key}"]
    packed = []
    for group in optimizer.param_groups:
        names = [own.name_of[id(param)] for param in group["params"]]
        agreed = _agreed(optimizer, group, names, settings)
        packed.append({**group, **agreed, "params": [number[name] for name in names]})
    before = [{k: v for k, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    for group, tensors in zip(optimizer.param_groups, before, strict=True):
        for key, tensor in tensors.items():  # they stay the same tensors, which a captured graph may read
            group[key] = tensor.copy_(torch.as_tensor(group[key]))
    for name, param in params.items():  # torch casts to the parameter's dtype, which may lose digits
        for key, value in state.get(number[name], {}).items():
            if isinstance(value, Tensor) and optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value.to(param.device)


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

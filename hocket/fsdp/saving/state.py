"""The state of a sharded model as a dict, by the names that the plain module would use.

What a rank keeps of a parameter is a `FlatTensor` with the whole parameter's shape, so `torch.distributed.checkpoint`
(DCP) saves and loads the dict at any number of ranks, with any strategy, and as a plain module's. The weights are the
main ones, those that the optimizer updates. Nothing here communicates, and nothing is copied: the dict holds the live
tensors, and DCP loads into them. A parameter that several modules share is one entry, under its first name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.fsdp.saving.kept import Inventory

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

EXTRA = "_extra_state"
"""How names end under which torch's modules keep what is neither parameter nor buffer. It may have any form."""

SHOWN = 4
"""How many names a message lists."""


def model_state(context: ShardContext | nn.Module) -> dict[str, Any]:
    """The main weights, as `FlatTensor`s, and what else the module's `state_dict` has: buffers, as they are.

    The same names on all ranks. Raises: ValueError for a parameter of which ranks hold different values under one name.
    """
    return entries(Inventory(context))


def entries(own: Inventory) -> dict[str, Any]:
    """`model_state` of what has been looked at already."""
    state: dict[str, Any] = {name: one.tensor(one.shard.to_local()) for name, one in own.kept.items()}
    for name, original in own.plain.items():
        value = own.state[original]
        state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


@torch.no_grad()
def load_model_state(context: ShardContext | nn.Module, state: Mapping[str, Any]) -> None:
    """Take weights and buffers from what `model_state` returned, after DCP has loaded into it.

    Takes tensors of the whole shapes as well, on every rank, such as a plain module's `state_dict`. Raises: ValueError
    if names or shapes don't fit; then nothing has changed.
    """
    own = Inventory(context)
    found = {own.others.get(name, name): value for name, value in state.items()}
    wrong = differences(found, entries(own))
    if wrong:
        raise ValueError(f"the state dict doesn't fit the {own.kind}: {wrong}")
    for name, one in own.kept.items():
        value, shard = one.part_of(found[name]), one.shard.to_local()
        if value.data_ptr() != shard.data_ptr() or value.dtype != shard.dtype:
            shard.copy_(value)
    # Buffers, and the extra state of modules that have any, go the way of every module.
    own.root.load_state_dict({original: found[name] for name, original in own.plain.items()}, strict=False)
    for group in own.context.param_groups:
        group.valueless = False
    own.context.weights_updated()


def differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Why what was found can't be loaded into what the module has, in words; empty if it can.

    Compares names, and the shapes of parameters and buffers.
    """
    both = [name for name in own if name in found and not name.endswith(EXTRA)]
    shapes = [(name, _shape(found[name]), _shape(own[name])) for name in both]
    texts = [
        listed("it lacks {}", [name for name in own if name not in found]),
        listed("it has {}, which the module lacks", [name for name in found if name not in own]),
        listed("{}", [f"{name} is {a} in it and {b} in the module" for name, a, b in shapes if a != b]),
    ]
    return "; ".join(filter(None, texts))


def listed(text: str, items: list[str]) -> str:
    """`text` with the first few of the items in it; empty if there are none."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return text.format(", ".join(items[:SHOWN]) + more) if items else ""


def _shape(value: Any) -> str:
    shape = value if isinstance(value, torch.Size) else getattr(value, "shape", None)
    return "no tensor" if shape is None else " x ".join(map(str, shape)) or "a single number"

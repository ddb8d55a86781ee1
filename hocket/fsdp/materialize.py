"""Give parameters on the meta device memory and values, one unit at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hocket.fsdp.members import Member
from hocket.fsdp.options import ShardOptions


def materialize(
    params: Sequence[Member], device: torch.device, options: ShardOptions, late: bool = False
) -> list[Member]:
    """The same parameters, moved to `device`; those of the meta device get values from `init`, or `reset_parameters`.

    With `offload` what is on the CPU stays there, since its shards will.

    With `late` they get none, and their buffers stay: somebody gives them values later.

    A module is initialized whole, with its buffers, so all its own parameters must be on the meta device or none.
    Raises: ValueError for a module that nothing initializes.
    """
    for found in params:
        stays = options.offload != "none" and found.param.device.type == "cpu"
        if not found.param.is_meta and not stays and found.param.device != device:
            found.param.data = found.param.data.to(device)
    modules = {owner: None for found in params if found.param.is_meta for owner, _ in found.owners}
    if not modules:
        return list(params)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for found in params:
        if found.param.is_meta:
            values = torch.empty_like(found.param, device=device)
            new[found.param] = nn.Parameter(values, requires_grad=found.param.requires_grad)
            for owner, key in found.owners:
                owner._parameters[key] = new[found.param]
    for module in () if late else modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        reset = options.init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"a {type(module).__name__} on the meta device has no reset_parameters(): say how its parameters get "
                f"their values with ShardOptions(init=...)"
            )
        with torch.no_grad():
            reset(module)
    return [replace(found, param=new.get(found.param, found.param)) for found in params]

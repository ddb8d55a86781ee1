"""The arguments of FSDP2's `fully_shard`, beside hocket's own ones, and what they say in hocket's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from hocket.fsdp.options import ShardOptions, UnitOptions
from hocket.fsdp.precision import Precision
from hocket.fsdp.shard_groups import Placement

Place = Callable[[str, nn.Parameter], Placement | None]


class Fsdp2Arguments(TypedDict, total=False):
    """Arguments of FSDP2's `fully_shard`, with the policies of `torch.distributed.fsdp`, and one of FSDP1's."""

    reshard_after_forward: bool | int | None
    """Whether units give up gathered weights between forward and backward; None: those that have no units in them."""
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    """Parameter -> None, a `Shard`, or a `ShardPlacementResult` with another mesh."""
    mp_policy: MixedPrecisionPolicy | None
    """Dtypes, and casts of inputs and outputs of each unit. Parameters keep the dtype in which they were built."""
    offload_policy: OffloadPolicy | None
    """`CPUOffloadPolicy`: see `ShardOptions.offload`."""
    ignored_params: set[nn.Parameter] | None
    """Parameters that stay as they are, each rank's own."""
    dp_mesh_dims: Any
    """Only None."""
    sync_module_states: bool
    """Take the weights and buffers of the first rank, instead of comparing those of all."""


@dataclass(frozen=True)
class Asked:
    """The arguments of a call of `fully_shard`, in hocket's terms."""

    mesh: DeviceMesh | None
    strategy: str
    precision: Precision
    place: Place | None
    options: ShardOptions
    unit: UnitOptions
    ignored: Iterable[nn.Parameter]
    nests: bool
    """Whether the model may become a part of a larger one."""
    first_rank: bool
    """Whether all ranks take the weights of the first one."""


def asked_for(mesh: DeviceMesh | None, own: Mapping[str, Any], fsdp2: Mapping[str, Any], nests: bool) -> Asked:
    """What a call asks for, by hocket's own arguments and FSDP2's.

    Raises: TypeError for an argument that is neither's, ValueError for one that is no such thing, or says the same as
        another one, or that hocket has no counterpart for.
    """
    for name in fsdp2:
        if name not in Fsdp2Arguments.__annotations__:
            raise TypeError(f"fully_shard() got an unexpected keyword argument {name!r}")
    given = dict.fromkeys(Fsdp2Arguments.__annotations__) | dict(fsdp2)
    _refuse(given)
    for name, other in _SAME.items():
        if given[name] is not None and own[other] is not None:
            raise ValueError(f"{name}= and {other}= say the same in two ways: give one of them")
    policy = given["mp_policy"] or (MixedPrecisionPolicy() if nests else None)
    place = given["shard_placement_fn"]
    return Asked(
        mesh=mesh,
        strategy=own["strategy"] or "optim_grads_params",
        precision=own["precision"] or (Precision() if policy is None else _precision(policy)),
        place=own["place"] if place is None else _place_by(place),
        options=_offloaded(
            own["options"] or ShardOptions(device=_device(mesh) if nests else None), given["offload_policy"]
        ),
        unit=_unit_options(given["reshard_after_forward"], policy),
        ignored=given["ignored_params"] or (),
        nests=nests,
        first_rank=bool(given["sync_module_states"]),
    )


_SAME = {"mp_policy": "precision", "reshard_after_forward": "strategy", "shard_placement_fn": "place"}
"""FSDP2's arguments, and hocket's that say the same."""


def _refuse(given: Mapping[str, Any]) -> None:
    """Refuse what is no such thing, or what hocket has no counterpart for."""
    reshard, policy, offload = (given[name] for name in ("reshard_after_forward", "mp_policy", "offload_policy"))
    if type(reshard) is int:
        raise ValueError(
            f"reshard_after_forward={reshard}, a number of ranks that keep weights for backward, is not supported: "
            f"give True, or shard over fewer ranks with a mesh of two axes, (replicate, shard)"
        )
    for name in ("reshard_after_forward", "sync_module_states"):
        if given[name] not in (None, True, False):
            raise ValueError(f"{name}={given[name]!r}: give True or False")
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy={policy!r} is no MixedPrecisionPolicy of torch.distributed.fsdp: give one")
    if offload is not None and not isinstance(offload, OffloadPolicy):
        raise ValueError(f"offload_policy={offload!r} is no OffloadPolicy of torch.distributed.fsdp: leave it out")
    if given["dp_mesh_dims"] is not None:
        raise ValueError(
            f"dp_mesh_dims={given['dp_mesh_dims']!r} is not supported: give the data-parallel part as mesh="
        )
    place = given["shard_placement_fn"]
    if place is not None and not callable(place):
        raise ValueError(f"shard_placement_fn={place!r} is no function of a parameter: give one, or None")
    strange = [one for one in given["ignored_params"] or () if not isinstance(one, nn.Parameter)]
    if strange:
        raise ValueError(f"ignored_params has a {type(strange[0]).__name__}: give a set of parameters of the module")


def _precision(policy: MixedPrecisionPolicy) -> Precision:
    """The dtypes of a policy: the optimizer's is that in which the module was built."""
    return Precision(main=None, compute=policy.param_dtype, wire=policy.reduce_dtype, accumulate=None)


def _offloaded(options: ShardOptions, policy: OffloadPolicy | None) -> ShardOptions:
    """The options with what a policy says."""
    if not isinstance(policy, CPUOffloadPolicy):
        return options
    if options.offload != "none":
        raise ValueError("offload_policy= and ShardOptions(offload=) say the same in two ways: give one of them")
    return replace(options, offload="pinned" if policy.pin_memory else "pageable")


def _unit_options(reshard_after_forward: bool | None, policy: MixedPrecisionPolicy | None) -> UnitOptions:
    """What units of one call do."""
    if policy is None:
        return UnitOptions(reshard_after_forward)
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return UnitOptions(reshard_after_forward, cast_inputs=inputs, cast_outputs=policy.output_dtype)


def _place_by(shard_placement_fn: Callable[[nn.Parameter], Any]) -> Place:
    """FSDP2's `shard_placement_fn` as `place`: shards are ranges of elements, along whichever dimension."""

    def place(name: str, param: nn.Parameter) -> Placement | None:
        found = shard_placement_fn(param)
        if found is None or isinstance(found, Shard):
            return None
        mesh = getattr(getattr(found, "mesh_info", None), "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"shard_placement_fn returned {found!r} for {name}: return None, a Shard, or a ShardPlacementResult"
            )
        return Placement(mesh, None)

    return place


def _device(mesh: DeviceMesh | None) -> torch.device | None:
    """Where FSDP2 puts a module: on this rank's GPU, if the mesh or the group of all ranks is of GPUs."""
    if mesh is None and not dist.is_initialized():
        return None
    gpus = mesh.device_type == "cuda" if mesh is not None else "nccl" in dist.get_backend()
    if gpus and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None if mesh is None else torch.device(mesh.device_type)

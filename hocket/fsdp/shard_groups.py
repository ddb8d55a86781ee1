"""From a device mesh to the process groups that gather and reduce parameters.

A mesh has one axis, over which parameters are sharded, or two: (replicate, shard), see Note: [Two levels of groups].
Gathers and reductions have separate groups, so that neither waits for the other.

Note: [All ranks make all groups]
Every rank of the world takes part in making a process group, in one order. A rank sees only its own row of a submesh,
so ranks first exchange their rows. Hence all ranks call `shard_groups_for` equally often, with meshes that together
cover all ranks, as when all run the same program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.config import COPIED
from hocket.fsdp.dtensors import ranks_of
from hocket.fsdp.options import ShardOptions, ShardTransport
from hocket.program.mesh import Purpose
from hocket.runtime.comm import Group, TransportName, make_group
from hocket.runtime.trial import LIMIT, why_no_copies
from hocket.runtime.world import everyone, rank_and_world

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where to shard parameters."""

    mesh: DeviceMesh | None
    """None: all ranks."""
    divide: float | None
    """Divisor of summed gradients; None is the number of ranks of the mesh, for a mean. Experts on a part of the ranks
    see the tokens of all: for them it is the number of ranks whose tokens they got."""
    part: tuple[int, int] = (0, 1)
    """(position, count): this rank's module holds that part of dimension 0 of the whole model's parameter, as with
    expert parallelism. Checkpoints hold the whole parameter."""

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise ValueError(f"Placement(mesh={self.mesh!r}) is no DeviceMesh: give one, or None for all ranks")
        divide = 1.0 if self.divide is None else self.divide
        if isinstance(divide, bool) or not isinstance(divide, int | float) or not 0 < divide < inf:
            raise ValueError(
                f"divide={self.divide!r} must be above 0, and a number: summed gradients are divided by it"
            )
        whole = isinstance(self.part, tuple) and len(self.part) == 2 and all(type(one) is int for one in self.part)
        if not whole or not 0 <= self.part[0] < self.part[1]:
            raise ValueError(f"part={self.part} must be (position, count) with 0 <= position < count")


@dataclass(frozen=True, eq=False)
class ShardGroups:
    """The groups of one placement. Compared by identity; equal placements share one object."""

    gather: Group
    reduce: Group
    outer: Group
    """Replicas of this rank's shards, which the reduce group does not have."""
    divide: float
    part: tuple[int, int] = (0, 1)
    holders: Ranks = ()
    mesh: DeviceMesh | None = None
    """Whose last axis divides parameters, for DTensors; None if nothing is divided, or parameters are no DTensors."""
    moved_by: str = ""
    """The transport within the shard group, and why not copy engines."""

    @property
    def alike(self) -> int:
        """How many ranks of the reduce group hold the same elements: all if nothing is sharded."""
        return self.reduce.size // self.gather.size

    @property
    def same(self) -> Group:
        """The ranks that keep the same elements as this one."""
        return self.reduce if self.alike > 1 else self.outer

    @property
    def replicas(self) -> int:
        """How many ranks of the mesh hold the same elements."""
        return self.alike * self.outer.size


_made: dict[object, ShardGroups] = {}
_tried: dict[tuple[object, Ranks, torch.device], str] = {}
"""Why copy engines can't serve these lists of ranks; empty if they can."""


def shard_groups_for(placement: Placement, strategy: str, options: ShardOptions, device: torch.device) -> ShardGroups:
    """The groups of a placement under a strategy, made and warmed up; cached.

    Every rank calls this at the same point.

    Raises: ValueError for a mesh without the axes, or an unavailable transport.
    """
    gather, reduce, outer = _axes(placement.mesh, strategy)
    mesh = ranks_of(placement.mesh)
    divide = float(len(mesh) if placement.divide is None else placement.divide)
    transport, reason = _transport(options.transport, device, reduce)
    world = dist.group.WORLD if dist.is_initialized() else None
    key = (world, gather, reduce, outer, divide, transport, device, placement.part)
    if key not in _made:
        _forget_other_worlds(world)
        # Copy engines reach one host; replicas are usually on others.
        outside: TransportName = "nccl" if transport in COPIED else transport
        _made[key] = ShardGroups(
            gather=_group("gather_dense", gather, device, transport),
            reduce=_group("reduce_dense", reduce, device, transport),
            outer=_group("reduce_dense", outer, device, outside),
            divide=divide,
            part=placement.part,
            holders=mesh,
            mesh=_divided_over(placement.mesh, gather, device),
            moved_by=f"{transport} ({reason})" if reason else transport,
        )
    return _made[key]


def _divided_over(mesh: DeviceMesh | None, gather: Ranks, device: torch.device) -> DeviceMesh | None:
    if len(gather) == 1:
        return None
    return DeviceMesh(device.type, list(gather)) if mesh is None else mesh


def _forget_other_worlds(world: object) -> None:
    """Drop groups of a destroyed default group."""
    for key in [key for key in _made if isinstance(key, tuple) and key[0] is not world]:
        del _made[key]


def _axes(mesh: DeviceMesh | None, strategy: str) -> tuple[Ranks, Ranks, Ranks]:
    """Ranks of (the gather group, the reduce group, replicas outside of the latter)."""
    alone = (rank_and_world()[0],)
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"{_describe(mesh)}, but parameters are sharded over one axis or two, (replicate, shard): take a slice "
            f"such as mesh['shard'], or flatten axes with mesh['a', 'b']._flatten()"
        )
    here = None if mesh is None else mesh.get_coordinate()
    if mesh is not None and here is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh: {_describe(mesh)} with ranks {mesh.mesh.tolist()}"
        )
    if strategy == "no_shard":
        return alone, tuple(sorted(ranks_of(mesh))), alone
    if mesh is None or here is None or mesh.ndim == 1:
        return ranks_of(mesh), ranks_of(mesh), alone
    inner, outer = tuple(mesh.mesh[here[0]].tolist()), tuple(mesh.mesh[:, here[1]].tolist())
    return inner, inner, outer


def _describe(mesh: DeviceMesh | None) -> str:
    if mesh is None:
        return "there is none (mesh=None: all ranks on one axis)"
    names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.mesh.shape, strict=True))
    return f"the mesh has {mesh.ndim} {'axis' if mesh.ndim == 1 else 'axes'} ({axes})"


def _transport(name: ShardTransport, device: torch.device, mine: Ranks) -> tuple[TransportName, str]:
    """The transport within `mine`, and why it is not copy engines. All ranks call this alike."""
    if name == "auto":
        if device.type != "cuda":
            return "gloo", ""
        reason = why_not_copies(mine, device) if len(mine) > 1 else ""
        return ("nccl" if reason or len(mine) == 1 else "copy_engine"), reason
    if (name == "nccl" or name in COPIED) and device.type != "cuda":
        raise ValueError(f"transport={name!r} moves bytes between GPUs, but parameters are on {device}: use 'gloo'")
    if name == "gloo" and device.type == "cuda":
        raise ValueError(f"transport='gloo' moves bytes between CPUs, but parameters are on {device}: use 'nccl'")
    return name, ""


def why_not_copies(mine: Ranks, device: torch.device) -> str:
    """Why copy engines can't serve all ranks' lists, of which this rank's is `mine`; empty if they can.

    All ranks call this together the first time; the result is cached.
    """
    world = dist.group.WORLD
    for old in [old for old in _tried if old[0] is not world]:
        del _tried[old]
    if (world, mine, device) not in _tried:
        several = [ranks for ranks in _all_lists(mine) if len(ranks) > 1]
        _tried[world, mine, device] = why_no_copies(["gather_dense", "reduce_dense"], device, LIMIT, groups=several)
    return _tried[world, mine, device]


def _all_lists(mine: Ranks) -> list[Ranks]:
    """Every rank's list, each once, in an order in which all ranks agree."""
    lists = sorted(set(everyone(mine)))
    for i, a in enumerate(lists):
        for b in lists[i + 1 :]:
            both = sorted(set(a) & set(b))
            if both:
                raise ValueError(
                    f"the meshes of different ranks contradict each other: ranks {both} are in {list(a)} and in "
                    f"{list(b)}. All ranks build the same mesh and slice it by the same axes"
                )
    return lists


def _group(purpose: Purpose, mine: Ranks, device: torch.device, how: TransportName) -> Group:
    """Make the groups of all ranks' lists; return that of `mine`."""
    made = {ranks: make_group(purpose, ranks, rank_and_world()[0], device, how) for ranks in _all_lists(mine)}
    found = made[mine]
    assert found is not None
    return found

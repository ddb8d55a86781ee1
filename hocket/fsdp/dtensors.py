"""Parameters that tensor-parallel ranks divide: DTensors, as torch's `parallelize_module` leaves them.

Note: [Two meshes]
A DTensor says of which whole weight each tensor-parallel rank has which part; `fully_shard` divides that part once
more, over the ranks of another mesh. What is gathered, reduced and updated is the part, as an ordinary parameter. While
its unit is in use, modules see a DTensor around it, so torch's tensor parallelism communicates as it does without
sharding. The DTensor is made of the part inside of autograd: its gradient comes back in the layout of the weight, which
is a sum over tensor-parallel ranks where each has seen some of the tokens.

Shards have the shape of the whole weight. Numbers of a parameter, such as its norm, are summed over both meshes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.layers.slices import Part
from hocket.runtime.world import over_group, rank_and_world

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

_TENSOR = "torch.distributed.tensor"
"""Loaded by those who have DTensors: it takes a second, which no other program pays."""


@dataclass(frozen=True, eq=False)
class DTensorLayout:
    """How the ranks of a mesh of one axis divide a parameter."""

    given: weakref.ref[nn.Parameter]
    """The DTensor that the module was built with: its memory goes when the module has a shard instead."""
    mesh: DeviceMesh
    placement: Shard | Replicate
    shape: torch.Size
    """Of the whole."""
    stride: tuple[int, ...]
    part: Part | None
    """What this rank has of the whole; None: all of it, as every other rank."""

    def shown(self, local: Tensor) -> Tensor:
        """What modules compute with. See Note: [Two meshes]."""
        from torch.distributed.tensor import DTensor

        with torch.enable_grad():  # under no_grad too: what runs inside may turn gradients on again
            return DTensor.from_local(
                local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
            )


def dtensor_layout_of(name: str, param: nn.Parameter) -> tuple[nn.Parameter, DTensorLayout | None]:
    """A parameter as this rank has it, and how it is divided; as it is, if it is no DTensor.

    Raises ValueError for a DTensor in a layout that is not to be had.
    """
    if _TENSOR not in sys.modules:
        return param, None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(param, DTensor):
        return param, None
    mesh, placements = param.device_mesh, param.placements
    if mesh.ndim != 1 or type(placements[0]) not in (Shard, Replicate):
        axes = "x".join(map(str, mesh.shape))
        raise ValueError(
            f"parameter {name} is a DTensor with placements {placements} on a mesh of {axes} ranks: hocket.fully_shard "
            f"takes DTensors on a mesh of one axis that are Shard(dim) or Replicate()"
        )
    (placement,), local, part = placements, param.to_local().detach(), None
    if isinstance(placement, Shard):
        dim, ranks, size = placement.dim % param.ndim, mesh.size(), param.shape[placement.dim]
        length = -(-size // ranks)  # as torch.chunk has it: the last part may be shorter
        if length * (ranks - 1) >= size:
            raise ValueError(
                f"parameter {name} of shape {tuple(param.shape)} leaves nothing for some of {ranks} tensor-parallel "
                f"ranks: leave it out of the plan of parallelize_module, or take fewer ranks"
            )
        part = Part(tuple(local.shape), dim, (mesh.get_local_rank() * length,))
    assert isinstance(placement, Shard | Replicate)
    layout = DTensorLayout(weakref.ref(param), mesh, placement, param.shape, param.stride(), part)
    return nn.Parameter(local, requires_grad=param.requires_grad), layout


def mesh_of(
    layouts: Iterable[tuple[str, DTensorLayout | None]], others: Sequence[DeviceMesh | None]
) -> DeviceMesh | None:
    """The mesh over which parameters (name, layout) are divided; None if none is. `others` are of models around.

    Raises ValueError for two meshes.
    """
    found: DeviceMesh | None = None
    named = [(name, layout.mesh) for name, layout in layouts if layout is not None]
    for name, mesh in [*(("", mesh) for mesh in others if mesh is not None), *named]:
        if found is not None and mesh != found:
            raise ValueError(
                f"parameter {name or 'of a module that is sharded already'} is a DTensor on {mesh}, and others are on "
                f"{found}: hocket.fully_shard takes one tensor-parallel mesh for a model"
            )
        found = mesh
    return found


def ranks_of(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The ranks of a mesh, row by row; None: all ranks."""
    return tuple(range(rank_and_world()[1]) if mesh is None else mesh.mesh.flatten().tolist())


def apart(layouts: Iterable[DTensorLayout | None], ranks: Collection[int]) -> DeviceMesh | None:
    """The mesh over which parameters are divided; None if it is among the `ranks` that shard others, as for experts."""
    mesh = next((layout.mesh for layout in layouts if layout is not None), None)
    return None if mesh is None or len({*ranks_of(mesh)} & {*ranks}) > 1 else mesh


def refuse_overlap(name: str, layout: DTensorLayout, mesh: DeviceMesh | None) -> None:
    """Refuse to divide a part over ranks that have other parts. `mesh` is that of `fully_shard`; None: all ranks."""
    here, ranks = {*ranks_of(layout.mesh)}, {*ranks_of(mesh)}
    if here & ranks - {rank_and_world()[0]}:
        raise ValueError(
            f"parameter {name} is a DTensor over ranks {sorted(here)}, and fully_shard would divide it once more over "
            f"ranks {sorted(ranks)}, which have other parts: give it the other axis, such as mesh=device_mesh['dp']"
        )


def copies(mesh: DeviceMesh | None, part: Part | None) -> int:
    """How many ranks of a model's tensor-parallel mesh have the same elements."""
    return 1 if mesh is None or part is not None else mesh.size()


def over(mesh: DeviceMesh, value: Tensor, how: Literal["sum", "max"]) -> None:
    """The `sum` or `max` of a tensor over the ranks of a mesh of one axis, in place."""
    value.copy_(over_group(value.to(mesh.device_type), how, mesh.get_group()))

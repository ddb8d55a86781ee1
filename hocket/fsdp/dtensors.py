"""DTensor parameters, as torch's `parallelize_module` leaves them: tensor parallelism beneath `fully_shard`.

Note: [Two meshes]
A DTensor's local part is sharded once more, over the ranks of another mesh; gathers, reductions and updates treat it as
an ordinary parameter. While its unit is in use, modules see a DTensor around it, so torch's tensor parallelism works as
without sharding. The DTensor is made inside of autograd: its gradient comes back in the weight's layout, summed over
tensor-parallel ranks where each has seen some of the tokens. Optimizers see a DTensor on a mesh of both axes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.layers.slices import Part
from hocket.runtime.world import all_reduce_over_group, rank_and_world

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

_TENSOR = "torch.distributed.tensor"
"""Imported only if the program has imported it: it takes a second."""


@dataclass(frozen=True, eq=False)
class DTensorLayout:
    """The layout of a parameter over a mesh of one axis."""

    given: weakref.ref[nn.Parameter]
    """The DTensor that the module was built with; freed when the module gets a shard instead."""
    mesh: DeviceMesh
    placement: Shard | Replicate
    shape: torch.Size
    """Of the whole parameter."""
    stride: tuple[int, ...]
    part: Part | None
    """The part on this rank; None: replicated."""

    def shown(self, local: Tensor) -> Tensor:
        """The DTensor that modules compute with. See Note: [Two meshes]."""
        from torch.distributed.tensor import DTensor

        with torch.enable_grad():  # under no_grad too: inner code may enable gradients
            return DTensor.from_local(
                local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
            )


def dtensor_layout_of(name: str, param: nn.Parameter) -> tuple[nn.Parameter, DTensorLayout | None]:
    """(local parameter, its layout); (parameter, None) if it is no DTensor. Raises ValueError for an unsupported
    layout.
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
        length = -(-size // ranks)  # like torch.chunk: the last part may be shorter
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
    layouts: Iterable[tuple[str, DTensorLayout | None]], others: Sequence[DeviceMesh | None], ranks: Collection[int]
) -> DeviceMesh | None:
    """The tensor-parallel mesh of parameters (name, layout), if any. `others` are of enclosing models.

    Meshes among the `ranks` that shard most parameters, such as that of experts, are not it. Raises ValueError for two
    different meshes.
    """
    found: DeviceMesh | None = None
    named = [(name, layout.mesh) for name, layout in layouts if layout is not None]
    for name, mesh in [*(("", mesh) for mesh in others if mesh is not None), *named]:
        if len({*ranks_of(mesh)} & {*ranks}) > 1:
            continue
        if found is not None and mesh != found:
            raise ValueError(
                f"parameter {name or 'of a module that is sharded already'} is a DTensor on {mesh}, and others are on "
                f"{found}: hocket.fully_shard takes one tensor-parallel mesh beside the ranks of mesh="
            )
        found = mesh
    return found


def spec_of(group: Any, index: int, tensors: DeviceMesh | None = None) -> Any:
    """The `DTensorSpec` of the shards of a member of a `ParamGroup`; None if this rank keeps it whole.

    `tensors` is the tensor-parallel mesh of the model: on it, members that are no DTensors are replicated.
    """
    member, mesh = group.members[index], group.groups.mesh
    if mesh is None and member.dtensor is None:
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Any] = []
    whole, placement = mesh, None
    if mesh is not None:
        placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0) if member.shape else Replicate()]
    if member.dtensor is not None:
        tensors, placement = member.dtensor.mesh, member.dtensor.placement
        if mesh is not None and placement == Shard(0):  # rows of this rank's rows
            placements[-1] = _StridedShard(0, split_factor=tensors.size())
    elif tensors is not None and mesh is not None and len({*ranks_of(tensors)} & {*ranks_of(mesh)}) == 1:
        placement = Replicate()
    if placement is not None:
        assert tensors is not None
        placements.append(placement)
        whole = tensors if mesh is None else _of_both(mesh, tensors)
    assert whole is not None
    like = torch.empty(member.shape, device="meta")
    return DTensorSpec(whole, tuple(placements), tensor_meta=TensorMeta(like.shape, like.stride(), group.formats.main))


def _of_both(mesh: DeviceMesh, tensors: DeviceMesh) -> DeviceMesh:
    """The mesh whose axes are those of both, which are slices of one mesh."""
    roots = [one._get_root_mesh() for one in (mesh, tensors)]
    names = [one.mesh_dim_names or () for one in (mesh, tensors)]
    if roots[0] != roots[1] or () in names:
        raise ValueError(
            f"parameters are DTensors on {tensors}, and hocket.fully_shard would divide them over {mesh}: slice both "
            f"from one mesh that init_device_mesh made with names for its axes"
        )
    return roots[0][(*names[0], *names[1])]


def ranks_of(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The ranks of a mesh, row by row; None: all ranks."""
    return tuple(range(rank_and_world()[1]) if mesh is None else mesh.mesh.flatten().tolist())


def refuse_overlap(name: str, layout: DTensorLayout, mesh: DeviceMesh | None) -> None:
    """Refuse to shard a part over ranks that have other parts. `mesh` is that of `fully_shard`; None: all ranks."""
    here, ranks = {*ranks_of(layout.mesh)}, {*ranks_of(mesh)}
    if here & ranks - {rank_and_world()[0]}:
        raise ValueError(
            f"parameter {name} is a DTensor over ranks {sorted(here)}, and fully_shard would divide it once more over "
            f"ranks {sorted(ranks)}, which have other parts: give it the other axis, such as mesh=device_mesh['dp']"
        )


def copies(mesh: DeviceMesh | None, layout: DTensorLayout | None) -> int:
    """How many ranks of a model's tensor-parallel mesh hold the same elements."""
    divided = layout is not None and layout.mesh == mesh and layout.part is not None
    return 1 if mesh is None or divided else mesh.size()


def over(mesh: DeviceMesh, value: Tensor, how: Literal["sum", "max"]) -> None:
    """All-reduce a tensor over a mesh of one axis, in place."""
    value.copy_(all_reduce_over_group(value.to(mesh.device_type), how, mesh.get_group()))

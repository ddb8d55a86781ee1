"""DTensor parameters, as torch's `parallelize_module` leaves them: tensor parallelism beneath `fully_shard`.

Note: [Two meshes]
A DTensor's local part is sharded once more, over the ranks of another mesh; gathers, reductions and updates treat it as
an ordinary parameter. While its unit is in use, modules see a DTensor around it, so torch's tensor parallelism works as
without sharding. The DTensor is made inside of autograd: its gradient comes back in the weight's layout, summed over
tensor-parallel ranks where each has seen some of the tokens. Optimizers see a DTensor on a mesh of both axes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from hocket.fsdp.sharded_parameter import around
from hocket.layers.slices import Part
from hocket.runtime.world import all_reduce_over_group, rank_and_world


class Shown(torch.autograd.Function):
    """What modules compute with in place of a parameter, which gets the gradient."""

    @classmethod
    def of(cls, param: Tensor, make: Callable[[Tensor], Tensor], back: Callable[[Any], Tensor]) -> Tensor:
        """`make` of the parameter without its graph; `back` turns a gradient of it into one of the parameter."""
        with torch.enable_grad():  # under no_grad too: inner code may enable gradients
            return cls.apply(param, make, back)

    @staticmethod
    def forward(ctx: Any, param: Tensor, make: Callable[[Tensor], Tensor], back: Callable[[Any], Tensor]) -> Tensor:
        ctx.back = back
        return make(param.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh on which all parameters are DTensors, with data-parallel axes: `dp_mesh_dims` of FSDP2."""

    mesh: DeviceMesh
    replicate: tuple[str, ...]
    shard: tuple[str, ...]

    def __post_init__(self) -> None:
        names = self.mesh.mesh_dim_names or ()
        if not {*self.replicate, *self.shard} <= {*names} or len(self.data) < len(names) - 1:
            raise ValueError(
                f"dp_mesh_dims={self.replicate, self.shard} of a mesh with axes {names}: name its data-parallel axes, "
                f"all but at most one"
            )

    @property
    def data(self) -> tuple[int, ...]:
        """The data-parallel axes."""
        names = enumerate(self.mesh.mesh_dim_names or ())
        return tuple(i for i, name in names if name in (*self.replicate, *self.shard))

    def data_mesh(self) -> DeviceMesh:
        """The mesh of data-parallel ranks: axes to replicate and to shard over. All ranks call this."""
        parts = [names for names in (self.replicate, self.shard) if names]
        axes = [self.mesh[n[0]] if len(n) == 1 else self.mesh[n]._flatten("_".join(n)) for n in parts]
        return axes[0] if len(axes) == 1 else DeviceMesh._concatenate(axes)


@dataclass(frozen=True, eq=False)
class DTensorLayout:
    """The layout of a parameter over a mesh of one axis."""

    mesh: DeviceMesh
    placement: Shard | Replicate
    shape: torch.Size
    """Of the whole parameter."""
    part: Part | None
    """The part on this rank; None: replicated."""


def _shown(spec: DTensorSpec, data: Collection[int], local: Tensor) -> Tensor:
    """The DTensor that modules compute with. Its gradients are not summed over `data` axes. See Note: [Two meshes]."""
    here = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.shape, spec.stride, local.dtype))

    def back(grad: DTensor) -> Tensor:
        found = zip(grad.placements, spec.placements, strict=True)
        placements = tuple(a if i in data else b for i, (a, b) in enumerate(found))
        return (grad if placements == grad.placements else grad.redistribute(placements=placements)).to_local()

    return Shown.of(local, lambda x: around(x, here), back)


def divided(member: Any, spmd: SpmdMesh | None = None) -> Any:
    """A `Member` that is a DTensor as its local part; others as they are.

    Raises: ValueError for an unsupported layout.
    """
    param, name = member.param, member.name
    if not isinstance(param, DTensor):
        if spmd is not None:
            raise ValueError(f"parameter {name} is no DTensor, and with dp_mesh_dims= all are, on mesh=")
        return member
    mesh, placements, local = param.device_mesh, param.placements, param.to_local().detach()
    data = () if spmd is None else spmd.data
    found = replace(
        member,
        param=nn.Parameter(local, requires_grad=param.requires_grad),
        faces=(partial(_shown, param._spec, data),),
        source=weakref.ref(param),
    )
    if spmd is not None:
        if mesh != spmd.mesh or not all(isinstance(placements[i], Replicate) for i in data):
            raise ValueError(
                f"parameter {name} is a DTensor with placements {placements} on {mesh}, and with dp_mesh_dims= it is "
                f"on mesh=, Replicate() on the data-parallel axes"
            )
        others = [i for i in range(mesh.ndim) if i not in data]
        if not others:
            return found
        assert mesh.mesh_dim_names is not None
        mesh, placements = mesh[mesh.mesh_dim_names[others[0]]], (placements[others[0]],)
    if mesh.ndim != 1 or type(placements[0]) not in (Shard, Replicate):
        axes = "x".join(map(str, mesh.shape))
        raise ValueError(
            f"parameter {name} is a DTensor with placements {placements} on a mesh of {axes} ranks: hocket.fully_shard "
            f"takes DTensors on a mesh of one axis that are Shard(dim) or Replicate()"
        )
    (placement,), part = placements, None
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
    layout = DTensorLayout(mesh, placement, param.shape, part)
    return replace(found, dtensor=layout)


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
    placements: list[Any] = []
    whole, placement = mesh, None
    if mesh is not None:
        placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0) if member.shape else Replicate()]
    if member.dtensor is not None:
        tensors, placement = member.dtensor.mesh, member.dtensor.placement
    elif tensors is not None and mesh is not None and len({*ranks_of(tensors)} & {*ranks_of(mesh)}) == 1:
        placement = Replicate()
    if placement is not None:
        assert tensors is not None
        placements.append(placement)
        whole = tensors
        if mesh is not None:
            whole, order = _of_both(mesh, tensors)
            if placement == Shard(0) and order[-1] == mesh.ndim:  # rows of this rank's rows
                placements[-2] = _StridedShard(0, split_factor=tensors.size())
            placements = [placements[axis] for axis in order]
    assert whole is not None
    like = torch.empty(member.shape, device="meta")
    return DTensorSpec(whole, tuple(placements), tensor_meta=TensorMeta(like.shape, like.stride(), group.formats.main))


def _of_both(mesh: DeviceMesh, tensors: DeviceMesh) -> tuple[DeviceMesh, list[int]]:
    """The mesh whose axes are those of both, which are slices of one mesh, and their order, in which it has them."""
    roots = [one._get_root_mesh() for one in (mesh, tensors)]
    names = [one.mesh_dim_names or () for one in (mesh, tensors)]
    if roots[0] != roots[1] or () in names:
        raise ValueError(
            f"parameters are DTensors on {tensors}, and hocket.fully_shard would divide them over {mesh}: slice both "
            f"from one mesh that init_device_mesh made with names for its axes"
        )
    both, known = (*names[0], *names[1]), roots[0].mesh_dim_names or ()
    order = list(range(len(both)))
    if {*both} <= {*known}:  # else one was flattened
        order.sort(key=lambda axis: known.index(both[axis]))
    return roots[0][tuple(both[axis] for axis in order)], order


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

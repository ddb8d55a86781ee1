"""Squares of gradients, of which the norm of all is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.spread import copies
from hocket.kernels import usable


def counted(group: ParamGroup, mesh: DeviceMesh | None) -> list[tuple[Tensor, int]]:
    """Gradients of a group, and how many ranks have the same: those of a model's tensor-parallel `mesh` too."""
    if mesh is None:
        return [(group.main_grad, group.groups.replicas)]
    views = zip(group.grads.views(), group.shards, strict=True)
    return [(view, group.groups.replicas * copies(mesh, shard.span.part)) for view, shard in views]


def squares_of(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each gradient, fp64 [n].

    torch reads fp32 as fp64 by way of a copy: 20 bytes for each element, and 8 of memory. On a GPU a kernel reads 4.
    """
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    if grads and all(_for_kernel(grad) for grad in grads):
        from hocket.kernels.sums import squares

        return squares(grads)
    return powers_of(grads, 2.0)


def powers_of(grads: Sequence[Tensor], p: float) -> Tensor:
    """The sum of |x|^p of each gradient, fp64 [n], by torch."""
    norms = [torch.linalg.vector_norm(grad, p, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(norms[0].device) for norm in norms]) ** p  # some may be in the host's memory


def _for_kernel(grad: Tensor) -> bool:
    return grad.dtype in (torch.float32, torch.bfloat16) and grad.is_contiguous() and usable(grad)

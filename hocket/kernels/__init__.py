"""Triton kernels for operations that move more data than they compute.

Every kernel has a torch formula beside its caller: CPUs run it, and it defines the kernel's result. Modules here need
Triton, so callers import them only for CUDA tensors.

Kernels compute in fp32 and round once, when they store. Where an order of additions is stated, products and sums are
not fused, so that a GPU gets a CPU's bits. No kernel uses atomics on shared sums, so all are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

IGNORED = -100
"""A target that a loss ignores, as in torch."""


# --------------------------------------------------------------------------------------------------------------- usable
#
# When a kernel replaces its torch formula.
#
# Note: [Kernels by hand, not by torch.compile]
# A compiler makes kernels about as good from the formulas. But it compiles in every process, and again for new numbers
# of rows, which experts have in every microbatch; it chooses how to split a sum, so a weight gradient's bits depend on
# its version; and it can't defer part of a weight gradient or overwrite a tensor that is no longer needed. A
# hand-written kernel compiles once per width and dtype, in a second.


_DTYPES = (torch.bfloat16, torch.float32)
_refused = 0


@contextmanager
def formulas() -> Iterator[None]:
    """In this context, formulas run on GPUs too, in all threads: the reference for tests of kernels."""
    global _refused
    _refused += 1
    try:
        yield
    finally:
        _refused -= 1


def refuse_graph() -> None:
    """Refuse `create_graph=True` in a kernel's backward: the graph would lack second derivatives."""
    if torch.is_grad_enabled():
        raise RuntimeError("hocket's functions have no second derivatives: call backward without create_graph=True")


def usable(*tensors: Tensor) -> bool:
    """Whether kernels support these tensors: on the current GPU, without a mode that must see each torch operation."""
    if torch.compiler.is_compiling() or _refused:  # compiling first: the rest cannot be traced
        return False
    return (
        all(t.is_cuda and type(t) in (Tensor, nn.Parameter) for t in tensors)
        and all(t.dtype in _DTYPES or not t.is_floating_point() for t in tensors)
        and all(t.get_device() == torch.cuda.current_device() for t in tensors)
        and not torch.is_autocast_enabled("cuda")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )

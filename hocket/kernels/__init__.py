"""Triton kernels, for what moves or touches data more than it computes.

Every kernel has a torch formula beside its caller, which is what CPUs run and what the kernel means. Modules here need
Triton, so they are imported where a CUDA tensor asks for them, never at the top of a file.

Kernels compute in fp32 and round once, when they store. Where an order of additions is stated, products and sums are
not fused either, so that a GPU gets the bits of a CPU. Nothing is added to memory that others add to, so all of them
are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

IGNORED = -100
"""A target that counts for nothing in a loss, as in torch."""


# --------------------------------------------------------------------------------------------------------------- usable
#
# The rule that says when a kernel stands in for its torch formula.
#
# Note: [Kernels by hand, not by torch.compile]
# A compiler makes kernels about as good out of the formulas. But it would do so in every process, and again for new
# numbers of rows, of which experts get others with every microbatch; how it splits a sum is its own choice, so bits of
# a weight gradient would change with its version; and it can neither leave part of a weight gradient for later nor
# overwrite a tensor that nobody reads any more. A kernel by hand is compiled once per width and dtype, in a second.


_DTYPES = (torch.bfloat16, torch.float32)
_refused = 0


@contextmanager
def formulas() -> Iterator[None]:
    """Inside, formulas run on GPUs too, in forward and in backward, in all threads: what kernels are compared with."""
    global _refused
    _refused += 1
    try:
        yield
    finally:
        _refused -= 1


def refuse_graph() -> None:
    """What a kernel's backward says to `create_graph=True`: a graph made of kernels would lack second derivatives."""
    if torch.is_grad_enabled():
        raise RuntimeError("hocket's GPU kernels have no second derivatives: call backward without create_graph=True")


def usable(*tensors: Tensor) -> bool:
    """Whether kernels may read these tensors, and nobody has to see or change each of torch's operations.

    A kernel runs on the current device, so that has to be theirs.
    """
    if torch.compiler.is_compiling() or _refused:  # compiling first, for the rest cannot be traced
        return False
    return (
        all(t.is_cuda and type(t) in (Tensor, nn.Parameter) for t in tensors)
        and all(t.dtype in _DTYPES or not t.is_floating_point() for t in tensors)
        and all(t.get_device() == torch.cuda.current_device() for t in tensors)
        and not torch.is_autocast_enabled("cuda")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )

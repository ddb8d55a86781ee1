"""The norm of one gradient, of which the norm of all is made."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.usable import usable


def norm_of(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient, a scalar in fp64.

    torch reads fp32 as fp64 by way of a copy: 20 bytes for each element, and 8 of memory. On a GPU a kernel reads 4.
    """
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    if grad.numel() and grad.is_contiguous() and usable(grad) and grad.dtype in (torch.float32, torch.bfloat16):
        from hocket.kernels.squares import launch

        return launch(grad).sqrt()
    return torch.linalg.vector_norm(grad, dtype=torch.float64)

"""Values of MXFP4 tensors: numbers of 4 bits in blocks that have a scale each (Open Compute Project, "OCP Microscaling
Formats (MX) Specification" 1.0, section 5.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Numbers of a block, two in a byte: the first one in its lower half."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
"""What 4 bits mean: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127
"""A scale is a power of 2 with this number added to its exponent."""


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns], fp32, of blocks uint8 [rows, columns / 32, 16] and scales uint8 [rows, columns / 32]."""
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(_NUMBERS[halves.int()], exponents).flatten(-2)

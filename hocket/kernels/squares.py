"""Sums of squares of tensors in fp64, in one pass: see `fsdp/grad_norm.py`."""

# pyrefly: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements of a program at a time."""
PROGRAMS = 528
"""Programs of one launch, 4 per SM of a Hopper."""


@triton.jit
def _squares(values, partials, numel, block_size: tl.constexpr):  # noqa: ANN001, ANN202
    start = tl.program_id(0).to(tl.int64) * block_size
    total = tl.zeros((block_size,), tl.float64)
    while start < numel:
        at = start + tl.arange(0, block_size)
        value = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
        start += tl.num_programs(0) * block_size
    tl.store(partials + tl.program_id(0), tl.sum(total))


def squares(tensors: Sequence[Tensor], programs: int = PROGRAMS) -> Tensor:
    """The sum of the squares of each contiguous tensor of fp32 or bf16, fp64 [n], on the current stream.

    The order in which they are added up depends on a tensor's number of elements alone.
    """
    partials = torch.zeros(len(tensors), programs, dtype=torch.float64, device=tensors[0].device)
    for tensor, row in zip(tensors, partials, strict=True):
        if tensor.numel():
            grid = (min(programs, triton.cdiv(tensor.numel(), BLOCK)),)
            _squares[grid](tensor, row, tensor.numel(), BLOCK, num_warps=8)
    return partials.sum(1)

"""fp32 numbers as sums of three bf16 ones, so that tensor cores multiply them without loss.

A bf16 number has 8 significant bits and fp32 has 24: what is left after rounding twice fits into a third. A product of
two bf16 numbers is exact in fp32, which is what tensor cores add up, so a matrix product of the thirds has the
precision of one in fp32, and far more than one in tf32, at a fraction of the time.

Shapes: T tokens, E columns.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a program."""


@triton.jit(do_not_specialize=["numel"])
def _thirds_elementwise(x, parts, numel, width: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rest = tl.load(x + at, mask=at < numel)
    into = parts + at // width * (3 * width) + at % width
    for _ in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(into, part, mask=at < numel)
        rest -= part.to(tl.float32)
        into += width


def thirds(x_TE: Tensor) -> Tensor:
    """bf16 [T, 3E] whose three [T, E] add up to fp32 `x`, the largest first."""
    parts = torch.empty(x_TE.shape[0], 3 * x_TE.shape[1], dtype=torch.bfloat16, device=x_TE.device)
    if x_TE.numel():
        grid = (triton.cdiv(x_TE.numel(), BLOCK),)
        _thirds_elementwise[grid](x_TE.contiguous(), parts, x_TE.numel(), x_TE.shape[1], BLOCK, num_warps=4)
    return parts

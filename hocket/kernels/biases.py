"""Biases of experts: added to the rows of each, and the sums of rows that are their gradients.

How many rows an expert has is known to the device alone. Rows behind the last one's are neither read nor written. One
program sums up one expert's rows of some columns, in their order, so the bits depend on nothing else.

Shapes: R rows grouped by expert, F width, E experts.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 128
"""Rows and columns of a tile of the sum; rows of one of the addition."""


@triton.jit(do_not_specialize=["rows"])
def _add_by_expert(
    x, bias, ends, rows, experts: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    block_e: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    e = tl.arange(0, block_e)
    end = tl.load(ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((row[:, None] >= end[None, :]).to(tl.int32), axis=1)
    column = (tl.program_id(1) * wide + tl.arange(0, wide))[None, :]
    inside = ((row < rows) & (expert < experts))[:, None] & (column < width)
    at = row.to(tl.int64)[:, None] * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + expert[:, None] * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, value, mask=inside)


@triton.jit
def _row_sums(g, ends, out, scale, width: tl.constexpr, add: tl.constexpr, deep: tl.constexpr, wide: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - start
    column = (tl.program_id(1) * wide + tl.arange(0, wide))[None, :]
    row = tl.arange(0, deep)[:, None]
    at = g + start.to(tl.int64) * width + row * width + column
    total = tl.zeros([deep, wide], tl.float32)
    for left in range(count, 0, -deep):
        total += tl.load(at, mask=(row < left) & (column < width), other=0.0).to(tl.float32)
        at += deep * width
    summed = tl.sum(total, axis=0)[None, :] * scale
    into = out + expert * width + column
    if add:
        summed += tl.load(into, mask=column < width, other=0.0).to(tl.float32)
    tl.store(into, summed, mask=column < width)


def add_by_expert(x_RF: Tensor, bias_EF: Tensor, ends_E: Tensor) -> Tensor:
    """Add `bias[e]` to the rows of expert e, which end before `ends[e]`, int32. Changes `x` and returns it."""
    assert x_RF.is_contiguous()
    (rows, width), experts = x_RF.shape, len(ends_E)
    if x_RF.numel():
        wide = min(triton.next_power_of_2(width), 512)
        grid = triton.cdiv(rows, ROWS), triton.cdiv(width, wide)
        sizes = (experts, width, ROWS, wide, triton.next_power_of_2(experts))
        _add_by_expert[grid](x_RF, bias_EF.contiguous(), ends_E, rows, *sizes, num_warps=4)
    return x_RF


def row_sums(g_RF: Tensor, ends_E: Tensor, out_EF: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """`out[e]` = or += `scale` times the sum of the rows of expert e, in fp32. Without rows it is 0."""
    width, experts = g_RF.shape[1], len(ends_E)
    assert out_EF.is_contiguous()
    grid = experts, triton.cdiv(width, COLUMNS)
    _row_sums[grid](g_RF.contiguous(), ends_E, out_EF, scale, width, add, ROWS, COLUMNS, num_warps=4)

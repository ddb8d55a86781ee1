"""The sum of rows in one pass: see `transports.local_sum`."""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of a program at a time; with 128 threads, each loads 32 bytes of every part."""
PROGRAMS = 528
"""Programs of one launch, 4 per SM of a Hopper: enough to use all of its memory bandwidth."""


@triton.jit
def _local_sum(
    parts,
    own,
    into,
    scale,
    numel,
    stride,
    rank: tl.constexpr,
    world: tl.constexpr,
    block_size: tl.constexpr,
    add: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block_size  # units of experts can have more than 2^31 elements
    while start < numel:
        at = start + tl.arange(0, block_size)
        inside = at < numel
        part = parts + at
        total = tl.load(own + at if rank == 0 else part, mask=inside).to(tl.float32)
        if rank != 0:
            part += stride
        for row in tl.static_range(1, world):
            if rank == row:
                total += tl.load(own + at, mask=inside).to(tl.float32)
            else:
                total += tl.load(part, mask=inside).to(tl.float32)
                part += stride
        total *= scale
        if add:
            total = tl.load(into + at, mask=inside).to(tl.float32) + total
        tl.store(into + at, total, mask=inside)
        start += tl.num_programs(0) * block_size


def launch(
    parts_WS: Tensor,
    into_S: Tensor,
    scale: float,
    add: bool = True,
    own: tuple[int, Tensor] | None = None,
    programs: int = PROGRAMS,
) -> None:
    """`into` += (or =) scale * the sum of the rows of `parts`, in order and in fp32, on the current stream."""
    world, numel = parts_WS.shape[0] + (own is not None), parts_WS.shape[1]
    rank, mine_S = own if own is not None else (-1, parts_WS)
    grid = (min(programs, triton.cdiv(numel, BLOCK)),)
    # Multiply, then add: a fused product would round differently from what the CPU does.
    stride = parts_WS.stride(0)
    _local_sum[grid](
        parts_WS, mine_S, into_S, scale, numel, stride, rank, world, BLOCK, add, num_warps=4, enable_fp_fusion=False
    )


# -------------------------------------------------------------------------------------------------------------- squares
#
# Sums of squares of tensors in fp64: see `fsdp/buffers.py`.


SQUARED = 4096
"""Elements of a program at a time."""


@triton.jit
def _squares(values, partials, numel, block_size: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block_size
    total = tl.zeros((block_size,), tl.float64)
    while start < numel:
        at = start + tl.arange(0, block_size)
        value = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
        start += tl.num_programs(0) * block_size
    tl.store(partials + tl.program_id(0), tl.sum(total))


def squares(tensors: Sequence[Tensor], programs: int = PROGRAMS) -> Tensor:
    """The sum of squares of each contiguous fp32 or bf16 tensor, fp64 [n], on the current stream.

    The order of additions depends on a tensor's number of elements alone.
    """
    partials = torch.zeros(len(tensors), programs, dtype=torch.float64, device=tensors[0].device)
    for tensor, row in zip(tensors, partials, strict=True):
        if tensor.numel():
            grid = (min(programs, triton.cdiv(tensor.numel(), SQUARED)),)
            _squares[grid](tensor, row, tensor.numel(), SQUARED, num_warps=8)
    return partials.sum(1)


# --------------------------------------------------------------------------------------------------------------- biases
#
# Biases of experts, added to their rows, and the row sums that are their gradients.
#
# Only the device knows the experts' row counts. Rows beyond the last one are neither read nor written. One program sums
# an expert's rows of some columns in order, so the bits are reproducible.
#
# Shapes: R rows grouped by expert, F width, E experts.


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
    """Add `bias[e]` to the rows of expert e, which end before `ends[e]`, int32. In place; returns `x`."""
    assert x_RF.is_contiguous()
    (rows, width), experts = x_RF.shape, len(ends_E)
    if x_RF.numel():
        wide = min(triton.next_power_of_2(width), 512)
        grid = triton.cdiv(rows, ROWS), triton.cdiv(width, wide)
        sizes = (experts, width, ROWS, wide, triton.next_power_of_2(experts))
        _add_by_expert[grid](x_RF, bias_EF.contiguous(), ends_E, rows, *sizes, num_warps=4)
    return x_RF


def row_sums(g_RF: Tensor, ends_E: Tensor, out_EF: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """`out[e]` = or += `scale` times the sum of the rows of expert e, in fp32; 0 without rows."""
    width, experts = g_RF.shape[1], len(ends_E)
    assert out_EF.is_contiguous()
    grid = experts, triton.cdiv(width, COLUMNS)
    _row_sums[grid](g_RF.contiguous(), ends_E, out_EF, scale, width, add, ROWS, COLUMNS, num_warps=4)


# -------------------------------------------------------------------------------------------------------------- merging
#
# Merges two attention results over disjoint keys: see `model/heads.py`.
#
# Shapes: T tokens, H heads, N width of a head.


HEADS = 8
"""Heads of a program, of one token or several."""


@triton.jit
def _merge(
    one, lse_one, other, lse_other, out, total, rows, heads, token_one, token_other, rows_block: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows_block + tl.arange(0, rows_block)
    inside, column = row < rows, tl.arange(0, width)
    token, head = row // heads, row % heads
    tokens = rows // heads
    a = tl.load(lse_one + head * tokens + token, mask=inside, other=0.0)
    b = tl.load(lse_other + head * tokens + token, mask=inside, other=0.0)
    most = tl.maximum(a, b)
    both = most + tl.log(tl.exp(a - most) + tl.exp(b - most))
    at = inside[:, None]
    x = tl.load(one + token[:, None] * token_one + head[:, None] * width + column[None, :], mask=at, other=0.0)
    y = tl.load(other + token[:, None] * token_other + head[:, None] * width + column[None, :], mask=at, other=0.0)
    merged = x.to(tl.float32) * tl.exp(a - both)[:, None] + y.to(tl.float32) * tl.exp(b - both)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], merged, mask=at)
    tl.store(total + head * tokens + token, both, mask=inside)


def merge(one_THN: Tensor, lse_HT: Tensor, other_THN: Tensor, other_lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, H, N] and lse [H, T] over all keys. N is a power of two; a token's heads are contiguous."""
    tokens, heads, width = one_THN.shape
    assert one_THN.stride()[1:] == other_THN.stride()[1:] == (width, 1)
    out_THN, total_HT = torch.empty_like(one_THN, memory_format=torch.contiguous_format), torch.empty_like(lse_HT)
    rows = tokens * heads
    _merge[(triton.cdiv(rows, HEADS),)](
        one_THN, lse_HT, other_THN, other_lse_HT, out_THN, total_HT, rows, heads, one_THN.stride(0),
        other_THN.stride(0), HEADS, width,
    )  # fmt: skip
    return out_THN, total_HT

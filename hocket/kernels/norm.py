"""RMS norm with its weight: one pass forward, one backward.

Forward also computes the residual sum; backward also adds the residual stream's gradient. Backward sums the weight
gradient over each program's rows: [P, D] in fp32, a few megabytes instead of two activations, added up when weight
gradients are due. The order depends on shapes alone, so the bits are reproducible.

Shapes: R rows (all leading dimensions together), D width, P programs.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements of a program at a time, unless one row has more."""
PROGRAMS = 264
"""Most programs of the backward, 2 per SM of a Hopper: with more, partial sums cost more than latency hiding gains."""
AHEAD = 96 * 1024
"""Shared memory in bytes for a program's prefetched tiles."""


@triton.jit
def _tile(start, rows, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    """Offsets of the rows from `start`, and which of them exist."""
    row = (start + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    column = tl.arange(0, block)[None, :]
    return row * width + column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_forward(
    x, more, weight, total, y, rows, eps, width: tl.constexpr, add: tl.constexpr, tile_rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    at, inside = _tile(tl.program_id(0) * tile_rows, rows, width, tile_rows, block)
    column = tl.arange(0, block)
    w = tl.load(weight + column, mask=column < width).to(tl.float32)[None, :]
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if add:
        value += tl.load(more + at, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)  # backward reads the rounded sum
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    tl.store(y + at, value * scale * w, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    g, more, x, weight, g_x, partial, rows, eps, width: tl.constexpr, add: tl.constexpr, tile_rows: tl.constexpr,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block)
    w = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)[None, :]
    total = tl.zeros((tile_rows, block), tl.float32)
    for start in tl.range(tl.program_id(0) * tile_rows, rows, tl.num_programs(0) * tile_rows, num_stages=stages):
        at, inside = _tile(start, rows, width, tile_rows, block)
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        up = tl.load(g + at, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        normed, g_normed = value * scale, up * w
        total += up * normed
        mean = (tl.sum(g_normed * normed, 1) / width)[:, None]
        result = (g_normed - normed * mean) * scale
        if add:
            result += tl.load(more + at, mask=inside, other=0).to(tl.float32)
        tl.store(g_x + at, result, mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit(do_not_specialize=["parts"])
def _rms_norm_sum(partial, out, parts, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((tile, block), tl.float32)
    start = 0
    while start < parts:
        part = start + tl.arange(0, tile)[:, None]
        total += tl.load(partial + part * width + column, mask=(part < parts) & (column < width), other=0)
        start += tile
    tl.store(out + column, tl.sum(total, 0), mask=column < width)


def _sizes(width: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns, and warps."""
    block = triton.next_power_of_2(width)
    rows = max(TILE // block, 1)
    return rows, block, min(max(rows * block // 512, 4), 32)


def stages_of(tile_bytes: int) -> int:
    """Tiles of a program's inputs in flight at a time."""
    return min(max(AHEAD // tile_bytes, 1), 3)


def forward(x: Tensor, weight_D: Tensor, eps: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`t = x + more`, or `x`, and `t / sqrt(mean(t ** 2) + eps) * weight`, the mean over the last dimension."""
    x, width = x.contiguous(), x.shape[-1]
    y, total = torch.empty_like(x), x if more is None else torch.empty_like(x)
    if y.numel():
        rows = y.numel() // width
        tile_rows, block, warps = _sizes(width)
        tensors = (x, x if more is None else more.contiguous(), weight_D.contiguous(), total, y)
        sizes = (rows, eps, width, more is not None, tile_rows, block)
        grid = (triton.cdiv(rows, tile_rows),)
        _rms_norm_forward[grid](*tensors, *sizes, num_warps=warps, enable_fp_fusion=False)
    return total, y


def backward(g: Tensor, x: Tensor, weight_D: Tensor, eps: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradient of `x`, plus `more`; and partial sums of the weight gradient: fp32 [P, D]."""
    g, x, width = g.contiguous(), x.contiguous(), x.shape[-1]
    g_x = torch.empty_like(x)
    if not g_x.numel():
        return g_x, torch.zeros(1, width, dtype=torch.float32, device=x.device)
    rows = g_x.numel() // width
    tile_rows, block, warps = _sizes(width)
    programs = min(triton.cdiv(rows, tile_rows), PROGRAMS)
    partial_PD = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    tensors = (g, g if more is None else more.contiguous(), x, weight_D.contiguous(), g_x, partial_PD)
    stages = stages_of((2 if more is None else 3) * tile_rows * block * x.itemsize)
    sizes = (rows, eps, width, more is not None, tile_rows, block, stages)
    _rms_norm_backward[programs,](*tensors, *sizes, num_warps=warps, enable_fp_fusion=False)
    return g_x, partial_PD


def sum_parts(partial_PD: Tensor, out_D: Tensor) -> None:
    """Write the sum of a backward's partial sums to `out`, in its dtype."""
    parts, width = partial_PD.shape
    _rms_norm_sum[triton.cdiv(width, 32),](partial_PD, out_D, parts, width, 64, 32, num_warps=4, enable_fp_fusion=False)


# --------------------------------------------------------------------------------------------------------------- rotary
#
# Rotary positions of heads, with or without a norm before, in one pass; and the gradient in another.
#
# A rotation's gradient is the inverse rotation and needs no input. The norm's partial weight gradients are as above.
#
# Shapes: B sequences, S sequence length, H heads, N width of a head, P programs.


HEADS_TILE = 4096
"""Elements of a program at a time, unless the heads of one position have more."""


@triton.jit
def _tile_of_heads(start, tile: tl.constexpr, block_h: tl.constexpr, block_n: tl.constexpr):
    """Positions of a tile, heads, and pairs of a head; 64-bit, because positions and heads may have any strides."""
    position = (start + tl.arange(0, tile)).to(tl.int64)[:, None, None]
    return position, tl.arange(0, block_h).to(tl.int64)[None, :, None], tl.arange(0, block_n)[None, None, :]


@triton.jit
def _pair(column, half: tl.constexpr, rotary: tl.constexpr):
    """Offsets of both elements of a pair. The first `rotary` pairs join the halves of the rotating elements, the
    others the halves of the rest.
    """
    one, other = column, column + half
    if rotary < half:
        one, other = tl.where(column < rotary, one, one + rotary), tl.where(column < rotary, one + rotary, other)
    return one, other


@triton.jit
def _load(x, inside, one, other):
    first = tl.load(x + one, mask=inside, other=0).to(tl.float32)
    return first, tl.load(x + other, mask=inside, other=0).to(tl.float32)


@triton.jit
def _rope(first, second, table, position, column, positions, seq, rotary: tl.constexpr, back: tl.constexpr):
    """Pairs rotated by the angles of their positions, or back."""
    angle, here = table + position % seq * rotary + column, (position < positions) & (column < rotary)
    cos, sin = tl.load(angle, mask=here, other=1), tl.load(angle + seq * rotary, mask=here, other=0)
    if back:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["positions", "seq"])
def _rotary(
    x, weight, table, y, positions, seq, eps, stride_b, stride_s, stride_h, heads: tl.constexpr, half: tl.constexpr,
    rotary: tl.constexpr, normed: tl.constexpr, back: tl.constexpr, tile: tl.constexpr, block_h: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    position, head, column = _tile_of_heads(tl.program_id(0) * tile, tile, block_h, block_n)
    inside = (position < positions) & (head < heads) & (column < half)
    one, other = _pair(column, half, rotary)
    at = position // seq * stride_b + position % seq * stride_s + head * stride_h
    first, second = _load(x + at, inside, one, other)
    if normed:
        w_first, w_second = _load(weight, column < half, one, other)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 2) / (2 * half) + eps)[:, :, None]
        first, second = first * scale * w_first, second * scale * w_second
    first, second = _rope(first, second, table, position, column, positions, seq, rotary, back)
    into = y + (position * heads + head) * (2 * half)
    tl.store(into + one, first, mask=inside)
    tl.store(into + other, second, mask=inside)


@triton.jit(do_not_specialize=["positions", "seq"])
def _rms_norm_rotary_backward(
    g, x, weight, table, g_x, partial, positions, seq, eps, stride_b, stride_s, stride_h, heads: tl.constexpr,
    half: tl.constexpr, rotary: tl.constexpr, tile: tl.constexpr, block_h: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    total_first = tl.zeros((tile, block_h, block_n), tl.float32)
    total_second = tl.zeros((tile, block_h, block_n), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, positions, tl.num_programs(0) * tile, num_stages=stages):
        position, head, column = _tile_of_heads(start, tile, block_h, block_n)
        inside = (position < positions) & (head < heads) & (column < half)
        one, other = _pair(column, half, rotary)
        w_first, w_second = _load(weight, column < half, one, other)
        at = position // seq * stride_b + position % seq * stride_s + head * stride_h
        g_first, g_second = _load(g + at, inside, one, other)
        g_first, g_second = _rope(g_first, g_second, table, position, column, positions, seq, rotary, True)

        at = (position * heads + head) * (2 * half)
        first, second = _load(x + at, inside, one, other)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 2) / (2 * half) + eps)[:, :, None]
        first, second = first * scale, second * scale
        total_first += g_first * first
        total_second += g_second * second
        g_first, g_second = g_first * w_first, g_second * w_second
        mean = (tl.sum(g_first * first + g_second * second, 2) / (2 * half))[:, :, None]
        tl.store(g_x + at + one, (g_first - first * mean) * scale, mask=inside)
        tl.store(g_x + at + other, (g_second - second * mean) * scale, mask=inside)
    column = tl.arange(0, block_n)
    one, other = _pair(column, half, rotary)
    into = partial + tl.program_id(0) * (2 * half)
    tl.store(into + one, tl.sum(tl.sum(total_first, 0), 0), mask=column < half)
    tl.store(into + other, tl.sum(tl.sum(total_second, 0), 0), mask=column < half)


def rope(x_BSHN: Tensor, table: Tensor, weight_N: Tensor | None = None, eps: float = 0.0, back: bool = False) -> Tensor:
    """Rotate every head by its position's angle, or back; with a weight, after the norm of every head. Contiguous.

    The table's width says how many of N elements rotate. Input strides are arbitrary except in the last dimension.
    """
    batch, seq, heads, width = x_BSHN.shape
    rotary = table.shape[-1]
    fits = table.shape[:3] == (2, seq, 1) and 2 * rotary <= width
    assert fits, "a table for other positions or heads of another width"
    x_BSHN = x_BSHN if x_BSHN.stride(-1) == 1 else x_BSHN.contiguous()
    y_BSHN = torch.empty_like(x_BSHN, memory_format=torch.contiguous_format)
    if y_BSHN.numel():
        tile, block_h, block_n, warps = _sizes_of_heads(heads, width)
        weight = x_BSHN if weight_N is None else weight_N.contiguous()
        numbers = (batch * seq, seq, eps, *x_BSHN.stride()[:3])
        sizes = (heads, width // 2, rotary, weight_N is not None, back, tile, block_h, block_n)
        tensors, grid = (x_BSHN, weight, table.contiguous(), y_BSHN), (triton.cdiv(batch * seq, tile),)
        _rotary[grid](*tensors, *numbers, *sizes, num_warps=warps, enable_fp_fusion=False)
    return y_BSHN


def norm_rope_backward(
    g_BSHN: Tensor, x_BSHN: Tensor, table: Tensor, weight_N: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradient of the input of `rope` with a weight, and partial sums of the weight gradient: fp32 [P, N]."""
    batch, seq, heads, width = x_BSHN.shape
    g_BSHN = g_BSHN if g_BSHN.stride(-1) == 1 else g_BSHN.contiguous()
    x_BSHN = x_BSHN.contiguous()
    g_x_BSHN = torch.empty_like(x_BSHN)
    if not g_x_BSHN.numel():
        return g_x_BSHN, torch.zeros(1, width, dtype=torch.float32, device=x_BSHN.device)
    tile, block_h, block_n, warps = _sizes_of_heads(heads, width)
    programs = min(triton.cdiv(batch * seq, tile), PROGRAMS)
    partial_PN = torch.empty(programs, width, dtype=torch.float32, device=x_BSHN.device)
    tensors = (g_BSHN, x_BSHN, weight_N.contiguous(), table.contiguous(), g_x_BSHN, partial_PN)
    numbers = (batch * seq, seq, eps, *g_BSHN.stride()[:3])
    ahead = stages_of(2 * 2 * tile * block_h * block_n * x_BSHN.itemsize)
    sizes = (heads, width // 2, table.shape[-1], tile, block_h, block_n, ahead)
    _rms_norm_rotary_backward[programs,](*tensors, *numbers, *sizes, num_warps=2 * warps, enable_fp_fusion=False)
    return g_x_BSHN, partial_PN


def _sizes_of_heads(heads: int, width: int) -> tuple[int, int, int, int]:
    """Positions of a tile, its heads, pairs of a head, and warps."""
    block_h, block_n = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    tile = max(HEADS_TILE // (2 * block_h * block_n), 1)
    return tile, block_h, block_n, 4 if 2 * tile * block_h * block_n <= HEADS_TILE else 8


class Rotary(torch.autograd.Function):
    """A rotation by the angles of a table, or back: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x_BSHN: Tensor, table: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.back = back
        return rope(x_BSHN, table, back=back)

    @staticmethod
    def backward(ctx: Any, g_BSHN: Tensor) -> tuple[Tensor, None, None]:
        return Rotary.apply(g_BSHN, ctx.saved_tensors[0], not ctx.back), None, None

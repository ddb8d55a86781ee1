"""Root-mean-square norm with its weight: one pass forward, one backward, and no tensor between norm and weight.

The pass forward also adds what the row is the sum of; the one backward adds the row's other gradient, that of the
residual stream which goes on beside the norm.

Backward meets everything that the weight gradient needs, so it also sums that over the rows of each program: [P, D] in
fp32, a few megabytes in place of two activations, to be added up when weight gradients are due. Which rows a program
takes and in what order depends on shapes alone, so the sums have the same bits in every run.

Shapes: R rows (all leading dimensions together), D width, P programs.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements of a program at a time, where one row does not have more."""
PROGRAMS = 264
"""Programs of the backward at most, 2 per SM of a Hopper: more would write more partial sums than they hide latency."""
AHEAD = 96 * 1024
"""Bytes of shared memory that one of them has for tiles, so that memory is busy while it computes."""


@triton.jit
def _tile(start, rows, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    """Places of the rows from `start`, and which of them exist."""
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
        rounded = value.to(total.dtype.element_ty)  # what backward will read
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
    """Rows of a tile, its columns, and warps for it."""
    block = triton.next_power_of_2(width)
    rows = max(TILE // block, 1)
    return rows, block, min(max(rows * block // 512, 4), 32)


def stages_of(tile_bytes: int) -> int:
    """How many tiles of a program's inputs are being loaded or worked on at a time."""
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
    """Gradient of `x`, plus `more`; and what the weight gradient is the sum of: fp32 [P, D]."""
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
    """Write the sum of a backward's parts to `out`, whose dtype it is rounded to."""
    parts, width = partial_PD.shape
    _rms_norm_sum[triton.cdiv(width, 32),](partial_PD, out_D, parts, width, 64, 32, num_warps=4, enable_fp_fusion=False)

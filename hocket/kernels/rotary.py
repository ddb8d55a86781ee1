"""Rotary positions of heads, with or without the norm before them, in one pass; and the gradient in another.

A rotation's gradient is the rotation back, and needs no input. That of the norm sums its weight gradient on the way, as
`norm.py` says.

Shapes: B sequences, S sequence length, H heads, N width of a head, P programs.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels.norm import PROGRAMS, stages_of

TILE = 4096
"""Elements of a program at a time, where the heads of one position do not have more."""


@triton.jit
def _tile(start, tile: tl.constexpr, block_h: tl.constexpr, block_n: tl.constexpr):
    """Positions of a tile, heads, and pairs of a head. Strides of the first two are any, so these are 64-bit."""
    position = (start + tl.arange(0, tile)).to(tl.int64)[:, None, None]
    return position, tl.arange(0, block_h).to(tl.int64)[None, :, None], tl.arange(0, block_n)[None, None, :]


@triton.jit
def _pair(column, half: tl.constexpr, turning: tl.constexpr):
    """Where both elements of a pair are. The first `turning` pairs are of the halves of what rotates; the others, which
    stay, are of the halves of what is behind that.
    """
    one, other = column, column + half
    if turning < half:
        one, other = tl.where(column < turning, one, one + turning), tl.where(column < turning, one + turning, other)
    return one, other


@triton.jit
def _load(x, inside, one, other):
    """Both elements of pairs, in fp32."""
    first = tl.load(x + one, mask=inside, other=0).to(tl.float32)
    return first, tl.load(x + other, mask=inside, other=0).to(tl.float32)


@triton.jit
def _turn(first, second, table, position, column, positions, seq, turning: tl.constexpr, back: tl.constexpr):
    """Pairs, turned by the angles of their positions, or back."""
    angle, here = table + position % seq * turning + column, (position < positions) & (column < turning)
    cos, sin = tl.load(angle, mask=here, other=1), tl.load(angle + seq * turning, mask=here, other=0)
    if back:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["positions", "seq"])
def _rotary(
    x, weight, table, y, positions, seq, eps, stride_b, stride_s, stride_h, heads: tl.constexpr, half: tl.constexpr,
    turning: tl.constexpr, normed: tl.constexpr, back: tl.constexpr, tile: tl.constexpr, block_h: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    position, head, column = _tile(tl.program_id(0) * tile, tile, block_h, block_n)
    inside = (position < positions) & (head < heads) & (column < half)
    one, other = _pair(column, half, turning)
    at = position // seq * stride_b + position % seq * stride_s + head * stride_h
    first, second = _load(x + at, inside, one, other)
    if normed:
        w_first, w_second = _load(weight, column < half, one, other)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 2) / (2 * half) + eps)[:, :, None]
        first, second = first * scale * w_first, second * scale * w_second
    first, second = _turn(first, second, table, position, column, positions, seq, turning, back)
    into = y + (position * heads + head) * (2 * half)
    tl.store(into + one, first, mask=inside)
    tl.store(into + other, second, mask=inside)


@triton.jit(do_not_specialize=["positions", "seq"])
def _rms_norm_rotary_backward(
    g, x, weight, table, g_x, partial, positions, seq, eps, stride_b, stride_s, stride_h, heads: tl.constexpr,
    half: tl.constexpr, turning: tl.constexpr, tile: tl.constexpr, block_h: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    total_first = tl.zeros((tile, block_h, block_n), tl.float32)
    total_second = tl.zeros((tile, block_h, block_n), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, positions, tl.num_programs(0) * tile, num_stages=stages):
        position, head, column = _tile(start, tile, block_h, block_n)
        inside = (position < positions) & (head < heads) & (column < half)
        one, other = _pair(column, half, turning)
        w_first, w_second = _load(weight, column < half, one, other)
        at = position // seq * stride_b + position % seq * stride_s + head * stride_h
        g_first, g_second = _load(g + at, inside, one, other)
        g_first, g_second = _turn(g_first, g_second, table, position, column, positions, seq, turning, True)

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
    one, other = _pair(column, half, turning)
    into = partial + tl.program_id(0) * (2 * half)
    tl.store(into + one, tl.sum(tl.sum(total_first, 0), 0), mask=column < half)
    tl.store(into + other, tl.sum(tl.sum(total_second, 0), 0), mask=column < half)


def turn(x_BSHN: Tensor, table: Tensor, weight_N: Tensor | None = None, eps: float = 0.0, back: bool = False) -> Tensor:
    """Every head turned by its position's angle, or back; with a weight, the norm of every head. Without gaps.

    Of N elements, as many rotate as the table has cosines and sines for a position.
    The input may have any strides but in its last dimension, as those that attention gives a gradient.
    """
    batch, seq, heads, width = x_BSHN.shape
    turning = table.shape[-1]
    fits = table.shape[:3] == (2, seq, 1) and 2 * turning <= width
    assert fits, "a table for other positions or heads of another width"
    x_BSHN = x_BSHN if x_BSHN.stride(-1) == 1 else x_BSHN.contiguous()
    y_BSHN = torch.empty_like(x_BSHN, memory_format=torch.contiguous_format)
    if y_BSHN.numel():
        tile, block_h, block_n, warps = _sizes(heads, width)
        weight = x_BSHN if weight_N is None else weight_N.contiguous()
        numbers = (batch * seq, seq, eps, *x_BSHN.stride()[:3])
        sizes = (heads, width // 2, turning, weight_N is not None, back, tile, block_h, block_n)
        tensors, grid = (x_BSHN, weight, table.contiguous(), y_BSHN), (triton.cdiv(batch * seq, tile),)
        _rotary[grid](*tensors, *numbers, *sizes, num_warps=warps, enable_fp_fusion=False)
    return y_BSHN


def norm_turn_backward(
    g_BSHN: Tensor, x_BSHN: Tensor, table: Tensor, weight_N: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradient of `turn`'s input with a weight, and what the weight gradient is the sum of: fp32 [P, N]."""
    batch, seq, heads, width = x_BSHN.shape
    g_BSHN = g_BSHN if g_BSHN.stride(-1) == 1 else g_BSHN.contiguous()
    x_BSHN = x_BSHN.contiguous()
    g_x_BSHN = torch.empty_like(x_BSHN)
    if not g_x_BSHN.numel():
        return g_x_BSHN, torch.zeros(1, width, dtype=torch.float32, device=x_BSHN.device)
    tile, block_h, block_n, warps = _sizes(heads, width)
    programs = min(triton.cdiv(batch * seq, tile), PROGRAMS)
    partial_PN = torch.empty(programs, width, dtype=torch.float32, device=x_BSHN.device)
    tensors = (g_BSHN, x_BSHN, weight_N.contiguous(), table.contiguous(), g_x_BSHN, partial_PN)
    numbers = (batch * seq, seq, eps, *g_BSHN.stride()[:3])
    ahead = stages_of(2 * 2 * tile * block_h * block_n * x_BSHN.itemsize)
    sizes = (heads, width // 2, table.shape[-1], tile, block_h, block_n, ahead)
    _rms_norm_rotary_backward[programs,](*tensors, *numbers, *sizes, num_warps=2 * warps, enable_fp_fusion=False)
    return g_x_BSHN, partial_PN


def _sizes(heads: int, width: int) -> tuple[int, int, int, int]:
    """Positions of a tile, its heads, pairs of a head, and warps for it."""
    block_h, block_n = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    tile = max(TILE // (2 * block_h * block_n), 1)
    return tile, block_h, block_n, 4 if 2 * tile * block_h * block_n <= TILE else 8


class Rotary(torch.autograd.Function):
    """A rotation by the angles of a table, or back: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x_BSHN: Tensor, table: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.back = back
        return turn(x_BSHN, table, back=back)

    @staticmethod
    def backward(ctx: Any, g_BSHN: Tensor) -> tuple[Tensor, None, None]:
        return Rotary.apply(g_BSHN, ctx.saved_tensors[0], not ctx.back), None, None

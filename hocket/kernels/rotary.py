"""Rotary positions in one pass over the heads, and the gradient in another: the rotation back, which needs no input.

Shapes: B sequences, S sequence length, H heads, N width of a head.
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
"""Elements of a program, where one position's heads do not take more; with 128 threads, each has 64 bytes in bf16."""


def rotary(x_BSHN: Tensor, table: Tensor) -> Tensor:
    """Every head turned by its position's angles; `table` is [2, S, 1, N / 2], cosines and sines. See `layers.rotate`.

    The input may have any strides but in its last dimension, as those that attention gives a gradient.
    """
    return _Rotary.apply(x_BSHN, table, False)


@triton.jit(do_not_specialize=["positions", "seq"])
def _rotary(
    x,
    table,
    y,
    positions,
    seq,
    stride_b,
    stride_s,
    stride_h,
    heads: tl.constexpr,
    half: tl.constexpr,
    back: tl.constexpr,
    tile: tl.constexpr,  # positions of a program
    block_h: tl.constexpr,
    block_n: tl.constexpr,
):
    position = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)[:, None, None]
    head, column = tl.arange(0, block_h)[None, :, None], tl.arange(0, block_n)[None, None, :]
    here = (position < positions) & (column < half)
    inside = here & (head < heads)

    angle = table + position % seq * half + column
    cos = tl.load(angle, mask=here)
    sin = tl.load(angle + seq * half, mask=here)
    if back:
        sin = -sin

    at = x + position // seq * stride_b + position % seq * stride_s + head * stride_h + column
    first = tl.load(at, mask=inside).to(tl.float32)
    second = tl.load(at + half, mask=inside).to(tl.float32)
    into = y + (position * heads + head) * (2 * half) + column
    tl.store(into, first * cos - second * sin, mask=inside)
    tl.store(into + half, second * cos + first * sin, mask=inside)


def _turn(x_BSHN: Tensor, table: Tensor, back: bool) -> Tensor:
    """The rotation, or the one back. The result has no gaps."""
    batch, seq, heads, width = x_BSHN.shape
    assert table.shape == (2, seq, 1, width // 2), "a table for other positions or heads of another width"
    x_BSHN = x_BSHN if x_BSHN.stride(-1) == 1 else x_BSHN.contiguous()
    y_BSHN = torch.empty_like(x_BSHN, memory_format=torch.contiguous_format)
    if y_BSHN.numel():
        block_h, block_n = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
        tile = max(TILE // (2 * block_h * block_n), 1)
        grid = (triton.cdiv(batch * seq, tile),)
        strides, sizes = x_BSHN.stride()[:3], (heads, width // 2, back, tile, block_h, block_n)
        warps = 4 if tile * block_h * block_n <= TILE else 8
        _rotary[grid](
            x_BSHN,
            table.contiguous(),
            y_BSHN,
            batch * seq,
            seq,
            *strides,
            *sizes,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return y_BSHN


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHN: Tensor, table: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.back = back
        return _turn(x_BSHN, table, back)

    @staticmethod
    def backward(ctx: Any, g_BSHN: Tensor) -> tuple[Tensor, None, None]:
        return _Rotary.apply(g_BSHN, ctx.saved_tensors[0], not ctx.back), None, None

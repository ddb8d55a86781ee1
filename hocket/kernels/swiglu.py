"""SwiGLU in one pass, and its gradient in one.

Shapes: R rows (all leading dimensions together), F width of the MLP.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels.usable import refuse_graph

TILE = 2048
"""Elements of a program; with 128 threads, each loads 32 bytes of every bf16 tensor."""


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension: [..., 2F] -> [..., F]."""
    return _Swiglu.apply(gate_up)


@triton.jit
def _places(rows, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    """Of a program's tile: places of gates, places of outputs, and which of them exist."""
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
    return row * (2 * width) + column, row * width + column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_forward(gate_up, out, rows, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    at, into, inside = _places(rows, width, tile_rows, block)
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    tl.store(out + into, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward(g_out, gate_up, g, rows, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    at, out, inside = _places(rows, width, tile_rows, block)
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    g_o = tl.load(g_out + out, mask=inside).to(tl.float32)
    chance = tl.sigmoid(gate)
    tl.store(g + at, g_o * up * chance * (1 + gate * (1 - chance)), mask=inside)
    tl.store(g + at + width, g_o * gate * chance, mask=inside)


def _tiles(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, rows and columns of a tile. Columns are a power of 2 that divides the width if one above 127 does."""
    block = min(max(width & -width, 128), 1024)
    tile_rows = TILE // block
    return (triton.cdiv(rows, tile_rows), triton.cdiv(width, block)), tile_rows, block


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        if out.numel():
            rows = out.numel() // width
            grid, tile_rows, block = _tiles(rows, width)
            _swiglu_forward[grid](gate_up, out, rows, width, tile_rows, block, num_warps=4, enable_fp_fusion=False)
        return out

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> Tensor:
        refuse_graph()
        (gate_up,) = ctx.saved_tensors
        g, width = torch.empty_like(gate_up), g_out.shape[-1]
        if g.numel():
            rows = g_out.numel() // width
            grid, tile_rows, block = _tiles(rows, width)
            _swiglu_backward[grid](
                g_out.contiguous(), gate_up, g, rows, width, tile_rows, block, num_warps=4, enable_fp_fusion=False
            )
        return g

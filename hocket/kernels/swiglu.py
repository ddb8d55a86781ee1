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


def swiglu(gate_up: Tensor, count: Tensor | None = None, limit: float = 0.0, alpha: float = 1.0) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension: [..., 2F] -> [..., F].

    Above a limit of 0 it is `gate * sigmoid(alpha * gate) * (up + 1)`, of gates that are at most `limit`, and ups
    within plus and minus of it. With `count`, int32 [1], only of so many rows; what the others become means nothing.
    """
    return _Swiglu.apply(gate_up, count, limit, alpha)


@triton.jit
def _places(rows, count, counted: tl.constexpr, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr):
    """Of a program's tile: places of gates, places of outputs, and which of them exist."""
    if counted:
        rows = tl.minimum(tl.load(count), rows)
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
    return row * (2 * width) + column, row * width + column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows", "limit", "alpha"])
def _swiglu_forward(
    gate_up,
    out,
    rows,
    count,
    limit,
    alpha,
    limited: tl.constexpr,
    counted: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    at, into, inside = _places(rows, count, counted, width, tile_rows, block)
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    if limited:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + into, gate * tl.sigmoid(alpha * gate) * (up + 1), mask=inside)
    else:
        tl.store(out + into, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit(do_not_specialize=["rows", "limit", "alpha"])
def _swiglu_backward(
    g_out,
    gate_up,
    g,
    rows,
    count,
    limit,
    alpha,
    limited: tl.constexpr,
    counted: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    at, out, inside = _places(rows, count, counted, width, tile_rows, block)
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    g_o = tl.load(g_out + out, mask=inside).to(tl.float32)
    if limited:
        # Where something is cut off, nothing flows back; at the bound itself it does, as torch's clamp has it.
        gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
        chance = tl.sigmoid(alpha * gate)
        g_gate = g_o * (up + 1) * chance * (1 + alpha * gate * (1 - chance))
        tl.store(g + at, tl.where(gate_passes, g_gate, 0.0), mask=inside)
        tl.store(g + at + width, tl.where(up_passes, g_o * gate * chance, 0.0), mask=inside)
    else:
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
    def forward(ctx: Any, gate_up: Tensor, count: Tensor | None, limit: float, alpha: float) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, count)
        ctx.limits = limit, alpha, limit > 0
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        if out.numel():
            rows = out.numel() // width
            grid, *tile = _tiles(rows, width)
            of_count, counted = (gate_up, False) if count is None else (count, True)
            given = (gate_up, out, rows, of_count, *ctx.limits, counted, width, *tile)
            _swiglu_forward[grid](*given, num_warps=4, enable_fp_fusion=False)
        return out

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_graph()
        gate_up, count = ctx.saved_tensors
        g, width = torch.empty_like(gate_up), g_out.shape[-1]
        if g.numel():
            rows = g_out.numel() // width
            grid, *tile = _tiles(rows, width)
            of_count, counted = (gate_up, False) if count is None else (count, True)
            given = (g_out.contiguous(), gate_up, g, rows, of_count, *ctx.limits, counted, width, *tile)
            _swiglu_backward[grid](*given, num_warps=4, enable_fp_fusion=False)
        return g, None, None, None

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

from hocket.kernels import refuse_graph

TILE = 2048
"""Elements of a program; with 128 threads, each loads 32 bytes of every bf16 tensor."""


def swiglu(
    gate_up: Tensor,
    count: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension: [..., 2F] -> [..., F].

    With a `limit` above 0: `gate * sigmoid(alpha * gate) * (up + 1)`, gates clamped to at most `limit`, ups to plus and
    minus it. With `count`, int32 [1], only that many rows are valid. With `weights`, fp32 [R], each row is multiplied
    by its weight.
    """
    return _Swiglu.apply(gate_up, weights, count, limit, alpha)


@triton.jit
def _places(
    rows, tile, count, counted: tl.constexpr, width: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr
):
    """Rows, offsets of gates and of outputs, and a mask of those that exist, for a tile of columns."""
    if counted:
        rows = tl.minimum(tl.load(count), rows)
    one = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    row, column = one[:, None], (tile * block + tl.arange(0, block))[None, :]
    return one, row * (2 * width) + column, row * width + column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows", "limit", "alpha"])
def _swiglu_forward(
    gate_up,
    out,
    weights,
    rows,
    count,
    limit,
    alpha,
    limited: tl.constexpr,
    counted: tl.constexpr,
    weighted: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    one, at, into, inside = _places(rows, tl.program_id(1), count, counted, width, tile_rows, block)
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    if limited:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        value = gate * tl.sigmoid(alpha * gate) * (up + 1)
    else:
        value = gate * tl.sigmoid(gate) * up
    if weighted:
        value *= tl.load(weights + one, mask=one < rows, other=0)[:, None]
    tl.store(out + into, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "limit", "alpha"])
def _swiglu_backward(
    g_out,
    gate_up,
    g,
    weights,
    g_weights,
    rows,
    count,
    limit,
    alpha,
    limited: tl.constexpr,
    counted: tl.constexpr,
    weighted: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
):
    """With weights a program has all columns of its rows, because the weights' gradients are sums over columns."""
    total = tl.zeros([tile_rows], tl.float32)
    for tile in range(tiles):
        one, at, out, inside = _places(rows, tl.program_id(1) * tiles + tile, count, counted, width, tile_rows, block)
        gate = tl.load(gate_up + at, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate_up + at + width, mask=inside, other=0).to(tl.float32)
        g_o = tl.load(g_out + out, mask=inside, other=0).to(tl.float32)
        # Clamped values have no gradient; at the bound itself they have one, as in torch's clamp.
        gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
        slope = 1.0
        if limited:
            gate, up, slope = tl.minimum(gate, limit), tl.clamp(up, -limit, limit) + 1, alpha
        chance = tl.sigmoid(slope * gate)
        if weighted:
            total += tl.sum(g_o * gate * chance * up, axis=1)
            g_o *= tl.load(weights + one, mask=one < rows, other=0)[:, None]
        g_gate, g_up = g_o * up * chance * (1 + slope * gate * (1 - chance)), g_o * gate * chance
        if limited:
            g_gate, g_up = tl.where(gate_passes, g_gate, 0.0), tl.where(up_passes, g_up, 0.0)
        tl.store(g + at, g_gate, mask=inside)
        tl.store(g + at + width, g_up, mask=inside)
    if weighted:
        one = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
        tl.store(g_weights + one, total, mask=one < rows)


def _tiles(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, rows and columns of a tile. Columns are a power of 2 that divides the width if one above 127 does."""
    block = min(max(width & -width, 128), 1024)
    tile_rows = TILE // block
    return (triton.cdiv(rows, tile_rows), triton.cdiv(width, block)), tile_rows, block


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weights: Tensor | None, count: Tensor | None, limit: float, alpha: float
    ) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weights, count)
        ctx.limits = limit, alpha, limit > 0
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        if out.numel():
            rows = out.numel() // width
            grid, *tile = _tiles(rows, width)
            of_rows, of_count = (gate_up if tensor is None else tensor for tensor in (weights, count))
            flags = (count is not None, weights is not None)
            given = (gate_up, out, of_rows, rows, of_count, *ctx.limits, *flags, width, *tile)
            _swiglu_forward[grid](*given, num_warps=4, enable_fp_fusion=False)
        return out

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        gate_up, weights, count = ctx.saved_tensors
        g, width = torch.empty_like(gate_up), g_out.shape[-1]
        g_weights = None if weights is None else torch.empty_like(weights)
        if g.numel():
            rows = g_out.numel() // width
            (programs, columns), *tile = _tiles(rows, width)
            of_rows, g_of_rows, of_count = (
                gate_up if tensor is None else tensor for tensor in (weights, g_weights, count)
            )
            grid, tiles = ((programs, columns), 1) if weights is None else ((programs, 1), columns)
            flags = (count is not None, weights is not None)
            given = (g_out.contiguous(), gate_up, g, of_rows, g_of_rows, rows, of_count, *ctx.limits, *flags)
            _swiglu_backward[grid](*given, width, *tile, tiles, num_warps=4, enable_fp_fusion=False)
        return g, g_weights, None, None, None

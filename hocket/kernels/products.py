"""Weight gradients of stacked experts, written or added to their destination by the product itself.

`torch._grouped_mm` returns a result in its operands' dtype, which would then be copied or summed in fp32: 16 bytes per
element instead of 8. One program makes one tile of one expert's gradient from all of its rows, in order. It adds with a
reduction in memory (`red`), for which no program waits. No other program of the launch adds to that element, so results
are reproducible. Numbers below 1e-38 count as 0.

Only the device knows the experts' row counts. Rows beyond the last one are not read.

Shapes: R rows grouped by expert, D input width, F output width, E experts.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels import sums


@dataclass(frozen=True)
class Tile:
    """A program's output, `tall` x `wide` elements, from `deep` rows at a time."""

    tall: int
    wide: int
    deep: int
    warps: int
    stages: int
    """Loads in flight."""


TILE = Tile(128, 256, 64, warps=8, stages=4)
"""Two groups of 4 warps with 64 x 256 sums in registers each: the largest product of a Hopper. The fastest tile of
`benchmarks.expert_grads` when adding, nearly so when writing."""


def weight_gradients(
    x_RD: Tensor,
    g_RF: Tensor,
    ends_E: Tensor,
    out_EDF: Tensor,
    add: bool = False,
    scale: float = 1.0,
    tile: Tile = TILE,
) -> None:
    """`out[e]` = or += `scale * x[rows of e].T @ g[rows of e]`, for rows `ends[e - 1]` to `ends[e]`, int32.

    Without rows, zeros are written or nothing is added. Adding needs fp32.
    """
    (_, width), inner, experts = x_RD.shape, g_RF.shape[1], len(ends_E)
    assert out_EDF.shape == (experts, width, inner), f"{tuple(out_EDF.shape)} is not {(experts, width, inner)}"
    assert out_EDF.is_contiguous()
    assert not add or out_EDF.dtype is torch.float32
    if not out_EDF.numel():
        return
    grid = experts * triton.cdiv(width, tile.tall) * triton.cdiv(inner, tile.wide)
    given = (x_RD.contiguous(), g_RF.contiguous(), ends_E, out_EDF, scale, width, inner, add)
    _weight_gradients[grid,](
        *given,
        tile.tall,
        tile.wide,
        tile.deep,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


@triton.jit
def _weight_gradients(
    x,
    g,
    ends,
    out,
    scale,
    width: tl.constexpr,
    inner: tl.constexpr,
    add: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    deep: tl.constexpr,
):
    across: tl.constexpr = (inner + wide - 1) // wide
    tiles: tl.constexpr = (width + tall - 1) // tall * across
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    rows = tl.load(ends + expert) - start
    if add and rows <= 0:
        return
    m = (tile // across * tall + tl.arange(0, tall))[None, :]
    n = (tile % across * wide + tl.arange(0, wide))[None, :]
    row = tl.arange(0, deep)[:, None]
    from_x = x + start.to(tl.int64) * width + row * width + m
    from_g = g + start.to(tl.int64) * inner + row * inner + n
    total = tl.zeros([tall, wide], tl.float32)
    for left in range(rows, 0, -deep):
        inside = row < left
        x_tile = tl.load(from_x, mask=inside & (m < width) if width % tall else inside, other=0.0)
        g_tile = tl.load(from_g, mask=inside & (n < inner) if inner % wide else inside, other=0.0)
        total = tl.dot(tl.trans(x_tile), g_tile, total)
        from_x += deep * width
        from_g += deep * inner
    total *= scale
    column = tl.trans(m)
    into = out + expert.to(tl.int64) * (width * inner) + column * inner + n
    if add:
        tl.atomic_add(into, total, mask=(column < width) & (n < inner), sem="relaxed")
    else:
        tl.store(into, total, mask=(column < width) & (n < inner))


# --------------------------------------------------------------------------------------------------------------- router
#
# Gradients of a router's product: fp32 logit gradients times bf16 operands, on tensor cores.
#
# Tensor cores multiply bf16 exactly and accumulate in fp32. An fp32 number (24 significant bits) is the sum of three
# bf16 *parts* (8 each), so products of the parts have fp32 precision at a fraction of the time. Gradients are split in
# registers.
#
# The weight gradient uses three parts. The input gradient is rounded to bf16, so two are enough: a third is at most
# 2^-16 of its term, the final rounding up to 2^-8. It would show only where all but 2^-8 of the terms cancel.
#
# Shapes: T tokens, E experts, D hidden, S slices of the tokens.


TOKENS, COLUMNS, EXPERTS = 128, 128, 32
"""Tokens and columns of a program of the input gradient, and experts at a time."""
BLOCK, ROWS = 128, 64
"""Experts and columns of a program of the weight gradient at most, and tokens at a time."""
PROGRAMS, SLICES = 132, 16
"""Programs of the weight gradient, about: one per SM of a Hopper; and slices of the tokens at most."""


@triton.jit(do_not_specialize=["tokens"])
def _router_input_gradient(
    g,
    weight,
    more,
    out,
    tokens,
    experts: tl.constexpr,
    width: tl.constexpr,
    add: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    deep: tl.constexpr,
):
    across: tl.constexpr = (width + wide - 1) // wide
    token = (tl.program_id(0) // across * tall + tl.arange(0, tall)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * wide + tl.arange(0, wide))[None, :]
    total = tl.zeros([tall, wide], tl.float32)
    for first in range(0, experts, deep):
        expert = first + tl.arange(0, deep)
        rest = tl.load(g + token * experts + expert[None, :], (token < tokens) & (expert < experts)[None, :], 0.0)
        inside = (expert < experts)[:, None] & (column < width)
        w = tl.load(weight + expert[:, None] * width + column, inside, 0.0)
        part = rest.to(tl.bfloat16)
        total = tl.dot(part, w, total)
        total = tl.dot((rest - part.to(tl.float32)).to(tl.bfloat16), w, total)
    at, inside = token * width + column, (token < tokens) & (column < width)
    if add:
        total += tl.load(more + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, total, inside)


@triton.jit(do_not_specialize=["tokens"])
def _router_weight_gradient(
    g,
    x,
    partial,
    tokens,
    experts: tl.constexpr,
    width: tl.constexpr,
    slices: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    deep: tl.constexpr,
):
    across: tl.constexpr = (width + wide - 1) // wide
    part_of = tl.program_id(1)
    expert = (tl.program_id(0) // across * tall + tl.arange(0, tall))[None, :]
    column = (tl.program_id(0) % across * wide + tl.arange(0, wide))[None, :]
    here = tl.cdiv(tl.cdiv(tokens, deep), slices) * deep
    start = part_of.to(tl.int64) * here
    row = tl.arange(0, deep)[:, None]
    from_g, from_x = g + start * experts + row * experts + expert, x + start * width + row * width + column
    total = tl.zeros([tall, wide], tl.float32)
    for left in range(tl.minimum(here, tokens - start).to(tl.int32), 0, -deep):
        rest = tl.load(from_g, (row < left) & (expert < experts), 0.0)
        values = tl.load(from_x, (row < left) & (column < width), 0.0)
        for _ in tl.static_range(3):
            part = rest.to(tl.bfloat16)
            total = tl.dot(tl.trans(part), values, total)
            rest -= part.to(tl.float32)
        from_g += deep * experts
        from_x += deep * width
    down = tl.trans(expert)
    into = partial + part_of.to(tl.int64) * (experts * width) + down * width + column
    tl.store(into, total, (down < experts) & (column < width))


def input_gradient(g_TE: Tensor, weight_ED: Tensor, more_TD: Tensor | None = None) -> Tensor:
    """`g @ weight`, bf16 [T, D], plus `more`: `g` is fp32, the others are bf16."""
    (tokens, experts), width = g_TE.shape, weight_ED.shape[1]
    g_TE, weight_ED = g_TE.contiguous(), weight_ED.contiguous()
    out_TD = torch.empty(tokens, width, dtype=weight_ED.dtype, device=g_TE.device)
    grid = triton.cdiv(tokens, TOKENS) * triton.cdiv(width, COLUMNS)
    if grid:
        given = (g_TE, weight_ED, g_TE if more_TD is None else more_TD.contiguous(), out_TD, tokens)
        sizes = (experts, width, more_TD is not None, TOKENS, COLUMNS, _block(experts, EXPERTS))
        _router_input_gradient[grid,](*given, *sizes, num_warps=8, num_stages=3, enable_fp_fusion=False)
    return out_TD


def weight_gradient(g_TE: Tensor, x_TD: Tensor, out_ED: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """`out` = or += `scale * g.T @ x`, accumulated in fp32: `g` is fp32, `x` bf16, `out` contiguous.

    Sums go slice by slice in order; the number of slices depends on E and D alone.
    """
    (tokens, experts), width = g_TE.shape, x_TD.shape[1]
    tall, wide = _block(experts, BLOCK), _block(width, BLOCK)
    tiles = triton.cdiv(experts, tall) * triton.cdiv(width, wide)
    slices = min(max(PROGRAMS // tiles, 1), SLICES)
    partial_SN = torch.empty(slices, experts * width, dtype=torch.float32, device=g_TE.device)
    given = (g_TE.contiguous(), x_TD.contiguous(), partial_SN, tokens)
    sizes = (experts, width, slices, tall, wide, ROWS)
    _router_weight_gradient[tiles, slices](*given, *sizes, num_warps=8, num_stages=3, enable_fp_fusion=False)
    sums.launch(partial_SN, out_ED.view(-1), scale, add)


def _block(size: int, most: int) -> int:
    """Tensor cores need sides of at least 16."""
    return min(max(triton.next_power_of_2(size), 16), most)

"""Weight gradients of stacked experts, written or added where they belong by the product itself.

`torch._grouped_mm` has a result of its own, in the dtype of its operands: from there gradients are copied to where they
are sent from, or summed up in fp32. Here they leave the product in fp32, once: 8 bytes per element where product, copy
and sum move 16.

One program makes one tile of one expert's gradient, from all of the expert's rows, in their order. So nothing depends
on which program runs first. An addition is made where the memory is (`red`), and no program waits for it: nobody else
adds to that element in the same launch, hence the same bits in every run. It takes numbers below 1e-38 for 0.

How many rows an expert has is known to the device alone. Rows behind the last one's are not read.

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


@dataclass(frozen=True)
class Tile:
    """What a program computes: `tall` x `wide` elements, from `deep` rows at a time."""

    tall: int
    wide: int
    deep: int
    warps: int
    stages: int
    """Loads of so many steps are under way at once."""


TILE = Tile(128, 256, 64, warps=8, stages=4)
"""Two groups of 4 warps, each with 64 x 256 sums in its registers: the largest product that a Hopper has. Of the tiles
of `benchmarks.expert_grads` it adds in the least time, and writes in little more than the least."""


GATHERED = Tile(128, 256, 64, warps=8, stages=5)
"""The same of gathered rows, whose numbers are loaded one stage ahead of them."""
Rows = Tensor | tuple[Tensor, Tensor]
"""Rows in grouped order; or others, and for each row in grouped order which of them it is, int32."""


def weight_gradients(
    x_RD: Rows,
    g_RF: Rows,
    ends_E: Tensor,
    out_EDF: Tensor,
    add: bool = False,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> None:
    """`out[e]` = or += `scale * x[rows of e].T @ g[rows of e]`: the rows from `ends[e - 1]` to `ends[e]`, int32.

    An expert without rows gets zeros, or nothing is added. What is added to is fp32.
    """
    (x, of_x), (g, of_g) = (rows if isinstance(rows, tuple) else (rows, None) for rows in (x_RD, g_RF))
    tile = tile or (TILE if of_x is of_g is None else GATHERED)
    width, inner, experts = x.shape[1], g.shape[1], len(ends_E)
    assert out_EDF.shape == (experts, width, inner), f"{tuple(out_EDF.shape)} is not {(experts, width, inner)}"
    assert out_EDF.is_contiguous()
    assert not add or out_EDF.dtype is torch.float32
    if not out_EDF.numel():
        return
    grid = experts * triton.cdiv(width, tile.tall) * triton.cdiv(inner, tile.wide)
    given = (x.contiguous(), g.contiguous(), ends_E, out_EDF, scale, width, inner, add)
    sources = (ends_E if of_x is None else of_x, ends_E if of_g is None else of_g)
    _weight_gradients[grid,](
        *sources,
        *given,
        of_x is not None,
        of_g is not None,
        tile.tall,
        tile.wide,
        tile.deep,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


@triton.jit
def _weight_gradients(
    of_x,
    of_g,
    x,
    g,
    ends,
    out,
    scale,
    width: tl.constexpr,
    inner: tl.constexpr,
    add: tl.constexpr,
    x_gathered: tl.constexpr,
    g_gathered: tl.constexpr,
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
    from_x, from_g = x + m, g + n
    if not x_gathered:
        from_x += start.to(tl.int64) * width + row * width
    if not g_gathered:
        from_g += start.to(tl.int64) * inner + row * inner
    of_x += start + row
    of_g += start + row
    total = tl.zeros([tall, wide], tl.float32)
    for left in range(rows, 0, -deep):
        inside = row < left
        here_x, here_g = from_x, from_g
        if x_gathered:
            here_x += tl.load(of_x, mask=inside, other=0).to(tl.int64) * width
            of_x += deep
        if g_gathered:
            here_g += tl.load(of_g, mask=inside, other=0).to(tl.int64) * inner
            of_g += deep
        x_tile = tl.load(here_x, mask=inside & (m < width) if width % tall else inside, other=0.0)
        g_tile = tl.load(here_g, mask=inside & (n < inner) if inner % wide else inside, other=0.0)
        total = tl.dot(tl.trans(x_tile), g_tile, total)
        if not x_gathered:
            from_x += deep * width
        if not g_gathered:
            from_g += deep * inner
    total *= scale
    column = tl.trans(m)
    into = out + expert.to(tl.int64) * (width * inner) + column * inner + n
    if add:
        tl.atomic_add(into, total, mask=(column < width) & (n < inner), sem="relaxed")
    else:
        tl.store(into, total, mask=(column < width) & (n < inner))

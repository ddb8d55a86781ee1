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


def weight_gradients(
    x_RD: Tensor,
    g_RF: Tensor,
    ends_E: Tensor,
    out_EDF: Tensor,
    add: bool = False,
    scale: float = 1.0,
    tile: Tile = TILE,
) -> None:
    """`out[e]` = or += `scale * x[rows of e].T @ g[rows of e]`: the rows from `ends[e - 1]` to `ends[e]`, int32.

    An expert without rows gets zeros, or nothing is added. What is added to is fp32.
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

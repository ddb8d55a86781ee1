"""The experts' products, with what stands beside them: rows are gathered, gated and sent back inside the products.

Two kernels. The first multiplies rows by gates and ups and gates them where the sums still are in registers. The second
multiplies gradients by the second weights, and goes on to the gradients of gates and ups, and of the rows' weights. So
nothing is read again that a product has just made. `hocket/kernels/grouped.py` has the weight gradients.

Rows may be gathered on the way in: `source` says, for each grouped row, which row of the input it is. Then rows in
grouped order are neither written nor kept.

How many rows an expert has is known to the device alone. A program works on a tile of one expert's rows, and goes by
how many tiles there are before it: no more than one a boundary too many, and these do nothing. Rows behind the last
expert's are neither read nor written.

Sums are in fp32. Each element is computed by one program, from start to end in the same order, so bits depend on
nothing else.

Shapes: N rows given, R rows grouped by expert, D hidden, F width of an expert, E experts.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels.grouped import Tile

UP = Tile(128, 128, 64, warps=8, stages=3)
"""Of the first product: `wide` gates and as many ups."""
DOWN = Tile(128, 128, 64, warps=8, stages=3)
BLOCK = tl.constexpr(32)
"""Columns that are gated at once in backward."""


@triton.jit
def _place(ends, slot, experts: tl.constexpr, tall: tl.constexpr, block_e: tl.constexpr):
    """The expert of a slot, its first row there, and the end of the expert's rows.

    An expert has slots from `start // tall + expert` on, and at least as many as tiles.
    """
    e = tl.arange(0, block_e)
    end = tl.load(ends + e, mask=e < experts, other=2147483647)
    behind = tl.where(e < experts, end // tall + e + 1, 2147483647)
    expert = tl.sum((behind <= slot).to(tl.int32))
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    stop = tl.load(ends + expert, mask=expert < experts, other=0)
    return expert, start + (slot - start // tall - expert) * tall, stop


@triton.jit
def _grouped_mm_gated(
    x, source, w, ends, weights, gate_up, inner,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr, gathered: tl.constexpr, weighted: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (ffn + wide - 1) // wide
    expert, first, stop = _place(ends, tl.program_id(0) // across, experts, tall, block_e)
    if first >= stop:
        return
    row = first + tl.arange(0, tall)
    here = tl.minimum(row, stop - 1)  # a tile's last rows may be another expert's, or nobody's
    taken = tl.load(source + here).to(tl.int64) if gathered else here.to(tl.int64)
    n, k = tl.program_id(0) % across * wide + tl.arange(0, wide), tl.arange(0, deep)
    from_x = x + taken[:, None] * width + k[None, :]
    from_gate = w + expert.to(tl.int64) * (2 * width * ffn) + k[:, None] * (2 * ffn) + n[None, :]
    from_up = from_gate + ffn
    whole: tl.constexpr = ffn % wide == 0 and width % deep == 0
    gate, up = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
    for low in range(0, width, deep):
        if whole:
            x_tile, gate_tile, up_tile = tl.load(from_x), tl.load(from_gate), tl.load(from_up)
        else:
            left = k < width - low
            both = left[:, None] & (n < ffn)[None, :]
            x_tile = tl.load(from_x, mask=left[None, :], other=0.0)
            gate_tile, up_tile = tl.load(from_gate, mask=both, other=0.0), tl.load(from_up, mask=both, other=0.0)
        gate = tl.dot(x_tile, gate_tile, gate)
        up = tl.dot(x_tile, up_tile, up)
        from_x += deep
        from_gate += deep * 2 * ffn
        from_up += deep * 2 * ffn
    _gate(gate, up, row, n, stop, weights, gate_up, inner, ffn, weighted)


@triton.jit
def _gate(gate, up, row, n, stop, weights, gate_up, inner, ffn: tl.constexpr, weighted: tl.constexpr):
    """Store gates and ups, and what they make: of the rounded ones, for those are what backward knows."""
    inside = (row < stop)[:, None] & (n < ffn)[None, :]
    gate, up = gate.to(gate_up.dtype.element_ty), up.to(gate_up.dtype.element_ty)
    at = gate_up + row.to(tl.int64)[:, None] * (2 * ffn) + n[None, :]
    tl.store(at, gate, mask=inside)
    tl.store(at + ffn, up, mask=inside)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weighted:
        value *= tl.load(weights + row, mask=row < stop, other=0.0)[:, None]
    into = inner + row.to(tl.int64)[:, None] * ffn + n[None, :]
    tl.store(into, value.to(inner.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_mm_gate_backward(
    g, source, w, ends, weights, gate_up, g_gate_up, g_weights, rows,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr, gathered: tl.constexpr, weighted: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """`g_weights` gets a row of sums from each tile of columns."""
    across: tl.constexpr = (ffn + wide - 1) // wide
    expert, first, stop = _place(ends, tl.program_id(0) // across, experts, tall, block_e)
    if first >= stop:
        return
    row = first + tl.arange(0, tall)
    here = tl.minimum(row, stop - 1)
    taken = tl.load(source + here).to(tl.int64) if gathered else here.to(tl.int64)
    tile = tl.program_id(0) % across
    n, k = tile * wide + tl.arange(0, wide), tl.arange(0, deep)
    from_g = g + taken[:, None] * width + k[None, :]
    from_w = w + expert.to(tl.int64) * (width * ffn) + n[None, :] * width + k[:, None]
    whole: tl.constexpr = ffn % wide == 0 and width % deep == 0
    total = tl.zeros([tall, wide], tl.float32)
    for low in range(0, width, deep):
        if whole:
            g_tile, w_tile = tl.load(from_g), tl.load(from_w)
        else:
            left = k < width - low
            g_tile = tl.load(from_g, mask=left[None, :], other=0.0)
            w_tile = tl.load(from_w, mask=left[:, None] & (n < ffn)[None, :], other=0.0)
        total = tl.dot(g_tile, w_tile, total)
        from_g += deep
        from_w += deep
    sums = g_weights + tile * rows
    _gate_backward(
        total,
        row,
        tile * wide,
        stop,
        weights,
        gate_up,
        g_gate_up,
        sums,
        ffn,
        weighted,
        wide,
        BLOCK if wide > BLOCK else wide,
    )


@triton.jit
def _gate_backward(
    g, row, first, stop, weights, gate_up, g_gate_up, g_weights,
    ffn: tl.constexpr, weighted: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Block by block of columns, for all of them at once do not fit into registers."""
    total = tl.zeros([g.shape[0]], tl.float32)
    weight = total + 1.0
    if weighted:
        weight = tl.load(weights + row, mask=row < stop, other=0.0)
    if wide > 4 * block:
        left, right = _halves(g)
        total += _gate_backward_4(left, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
        total += _gate_backward_4(right, weight, row, first + 4 * block, stop, gate_up, g_gate_up, ffn, block)
    elif wide > 2 * block:
        total += _gate_backward_4(g, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
    elif wide > block:
        total += _gate_backward_2(g, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
    else:
        total += _gate_backward_1(g, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
    if weighted:
        tl.store(g_weights + row, total, mask=row < stop)


@triton.jit
def _halves(g):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(g, [g.shape[0], 2, g.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _gate_backward_4(g, weight, row, first, stop, gate_up, g_gate_up, ffn: tl.constexpr, block: tl.constexpr):
    left, right = _halves(g)
    total = _gate_backward_2(left, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
    return total + _gate_backward_2(right, weight, row, first + 2 * block, stop, gate_up, g_gate_up, ffn, block)


@triton.jit
def _gate_backward_2(g, weight, row, first, stop, gate_up, g_gate_up, ffn: tl.constexpr, block: tl.constexpr):
    left, right = _halves(g)
    total = _gate_backward_1(left, weight, row, first, stop, gate_up, g_gate_up, ffn, block)
    return total + _gate_backward_1(right, weight, row, first + block, stop, gate_up, g_gate_up, ffn, block)


@triton.jit
def _gate_backward_1(g, weight, row, first, stop, gate_up, g_gate_up, ffn: tl.constexpr, block: tl.constexpr):
    n = first + tl.arange(0, block)
    inside = (row < stop)[:, None] & (n < ffn)[None, :]
    at = row.to(tl.int64)[:, None] * (2 * ffn) + n[None, :]
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + ffn, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    total = tl.sum(g * gate * chance * up, axis=1)
    g *= weight[:, None]
    g_gate, g_up = g * up * chance * (1 + gate * (1 - chance)), g * gate * chance
    tl.store(g_gate_up + at, g_gate.to(g_gate_up.dtype.element_ty), mask=inside)
    tl.store(g_gate_up + at + ffn, g_up.to(g_gate_up.dtype.element_ty), mask=inside)
    return total


def up(
    x_ND: Tensor, source_R: Tensor | None, w_EDF: Tensor, ends_E: Tensor, weights_R: Tensor | None, rows: int,
    tile: Tile = UP,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gates and ups of each row, [R, 2F], and `silu(gate) * up`, times the row's weight: [R, F].

    `source` int32, for each row, the row of `x`; None: the same. `ends[e]` int32, the end of expert e's rows. Rows
    behind the last end hold anything.
    """
    experts, width, twice = w_EDF.shape
    gate_up_RF, inner_RF = x_ND.new_empty(rows, twice), x_ND.new_empty(rows, twice // 2)
    if rows:
        grid = (rows // tile.tall + experts) * triton.cdiv(twice // 2, tile.wide)
        given = (_or(source_R, ends_E), w_EDF.contiguous(), ends_E, _or(weights_R, ends_E), gate_up_RF, inner_RF)
        sizes = (width, twice // 2, experts, source_R is not None, weights_R is not None)
        shape = (tile.tall, tile.wide, tile.deep, triton.next_power_of_2(experts))
        _grouped_mm_gated[grid,](
            x_ND.contiguous(), *given, *sizes, *shape, num_warps=tile.warps, num_stages=tile.stages
        )
    return gate_up_RF, inner_RF


def down_backward(
    g_ND: Tensor, source_R: Tensor | None, w_EFD: Tensor, ends_E: Tensor, weights_R: Tensor | None,
    gate_up_RF: Tensor, tile: Tile = DOWN,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of gates and ups, [R, 2F], and of the rows' weights, fp32 [R], from those of rows behind the experts.

    `source` as in `up`, of rows of `g`.
    """
    experts, ffn, width = w_EFD.shape
    rows, across = gate_up_RF.shape[0], triton.cdiv(ffn, tile.wide)
    g_gate_up_RF = torch.empty_like(gate_up_RF)
    g_weights = None if weights_R is None else weights_R.new_empty(across, rows)
    if rows:
        grid = (rows // tile.tall + experts) * across
        given = (_or(source_R, ends_E), w_EFD.contiguous(), ends_E, _or(weights_R, ends_E), gate_up_RF)
        sizes = (rows, width, ffn, experts, source_R is not None, weights_R is not None)
        shape = (tile.tall, tile.wide, tile.deep, triton.next_power_of_2(experts))
        into = (g_gate_up_RF, _or(g_weights, ends_E))
        how = {"num_warps": tile.warps, "num_stages": tile.stages}
        _grouped_mm_gate_backward[grid,](g_ND.contiguous(), *given, *into, *sizes, *shape, **how)
    return g_gate_up_RF, None if g_weights is None else g_weights.sum(0)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor

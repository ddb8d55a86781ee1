"""Casts to fp8: rows with one scale each, as products need them, and transposes of the result.

A row is divided by the least power of two with which it fits e4m3, whose largest number is 448. That rounds nothing, so
the transpose that another product needs is made from the bytes: differing scales only move exponents. One program casts
a whole row, held in registers until its scale is known. SwiGLU and its backward cast their rows in the same pass.

Shapes: R rows, W width of a row, F width of an MLP.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 3
"""Most tensors concatenated into one row: gradients of queries, keys and values."""
WIDEST = 65536
"""Most elements of a row, limited by registers."""
TILE = 128


@triton.jit
def _largest(value):
    """The largest magnitude of each row, as bits: ordered like the numbers, with nan above all."""
    return tl.max(tl.abs(value).to(tl.int32, bitcast=True), 1)


@triton.jit
def _scale_of(bits):
    """Least powers of two 2^e, e >= -60, that scale magnitudes to at most 448; and 2^-e. nan for rows that are not
    finite.
    """
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 75)  # of 256 * 2^e, for 448 is 1.75 * 256
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan")), inverse


@triton.jit
def _folded(value, fold, owner, row, column, here, rows, width: tl.constexpr, folds: tl.constexpr):
    """Columns times `fold`: the same for all rows (1), or that of each row's owner (2)."""
    if folds == 1:
        value *= tl.load(fold + column, mask=here, other=0)
    if folds == 2:
        of = tl.load(owner + row, mask=row < rows, other=0).to(tl.int64)
        value *= tl.load(fold + of * width + column, mask=here & (row < rows), other=0)
    return value


@triton.jit
def _rows_here(rows, count, counted: tl.constexpr, tile_rows: tl.constexpr):
    """The rows of a program, and the number of rows."""
    if counted:
        rows = tl.minimum(tl.load(count), rows)
    return (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64), rows


@triton.jit(do_not_specialize=["rows"])
def _cast_rows(
    a, b, c, fold, owner, count, out, scales, rows, wide_a: tl.constexpr, wide_b: tl.constexpr, wide_c: tl.constexpr,
    folds: tl.constexpr, counted: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    one, rows = _rows_here(rows, count, counted, tile_rows)
    row, column = one[:, None], tl.arange(0, block)[None, :]
    width: tl.constexpr = wide_a + wide_b + wide_c
    inside = (row < rows) & (column < width)
    value = tl.load(a + row * wide_a + column, mask=inside & (column < wide_a), other=0).to(tl.float32)
    if wide_b:
        here = inside & (column >= wide_a) & (column < wide_a + wide_b)
        more = tl.load(b + row * wide_b + (column - wide_a), mask=here, other=0).to(tl.float32)
        value = tl.where(here, more, value)
    if wide_c:
        here = inside & (column >= wide_a + wide_b)
        more = tl.load(c + row * wide_c + (column - wide_a - wide_b), mask=here, other=0).to(tl.float32)
        value = tl.where(here, more, value)
    value = _folded(value, fold, owner, row, column, column < width, rows, width, folds)
    scale, inverse = _scale_of(_largest(value))
    tl.store(out + row * width + column, (value * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + one, scale, mask=one < rows)


@triton.jit
def _transposed(x, factors, limit, out, fours, width: tl.constexpr, weighs: tl.constexpr, tile: tl.constexpr):
    """Transposes words made of four rows' bytes each, which moves four times as much per operation."""
    four = (tl.program_id(0) * (tile // 4) + tl.arange(0, tile // 4)).to(tl.int64)
    column = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    x += tl.program_id(2).to(tl.int64) * (4 * fours * width)
    out += tl.program_id(2).to(tl.int64) * (fours * width)
    words = tl.zeros((tile // 4, tile), tl.uint32)
    for i in tl.static_range(4):
        row = 4 * four + i
        inside = (four[:, None] < fours) & (column[None, :] < width)
        byte = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0)
        if weighs:
            # A quotient of powers of two, by exponents; underflow gives 0.
            least = tl.load(limit).to(tl.int32, bitcast=True)
            bits = tl.load(factors + row, mask=four < fours, other=0).to(tl.int32, bitcast=True)
            share = tl.maximum(bits - least + (127 << 23), 0).to(tl.float32, bitcast=True)
            value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * share[:, None]
            byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        words |= byte.to(tl.uint32) << (8 * i)
    turned = (column[:, None] < width) & (four[None, :] < fours)
    tl.store(out + column[:, None] * fours + four[None, :], tl.trans(words), mask=turned)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_rows(
    gate_up, fold, owner, count, wide, weights, out, scales, rows, width: tl.constexpr, folds: tl.constexpr,
    counted: tl.constexpr, widens: tl.constexpr, weighted: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    one, rows = _rows_here(rows, count, counted, tile_rows)
    row, column = one[:, None], tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < width)
    at = gate_up + row * (2 * width) + column
    gate = tl.load(at, mask=inside, other=0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * tl.load(at + width, mask=inside, other=0).to(tl.float32)
    if weighted:
        value *= tl.load(weights + one, mask=one < rows, other=0)[:, None]
    if widens:
        tl.store(wide + row * width + column, value, mask=inside)
    value = _folded(value, fold, owner, row, column, column < width, rows, width, folds)
    scale, inverse = _scale_of(_largest(value))
    tl.store(out + row * width + column, (value * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + one, scale, mask=one < rows)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_rows_backward(
    g_out, gate_up, fold, count, wide, weights, g_weights, out, scales, rows, width: tl.constexpr, folds: tl.constexpr,
    counted: tl.constexpr, widens: tl.constexpr, weighted: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    one, rows = _rows_here(rows, count, counted, tile_rows)
    row, column = one[:, None], tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < width)
    at = row * (2 * width) + column
    gate = tl.load(gate_up + at, mask=inside, other=0).to(tl.float32)
    g_o = tl.load(g_out + row * width + column, mask=inside, other=0).to(tl.float32)
    chance = tl.sigmoid(gate)
    up = tl.load(gate_up + at + width, mask=inside, other=0).to(tl.float32)
    if weighted:
        tl.store(g_weights + one, tl.sum(g_o * gate * chance * up, axis=1), mask=one < rows)
        g_o *= tl.load(weights + one, mask=one < rows, other=0)[:, None]
    g_gate, g_up = g_o * up * chance * (1 + gate * (1 - chance)), g_o * gate * chance
    if widens:
        tl.store(wide + at, g_gate, mask=inside)
        tl.store(wide + at + width, g_up, mask=inside)
    g_gate = _folded(g_gate, fold, fold, row, column, column < width, rows, width, folds)
    g_up = _folded(g_up, fold + width, fold, row, column, column < width, rows, width, folds)
    scale, inverse = _scale_of(tl.maximum(_largest(g_gate), _largest(g_up)))
    tl.store(out + at, (g_gate * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(out + at + width, (g_up * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + one, scale, mask=one < rows)


def _sizes(width: int) -> tuple[int, int, int]:
    """Rows of a program, columns that it holds, and warps."""
    assert width <= WIDEST, f"a row of {width} elements is wider than {WIDEST}"
    block = triton.next_power_of_2(width)
    rows = max(2048 // block, 1)
    return rows, block, min(max(rows * block // 1024, 4), 16)


def _new(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=like.device)
    return out, torch.empty(rows, dtype=torch.float32, device=like.device)


def _folds(fold: Tensor | None, owner_R: Tensor | None) -> int:
    return 0 if fold is None else 1 if owner_R is None else 2


def cast_rows(
    parts: Sequence[Tensor],
    fold: Tensor | None = None,
    owner_R: Tensor | None = None,
    count: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """e4m3 [R, W] and scales [R], fp32, of concatenated matrices.

    Columns are multiplied by `fold` [W], or each row's by `fold[owner]`, [E, W] and int32 [R]. With `count`, int32 [1],
    only that many rows are valid. `into`: where to write both, contiguous.
    """
    assert 1 <= len(parts) <= PARTS
    given = [part.contiguous() for part in parts]
    rows, widths = given[0].shape[0], [part.shape[1] for part in given] + [0] * (PARTS - len(parts))
    out, scales = _new(rows, sum(widths), given[0]) if into is None else into
    if out.numel():
        none = given[0]
        tile_rows, block, warps = _sizes(sum(widths))
        others = [none if tensor is None else tensor for tensor in (fold, owner_R, count)]
        tensors = (*given, *[none] * (PARTS - len(parts)), *others, out, scales)
        sizes = (rows, *widths, _folds(fold, owner_R), count is not None, tile_rows, block)
        _cast_rows[triton.cdiv(rows, tile_rows),](*tensors, *sizes, num_warps=warps, enable_fp_fusion=False)
    return out, scales


def transposed(
    x: Tensor, factors_R: Tensor | None = None, limit: Tensor | None = None, tile: int = TILE, warps: int = 4
) -> Tensor:
    """[..., W, R] of [..., R, W], R a multiple of 4.

    With `factors`, powers of two, a single matrix's rows are first multiplied by theirs over `limit`, a scalar, the
    largest.
    """
    rows, width = x.shape[-2:]
    assert rows % 4 == 0, f"{rows} rows make no words of four"
    assert factors_R is None or x.dim() == 2
    out = torch.empty(*x.shape[:-2], width, rows, dtype=x.dtype, device=x.device)
    if out.numel():
        given = x.contiguous().view(torch.uint8)
        scales = (given, given) if factors_R is None else (factors_R, limit)
        grid = (triton.cdiv(rows, tile), triton.cdiv(width, tile), out.numel() // (rows * width))
        sizes = (rows // 4, width, factors_R is not None, tile)
        _transposed[grid](given, *scales, out.view(torch.int32), *sizes, num_warps=warps, enable_fp_fusion=False)
    return out


def swiglu_rows(
    gate_up_RF: Tensor,
    fold: Tensor | None = None,
    owner_R: Tensor | None = None,
    count: Tensor | None = None,
    wide: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up` of the halves [R, F] of a matrix, cast like `cast_rows`; also written to `wide`, without
    `fold`.

    With `weights`, fp32, each row is multiplied by its own.
    """
    gate_up_RF = gate_up_RF.contiguous()
    rows, width = gate_up_RF.shape[0], gate_up_RF.shape[1] // 2
    out, scales = _new(rows, width, gate_up_RF)
    if out.numel():
        tile_rows, block, warps = _sizes(width)
        others = [gate_up_RF if tensor is None else tensor for tensor in (fold, owner_R, count, wide, weights_R)]
        flags = (_folds(fold, owner_R), count is not None, wide is not None, weights_R is not None)
        given = (gate_up_RF, *others, out, scales, rows, width, *flags, tile_rows, block)
        _swiglu_rows[triton.cdiv(rows, tile_rows),](*given, num_warps=warps, enable_fp_fusion=False)
    return out, scales


def swiglu_rows_backward(
    g_RF: Tensor,
    gate_up_RF: Tensor,
    fold: Tensor | None = None,
    count: Tensor | None = None,
    wide: Tensor | None = None,
    weights: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up` [R, 2F] from SwiGLU's, cast like `cast_rows`; also written to `wide`, without `fold`.

    `weights`: the rows' weights, and where to write their gradients; both fp32 [R].
    """
    g_RF, gate_up_RF = g_RF.contiguous(), gate_up_RF.contiguous()
    rows, width = g_RF.shape
    out, scales = _new(rows, 2 * width, g_RF)
    if out.numel():
        tile_rows, block, warps = _sizes(width)
        others = [g_RF if tensor is None else tensor for tensor in (fold, count, wide, *(weights or (None, None)))]
        flags = (_folds(fold, None), count is not None, wide is not None, weights is not None)
        given = (g_RF, gate_up_RF, *others, out, scales, rows, width, *flags, tile_rows, block)
        _swiglu_rows_backward[triton.cdiv(rows, tile_rows),](*given, num_warps=warps, enable_fp_fusion=False)
    return out, scales

"""Moving rows between tokens, ranks and experts: each is read once and written once, whatever is computed on the way.

One program works on a tile of one row's columns, and on the rows of all its choices there.

Shapes: N and R rows, K choices, D columns. `place` is the row of every choice, [N, K], or -1; see `parallel/rows.py`.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4
"""Columns of a tile at most; with 128 threads, each holds 32 bytes of every bf16 row."""
GATHERED = 4
"""Rows of a program that only copies."""
PAIRS, PAIRS_WARPS = 8192, 8
"""Elements of a tile of all choices at most."""


@triton.jit(do_not_specialize=["rows"])
def _group_gather(x, order, y, rows, width, block_r: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(1) * block + tl.arange(0, block)
    for i in tl.static_range(block_r):
        row = tl.program_id(0).to(tl.int64) * block_r + i
        inside = (column < width) & (row < rows)
        source = tl.load(order + row, mask=row < rows, other=0).to(tl.int64)
        tl.store(y + row * width + column, tl.load(x + source * width + column, mask=inside), mask=inside)


@triton.jit
def _spread(x, place, out, x_stride, out_stride, width, top_k: tl.constexpr, block: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    value = tl.load(x + token * x_stride + column, mask=inside)
    for k in tl.static_range(top_k):
        row = tl.load(place + token * top_k + k).to(tl.int64)
        tl.store(out + row * out_stride + column, value, mask=inside & (row >= 0))


@triton.jit
def _weights(here, there, place, choices, back: tl.constexpr, block: tl.constexpr):
    """Numbers of choices to their places, or with `back` from there; 0 for choices that have none."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(place + at, mask=at < choices, other=-1).to(tl.int64)
    if back:
        tl.store(here + at, tl.load(there + row, mask=row >= 0, other=0.0), mask=at < choices)
    else:
        tl.store(there + row, tl.load(here + at, mask=row >= 0), mask=row >= 0)


@triton.jit
def _total(
    rows,
    probs,
    place,
    residual,
    shared,
    out,
    rows_stride,
    out_stride,
    width,
    top_k: tl.constexpr,
    has_probs: tl.constexpr,
    has_residual: tl.constexpr,
    has_shared: tl.constexpr,
    block: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside, here = column < width, token * width + column
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        row = tl.load(place + token * top_k + k).to(tl.int64)
        value = tl.load(rows + row * rows_stride + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if has_probs:
            value *= tl.load(probs + token * top_k + k, mask=row >= 0, other=0.0)
        total += value
    if has_shared:
        total += tl.load(shared + here, mask=inside).to(tl.float32)
    if has_residual:
        total += tl.load(residual + here, mask=inside).to(tl.float32)
    tl.store(out + token * out_stride + column, total, mask=inside)


@triton.jit
def _total_backward(
    g,
    rows,
    probs,
    place,
    g_rows,
    g_probs,
    width,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    tiles: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, choices)
    at = token * top_k + k
    row = tl.load(place + at, mask=k < top_k, other=-1).to(tl.int64)
    prob = tl.load(probs + at, mask=row >= 0, other=0.0)
    total = tl.zeros([choices], tl.float32)
    for tile in range(tiles):
        column = tile * block + tl.arange(0, block)
        inside = column < width
        there, both = row[:, None] * width + column[None, :], (row >= 0)[:, None] & inside[None, :]
        grad = tl.load(g + token * width + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + there, mask=both, other=0.0).to(tl.float32)
        total += tl.sum(value * grad[None, :], axis=1)
        tl.store(g_rows + there, prob[:, None] * grad[None, :], mask=both)
    tl.store(g_probs + at, total, mask=k < top_k)


def _tiles(tokens: int, width: int) -> tuple[tuple[int, int], int]:
    """The grid, and the columns of a tile."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return (tokens, triton.cdiv(width, block)), block


def gather(x_RD: Tensor, order_R: Tensor) -> Tensor:
    """Rows `x[order]`."""
    rows, width = order_R.numel(), x_RD.shape[1]
    y_RD = x_RD.new_empty(rows, width)
    if y_RD.numel():
        (_, columns), block = _tiles(rows, width)
        grid = (triton.cdiv(rows, GATHERED), columns)
        _group_gather[grid](x_RD.contiguous(), order_R, y_RD, rows, width, GATHERED, block, num_warps=WARPS)
    return y_RD


def spread(x_ND: Tensor, place_NK: Tensor, out_RD: Tensor) -> None:
    """Copy every row to all its places in `out`. Both may be columns of something wider."""
    (rows, width), top_k = x_ND.shape, place_NK.shape[1]
    x_ND = _by_rows(x_ND)
    assert out_RD.stride(1) == 1
    if rows and width:
        grid, block = _tiles(rows, width)
        given = (x_ND, place_NK.contiguous(), out_RD, x_ND.stride(0), out_RD.stride(0))
        _spread[grid](*given, width, top_k, block, num_warps=WARPS)


def weights(here_NK: Tensor, there_R: Tensor, place_NK: Tensor, back: bool) -> None:
    """Copy the number of every choice to its place, or `back` from there. Both fp32, `here` contiguous."""
    if choices := here_NK.numel():
        given = (here_NK, there_R, place_NK.contiguous(), choices, back, BLOCK)
        _weights[triton.cdiv(choices, BLOCK),](*given, num_warps=WARPS)


def total(
    rows_RD: Tensor,
    probs_NK: Tensor | None,
    place_NK: Tensor,
    residual_ND: Tensor | None,
    shared_ND: Tensor | None,
    out_ND: Tensor | None = None,
) -> Tensor:
    """The sum of every choice's row [times its fp32 weight], plus `shared`, plus `residual`: [N, D].

    `rows` and `out` may be columns of something wider.
    """
    (tokens, top_k), width = place_NK.shape, rows_RD.shape[1]
    rows_RD = _by_rows(rows_RD)
    if out_ND is None:
        shape = (tokens, width) if residual_ND is None else residual_ND.shape
        out_ND = (rows_RD if residual_ND is None else residual_ND).new_empty(shape)
    if out_ND.numel():
        grid, block = _tiles(tokens, width)
        extra = (rows_RD if t is None else t.contiguous() for t in (residual_ND, shared_ND))
        probs = rows_RD if probs_NK is None else probs_NK.contiguous()
        flags = (probs_NK is not None, residual_ND is not None, shared_ND is not None)
        strides = (rows_RD.stride(0), width if out_ND.is_contiguous() else out_ND.stride(0))
        given = (rows_RD, probs, place_NK.contiguous(), *extra, out_ND, *strides, width, top_k, *flags)
        _total[grid](*given, block, num_warps=WARPS, enable_fp_fusion=False)
    return out_ND


def total_backward(g_ND: Tensor, rows_RD: Tensor, probs_NK: Tensor, place_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `total`'s rows, [R, D], and weights, fp32 [N, K]. Every row of `rows` has a choice."""
    (tokens, top_k), width = probs_NK.shape, rows_RD.shape[1]
    g_rows_RD, g_probs_NK = torch.empty_like(rows_RD, memory_format=torch.contiguous_format), torch.empty_like(probs_NK)
    if not g_rows_RD.numel():
        return g_rows_RD, g_probs_NK.zero_()
    choices = triton.next_power_of_2(top_k)
    block = min(triton.next_power_of_2(width), max(PAIRS // choices, 32))
    given = (t.contiguous() for t in (g_ND, rows_RD, probs_NK, place_NK))
    _total_backward[tokens,](
        *given,
        g_rows_RD,
        g_probs_NK,
        width,
        top_k,
        choices,
        triton.cdiv(width, block),
        block,
        num_warps=PAIRS_WARPS,
        enable_fp_fusion=False,
    )
    return g_rows_RD, g_probs_NK


def _by_rows(x: Tensor) -> Tensor:
    """The tensor itself, if its columns are contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()

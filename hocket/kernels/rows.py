"""Moving rows between tokens and experts: every row is read once and written once, whatever is computed on the way.

One program works on a tile of one token's columns, and on the rows of all its choices there. What a token's rows are
summed to is summed in the order of its choices.

Shapes: T tokens, K choices per token, D columns, R = T * K rows. `inverse` is the row of every choice, [T * K].
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
def _permute(x, inverse, rows, width, top_k: tl.constexpr, block: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    value = tl.load(x + token * width + column, mask=inside)
    for k in tl.static_range(top_k):
        row = tl.load(inverse + token * top_k + k).to(tl.int64)
        tl.store(rows + row * width + column, value, mask=inside)


@triton.jit
def _permute_backward(rows, inverse, x, width, top_k: tl.constexpr, block: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        row = tl.load(inverse + token * top_k + k).to(tl.int64)
        total += tl.load(rows + row * width + column, mask=inside).to(tl.float32)
    tl.store(x + token * width + column, total, mask=inside)


@triton.jit
def _unpermute(
    rows,
    probs,
    inverse,
    residual,
    shared,
    out,
    width,
    top_k: tl.constexpr,
    has_shared: tl.constexpr,
    block: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside, here = column < width, token * width + column
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        row = tl.load(inverse + token * top_k + k).to(tl.int64)
        prob = tl.load(probs + token * top_k + k)
        total += tl.load(rows + row * width + column, mask=inside).to(tl.float32) * prob
    if has_shared:
        total += tl.load(shared + here, mask=inside).to(tl.float32)
    total += tl.load(residual + here, mask=inside).to(tl.float32)
    tl.store(out + here, total, mask=inside)


@triton.jit
def _unpermute_backward(
    g,
    rows,
    probs,
    inverse,
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
    chosen, at = k < top_k, token * top_k + k
    row = tl.load(inverse + at, mask=chosen, other=0).to(tl.int64)
    prob = tl.load(probs + at, mask=chosen, other=0.0)
    total = tl.zeros([choices], tl.float32)
    for tile in range(tiles):
        column = tile * block + tl.arange(0, block)
        inside = column < width
        there, both = row[:, None] * width + column[None, :], chosen[:, None] & inside[None, :]
        grad = tl.load(g + token * width + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + there, mask=both, other=0.0).to(tl.float32)
        total += tl.sum(value * grad[None, :], axis=1)
        tl.store(g_rows + there, prob[:, None] * grad[None, :], mask=both)
    tl.store(g_probs + at, total, mask=chosen)


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


def permute(x_TD: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
    """Every token's columns at the rows of its choices: [R, D]."""
    tokens, width = x_TD.shape
    rows_RD = x_TD.new_empty(tokens * top_k, width)
    if rows_RD.numel():
        grid, block = _tiles(tokens, width)
        _permute[grid](x_TD.contiguous(), inverse_R, rows_RD, width, top_k, block, num_warps=WARPS)
    return rows_RD


def permute_backward(rows_RD: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
    """The sum of every token's rows: [T, D]."""
    tokens, width = rows_RD.shape[0] // top_k, rows_RD.shape[1]
    x_TD = rows_RD.new_empty(tokens, width)
    if x_TD.numel():
        grid, block = _tiles(tokens, width)
        _permute_backward[grid](rows_RD.contiguous(), inverse_R, x_TD, width, top_k, block, num_warps=WARPS)
    return x_TD


def unpermute(
    rows_RD: Tensor, probs_TK: Tensor, inverse_R: Tensor, residual_TD: Tensor, shared_TD: Tensor | None
) -> Tensor:
    """The sum of every token's rows times their fp32 weights, plus `shared`, plus `residual`: [T, D]."""
    (tokens, top_k), width = probs_TK.shape, rows_RD.shape[1]
    out_TD = torch.empty_like(residual_TD, memory_format=torch.contiguous_format)
    if out_TD.numel():
        grid, block = _tiles(tokens, width)
        extra = residual_TD if shared_TD is None else shared_TD
        given = (t.contiguous() for t in (rows_RD, probs_TK, inverse_R, residual_TD, extra))
        _unpermute[grid](
            *given, out_TD, width, top_k, shared_TD is not None, block, num_warps=WARPS, enable_fp_fusion=False
        )
    return out_TD


def unpermute_backward(g_TD: Tensor, rows_RD: Tensor, probs_TK: Tensor, inverse_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `unpermute`'s rows, [R, D], and weights, fp32 [T, K]."""
    (tokens, top_k), width = probs_TK.shape, rows_RD.shape[1]
    g_rows_RD, g_probs_TK = torch.empty_like(rows_RD, memory_format=torch.contiguous_format), torch.empty_like(probs_TK)
    if not g_rows_RD.numel():
        return g_rows_RD, g_probs_TK.zero_()
    choices = triton.next_power_of_2(top_k)
    block = min(triton.next_power_of_2(width), max(PAIRS // choices, 32))
    given = (t.contiguous() for t in (g_TD, rows_RD, probs_TK, inverse_R))
    _unpermute_backward[tokens,](
        *given,
        g_rows_RD,
        g_probs_TK,
        width,
        top_k,
        choices,
        triton.cdiv(width, block),
        block,
        num_warps=PAIRS_WARPS,
        enable_fp_fusion=False,
    )
    return g_rows_RD, g_probs_TK

"""Moving rows between tokens, ranks and experts: each row is read once and written once.

One program handles a tile of one row's columns, for all its choices.

Shapes: N and R rows, K choices, D columns. `place` is the row of every choice, [N, K], or -1; see `layers/rows.py`.
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
PAIRS, PAIRS_WARPS = 8192, 8
"""Most elements of a tile of all choices."""


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
    """Copy numbers of choices to their places, or `back`; 0 for choices without a place."""
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
    block = min(BLOCK, triton.next_power_of_2(width))
    return (tokens, triton.cdiv(width, block)), block


def gather(x_RD: Tensor, order_R: Tensor) -> Tensor:
    rows, width = order_R.numel(), x_RD.shape[1]
    y_RD = x_RD.new_empty(rows, width)
    if y_RD.numel():
        (_, columns), block = _tiles(rows, width)
        grid = (triton.cdiv(rows, GATHERED), columns)
        _group_gather[grid](x_RD.contiguous(), order_R, y_RD, rows, width, GATHERED, block, num_warps=WARPS)
    return y_RD


def spread(x_ND: Tensor, place_NK: Tensor, out_RD: Tensor) -> None:
    """Copy every row to all its places in `out`. Both may be columns of a wider tensor."""
    (rows, width), top_k = x_ND.shape, place_NK.shape[1]
    x_ND = _by_rows(x_ND)
    assert out_RD.stride(1) == 1
    if rows and width:
        grid, block = _tiles(rows, width)
        given = (x_ND, place_NK.contiguous(), out_RD, x_ND.stride(0), out_RD.stride(0))
        _spread[grid](*given, width, top_k, block, num_warps=WARPS)


def weights(here_NK: Tensor, there_R: Tensor, place_NK: Tensor, back: bool) -> None:
    """Copy the number of every choice to its place, or `back`. Both fp32, `here` contiguous."""
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

    `rows` and `out` may be columns of a wider tensor.
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
    return x if x.stride(1) == 1 else x.contiguous()


# ------------------------------------------------------------------------------------------------------------- per rank
#
# Rows of (token, rank) pairs and their labels, written by the sender and read by the receiver (`layers/rows.py`).
#
# Labels are the last int32 columns of a row: K seats, then the bits of K weights.
#
# Shapes: T tokens, K choices, P ranks, N rows.


TOKENS = 128


@triton.jit
def _ends(counts, p, experts: tl.constexpr, local: tl.constexpr, block_e: tl.constexpr):
    """End of each rank's rows with one row per choice."""
    e = tl.arange(0, block_e)
    count = tl.load(counts + e, mask=e < experts, other=0).to(tl.int32)
    return tl.sum(tl.where((e // local)[None, :] <= p[:, None], count[None, :], 0), axis=1)


@triton.jit
def _ranks_of(inverse, ends, token, tokens, p, top_k: tl.constexpr, block: tl.constexpr, block_p: tl.constexpr):
    """A mask of the ranks of each token's choices."""
    here = tl.zeros([block, block_p], tl.int32)
    for k in tl.static_range(top_k):
        row = tl.load(inverse + token * top_k + k, mask=token < tokens, other=0)
        rank = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)
        here = tl.where((p[None, :] == rank[:, None]) & (token < tokens)[:, None], 1, here)
    return here


@triton.jit(do_not_specialize=["tokens"])
def _pair_counts(
    inverse,
    counts,
    block_counts,
    tokens,
    experts: tl.constexpr,
    local: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
    block_p: tl.constexpr,
):
    """How many tokens of each block have a choice on each rank."""
    token, p = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_p)
    ends = _ends(counts, p, experts, local, block_e)
    here = _ranks_of(inverse, ends, token, tokens, p, top_k, block, block_p)
    tl.store(block_counts + tl.program_id(0) * block_p + p, tl.sum(here, axis=0))


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _pair_rows(
    inverse,
    counts,
    block_counts,
    rows,
    firsts,
    seats,
    sent,
    tokens,
    blocks,
    experts: tl.constexpr,
    local: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
    block_p: tl.constexpr,
):
    """Rows of choices, rows of first choices, seats; and `sent` [P, L + 1], the counts for every rank."""
    token, p = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_p)
    inside = token < tokens
    total, before = tl.zeros([block_p], tl.int32), tl.zeros([block_p], tl.int32)
    first = 0
    while first < blocks:
        other = first + tl.arange(0, block)
        count = tl.load(block_counts + other[:, None] * block_p + p[None, :], mask=(other < blocks)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < tl.program_id(0))[:, None], count, 0), axis=0)
        first += block
    ends = _ends(counts, p, experts, local, block_e)
    here = _ranks_of(inverse, ends, token, tokens, p, top_k, block, block_p)
    row_of = (tl.cumsum(total, axis=0) - total + before)[None, :] + tl.cumsum(here, axis=0) - here
    seen = tl.zeros([block, block_p], tl.int32)
    for k in tl.static_range(top_k):
        at = token * top_k + k
        own = tl.load(inverse + at, mask=inside, other=0)
        past = own[:, None] >= ends[None, :]
        mine = p[None, :] == tl.sum(past.to(tl.int32), axis=1)[:, None]
        row = tl.sum(tl.where(mine, row_of, 0), axis=1)
        earlier = tl.sum(tl.where(mine, seen, 0), axis=1)
        start = tl.max(tl.where(past, ends[None, :], 0), axis=1)
        tl.store(rows + at, row, mask=inside)
        tl.store(firsts + at, tl.where(earlier > 0, -1, row), mask=inside)
        tl.store(seats + at, own - start, mask=inside)
        seen = tl.where(mine, 1, seen)
    if tl.program_id(0) == 0:
        e = tl.arange(0, block_e)
        into = e // local * (local + 1) + e % local
        tl.store(sent + into, tl.load(counts + e, mask=e < experts, other=0), mask=e < experts)
        tl.store(sent + p * (local + 1) + local, total.to(tl.int64), mask=p < experts // local)


@triton.jit(do_not_specialize=["tokens"])
def _write_labels(
    labels, probs, rows, seats, tokens, stride, top_k: tl.constexpr, choices: tl.constexpr, block: tl.constexpr
):
    """Every choice of a token writes its row's whole label; all write the same."""
    token, k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, choices)
    inside = (token < tokens)[:, None] & (k < top_k)[None, :]
    at = token[:, None] * top_k + k[None, :]
    row = tl.load(rows + at, mask=inside, other=-1)
    seat = tl.load(seats + at, mask=inside, other=-1)
    bits = tl.load(probs + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    for choice in tl.static_range(top_k):
        mine = tl.load(rows + token * top_k + choice, mask=token < tokens, other=0)
        into = labels + mine.to(tl.int64)[:, None] * stride + k[None, :]
        here = row == mine[:, None]
        tl.store(into, tl.where(here, seat, -1), mask=inside)
        tl.store(into + top_k, tl.where(here, bits, 0), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _label_grads(
    labels, rows, g_probs, tokens, stride, top_k: tl.constexpr, choices: tl.constexpr, block: tl.constexpr
):
    """The gradient of every choice's weight, from its row's label."""
    token, k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, choices)
    inside = (token < tokens)[:, None] & (k < top_k)[None, :]
    at = token[:, None] * top_k + k[None, :]
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    bits = tl.load(labels + row * stride + top_k + k[None, :], mask=inside, other=0)
    tl.store(g_probs + at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _read_labels(
    labels,
    counts,
    grouped,
    places,
    probs,
    rows,
    stride,
    counts_stride,
    ranks: tl.constexpr,
    local: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    block: tl.constexpr,
    block_p: tl.constexpr,
    block_l: tl.constexpr,
):
    """Turn seats into places: seats count from the first row of the source rank."""
    row, k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, choices)
    p, e = tl.arange(0, block_p), tl.arange(0, block_l)
    inside = (row < rows)[:, None] & (k < top_k)[None, :]
    count = tl.load(counts + p * counts_stride + local, mask=p < ranks, other=0).to(tl.int32)
    end = tl.cumsum(count, axis=0)
    chosen = (p < ranks)[:, None] & (e < local)[None, :]
    seats = tl.sum(tl.load(counts + p[:, None] * counts_stride + e[None, :], mask=chosen, other=0).to(tl.int32), axis=1)
    first = tl.cumsum(seats, axis=0) - seats
    mine = (row[:, None] < end[None, :]) & (row[:, None] >= (end - count)[None, :])
    start = tl.sum(tl.where(mine, first[None, :], 0), axis=1)
    label = labels + row.to(tl.int64)[:, None] * stride + k[None, :]
    seat = tl.load(label, mask=inside, other=-1)
    prob = tl.load(label + top_k, mask=inside, other=0).to(tl.float32, bitcast=True)
    place = tl.load(grouped + start[:, None] + seat, mask=inside & (seat >= 0), other=-1)
    at = row[:, None] * top_k + k[None, :]
    tl.store(places + at, place, mask=inside)
    tl.store(probs + at, prob, mask=inside)


def number(inverse_TK: Tensor, counts_E: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row, first, seat, all int32 [T, K]; counts to send, int64 [P, L + 1]) of `layers.rows.Pairs`."""
    (tokens, top_k), experts = inverse_TK.shape, len(counts_E)
    blocks, block_p = triton.cdiv(tokens, TOKENS), triton.next_power_of_2(ranks)
    sizes = (experts, experts // ranks, top_k, TOKENS, triton.next_power_of_2(experts), block_p)
    block_counts = torch.empty(blocks, block_p, dtype=torch.int32, device=counts_E.device)
    inverse_TK = inverse_TK.contiguous()
    _pair_counts[blocks,](inverse_TK, counts_E, block_counts, tokens, *sizes)
    row_TK, first_TK, seat_TK = (torch.empty_like(inverse_TK) for _ in range(3))
    sent_PM = counts_E.new_empty(ranks, experts // ranks + 1)
    found = (row_TK, first_TK, seat_TK, sent_PM)
    _pair_rows[blocks,](inverse_TK, counts_E, block_counts, *found, tokens, blocks, *sizes)
    return found


def write_labels(rows_NC: Tensor, columns: int, probs_TK: Tensor, row_TK: Tensor, seat_TK: Tensor) -> None:
    """Write the labels, the last `columns` of rows seen as int32, of all rows that carry choices."""
    tokens, top_k = probs_TK.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    given = (labels, probs_TK.contiguous(), row_TK, seat_TK, tokens, labels.stride(0))
    _write_labels[triton.cdiv(tokens, TOKENS),](*given, top_k, triton.next_power_of_2(top_k), TOKENS)


def label_grads(rows_NC: Tensor, columns: int, row_TK: Tensor) -> Tensor:
    """The weights' gradients in returned labels, fp32 [T, K]."""
    tokens, top_k = row_TK.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    g_probs_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=row_TK.device)
    given = (labels, row_TK, g_probs_TK, tokens, labels.stride(0), top_k, triton.next_power_of_2(top_k), TOKENS)
    _label_grads[triton.cdiv(tokens, TOKENS),](*given)
    return g_probs_TK


def read_labels(
    rows_NC: Tensor, columns: int, top_k: int, counts_PM: Tensor, grouped_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Places, int32, and weights, fp32, of every row's choices, both [N, K].

    `counts` has, by source rank, choices per local expert and the number of rows.
    """
    rows, (ranks, width) = len(rows_NC), counts_PM.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    place_NK = torch.empty(rows, top_k, dtype=torch.int32, device=rows_NC.device)
    probs_NK = torch.empty(rows, top_k, dtype=torch.float32, device=rows_NC.device)
    given = (labels, counts_PM, grouped_R, place_NK, probs_NK, rows, labels.stride(0), counts_PM.stride(0))
    powers = (triton.next_power_of_2(n) for n in (ranks, width))
    blocks = (triton.next_power_of_2(top_k), TOKENS, *powers)
    _read_labels[triton.cdiv(rows, TOKENS),](*given, ranks, width - 1, top_k, *blocks)
    return place_NK, probs_NK

"""Numbers of (token, rank) pairs, and labels of their rows: written by whoever sends rows, read by whoever gets them.

`parallel/per_rank.py` has the formulas. Labels are the last int32 columns of a row: K seats, then the bits of K
weights.

Shapes: T tokens, K choices, P ranks, N rows.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Tokens or rows of a program."""


@triton.jit
def _ends(counts, p, experts: tl.constexpr, local: tl.constexpr, block_e: tl.constexpr):
    """Where the rows of each rank's experts end, if every choice has a row of its own."""
    e = tl.arange(0, block_e)
    count = tl.load(counts + e, mask=e < experts, other=0).to(tl.int32)
    return tl.sum(tl.where((e // local)[None, :] <= p[:, None], count[None, :], 0), axis=1)


@triton.jit
def _ranks_of(inverse, ends, token, tokens, p, top_k: tl.constexpr, block: tl.constexpr, block_p: tl.constexpr):
    """Which ranks have some of each token's choices."""
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
    """Rows of choices, rows of first choices, seats; and `sent` [P, L + 1], what every rank must be told."""
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
        behind = own[:, None] >= ends[None, :]
        mine = p[None, :] == tl.sum(behind.to(tl.int32), axis=1)[:, None]
        row = tl.sum(tl.where(mine, row_of, 0), axis=1)
        earlier = tl.sum(tl.where(mine, seen, 0), axis=1)
        start = tl.max(tl.where(behind, ends[None, :], 0), axis=1)
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
    """A token's choices write the label of their row whole: once each, but all write the same."""
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
    """The gradient of every choice's weight, from the label of its row."""
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
    """Seats become places: those of a row count from the first one of the rank that it came from."""
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
    """(row, first, seat, all int32 [T, K]; what to send, int64 [P, L + 1]) of `parallel.per_rank.Pairs`."""
    (tokens, top_k), experts = inverse_TK.shape, len(counts_E)
    blocks, block_p = triton.cdiv(tokens, BLOCK), triton.next_power_of_2(ranks)
    sizes = (experts, experts // ranks, top_k, BLOCK, triton.next_power_of_2(experts), block_p)
    block_counts = torch.empty(blocks, block_p, dtype=torch.int32, device=counts_E.device)
    inverse_TK = inverse_TK.contiguous()
    _pair_counts[blocks,](inverse_TK, counts_E, block_counts, tokens, *sizes)
    row_TK, first_TK, seat_TK = (torch.empty_like(inverse_TK) for _ in range(3))
    sent_PM = counts_E.new_empty(ranks, experts // ranks + 1)
    found = (row_TK, first_TK, seat_TK, sent_PM)
    _pair_rows[blocks,](inverse_TK, counts_E, block_counts, *found, tokens, blocks, *sizes)
    return found


def write_labels(rows_NC: Tensor, columns: int, probs_TK: Tensor, row_TK: Tensor, seat_TK: Tensor) -> None:
    """Write the labels, the last `columns` of rows seen as int32, of all rows that stand for choices."""
    tokens, top_k = probs_TK.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    given = (labels, probs_TK.contiguous(), row_TK, seat_TK, tokens, labels.stride(0))
    _write_labels[triton.cdiv(tokens, BLOCK),](*given, top_k, triton.next_power_of_2(top_k), BLOCK)


def label_grads(rows_NC: Tensor, columns: int, row_TK: Tensor) -> Tensor:
    """The gradients of weights, fp32 [T, K], that labels brought back."""
    tokens, top_k = row_TK.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    g_probs_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=row_TK.device)
    given = (labels, row_TK, g_probs_TK, tokens, labels.stride(0), top_k, triton.next_power_of_2(top_k), BLOCK)
    _label_grads[triton.cdiv(tokens, BLOCK),](*given)
    return g_probs_TK


def read_labels(
    rows_NC: Tensor, columns: int, top_k: int, counts_PM: Tensor, grouped_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Places, int32, and weights, fp32, of every row's choices, both [N, K].

    The last `columns` of rows seen as int32 are their labels; `counts` has, by the rank that they came from, choices by
    local expert and rows.
    """
    rows, (ranks, width) = len(rows_NC), counts_PM.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    place_NK = torch.empty(rows, top_k, dtype=torch.int32, device=rows_NC.device)
    probs_NK = torch.empty(rows, top_k, dtype=torch.float32, device=rows_NC.device)
    given = (labels, counts_PM, grouped_R, place_NK, probs_NK, rows, labels.stride(0), counts_PM.stride(0))
    powers = (triton.next_power_of_2(n) for n in (ranks, width))
    blocks = (triton.next_power_of_2(top_k), BLOCK, *powers)
    _read_labels[triton.cdiv(rows, BLOCK),](*given, ranks, width - 1, top_k, *blocks)
    return place_NK, probs_NK

"""Numbers of (token, rank) pairs, and labels of their rows: written by whoever sends rows, read by whoever gets them.

`parallel/pairs.py` has the formulas. Labels are the last int32 columns of a row: K seats, then the bits of K weights.

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
def _rank_of(row, end, block_p: tl.constexpr):
    """How many segments end at or before each of the rows, and which column that is."""
    rank = tl.sum((row[:, None] >= end[None, :]).to(tl.int32), axis=1)
    return rank, tl.arange(0, block_p)[None, :] == rank[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _pair_flags(
    inverse, end, flags, tokens, ranks: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr, block_p: tl.constexpr
):
    """`flags` [P, T]: whether a token has a choice on a rank."""
    token, p = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_p)
    inside = token < tokens
    ends = tl.load(end + p, mask=p < ranks, other=2**62)
    here = tl.zeros([block, block_p], tl.int32)
    for k in tl.static_range(top_k):
        _, mine = _rank_of(tl.load(inverse + token * top_k + k, mask=inside, other=0), ends, block_p)
        here = tl.where(mine, 1, here)
    tl.store(flags + p[None, :] * tokens + token[:, None], here, mask=inside[:, None] & (p < ranks)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _pair_rows(
    inverse,
    end,
    upto,
    rows,
    firsts,
    seats,
    counts,
    tokens,
    ranks: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    block_p: tl.constexpr,
):
    """From `upto` [P, T], the flags added up: rows of choices, rows of first choices, seats, and rows by rank."""
    token, p = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_p)
    inside = token < tokens
    ends = tl.load(end + p, mask=p < ranks, other=2**62)
    starts = tl.load(end + p - 1, mask=(p > 0) & (p < ranks), other=0)
    seen = tl.zeros([block, block_p], tl.int32)
    for k in tl.static_range(top_k):
        at = token * top_k + k
        own = tl.load(inverse + at, mask=inside, other=0)
        rank, mine = _rank_of(own, ends, block_p)
        row = tl.load(upto + rank * tokens + token, mask=inside, other=1) - 1
        earlier = tl.sum(tl.where(mine, seen, 0), axis=1)
        start = tl.sum(tl.where(mine, starts[None, :], 0), axis=1)
        tl.store(rows + at, row, mask=inside)
        tl.store(firsts + at, tl.where(earlier > 0, -1, row), mask=inside)
        tl.store(seats + at, own - start, mask=inside)
        seen = tl.where(mine, 1, seen)
    if tl.program_id(0) == 0:
        last = tl.load(upto + p * tokens + tokens - 1, mask=p < ranks, other=0)
        before = tl.load(upto + p * tokens - 1, mask=(p > 0) & (p < ranks), other=0)
        tl.store(counts + p, (last - before).to(tl.int64), mask=p < ranks)


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


@triton.jit(do_not_specialize=["rows"])
def _read_labels(
    labels,
    received,
    chosen,
    grouped,
    places,
    probs,
    rows,
    stride,
    ranks: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    block: tl.constexpr,
    block_p: tl.constexpr,
):
    """Seats become places: those of a row count from the first one of the rank that it came from."""
    row, k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, choices)
    p = tl.arange(0, block_p)
    inside = (row < rows)[:, None] & (k < top_k)[None, :]
    count = tl.load(received + p, mask=p < ranks, other=0)
    end = tl.cumsum(count, axis=0)
    seats = tl.load(chosen + p, mask=p < ranks, other=0)
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


def number(inverse_TK: Tensor, end_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row, first, seat, all int32 [T, K]; rows by rank, int64 [P]) of `parallel.pairs.Pairs`."""
    (tokens, top_k), ranks = inverse_TK.shape, len(end_P)
    flags_PT = torch.empty(ranks, tokens, dtype=torch.int32, device=end_P.device)
    sizes = (tokens, ranks, top_k, BLOCK, triton.next_power_of_2(ranks))
    grid = (triton.cdiv(tokens, BLOCK),)
    inverse_TK = inverse_TK.contiguous()
    _pair_flags[grid](inverse_TK, end_P, flags_PT, *sizes)
    upto_PT = flags_PT.view(-1).cumsum(0, dtype=torch.int32)
    row_TK, first_TK, seat_TK = (torch.empty_like(inverse_TK) for _ in range(3))
    counts_P = torch.empty_like(end_P)
    _pair_rows[grid](inverse_TK, end_P, upto_PT, row_TK, first_TK, seat_TK, counts_P, *sizes)
    return row_TK, first_TK, seat_TK, counts_P


def write_labels(rows_NC: Tensor, columns: int, probs_TK: Tensor, row_TK: Tensor, seat_TK: Tensor) -> None:
    """Write the labels, the last `columns` of rows seen as int32, of all rows that stand for choices."""
    tokens, top_k = probs_TK.shape
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    given = (labels, probs_TK.contiguous(), row_TK, seat_TK, tokens, labels.stride(0))
    _write_labels[triton.cdiv(tokens, BLOCK),](*given, top_k, triton.next_power_of_2(top_k), BLOCK)


def read_labels(
    rows_NC: Tensor, columns: int, top_k: int, by_source_2P: tuple[Tensor, Tensor], grouped_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Places, int32, and weights, fp32, of every row's choices, both [N, K].

    The last `columns` of rows seen as int32 are their labels; `by_source` are the rows and the choices that came from
    each rank, int64 [P].
    """
    rows, ranks = len(rows_NC), len(by_source_2P[0])
    labels = rows_NC[:, rows_NC.shape[1] - columns :]
    place_NK = torch.empty(rows, top_k, dtype=torch.int32, device=rows_NC.device)
    probs_NK = torch.empty(rows, top_k, dtype=torch.float32, device=rows_NC.device)
    given = (labels, *by_source_2P, grouped_R, place_NK, probs_NK, rows, labels.stride(0), ranks, top_k)
    blocks = (triton.next_power_of_2(top_k), BLOCK, triton.next_power_of_2(ranks))
    _read_labels[triton.cdiv(rows, BLOCK),](*given, *blocks)
    return place_NK, probs_NK

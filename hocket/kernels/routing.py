"""Expert choice: from router logits to weights and the row of every choice, in three kernels.

The first computes scores, the best experts, their weights, and each expert's count, per block of tokens. The second is
a scan of the counts over blocks. The third assigns rows, in token order: a stable sort by expert for a tenth of its
launches. Backward is one kernel over the same blocks.

Shapes: T tokens, E experts, K choices per token, N blocks of tokens.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.config import ModelConfig

TILE = 2048
"""Elements of a block's scores; with 128 threads, each holds 16."""
LOWEST = tl.constexpr(-3.0e38)
"""Stands for NaN scores, so that padding after the last expert is never chosen."""


@triton.jit
def _scores(logits, token, column, tokens, experts: tl.constexpr, sigmoid: tl.constexpr):
    """Scores of a block, 0 outside, and a mask of those that exist."""
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    logit = tl.load(logits + token[:, None] * experts + column[None, :], mask=inside, other=float("-inf"))
    if sigmoid:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    return tl.where(inside, score, 0.0), inside


@triton.jit
def _within_groups(
    rank, column, experts: tl.constexpr, groups: tl.constexpr, top_groups: tl.constexpr, two: tl.constexpr,
    block: tl.constexpr, block_g: tl.constexpr,
):  # fmt: skip
    """`rank`, with -inf outside of a token's best groups: those of the best expert, or of the best two."""
    size: tl.constexpr = experts // groups
    g = tl.arange(0, block_g)[None, :]
    rating = tl.full([block, block_g], float("-inf"), tl.float32)
    for group in tl.static_range(groups):
        here = tl.where((column // size == group)[None, :], rank, float("-inf"))
        best = tl.max(here, axis=1)
        if two:
            others = tl.where(column[None, :] == tl.argmax(here, axis=1)[:, None], float("-inf"), here)
            best += tl.max(others, axis=1)
        rating = tl.where(g == group, tl.where(best > LOWEST, best, LOWEST)[:, None], rating)
    kept = tl.zeros(rank.shape, tl.int32)
    for _ in tl.static_range(top_groups):
        group = tl.argmax(rating, axis=1)[:, None]
        kept += (column[None, :] // size == group).to(tl.int32)
        rating = tl.where(g == group, float("-inf"), rating)
    return tl.where(kept > 0, rank, float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _route_topk(
    logits,
    bias,
    probs,
    chosen,
    block_counts,
    block_scores,
    tokens,
    scale,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    sigmoid: tl.constexpr,
    biased: tl.constexpr,
    given: tl.constexpr,
    groups: tl.constexpr, top_groups: tl.constexpr, two: tl.constexpr, block_g: tl.constexpr,
    normalize: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
):  # fmt: skip
    """With `given`, the choices are known: only their weights are written."""
    token, column = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_e)
    score, inside = _scores(logits, token, column, tokens, experts, sigmoid)
    rank = score
    if biased:
        rank += tl.load(bias + column, mask=column < experts, other=0.0)[None, :]
    rank = tl.where(rank > LOWEST, rank, LOWEST)
    rank = tl.where((column < experts)[None, :], rank, float("-inf"))
    if groups > top_groups and not given:
        rank = _within_groups(rank, column, experts, groups, top_groups, two, block, block_g)

    k = tl.arange(0, choices)
    mine = tl.zeros([block, block_e], tl.int32)
    weight = tl.zeros([block, choices], tl.float32)
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(top_k):
        if given:
            best = tl.load(chosen + token * top_k + choice, mask=token < tokens, other=0)
        else:
            best = tl.argmax(rank, axis=1)
        is_best = column[None, :] == best[:, None]
        value = tl.sum(tl.where(is_best, score, 0.0), axis=1)
        mine += (is_best & inside).to(tl.int32)
        rank = tl.where(is_best, float("-inf"), rank)
        weight = tl.where((k == choice)[None, :], value[:, None], weight)
        total += value
        if not given:
            tl.store(chosen + token * top_k + choice, best, mask=token < tokens)
    if normalize:
        weight = weight / (total + 1e-20)[:, None]
    at = token[:, None] * top_k + k[None, :]
    tl.store(probs + at, weight * scale, mask=(token < tokens)[:, None] & (k < top_k)[None, :])

    if not given:
        mean = score
        if sigmoid:
            mean = score / tl.where(token < tokens, tl.sum(score, axis=1), 1.0)[:, None]
        into = tl.program_id(0) * experts + column
        tl.store(block_counts + into, tl.sum(mine, axis=0), mask=column < experts)
        tl.store(block_scores + into, tl.sum(mean, axis=0), mask=column < experts)


@triton.jit(do_not_specialize=["blocks"])
def _route_scan(
    block_counts,
    block_scores,
    counts,
    scores,
    blocks,
    experts: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
):
    """Replace each block's counts by those of all blocks before; `counts` and `scores` get the totals."""
    column = tl.program_id(0) * block_e + tl.arange(0, block_e)
    count, score = tl.zeros([block_e], tl.int32), tl.zeros([block_e], tl.float32)
    first = 0
    while first < blocks:
        row = first + tl.arange(0, block)
        at, inside = row[:, None] * experts + column[None, :], (row < blocks)[:, None] & (column < experts)[None, :]
        here = tl.load(block_counts + at, mask=inside, other=0)
        tl.store(block_counts + at, count[None, :] + tl.cumsum(here, axis=0) - here, mask=inside)
        count += tl.sum(here, axis=0)
        score += tl.sum(tl.load(block_scores + at, mask=inside, other=0.0), axis=0)
        first += block
    tl.store(counts + column, count.to(tl.int64), mask=column < experts)
    tl.store(scores + column, score, mask=column < experts)


@triton.jit(do_not_specialize=["tokens"])
def _route_index(
    chosen,
    before,
    counts,
    inverse,
    tokens,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
):
    token, column = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_e)
    count = tl.load(counts + column, mask=column < experts, other=0).to(tl.int32)
    first = tl.cumsum(count, axis=0) - count
    first += tl.load(before + tl.program_id(0) * experts + column, mask=column < experts, other=0)
    mine = tl.zeros([block, block_e], tl.int32)
    for choice in tl.static_range(top_k):
        expert = tl.load(chosen + token * top_k + choice, mask=token < tokens, other=-1)
        mine += (column[None, :] == expert[:, None]).to(tl.int32)
    row = first[None, :] + tl.cumsum(mine, axis=0) - mine
    for choice in tl.static_range(top_k):
        expert = tl.load(chosen + token * top_k + choice, mask=token < tokens, other=-1)
        here = tl.sum(tl.where(column[None, :] == expert[:, None], row, 0), axis=1)
        tl.store(inverse + token * top_k + choice, here, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "everywhere"])
def _route_backward(
    logits,
    chosen,
    counts,
    g_probs,
    g_logits,
    tokens,
    everywhere,
    scale,
    aux,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    sigmoid: tl.constexpr,
    normalize: tl.constexpr,
    block: tl.constexpr,
    block_e: tl.constexpr,
):
    """`counts` are summed over all tensor-parallel ranks, of which there are `everywhere`."""
    token, column = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, block_e)
    score, inside = _scores(logits, token, column, tokens, experts, sigmoid)
    g = tl.zeros([block, block_e], tl.float32)
    mine = tl.zeros([block, block_e], tl.int32)
    for choice in tl.static_range(top_k):
        expert = tl.load(chosen + token * top_k + choice, mask=token < tokens, other=-1)
        given = tl.load(g_probs + token * top_k + choice, mask=token < tokens, other=0.0) * scale
        is_chosen = column[None, :] == expert[:, None]
        g = tl.where(is_chosen, given[:, None], g)
        mine += is_chosen.to(tl.int32)
    if normalize:
        total = tl.sum(tl.where(mine > 0, score, 0.0), axis=1) + 1e-20
        along = tl.sum(g * score, axis=1) / total
        g = tl.where(mine > 0, (g - along[:, None]) / total[:, None], 0.0)
    # The balance loss: every score's gradient contains its expert's share of the rows.
    share = tl.load(counts + column, mask=column < experts, other=0).to(tl.float32) / (everywhere * top_k)
    push = (aux * experts / everywhere) * share
    if sigmoid:
        whole = tl.where(token < tokens, tl.sum(score, axis=1), 1.0)
        g += (push[None, :] - (tl.sum(push[None, :] * score, axis=1) / whole)[:, None]) / whole[:, None]
        g = g * score * (1.0 - score)
    else:
        g += push[None, :]
        g = score * (g - tl.sum(g * score, axis=1)[:, None])
    tl.store(g_logits + token[:, None] * experts + column[None, :], g, mask=inside)


@triton.jit
def _regroup_index(
    counts,
    ends,
    order,
    inverse,
    stride,
    ranks: tl.constexpr,
    local: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """One program per block: rows of one expert from one rank."""
    rank, expert = tl.program_id(0) // local, tl.program_id(0) % local
    i = tl.arange(0, size)
    at = i // local * stride + i % local
    count = tl.load(counts + at, mask=i < ranks * local, other=0).to(tl.int32)
    mine = tl.sum(tl.where(i == tl.program_id(0), count, 0))
    received = tl.sum(tl.where(i < tl.program_id(0), count, 0))
    earlier = (i % local < expert) | ((i % local == expert) & (i // local < rank))
    grouped = tl.sum(tl.where(earlier, count, 0))
    if rank == ranks - 1:
        tl.store(ends + expert, grouped + mine)
    if ranks > 1:
        first = 0
        while first < mine:
            row = first + tl.arange(0, block)
            tl.store(order + grouped + row, received + row, mask=row < mine)
            tl.store(inverse + received + row, grouped + row, mask=row < mine)
            first += block


class Total(Protocol):
    """A pending sum of rows per expert over tensor-parallel ranks, int64 [E]."""

    def get(self) -> Tensor: ...


OneTotal = TypeVar("OneTotal", bound=Total)


def choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: ModelConfig,
    aux: float,
    begin: Callable[[Tensor], OneTotal],
    ranks: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, OneTotal]:
    """(weights fp32 [T, K], row of every choice int32 [T * K], rows per expert int64 [E], experts, scores, total).

    Experts are int32 [T, K], scores are sums over tokens, fp32 [E]; see `layers.routing.route`. Backward of the
    weights adds the gradient of `aux` times the balance loss. `begin` starts summing the rows over `ranks`
    tensor-parallel ranks and returns the total.
    """
    return _Choose.apply(logits_TE, bias_E, config, aux, begin, ranks)


def weigh(
    logits_TE: Tensor, chosen_TK: Tensor, total: Total, config: ModelConfig, aux: float, ranks: int = 1
) -> Tensor:
    """The weights of known choices: the bits of `choose`, and its backward."""
    return _Weigh.apply(logits_TE, chosen_TK, total, config, aux, ranks)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        config: ModelConfig,
        aux: float,
        begin: Callable[[Tensor], Total],
        ranks: int,
    ) -> Any:
        logits_TE = logits_TE.contiguous()
        (tokens, experts), top_k = logits_TE.shape, config.top_k
        block, sizes, flags = _shape(config)
        blocks = triton.cdiv(tokens, block)
        ints = {"device": logits_TE.device, "dtype": torch.int32}
        probs_TK, chosen_TK = logits_TE.new_empty(tokens, top_k), torch.empty(tokens, top_k, **ints)
        counts_NE, scores_NE = torch.empty(blocks, experts, **ints), logits_TE.new_empty(blocks, experts)
        counts_E = torch.empty(experts, device=logits_TE.device, dtype=torch.int64)
        scores_E, inverse_R = logits_TE.new_empty(experts), torch.empty(tokens * top_k, **ints)

        bias = logits_TE if bias_E is None else bias_E
        given = (logits_TE, bias, probs_TK, chosen_TK, counts_NE, scores_NE, tokens, config.route_scale)
        choices = triton.next_power_of_2(top_k)
        flags |= {"biased": bias_E is not None, "given": False}
        _route_topk[blocks,](*given, **sizes, **flags, **_groups(config), choices=choices)
        summed = (counts_NE, scores_NE, counts_E, scores_E, blocks, experts)
        _route_scan[triton.cdiv(experts, 16),](*summed, block=128, block_e=16)
        total = begin(counts_E)  # overlaps with the next kernel
        _route_index[blocks,](chosen_TK, counts_NE, counts_E, inverse_R, tokens, **sizes)

        _keep(ctx, logits_TE, chosen_TK, total, config, aux, ranks)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse_R, counts_E, chosen_TK, scores_E)
        return probs_TK, inverse_R, counts_E, chosen_TK, scores_E, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TK: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _logits_gradient(ctx, g_TK), None, None, None, None, None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, chosen_TK: Tensor, total: Total, config: ModelConfig, aux: float, ranks: int
    ) -> Tensor:
        logits_TE = logits_TE.contiguous()
        tokens, top_k = chosen_TK.shape
        block, sizes, flags = _shape(config)
        probs_TK = logits_TE.new_empty(tokens, top_k)
        given = (logits_TE, logits_TE, probs_TK, chosen_TK, chosen_TK, probs_TK, tokens, config.route_scale)
        flags |= {"biased": False, "given": True}
        sizes |= {**_groups(config), "choices": triton.next_power_of_2(top_k)}
        _route_topk[triton.cdiv(tokens, block),](*given, **sizes, **flags)
        _keep(ctx, logits_TE, chosen_TK, total, config, aux, ranks)
        return probs_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TK: Tensor) -> tuple[Tensor | None, ...]:
        return _logits_gradient(ctx, g_TK), None, None, None, None, None


def _keep(
    ctx: Any, logits_TE: Tensor, chosen_TK: Tensor, total: Total, config: ModelConfig, aux: float, ranks: int
) -> None:
    ctx.save_for_backward(logits_TE, chosen_TK)
    ctx.total, ctx.config, ctx.aux, ctx.ranks = total, config, aux, ranks


def _logits_gradient(ctx: Any, g_TK: Tensor) -> Tensor:
    logits_TE, chosen_TK = ctx.saved_tensors
    block, sizes, flags = _shape(ctx.config)
    g_TE, tokens = torch.empty_like(logits_TE), logits_TE.shape[0]
    given = (logits_TE, chosen_TK, ctx.total.get(), g_TK.contiguous(), g_TE, tokens, tokens * ctx.ranks)
    _route_backward[triton.cdiv(tokens, block),](*given, ctx.config.route_scale, ctx.aux, **sizes, **flags)
    return g_TE


def _shape(config: ModelConfig) -> tuple[int, dict[str, int], dict[str, bool]]:
    """Tokens of a block, and the compile-time sizes and flags."""
    block_e = triton.next_power_of_2(config.experts)
    block = min(max(TILE // block_e, 1), 64)
    sizes = {"experts": config.experts, "top_k": config.top_k, "block": block, "block_e": block_e}
    return block, sizes, {"sigmoid": config.router == "sigmoid", "normalize": config.normalize_top_k}


def _groups(config: ModelConfig) -> dict[str, int]:
    groups, two = config.route_groups, config.route_group_score == "best_two"
    block_g = triton.next_power_of_2(groups)
    return {"groups": groups, "top_groups": config.route_top_groups, "two": two, "block_g": block_g}


def regroup(counts_PL: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(end of every local expert's rows in grouped order, received position of every grouped row, and the inverse).

    All int32. With one rank the two orders are equal and not computed.
    """
    ranks, local = counts_PL.shape
    ints = {"device": counts_PL.device, "dtype": torch.int32}
    ends_L, order_R, inverse_R = torch.empty(local, **ints), torch.empty(rows, **ints), torch.empty(rows, **ints)
    sizes = (ranks, local, triton.next_power_of_2(ranks * local), 1024)
    assert counts_PL.stride(1) == 1
    _regroup_index[ranks * local,](counts_PL, ends_L, order_R, inverse_R, counts_PL.stride(0), *sizes)
    return ends_L, order_R, inverse_R

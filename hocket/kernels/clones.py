"""Rows that clones of experts get, on the device: `program.cloning.divide`, whose rows these are, one for one.

One program does it, in registers: there are as many numbers as ranks and clones.

Shapes: E experts, P ranks, N clones.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.program.cloning import ROUNDS


def divide_rows(counts_E: Tensor, expert_N: Tensor, rank_N: Tensor, ranks: int, most: int) -> Tensor:
    """Rows that each clone gets, int64 [N], of int64 rows by expert.

    There are `most` clones at most: no other number of them needs another kernel.
    """
    experts, clones = len(counts_E), len(expert_N)
    given_N = torch.empty_like(expert_N)
    local = experts // ranks
    blocks = (triton.next_power_of_2(ranks), triton.next_power_of_2(local), triton.next_power_of_2(most))
    _divide_among_clones[(1,)](counts_E, expert_N, rank_N, given_N, clones, ranks, local, ROUNDS, *blocks, num_warps=1)
    return given_N


@triton.jit(do_not_specialize=["clones"])
def _divide_among_clones(
    counts,
    experts,
    ranks_of,
    given_out,
    clones,
    ranks: tl.constexpr,
    local: tl.constexpr,
    rounds: tl.constexpr,
    block_p: tl.constexpr,
    block_l: tl.constexpr,
    block_n: tl.constexpr,
):
    p, at, n = tl.arange(0, block_p), tl.arange(0, block_l), tl.arange(0, block_n)
    inside = (p < ranks)[:, None] & (at < local)[None, :]
    loads = tl.sum(tl.load(counts + p[:, None] * local + at[None, :], mask=inside, other=0), axis=1)
    expert_of = tl.load(experts + n, mask=n < clones, other=-1)
    kept = tl.load(counts + expert_of, mask=n < clones, other=0)
    given = tl.zeros([block_n], tl.int64)
    for step in range(rounds * clones):
        i = step % clones
        expert, rank = tl.load(experts + i), tl.load(ranks_of + i)
        owner = expert // local
        over = tl.sum(tl.where(p == owner, loads, 0) - tl.where(p == rank, loads, 0), axis=0)
        half = tl.abs(over) // 2
        more = tl.minimum(half, tl.sum(tl.where(n == i, kept, 0), axis=0))
        less = tl.minimum(half, tl.sum(tl.where(n == i, given, 0), axis=0))
        rows = tl.where(over > 0, more, -less)
        given += tl.where(n == i, rows, 0)
        kept -= tl.where(expert_of == expert, rows, 0)
        loads += tl.where(p == rank, rows, 0) - tl.where(p == owner, rows, 0)
    tl.store(given_out + n, given, mask=n < clones)

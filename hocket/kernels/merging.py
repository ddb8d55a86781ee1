"""Two results of attention to disjoint keys made one, in one pass: see `model/heads.py`.

Shapes: T tokens, H heads, N width of a head.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Heads of a token, or of several, of one program."""


@triton.jit
def _merge(
    one, lse_one, other, lse_other, out, total, rows, heads, token_one, token_other, rows_block: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows_block + tl.arange(0, rows_block)
    inside, column = row < rows, tl.arange(0, width)
    token, head = row // heads, row % heads
    tokens = rows // heads
    a = tl.load(lse_one + head * tokens + token, mask=inside, other=0.0)
    b = tl.load(lse_other + head * tokens + token, mask=inside, other=0.0)
    most = tl.maximum(a, b)
    both = most + tl.log(tl.exp(a - most) + tl.exp(b - most))
    at = inside[:, None]
    x = tl.load(one + token[:, None] * token_one + head[:, None] * width + column[None, :], mask=at, other=0.0)
    y = tl.load(other + token[:, None] * token_other + head[:, None] * width + column[None, :], mask=at, other=0.0)
    merged = x.to(tl.float32) * tl.exp(a - both)[:, None] + y.to(tl.float32) * tl.exp(b - both)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], merged, mask=at)
    tl.store(total + head * tokens + token, both, mask=inside)


def merge(one_THN: Tensor, lse_HT: Tensor, other_THN: Tensor, other_lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, H, N] and lse [H, T] of all keys. N is a power of two; heads of a token lie one after the other."""
    tokens, heads, width = one_THN.shape
    assert one_THN.stride()[1:] == other_THN.stride()[1:] == (width, 1)
    out_THN, total_HT = torch.empty_like(one_THN, memory_format=torch.contiguous_format), torch.empty_like(lse_HT)
    rows = tokens * heads
    _merge[(triton.cdiv(rows, ROWS),)](
        one_THN, lse_HT, other_THN, other_lse_HT, out_THN, total_HT, rows, heads, one_THN.stride(0),
        other_THN.stride(0), ROWS, width,
    )  # fmt: skip
    return out_THN, total_HT

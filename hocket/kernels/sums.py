"""The sum of rows in one pass, and the copy of a shard to its places in a buffer: see `runtime/transports.py`."""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels.pieces import Own, Pieces

BLOCK = 2048
"""Elements of a program at a time; with 128 threads, each loads 32 bytes of every part."""
PROGRAMS = 528
"""Programs of one launch, 4 per SM of a Hopper: enough to use all of its memory bandwidth."""


@triton.jit
def _block(table, block, low, high, aligned: tl.constexpr):
    """A shard's elements in one block of the table, between `low` and `high`: first, end, and offset to the buffer."""
    first, end = tl.load(table + 3 * block), tl.load(table + 3 * block + 1)
    first, end, shift = tl.maximum(first, low), tl.minimum(end, high), tl.load(table + 3 * block + 2)
    if aligned:  # tells the compiler that they are multiples of 16, so that it moves 16 bytes at a time
        first, end, shift = first // 16 * 16, end // 16 * 16, shift // 16 * 16
    return first, end, shift


@triton.jit
def _local_sum(
    parts, own, table, into, scale, low, high, stride, start, stop,
    rank: tl.constexpr, world: tl.constexpr, size: tl.constexpr, add: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) + start  # units of experts can have more than 2^31 elements
    while block < stop:
        if rank >= 0:
            first, end, shift = _block(table, block, low, high, aligned)
        else:
            first, end, shift = block * size + low, block * 0 + high, block * 0
        at = first + tl.arange(0, size)
        inside = at < end
        part, mine, sum_ = parts + (at - low), own + (at + shift), into + (at - low)
        total = tl.load(mine if rank == 0 else part, mask=inside).to(tl.float32)
        if rank != 0:
            part += stride
        for row in tl.static_range(1, world):
            if rank == row:
                total += tl.load(mine, mask=inside).to(tl.float32)
            else:
                total += tl.load(part, mask=inside).to(tl.float32)
                part += stride
        total *= scale
        if add:
            total = tl.load(sum_, mask=inside).to(tl.float32) + total
        tl.store(sum_, total, mask=inside)
        block += tl.num_programs(0)


def launch(
    parts_WS: Tensor, into_S: Tensor, scale: float, add: bool = True, own: Own | None = None, programs: int = PROGRAMS
) -> None:
    """`into` += (or =) scale * the sum of the rows of `parts`, in order and in fp32, on the current stream.

    With `own` there is one more row, and elements of no chunk are not written.
    """
    world, numel = parts_WS.shape[0] + (own is not None), parts_WS.shape[1]
    if own is None:
        rank, whole, table, low, (start, stop), aligned = (
            -1,
            parts_WS,
            parts_WS,
            0,
            (0, triton.cdiv(numel, BLOCK)),
            False,
        )
    else:
        rank, whole, pieces, low = own
        table, (start, stop), aligned = _blocks(pieces, rank, low, low + numel, whole.device)
    # Multiply, then add: a fused product would round differently from the CPU.
    _local_sum[(max(min(programs, stop - start), 1),)](
        parts_WS, whole, table, into_S, scale, low, low + numel, parts_WS.stride(0), start, stop,
        rank, world, BLOCK, add, aligned, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _place(
    shard, whole, packed, table, low, high, start, size: tl.constexpr, aligned: tl.constexpr, pack: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) + start
    first, end, shift = _block(table, block, low, high, aligned)
    at = first + tl.arange(0, size)
    inside = at < end
    value = tl.load(shard + at, mask=inside).to(whole.dtype.element_ty)
    tl.store(whole + (at + shift), value, mask=inside)
    if pack:
        tl.store(packed + (at - low), value, mask=inside)


def place(shard_S: Tensor, own: Own, high: int, packed: Tensor | None = None) -> None:
    """Cast the elements `own.low:high` of a shard to its places in the buffer, and to `packed`, on the current
    stream.
    """
    rank, whole, pieces, low = own
    table, (start, stop), aligned = _blocks(pieces, rank, low, high, whole.device)
    if stop > start:
        into = whole if packed is None else packed
        _place[(stop - start,)](
            shard_S, whole, into, table, low, high, start, BLOCK, aligned, packed is not None, num_warps=4
        )


def _blocks(
    pieces: Pieces, rank: int, low: int, high: int, device: torch.device
) -> tuple[Tensor, tuple[int, int], bool]:
    """(table of all blocks, range of the blocks that contain `low:high`, whether 16 bytes move at once)."""
    table, first, end, aligned = _table(pieces, rank, device)
    found = int(np.searchsorted(end, low, "right")), int(np.searchsorted(first, high))
    return table, found, aligned and low % 16 == high % 16 == 0


@lru_cache(maxsize=256)
def _table(pieces: Pieces, rank: int, device: torch.device) -> tuple[Tensor, np.ndarray, np.ndarray, bool]:
    """Each chunk in blocks, int64 [N, 3] on the device: first element, end, and offset to the buffer; the first two on
    the host; and whether all are multiples of 16.
    """
    start, length = np.array(pieces.bounds, dtype=np.int64).reshape(-1, 2).T
    blocks = -(-length // BLOCK)
    number = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = np.repeat(start, blocks) + number * BLOCK
    end = np.minimum(first + BLOCK, np.repeat(start + length, blocks))
    shift = np.repeat((pieces.world - 1) * start + rank * length, blocks)
    found = np.stack([first, end, shift], 1)
    return torch.from_numpy(found).to(device), first, end, not (found % 16).any()


# -------------------------------------------------------------------------------------------------------------- squares
#
# Sums of squares of tensors in fp64: see `fsdp/buffers.py`.


SQUARED = 4096
"""Elements of a program at a time."""


@triton.jit
def _squares(values, partials, numel, block_size: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block_size
    total = tl.zeros((block_size,), tl.float64)
    while start < numel:
        at = start + tl.arange(0, block_size)
        value = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
        start += tl.num_programs(0) * block_size
    tl.store(partials + tl.program_id(0), tl.sum(total))


def squares(tensors: Sequence[Tensor], programs: int = PROGRAMS) -> Tensor:
    """The sum of squares of each contiguous fp32 or bf16 tensor, fp64 [n], on the current stream.

    The order of additions depends on a tensor's number of elements alone.
    """
    partials = torch.zeros(len(tensors), programs, dtype=torch.float64, device=tensors[0].device)
    for tensor, row in zip(tensors, partials, strict=True):
        if tensor.numel():
            grid = (min(programs, triton.cdiv(tensor.numel(), SQUARED)),)
            _squares[grid](tensor, row, tensor.numel(), SQUARED, num_warps=8)
    return partials.sum(1)


# --------------------------------------------------------------------------------------------------------------- biases
#
# Biases of experts, added to their rows, and the row sums that are their gradients.
#
# Only the device knows the experts' row counts. Rows beyond the last one are neither read nor written. One program sums
# an expert's rows of some columns in order, so the bits are reproducible.
#
# Shapes: R rows grouped by expert, F width, E experts.


ROWS, COLUMNS = 16, 128
"""Rows and columns of a tile of the sum; rows of one of the addition."""


@triton.jit(do_not_specialize=["rows"])
def _add_by_expert(
    x, bias, ends, rows, experts: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    block_e: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tall + tl.arange(0, tall)
    e = tl.arange(0, block_e)
    end = tl.load(ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((row[:, None] >= end[None, :]).to(tl.int32), axis=1)
    column = (tl.program_id(1) * wide + tl.arange(0, wide))[None, :]
    inside = ((row < rows) & (expert < experts))[:, None] & (column < width)
    at = row.to(tl.int64)[:, None] * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + expert[:, None] * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, value, mask=inside)


@triton.jit
def _row_sums(g, ends, out, scale, width: tl.constexpr, add: tl.constexpr, deep: tl.constexpr, wide: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - start
    column = (tl.program_id(1) * wide + tl.arange(0, wide))[None, :]
    row = tl.arange(0, deep)[:, None]
    at = g + start.to(tl.int64) * width + row * width + column
    total = tl.zeros([deep, wide], tl.float32)
    for left in range(count, 0, -deep):
        total += tl.load(at, mask=(row < left) & (column < width), other=0.0).to(tl.float32)
        at += deep * width
    summed = tl.sum(total, axis=0)[None, :] * scale
    into = out + expert * width + column
    if add:
        summed += tl.load(into, mask=column < width, other=0.0).to(tl.float32)
    tl.store(into, summed, mask=column < width)


def add_by_expert(x_RF: Tensor, bias_EF: Tensor, ends_E: Tensor) -> Tensor:
    """Add `bias[e]` to the rows of expert e, which end before `ends[e]`, int32. In place; returns `x`."""
    assert x_RF.is_contiguous()
    (rows, width), experts = x_RF.shape, len(ends_E)
    if x_RF.numel():
        wide = min(triton.next_power_of_2(width), 512)
        grid = triton.cdiv(rows, ROWS), triton.cdiv(width, wide)
        sizes = (experts, width, ROWS, wide, triton.next_power_of_2(experts))
        _add_by_expert[grid](x_RF, bias_EF.contiguous(), ends_E, rows, *sizes, num_warps=4)
    return x_RF


def row_sums(g_RF: Tensor, ends_E: Tensor, out_EF: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """`out[e]` = or += `scale` times the sum of the rows of expert e, in fp32; 0 without rows."""
    width, experts = g_RF.shape[1], len(ends_E)
    assert out_EF.is_contiguous()
    grid = experts, triton.cdiv(width, COLUMNS)
    _row_sums[grid](g_RF.contiguous(), ends_E, out_EF, scale, width, add, ROWS, COLUMNS, num_warps=4)


# -------------------------------------------------------------------------------------------------------------- merging
#
# Merges two attention results over disjoint keys: see `model/heads.py`.
#
# Shapes: T tokens, H heads, N width of a head.


HEADS = 8
"""Heads of a program, of one token or several."""


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
    """Output [T, H, N] and lse [H, T] over all keys. N is a power of two; a token's heads are contiguous."""
    tokens, heads, width = one_THN.shape
    assert one_THN.stride()[1:] == other_THN.stride()[1:] == (width, 1)
    out_THN, total_HT = torch.empty_like(one_THN, memory_format=torch.contiguous_format), torch.empty_like(lse_HT)
    rows = tokens * heads
    _merge[(triton.cdiv(rows, HEADS),)](
        one_THN, lse_HT, other_THN, other_lse_HT, out_THN, total_HT, rows, heads, one_THN.stride(0),
        other_THN.stride(0), HEADS, width,
    )  # fmt: skip
    return out_THN, total_HT

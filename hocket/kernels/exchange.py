"""All-to-all of rows between GPUs with peer access. `hocket/runtime/blocks.py` has the formulas and the terms.

Shapes: P ranks, L local experts of each, D columns. Rows are moved as words of four bytes.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
"""Words that a program moves at once; with 256 threads, each has 8 loads of 16 bytes in flight."""
WARPS = 8
PUSHING = 32
"""Programs that store into peers, in total: as few as saturate the links, since products run concurrently."""
TAKING = 132
"""Programs that copy rows out: this stays on the chip, and takes a quarter of the transfer's time."""


@triton.jit(do_not_specialize=["rank"])
def _push_counts(counts, arrivals, rank, size: tl.constexpr, block: tl.constexpr):
    """One program per peer."""
    into = tl.load(arrivals + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    i = tl.arange(0, block)
    tl.store(into + rank * size + i, tl.load(counts + i, mask=i < size), mask=i < size)


@triton.jit
def _lay_out_blocks(
    counts,
    leaving,
    arriving,
    ends,
    needed,
    rank,
    capacity,
    ranks: tl.constexpr,
    local: tl.constexpr,
    size: tl.constexpr,
):
    """One program per block: this rank's rows for a peer's expert, and a peer's rows for this rank's expert."""
    blocks: tl.constexpr = ranks * local
    peer, expert = tl.program_id(0) // local, tl.program_id(0) % local
    i = tl.arange(0, size)
    count = tl.load(counts + i, mask=i < ranks * blocks, other=0).to(tl.int32)
    source, target, e = i // blocks, i // local % ranks, i % local
    # Sent order is by (target, expert), grouped order by (expert, source).
    to_peer, from_peer = (source == rank) & (target == peer), (source == peer) & (target == rank)
    same = e == expert
    start = tl.sum(tl.where((source == rank) & ((target < peer) | ((target == peer) & (e < expert))), count, 0))
    place = tl.sum(tl.where((target == peer) & ((e < expert) | (same & (source < rank))), count, 0))
    rows = tl.sum(tl.where(to_peer & same, count, 0))
    here = leaving + tl.program_id(0)
    tl.store(here, start)
    tl.store(here + blocks, place)
    tl.store(here + 2 * blocks, tl.maximum(tl.minimum(rows, capacity - place), 0))

    start = tl.sum(tl.where((target == rank) & ((e < expert) | (same & (source < peer))), count, 0))
    place = tl.sum(tl.where((source == peer) & ((target < rank) | ((target == rank) & (e < expert))), count, 0))
    rows = tl.sum(tl.where(from_peer & same, count, 0))
    here = arriving + tl.program_id(0)
    tl.store(here, start)
    tl.store(here + blocks, place)
    tl.store(here + 2 * blocks, tl.maximum(tl.minimum(rows, capacity - start), 0))

    if peer == 0:
        end = tl.sum(tl.where((target == rank) & (e <= expert), count, 0))
        tl.store(ends + expert, tl.minimum(end, capacity))
    if tl.program_id(0) == 0:
        tl.store(ends + local, tl.sum(tl.where(source == rank, count, 0)))
        before = tl.load(needed)
        most = before
        for other in range(ranks):
            most = tl.maximum(most, tl.sum(tl.where(target == other, count, 0)).to(tl.int64))
        tl.store(needed, tl.where(before > capacity, before, most))


@triton.jit(do_not_specialize=["rank"])
def _push_rows(
    rows,
    arrivals,
    blocks,
    rank,
    ranks: tl.constexpr,
    local: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Programs of one peer take turns in tiles of its rows. Ranks start with different peers."""
    peer = (rank + 1 + tl.program_id(0)) % ranks
    into = tl.multiple_of(tl.load(arrivals + peer).to(tl.pointer_type(tl.int32)), 16)
    step = tl.num_programs(1) * tile
    for expert in range(local):
        at = blocks + peer * local + expert
        start, place = tl.load(at).to(tl.int64), tl.load(at + ranks * local).to(tl.int64)
        count = tl.load(at + 2 * ranks * local)
        first = (tl.program_id(1) + expert) % tl.num_programs(1) * tile
        while first < count:
            row = first + tl.arange(0, tile)[:, None]
            for low in tl.static_range(0, width, block):
                column = low + tl.arange(0, block)[None, :]
                inside = (row < count) & (column < width)
                words = tl.load(rows + (start + row) * width + column, mask=inside)
                tl.store(into + (place + row) * width + column, words, mask=inside)
            first += step


@triton.jit(do_not_specialize=["rows", "cycle"])
def _take_rows(
    arrived, out, count, rows, cycle, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, cycled: tl.constexpr
):
    most = tl.minimum(tl.load(count), rows)
    first = tl.program_id(0) * tile
    while first < most:
        row = (first + tl.arange(0, tile)).to(tl.int64)[:, None]
        source = row % cycle if cycled else row
        for low in tl.static_range(0, width, block):
            column = low + tl.arange(0, block)[None, :]
            inside = (row < most) & (column < width)
            tl.store(out + row * width + column, tl.load(arrived + source * width + column, mask=inside), mask=inside)
        first += tl.num_programs(0) * tile


@triton.jit(do_not_specialize=["low", "high"])
def _take_blocks(
    arrived,
    rows,
    out,
    own,
    low,
    high,
    local: tl.constexpr,
    blocks: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Rows `low` to `high`: from this rank's own rows for its own blocks, else from arrived ones."""
    i = tl.arange(0, blocks)[None, :]
    start = tl.load(own + i, mask=i < local, other=0)
    place = tl.load(own + local + i, mask=i < local, other=0)
    end = place + tl.load(own + 2 * local + i, mask=i < local, other=0)
    first = low + tl.program_id(0) * tile
    while first < high:
        row = (first + tl.arange(0, tile)).to(tl.int64)[:, None]
        here = (row >= place) & (row < end)
        mine = tl.sum(here.to(tl.int32), 1, keep_dims=True) > 0
        source = row + tl.sum(tl.where(here, start - place, 0), 1, keep_dims=True)
        for begin in tl.static_range(0, width, block):
            column = begin + tl.arange(0, block)[None, :]
            inside = (row < high) & (column < width)
            words = tl.load(rows + source * width + column, mask=inside & mine, other=0)
            words |= tl.load(arrived + (row - low) * width + column, mask=inside & ~mine, other=0)
            tl.store(out + row * width + column, words, mask=inside)
        first += tl.num_programs(0) * tile


def push_counts(counts_PL: Tensor, arrivals: Tensor, rank: int) -> None:
    """Store counts, int64, as row `rank` of the matrices at the addresses `arrivals`, int64 [P]."""
    size = counts_PL.numel()
    _push_counts[len(arrivals),](counts_PL.contiguous(), arrivals, rank, size, triton.next_power_of_2(size))


def lay_out(every_PPL: Tensor, rank: int, capacity: int, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(leaving blocks, int32 [3, P, L], arriving blocks, the same, ends int32 [L + 1]); see `blocks.lay_out`."""
    ranks, _, local = every_PPL.shape
    ints = {"device": every_PPL.device, "dtype": torch.int32}
    leaving, arriving = torch.empty(3, ranks, local, **ints), torch.empty(3, ranks, local, **ints)
    ends = torch.empty(local + 1, **ints)
    size = triton.next_power_of_2(every_PPL.numel())
    given = (every_PPL.contiguous(), leaving, arriving, ends, needed, rank, capacity)
    _lay_out_blocks[ranks * local,](*given, ranks, local, size)
    return leaving, arriving, ends


def push(rows: Tensor, arrivals: Tensor, blocks: Tensor, rank: int, programs: int = PUSHING) -> None:
    """Store the blocks [3, P, L] of `rows` [R, D] at their places in the buffers at the addresses `arrivals`, int64
    [P].
    """
    assert rows.is_contiguous()
    _, ranks, local = blocks.shape
    width, tile, block = _tiles(rows)
    grid = (ranks, max(programs // ranks, 1))
    _push_rows[grid](rows.view(torch.int32), arrivals, blocks, rank, ranks, local, width, tile, block, num_warps=WARPS)


def take(arrived: Tensor, out: Tensor, count: Tensor, cycle: int = 0, programs: int = TAKING) -> None:
    """Copy the first `count`, int32 [1], rows of `arrived`, or its first `cycle` rows repeatedly, to `out` [R, D]."""
    assert out.is_contiguous()
    assert arrived.is_contiguous()
    if not out.numel():
        return
    width, tile, block = _tiles(out)
    grid = min(triton.cdiv(out.shape[0], tile), programs)
    words = arrived.view(torch.int32), out.view(torch.int32)
    _take_rows[grid,](*words, count, out.shape[0], cycle, width, tile, block, cycle > 0, num_warps=WARPS)


def take_blocks(
    arrived: Tensor, rows: Tensor, out: Tensor, own: Tensor, low: int, high: int, programs: int = TAKING
) -> None:
    """Fill rows `low` to `high` of `out` [R', D] with blocks of `rows` [R, D], and with `arrived` bytes elsewhere.

    `own` are the blocks, int64 [3, L]: first row in `rows`, first row in `out`, number of rows.
    """
    assert out.is_contiguous()
    assert rows.is_contiguous()
    width, tile, block = _tiles(out)
    local = own.shape[1]
    sizes = local, triton.next_power_of_2(local), width, tile, block
    words = (tensor.view(torch.int32) for tensor in (arrived, rows, out))
    grid = min(triton.cdiv(high - low, tile), programs)
    _take_blocks[grid,](*words, own, low, high, *sizes, num_warps=WARPS)


def _tiles(rows: Tensor) -> tuple[int, int, int]:
    """Words of a row; rows and words of a tile."""
    width = rows.shape[1] * rows.itemsize // 4
    block = min(triton.next_power_of_2(width), 1024)
    return width, max(TILE // block, 1), block

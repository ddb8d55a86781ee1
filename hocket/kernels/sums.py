"""Adding up what has arrived, in one pass: see `transports.local_sum`."""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of a program at a time; with 128 threads, each loads 32 bytes of every part."""
PROGRAMS = 528
"""Programs of one launch, 4 per SM of a Hopper: enough to use all of its memory bandwidth."""


@triton.jit
def _local_sum(
    parts,
    own,
    into,
    scale,
    numel,
    stride,
    rank: tl.constexpr,
    world: tl.constexpr,
    block_size: tl.constexpr,
    add: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block_size  # units of experts can have more than 2^31 elements
    while start < numel:
        at = start + tl.arange(0, block_size)
        inside = at < numel
        part = parts + at
        total = tl.load(own + at if rank == 0 else part, mask=inside).to(tl.float32)
        if rank != 0:
            part += stride
        for row in tl.static_range(1, world):
            if rank == row:
                total += tl.load(own + at, mask=inside).to(tl.float32)
            else:
                total += tl.load(part, mask=inside).to(tl.float32)
                part += stride
        total *= scale
        if add:
            total = tl.load(into + at, mask=inside).to(tl.float32) + total
        tl.store(into + at, total, mask=inside)
        start += tl.num_programs(0) * block_size


def launch(
    parts_WS: Tensor,
    into_S: Tensor,
    scale: float,
    add: bool = True,
    own: tuple[int, Tensor] | None = None,
    programs: int = PROGRAMS,
) -> None:
    """`into` += (or =) scale * the sum of the rows of `parts`, in their order and in fp32, on the current stream."""
    world, numel = parts_WS.shape[0] + (own is not None), parts_WS.shape[1]
    rank, mine_S = own if own is not None else (-1, parts_WS)
    grid = (min(programs, triton.cdiv(numel, BLOCK)),)
    # Multiply, then add: a fused product would round differently from what the CPU does.
    stride = parts_WS.stride(0)
    _local_sum[grid](
        parts_WS, mine_S, into_S, scale, numel, stride, rank, world, BLOCK, add, num_warps=4, enable_fp_fusion=False
    )

"""Kernels that move rows between ranks, whose buffers are all in one process here."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import exchange as kernels
from hocket.runtime.blocks import _formula

CASES = {
    "ranks": st.integers(1, 4),
    "local": st.integers(1, 5),
    "most": st.sampled_from([0, 1, 4, 30]),
    "capacity": st.sampled_from([1, 7, 20, 10_000]),
    "seed": st.integers(0, 1000),
}


def counts(ranks: int, local: int, most: int, seed: int) -> Tensor:
    """Rows of every rank for every expert of every rank, many of them none."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randint(0, most + 1, (ranks, ranks, local), generator=generator)
    return every * torch.randint(0, 2, every.shape, generator=generator)


@given(**CASES)
@settings(max_examples=5)
def test_blocks_are_laid_out_as_the_formula_says(ranks, local, most, capacity, seed) -> None:
    every = counts(ranks, local, most, seed)
    for rank in range(ranks):
        wanted_needed, found_needed = torch.tensor([3]), torch.tensor([3])
        wanted = _formula(every, rank, capacity, wanted_needed)
        found = kernels.lay_out(every, rank, capacity, found_needed)
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(wanted_needed, found_needed)
        most = int(every.sum((0, 2)).max())
        assert int(found_needed) == (3 if capacity < 3 else max(3, most))


@given(**CASES, width=st.sampled_from([8, 12, 72]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=3)
def test_rows_reach_their_experts_and_return(ranks, local, most, capacity, seed, width, dtype) -> None:
    """Every rank's rows are pushed into all buffers; each rank takes what is there, and sends it back."""
    every = counts(ranks, local, most, seed)
    layouts = [kernels.lay_out(every, rank, capacity, torch.zeros(1, dtype=torch.int64)) for rank in range(ranks)]
    sent = [torch.randn(int(every[rank].sum()), width).to(dtype) for rank in range(ranks)]
    room = max(capacity, *(len(rows) for rows in sent)) if capacity < 10_000 else int(every.sum()) + 1
    buffers = [torch.full((room, width), float("nan"), dtype=dtype) for _ in range(ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    for rank in range(ranks):
        kernels.push(sent[rank], addresses, layouts[rank][0], rank)
    arrived = []
    for rank, (_, _, ends) in enumerate(layouts):
        out = torch.full((min(capacity, room), width), 7.0, dtype=dtype)
        kernels.take(buffers[rank], out, ends[local - 1 : local])
        end = int(ends[local - 1])
        wanted = [
            sent[source].split(every[source].flatten().tolist())[rank * local + expert]
            for expert in range(local)
            for source in range(ranks)
        ]
        assert torch.equal(out[:end], torch.cat(wanted)[:capacity])
        assert (out[end:] == 7.0).all(), "rows beyond those that have arrived were written"
        arrived.append(out)
    for buffer in buffers:
        buffer.fill_(float("nan"))
    for rank in range(ranks):
        kernels.push(arrived[rank], addresses, layouts[rank][1], rank)
    for rank, (_, _, ends) in enumerate(layouts):
        out = torch.empty_like(sent[rank])
        kernels.take(buffers[rank], out, ends[local:])
        full = int(every.sum((0, 2)).max()) <= capacity
        lost = out.isnan().any(1)
        assert not (full and lost.any())
        assert torch.equal(out[~lost], sent[rank][~lost])


def test_counts_reach_all_ranks() -> None:
    every = counts(3, 5, 30, 0)
    buffers = [torch.zeros_like(every) for _ in range(3)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    for rank in range(3):
        kernels.push_counts(every[rank], addresses, rank)
    for buffer in buffers:
        assert torch.equal(buffer, every)


def test_rows_may_be_taken_over_and_over() -> None:
    block, out = torch.randn(3, 8), torch.zeros(10, 8)
    kernels.take(block, out, torch.tensor([7], dtype=torch.int32), cycle=3)
    assert torch.equal(out[:7], block.repeat(3, 1)[:7])
    assert (out[7:] == 0).all()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    capacity=st.sampled_from([1, 3, 50]),
    width=st.sampled_from([8, 12, 72]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=6)
def test_own_rows_are_put_between_those_that_arrive(sizes, capacity, width, dtype) -> None:
    """In as many rounds as it takes, from a buffer with room for `capacity` rows."""
    own, place, at = [], 0, 1
    for foreign, mine in sizes:
        place += foreign
        own.append((at, place, mine))
        place, at = place + mine, at + mine + 1  # own rows lie apart
    rows, wanted = (torch.randn(count, width).to(dtype) for count in (at, place + 2))
    for first, there, count in own:
        wanted[there : there + count] = rows[first : first + count]
    buffer = torch.full((capacity, width), float("nan"), dtype=dtype)
    out = torch.full_like(wanted, 7.0)
    blocks = torch.tensor(own).T.contiguous()
    for low in range(0, place, capacity):
        high = min(low + capacity, place)
        buffer[: high - low] = wanted[low:high]
        for _, there, count in own:  # nothing of these has arrived
            buffer[max(there, low) - low : max(min(there + count, high) - low, 0)] = float("nan")
        kernels.take_blocks(buffer.view(torch.uint8).view(-1), rows, out, blocks, low, high, programs=3)
    assert torch.equal(out[:place], wanted[:place])
    assert (out[place:] == 7.0).all()

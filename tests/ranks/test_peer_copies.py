"""Rows written into the peers' arrival buffers, by threads that stand for ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.runtime.blocks import host_blocks
from hocket.runtime.peer_rows import CopiedRows, PeerCopies
from hocket.runtime.transports import RowTable
from tests.helpers.driver import Memcpy


def exchange(tables, width, capacity, dtype=torch.bfloat16):
    """Every rank receives in each of several exchanges what it should, and gets its own rows back.

    `tables[i][s][d]` are the rows from rank s to rank d in exchange i, or a list of those for each of its experts.
    """
    world = len(tables[0])
    nbytes = capacity * width * dtype.itemsize
    arrivals = [torch.zeros(2, nbytes, dtype=torch.uint8) for _ in range(world)]
    barrier = threading.Barrier(world, timeout=20)
    tables = [[[of if isinstance(of, list) else [of] for of in line] for line in table] for table in tables]

    def rank(me):
        copies = PeerCopies(me, arrivals, barrier.wait, Memcpy(), lambda: 0)
        found = []
        for i, table in enumerate(tables):
            blocks = host_blocks(torch.tensor(table), me)
            parts = [
                rows(i, me, d, e, count, width, dtype) for d in range(world) for e, count in enumerate(table[me][d])
            ]
            out, back = (torch.full((n, width), float("nan"), dtype=dtype) for n in (blocks.room, blocks.sent))
            copies.exchange(out, torch.cat(parts), blocks)
            copies.exchange(back, out, blocks.back)
            assert torch.equal(back, torch.cat(parts))
            found.append(out)
        return found

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank, range(world)))
    for i, table in enumerate(tables):
        for d in range(world):
            experts = range(len(table[0][d]))
            wanted = [rows(i, s, d, e, table[s][d][e], width, dtype) for e in experts for s in range(world)]
            assert torch.equal(found[d][i], torch.cat(wanted)), f"exchange {i}, rank {d}"


def rows(i, source, destination, expert, count, width, dtype):
    generator = torch.Generator().manual_seed(10000 * i + 1000 * expert + 10 * source + destination)
    return torch.randint(-9, 9, (count, width), generator=generator).to(dtype)


def test_rows_arrive_in_the_order_of_ranks():
    exchange([[[3, 1, 2], [0, 4, 1], [2, 2, 2]]] * 3, width=5, capacity=100)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7])
def test_rows_that_do_not_fit_take_more_rounds(capacity):
    """One rank gets everything, another one nothing, and rounds of later exchanges use the right buffers."""
    exchange([[[0, 9], [0, 11]], [[5, 0], [3, 0]], [[1, 1], [1, 1]]], width=4, capacity=capacity, dtype=torch.float32)


@pytest.mark.parametrize("capacity", [1, 2, 5, 100])
def test_blocks_arrive_by_expert(capacity):
    """Then by source: the order in which experts read them."""
    table = [[[3, 1], [0, 2], [1, 1]], [[0, 4], [1, 0], [2, 2]], [[0, 0], [5, 0], [0, 0]]]
    exchange([table, table[::-1]] * 2, width=5, capacity=capacity)


def test_nothing_to_exchange():
    exchange([[[0, 0], [0, 0]], [[2, 1], [0, 0]]], width=3, capacity=2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_table(data):
    world = data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(1, 3))
    line = st.lists(st.lists(st.integers(0, 4), min_size=experts, max_size=experts), min_size=world, max_size=world)
    tables = data.draw(st.lists(st.lists(line, min_size=world, max_size=world), min_size=1, max_size=3))
    exchange(tables, width=data.draw(st.integers(1, 4)), capacity=data.draw(st.integers(1, 9)))


def test_a_row_must_fit():
    copies = PeerCopies(0, [torch.zeros(2, 4, dtype=torch.uint8)] * 2, lambda: None, Memcpy(), lambda: 0)
    blocks = host_blocks(torch.tensor([[[0], [1]], [[0], [0]]]), 0)
    with pytest.raises(AssertionError, match="a row of 8 bytes does not fit into an arrival buffer of 4"):
        copies.exchange(torch.empty(0, 4).bfloat16(), torch.empty(1, 4).bfloat16(), blocks)


def test_a_table_without_experts_keeps_the_order_of_ranks():
    copies = PeerCopies(0, [torch.zeros(2, 64, dtype=torch.uint8)] * 2, lambda: None, Memcpy(), lambda: 0)
    copied = CopiedRows(None, (0, 1), torch.device("cpu"), copies)  # pyrefly: ignore
    copies.arrivals[0][0].view(torch.float32)[1:3] = torch.tensor([5.0, 6.0])  # rank 1's, behind this rank's own
    out = torch.zeros(3, 1)
    copied.all_to_all(out, torch.tensor([[1.0], [2.0]]), RowTable([[1, 1], [2, 0]], 0))
    assert out.view(-1).tolist() == [1.0, 5.0, 6.0]
    assert copies.arrivals[1][0].view(torch.float32)[0] == 2.0

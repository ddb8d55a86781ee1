"""Rows written into the peers' arrival buffers, by threads that stand for ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.runtime.peer_copies import PeerCopies
from hocket.runtime.transports import RowTable


def exchange(tables, width, capacity, dtype=torch.bfloat16):
    """What every rank receives in each of several exchanges, and what it should."""
    world = len(tables[0])
    nbytes = capacity * width * dtype.itemsize
    arrivals = [torch.zeros(2, nbytes, dtype=torch.uint8) for _ in range(world)]
    barrier = threading.Barrier(world, timeout=20)

    def rank(me):
        copies = PeerCopies(me, arrivals, barrier.wait)
        found = []
        for i, table in enumerate(tables):
            parts = [rows(i, me, d, table[me][d], width, dtype) for d in range(world)]
            out = torch.full((sum(line[me] for line in table), width), float("nan"), dtype=dtype)
            copies.exchange(out, torch.cat(parts), RowTable(table, me))
            found.append(out)
        return found

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank, range(world)))
    for i, table in enumerate(tables):
        for d in range(world):
            wanted = torch.cat([rows(i, s, d, table[s][d], width, dtype) for s in range(world)])
            assert torch.equal(found[d][i], wanted)


def rows(i, source, destination, count, width, dtype):
    generator = torch.Generator().manual_seed(1000 * i + 10 * source + destination)
    return torch.randint(-9, 9, (count, width), generator=generator).to(dtype)


def test_rows_arrive_in_the_order_of_ranks():
    exchange([[[3, 1, 2], [0, 4, 1], [2, 2, 2]]] * 3, width=5, capacity=100)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7])
def test_rows_that_do_not_fit_take_more_rounds(capacity):
    """One rank gets everything, another one nothing, and rounds of later exchanges use the right buffers."""
    exchange([[[0, 9], [0, 11]], [[5, 0], [3, 0]], [[1, 1], [1, 1]]], width=4, capacity=capacity, dtype=torch.float32)


def test_nothing_to_exchange():
    exchange([[[0, 0], [0, 0]], [[2, 1], [0, 0]]], width=3, capacity=2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_table(data):
    world = data.draw(st.integers(1, 4))
    line = st.lists(st.integers(0, 6), min_size=world, max_size=world)
    tables = data.draw(st.lists(st.lists(line, min_size=world, max_size=world), min_size=1, max_size=3))
    exchange(tables, width=data.draw(st.integers(1, 4)), capacity=data.draw(st.integers(1, 9)))


def test_a_row_must_fit():
    copies = PeerCopies(0, [torch.zeros(2, 4, dtype=torch.uint8)] * 2, lambda: None)
    with pytest.raises(AssertionError, match="a row of 8 bytes does not fit into an arrival buffer of 4"):
        copies.exchange(torch.empty(0, 4).bfloat16(), torch.empty(1, 4).bfloat16(), RowTable([[0, 1], [0, 0]], 0))

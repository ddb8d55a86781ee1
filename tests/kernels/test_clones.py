"""The kernel that divides rows between owners and clones, against the formula in `hocket/program/cloning.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.kernels.clones import divide_rows
from hocket.program.cloning import choose, divide


@given(
    sizes=st.sampled_from([(2, 1, 1), (2, 4, 1), (3, 2, 2), (8, 5, 2), (5, 3, 12)]),
    seed=st.integers(0, 1000),
    most=st.sampled_from([1, 30, 10**6]),
)
@settings(max_examples=25)
def test_rows_of_clones(sizes: tuple[int, int, int], seed: int, most: int) -> None:
    ranks, local, room = sizes
    draw = torch.Generator().manual_seed(seed)
    before, counts_E = (torch.randint(0, most, (ranks * local,), generator=draw) for _ in range(2))
    clones = choose(before.tolist(), ranks, room)
    expert_N = torch.tensor([clone.expert for clone in clones], dtype=torch.int64)
    rank_N = torch.tensor([clone.rank for clone in clones], dtype=torch.int64)
    found = divide_rows(counts_E, expert_N, rank_N, ranks, ranks * room)
    assert found.tolist() == divide(counts_E.tolist(), clones, ranks)


@pytest.mark.parametrize("ranks", [2, 7])
def test_all_rows_of_one_expert(ranks: int) -> None:
    counts = [0] * (3 * ranks)
    counts[4] = 10_000
    clones = choose(counts, ranks, 1)
    expert_N, rank_N = (torch.tensor([clone[n] for clone in clones]) for n in (0, 1))
    assert divide_rows(torch.tensor(counts), expert_N, rank_N, ranks, ranks).tolist() == divide(counts, clones, ranks)

"""Memory that a group shares, with torch's part of it imitated: what is done to it, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.runtime import shared_memory as module
from hocket.runtime.p2p_copies import FLAG_BYTES, HALVES, p2p_copies, reset_flags
from hocket.runtime.peer_rows import shared_buffers

CPU = torch.device("cpu")
GROUP: Any = "the group"


class Imitated:
    """Symmetric memory of this rank, the second of two; the other's is all sevens."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.rank, self.world_size = 1, 2

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.mine = torch.full((nbytes,), 9, dtype=dtype, device=device)
        return self.mine

    def rendezvous(self, mine: Tensor, group: object) -> Imitated:
        assert mine is self.mine
        assert group is GROUP
        return self

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.done.append(f"barrier of {timeout_ms} ms, {'raw' if self.mine[-1] == 9 else 'blank'}")

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, 7, dtype=dtype)


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> Imitated:
    found = Imitated()
    monkeypatch.setattr(module, "symm_mem", found)
    return found


def test_nobody_writes_before_memory_is_prepared_and_no_barrier_is_endless(imitated: Imitated) -> None:
    rank, memories, barrier = module.shared_memory(GROUP, HALVES * 8 + FLAG_BYTES, CPU, 2.5, reset_flags)
    assert imitated.done == ["barrier of 2500 ms, blank"]
    assert rank == 1
    assert memories[1] is imitated.mine
    assert memories[0].eq(7).all()
    barrier()
    assert len(imitated.done) == 2


def test_memory_that_needs_no_preparation_needs_no_barrier(imitated: Imitated) -> None:
    _, buffers, _ = shared_buffers(GROUP, 64, CPU, 2.5)
    assert not imitated.done
    assert [buffer.shape for buffer in buffers] == [(2, 64)] * 2
    assert buffers[1].data_ptr() == imitated.mine.data_ptr()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 have a group, in torch's order, and a driver that does nothing."""
    monkeypatch.setattr("hocket.runtime.p2p_copies.Cuda", lambda: None)
    monkeypatch.setattr("hocket.runtime.p2p_copies.dist.get_process_group_ranks", lambda group: [0, 1])


@pytest.mark.parametrize(("nbytes", "half"), [(1, 256), (512, 256), (513, 512), (64 << 10, 32 << 10)])
@pytest.mark.usefixtures("joined")
def test_an_edge_has_room_for_what_is_sent_in_two_whole_halves(nbytes: int, half: int, imitated: Imitated) -> None:
    copies = p2p_copies(GROUP, (0, 1), nbytes, CPU, 2.5)
    assert copies.nbytes == half
    assert copies._memories[1] is imitated.mine
    assert len(list(copies._pieces(torch.zeros(nbytes, dtype=torch.uint8)))) <= HALVES


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.usefixtures("joined")
def test_ranks_have_the_order_of_the_edge(ranks: tuple[int, int], imitated: Imitated) -> None:
    """Not torch's, which is the other one where a ring closes."""
    copies = p2p_copies(GROUP, ranks, 1, CPU, 2.5)
    assert copies._rank == ranks.index(1)
    assert [memory is imitated.mine for memory in copies._memories] == [rank == 1 for rank in ranks]

"""Gathers and reductions through halves of shown memory, with threads in place of ranks: a queue does at once what it
is given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hocket.kernels.pieces import Pieces
from hocket.runtime.collective_copies import ALIGNED, HALVES, CollectiveCopies, Halves, flag_bytes, reset_flags
from tests.helpers.driver import Memcpy

BF16 = torch.bfloat16
HALF = 8 * ALIGNED
"""Bytes of a half."""
SIZES = [64, 1, 128 * 8, 4096, 5000, 3, 0, 128 * 8 + 1, 20000]
"""Elements of a rank's part: less than a piece, whole pieces, several times a half."""


def rank_order_sum(parts: Tensor, into: Tensor, scale: float) -> Tensor:
    total = parts[0].to(into.dtype)
    for part in parts[1:]:
        total = (total + part).to(into.dtype)
    return into + total * scale


def pieces_of(size: int, world: int) -> Pieces:
    """Some chunks of a shard, often with gaps; for small shards one."""
    cuts = sorted(random.sample(range(size + 1), random.choice([2, 4, 8]))) if size > 8 else [0, size]
    bounds = tuple((lo, hi - lo) for lo, hi in zip(cuts[::2], cuts[1::2], strict=True) if lo < hi)
    return random.choice([Pieces(bounds, size, world), Pieces.one(size, world)])


class Ranks:
    """The copies of all ranks of a group, which share a driver."""

    def __init__(self, size: int, driver: Memcpy | None = None) -> None:
        self.size, self.driver = size, driver or Memcpy()
        self.memories = [self._shown(size) for _ in range(2)]
        self.copies = []
        for rank in range(size):
            shown = iter(self.memories)
            make = lambda rank=rank, shown=shown: Halves(rank, next(shown), self.driver)  # noqa: E731
            self.copies.append(CollectiveCopies(rank, size, lambda: 0, make))

    @staticmethod
    def _shown(size: int) -> list[Tensor]:
        memories = [torch.full((HALVES * HALF + flag_bytes(size),), 77, dtype=torch.uint8) for _ in range(size)]
        for memory in memories:
            reset_flags(memory, size)
        return memories

    def signs(self) -> list[list[int]]:
        flags = (memory[-flag_bytes(self.size) :].view(torch.int32) for shown in self.memories for memory in shown)
        return [each[: 2 * HALVES * self.size].sign().tolist() for each in flags]

    def each(self, work: Callable[[int], None]) -> None:
        """Do something as every rank, at once."""
        with ThreadPoolExecutor(self.size) as pool:
            for future in [pool.submit(work, rank) for rank in range(self.size)]:
                future.result(60.0)


@pytest.mark.parametrize("late", [None, 0, 1, "any"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_gathers_and_reductions_are_exact_whoever_is_late(size: int, late: int | str | None) -> None:
    ranks = Ranks(size)
    order = [random.choice(SIZES) for _ in range(12)]
    generator = torch.Generator().manual_seed(0)
    shards = [[torch.randn(n, generator=generator).to(BF16) for n in order] for _ in range(size)]
    fulls = [[torch.randn(size * n, generator=generator).to(BF16) for n in order] for _ in range(size)]
    intos = [[torch.randn(n, generator=generator) for n in order] for _ in range(size)]
    starts = [[into.clone() for into in each] for each in intos]
    outs = [[torch.full((size * n,), -1.0, dtype=BF16) for n in order] for _ in range(size)]
    pieces = [pieces_of(n, size) for n in order]

    def work(rank: int) -> None:
        copies = ranks.copies[rank]
        for i in range(len(order)):
            if late == rank or (late == "any" and random.random() < 0.3):
                time.sleep(0.002)
            if i % 3 == 2 and pieces[i].in_order:  # the shard is already where it belongs
                mine = outs[rank][i].view(size, -1)[rank].copy_(shards[rank][i])
                copies.gather(outs[rank][i], mine, pieces[i])
            else:
                shard = shards[rank][i].to(torch.float32 if i % 2 else BF16, copy=True)  # the gather casts
                copies.gather(outs[rank][i], shard, pieces[i])
                shard.fill_(-2.0)  # the copies are over
            full = fulls[rank][i].clone()
            copies.reduce(full, intos[rank][i], 1 / 3, i % 2 == 0, pieces[i])
            full.fill_(-2.0)

    before = ranks.signs()
    ranks.each(work)
    for i, n in enumerate(order):
        packed = torch.zeros(size * n, dtype=BF16)
        parts = torch.stack([pieces[i].pack(fulls[rank][i], packed).view(size, n).clone() for rank in range(size)])
        whole = torch.full((size * n,), -1.0, dtype=BF16)
        pieces[i].unpack(torch.cat([shards[rank][i] for rank in range(size)]), whole)
        for rank in range(size):
            assert torch.equal(outs[rank][i], whole), f"gather {i} of {n} at rank {rank}"
            start = starts[rank][i] if i % 2 == 0 else torch.zeros(n)
            summed = rank_order_sum(parts[:, rank], start, 1 / 3)
            for lo, hi in pieces[i].gaps:
                summed[lo:hi] = starts[rank][i][lo:hi]
            assert torch.equal(intos[rank][i], summed), f"sum {i} at rank {rank}"
    after = ranks.signs()
    assert before == after or not any(order), "a recorded step finds the flags as it found them first"


class Stepwise(Memcpy):
    """Notes which flags were said, taken and waited for, and whether something had been sent, and received, by then."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, bool, bool]] = []
        self.sent = self.received = torch.zeros(1)

    def _note(self, what: str) -> None:
        self.done.append((what, bool(self.sent.any()), bool(self.received.any())))

    def write(self, stream: int, flag: int, value: int) -> None:
        super().write(stream, flag, value)
        self._note("say" if value > 0 else "take")

    def wait(self, stream: int, flag: int, value: int) -> None:
        super().wait(stream, flag, value)
        self._note("wait")


def test_words_are_taken_before_a_copy_and_said_behind_it() -> None:
    """Two ranks in one thread: rank 1 has said that its piece is here."""
    driver = Stepwise()
    ranks = Ranks(2, driver)
    mine, theirs = ranks.copies
    theirs._gathered.bytes_of(1, 0).fill_(1)
    theirs._gathered.signal_arrived[0](0)
    out = torch.zeros(8)
    driver.sent, driver.received = mine._gathered.bytes_of(0, 0).zero_(), out[4:]
    driver.done.clear()
    mine.gather(out, torch.ones(4), Pieces.one(4, 2))
    sends = [("wait", False, False), ("take", False, False), ("say", True, False)]
    receives = [("wait", True, False), ("take", True, False), ("say", True, True)]
    assert driver.done == sends + receives


def test_a_rank_sends_the_next_piece_before_it_receives_one() -> None:
    """A rank alone can send two pieces: nobody has to read the first one before the second one leaves."""
    ranks = Ranks(2)
    halves = ranks.memories[0][0][: HALVES * HALF].zero_().view(HALVES, HALF)

    def work(rank: int) -> None:
        if rank == 1:
            end = time.monotonic() + 10
            while not halves.any(1).all():
                assert time.monotonic() < end, "the second piece waits for the first one to be read"
        ranks.copies[rank].gather(torch.zeros(HALF), torch.ones(HALF // 2), Pieces.one(HALF // 2, 2))

    ranks.each(work)


def test_halves_without_room_for_every_rank_are_an_error() -> None:
    ranks = Ranks(2)
    ranks.copies[0].size = HALF // ALIGNED + 2
    with pytest.raises(AssertionError, match="no room for a piece of each"):
        ranks.copies[0].reduce(torch.zeros(0), torch.zeros(0), 1.0, True, Pieces.one(0, 2))


def test_a_call_on_another_stream_comes_behind_the_one_before() -> None:
    """Two streams in the same halves would take each other's flags."""
    streams, followed = iter([7, 7, 7, 9, 9, 7]), list[int]()
    shown = Ranks(1).memories
    make = lambda: Halves(0, shown[0], Memcpy())  # noqa: E731
    copies = CollectiveCopies(0, 1, lambda: next(streams), make, followed.append)
    for _ in range(5):  # of one rank, so that nobody has to answer
        copies.gather(torch.zeros(4), torch.ones(4), Pieces.one(4, 1))
    assert followed == [7, 9]

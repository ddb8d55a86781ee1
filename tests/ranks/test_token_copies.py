"""Arrival buffers and flags, with threads in place of ranks: a queue does at once what it is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.engine.graphed import from_turn_one
from hocket.runtime.driver import FlagStep
from hocket.runtime.lanes import SideStream
from hocket.runtime.tokens import FLAG_BYTES, CopiedTokens
from tests.helpers.driver import Memcpy

CPU = torch.device("cpu")
TOKENS, WIDTH, TURNS = 3, 4, 6


class Growing(Memcpy):
    def write(self, stream: int, flag: int, value: int) -> None:
        assert self.value(flag) < value, "turns only grow"
        super().write(stream, flag, value)


def on_ranks(size: int, work: Callable[[CopiedTokens], list[Tensor]]) -> list[list[Tensor]]:
    driver, nbytes = Growing(), size * TOKENS * WIDTH * 4
    memories = [torch.zeros(2 * nbytes + FLAG_BYTES, dtype=torch.uint8) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(CopiedTokens(rank, memories, driver, SideStream(CPU))), range(size)))


def tokens_of(rank: int, turn: int) -> Tensor:
    return torch.full((TOKENS, WIDTH), 10.0 * turn + rank)


@pytest.mark.parametrize("size", [2, 4])
def test_everybody_sees_everybodys_tokens(size: int) -> None:
    def work(tokens: CopiedTokens) -> list[Tensor]:
        found = []
        for turn in range(TURNS):
            spread = tokens.spread(tokens_of(tokens.rank, turn))
            out = torch.zeros(size * TOKENS, WIDTH)
            if turn % 2:
                spread.whole(out)()
            else:
                for source in tokens.others:
                    out[source * TOKENS : (source + 1) * TOKENS] = spread.take(source, source + 1)
                out[tokens.rank * TOKENS : (tokens.rank + 1) * TOKENS] = tokens_of(tokens.rank, turn)
            spread.end()
            found.append(out)
        return found

    for found in on_ranks(size, work):
        for turn, out in enumerate(found):
            assert torch.equal(out, torch.cat([tokens_of(rank, turn) for rank in range(size)]))


def test_everybody_gets_the_sum_of_its_tokens() -> None:
    size = 4

    def work(tokens: CopiedTokens) -> list[Tensor]:
        found = []
        for turn in range(TURNS):
            out = torch.empty(TOKENS, WIDTH)
            collect = tokens.collect(out)
            for low, high in ((0, 2), (2, 3), (3, 4)):
                collect.place(low, high).copy_(tokens_of(tokens.rank, turn).repeat(high - low, 1))
                collect.send(low, high)
            collect.sum(out)
            found.append(out)
        return found

    for found in on_ranks(size, work):
        for turn, out in enumerate(found):
            assert torch.equal(out, torch.stack([tokens_of(rank, turn) for rank in range(size)]).sum(0))


def test_what_does_not_fit_is_refused() -> None:
    def work(tokens: CopiedTokens) -> list[Tensor]:
        with pytest.raises(AssertionError, match="arrival buffers"):
            tokens.spread(torch.zeros(TOKENS + 1, WIDTH))
        return []

    on_ranks(2, work)


class Recorded:
    """A driver that keeps operations while it records, and does them in replays. All of a test's share one `Memcpy`."""

    def __init__(self, real: Memcpy) -> None:
        self.real, self.calls = real, list[Callable[[], None]]()
        self.recording = False

    def _do(self, call: Callable[[], None]) -> None:
        self.calls.append(call) if self.recording else call()

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        self._do(lambda: self.real.copy(stream, into, source, nbytes))

    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        self._do(lambda: self.real.copies(stream, into, sources, nbytes))

    def write(self, stream: int, flag: int, value: int) -> None:
        self._do(lambda: self.real.write(stream, flag, value))

    def wait(self, stream: int, flag: int, value: int) -> None:
        self._do(lambda: self.real.wait(stream, flag, value))

    def prepared(self, steps: Sequence[FlagStep]) -> Callable[[int], None]:
        made = self.real.prepared(steps)
        return lambda stream: self._do(lambda: made(stream))

    def read(self, flags: Sequence[int]) -> list[int] | None:
        return self.real.read(flags)

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.recording, self.calls = True, []
        result, calls = run(), self.calls
        self.recording = False
        return result, lambda: [call() for call in calls].clear()


@pytest.mark.parametrize("turns", [2, 3])
def test_recorded_turns_begin_at_one_in_each_replay(turns: int) -> None:
    """Replays and turns that are issued follow each other, on ranks of which one is late."""
    size, nbytes = 2, 2 * TOKENS * WIDTH * 4
    memories, real = [torch.zeros(2 * nbytes + FLAG_BYTES, dtype=torch.uint8) for _ in range(size)], Growing()
    barrier = threading.Barrier(size, timeout=10.0)

    def work(rank: int) -> list[Tensor]:
        driver = Recorded(real)
        tokens = CopiedTokens(rank, memories, driver, SideStream(CPU))
        mine = [torch.empty(TOKENS, WIDTH) for _ in range(turns)]

        def step() -> list[Tensor]:
            outs = [torch.zeros(size * TOKENS, WIDTH) for _ in mine]
            for x, out in zip(mine, outs, strict=True):
                spread = tokens.spread(x)
                spread.whole(out)()
                spread.end()
            return outs

        def fill(number: int) -> None:
            for turn, x in enumerate(mine):
                x.copy_(tokens_of(rank, turns * number + turn))
            time.sleep(0.01 * (rank == number % size))

        found = list[Tensor]()
        for number in range(turns):  # as many as a recording has, and more
            fill(number)
            found += step()
        outs, replay = from_turn_one(driver.record, tokens, barrier.wait)(step)
        for number in range(turns, turns + 6):
            fill(number)
            if number % 3:
                replay()
                found += [out.clone() for out in outs]
            else:
                found += step()
            barrier.wait()  # as behind each step, where gradients of whole parameters are added up
        return found

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(work, range(size)):
            for number, out in enumerate(found):
                assert torch.equal(out, torch.cat([tokens_of(rank, number) for rank in range(size)]))


def test_words_tell_which_turn_a_rank_waits_in_and_for_whom() -> None:
    """Rank 0 takes two turns with both peers, then a third in which the second peer is missing."""
    size, nbytes = 3, 3 * TOKENS * WIDTH * 4
    memories, driver = [torch.zeros(2 * nbytes + FLAG_BYTES, dtype=torch.uint8) for _ in range(size)], Memcpy()
    ranks = [CopiedTokens(rank, memories, driver, SideStream(CPU)) for rank in range(size)]
    for tokens in ranks:
        tokens.spread(tokens_of(tokens.rank, 0))
    marks = [tokens.begin() for tokens in ranks]

    def progress(rank: int) -> tuple[object, ...]:
        found = ranks[rank].progress(marks[rank], False)
        assert found is not None
        return found.done, found.absent, found.turns

    assert [progress(rank) for rank in range(size)] == [(0, (), (0, 0))] * size
    for tokens in ranks:
        tokens.spread(tokens_of(tokens.rank, 1))
    assert [progress(rank) for rank in range(size)] == [(1, (), (1, 1))] * size
    for tokens in ranks[:2]:
        tokens.spread(tokens_of(tokens.rank, 2))
    assert [progress(rank) for rank in range(size)] == [(1, (2,), (2, 2)), (1, (2,), (2, 2)), (1, (), (1, 1))]
    behind = ranks[2].turn(tokens_of(2, 2))  # issued, and its stream has not come to it
    assert behind[0] == 3
    assert progress(2) == (1, (), (1, 2))

"""Halves and words of an edge of a pipeline, with threads in place of ranks: a queue does at once what it is given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hocket.runtime.hop_copies import HALVES, WORDS, HopCopies, blank
from tests.helpers.driver import Memcpy

HALF = 64
"""Bytes of a half."""
SIZES = [16, 7, 32, 33, 0, 200, 48, 16, 1, 128]
"""Elements of fp32: less than a half, whole halves, and several times both."""


def edge(driver: Memcpy) -> list[HopCopies]:
    memories = [torch.full((HALVES * HALF + WORDS,), 77, dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        blank(memory)
    return [HopCopies(rank, memories, driver, lambda: 0) for rank in range(2)]


def at_once(*work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(one) for one in work]:
            future.result(30.0)


def sent(number: int) -> Tensor:
    return torch.arange(SIZES[number % len(SIZES)], dtype=torch.float32) + 1000.0 * number


@pytest.mark.parametrize("late", ["nobody", "the sender", "the receiver", "now this one, now that one"])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "back"])
def test_what_is_sent_arrives_in_order(late: str, forward: bool) -> None:
    sender, receiver = edge(Memcpy())[:: 1 if forward else -1]
    received = [torch.full_like(sent(number), -1.0) for number in range(40)]

    def wait(who: str) -> None:
        if late == who or (late.startswith("now") and random.random() < 0.3):
            time.sleep(0.001)

    def send() -> None:
        for number in range(len(received)):
            wait("the sender")
            tensor = sent(number)
            sender.send(tensor)
            tensor.fill_(-2.0)  # the copies are over: the sender may do with it what it likes

    def receive() -> None:
        for tensor in received:
            wait("the receiver")
            receiver.receive(tensor)

    at_once(send, receive)
    for number, tensor in enumerate(received):
        assert torch.equal(tensor, sent(number)), f"tensor {number}"


def test_a_tensor_that_fits_waits_for_its_receiver_beside_the_sender() -> None:
    sender, receiver = edge(Memcpy())
    sender.send(sent(2))  # two halves: returns although nobody receives
    received = torch.empty_like(sent(2))
    receiver.receive(received)
    assert torch.equal(received, sent(2))


class Stepwise(Memcpy):
    """Says which words were written and waited for, and what the receiver had got by then."""

    def __init__(self, received: Tensor) -> None:
        super().__init__()
        self.received, self.done = received, list[tuple[str, bool]]()

    def _note(self, what: str) -> None:
        self.done.append((what, bool(self.received.any())))

    def write(self, stream: int, word: int, value: int) -> None:
        super().write(stream, word, value)
        self._note(f"write {value}")

    def wait(self, stream: int, word: int, value: int) -> None:
        super().wait(stream, word, value)
        self._note("wait")


def test_words_change_only_around_the_copy() -> None:
    """Its own word becomes zero before the copy: one that became it behind could undo what the other rank says."""
    received = torch.zeros(16)
    driver = Stepwise(received)
    sender, receiver = edge(driver)
    sender.send(sent(0) + 1)
    assert driver.done == [("wait", False), ("write 0", False), ("write 1", False)]
    receiver.receive(received)
    assert driver.done[3:] == [("wait", False), ("write 0", False), ("write 1", True)]


def test_all_words_are_as_they_were_so_that_a_step_can_be_replayed() -> None:
    """The same calls again, on the same addresses, as a replay makes them, and other steps between them."""
    driver = Memcpy()
    sender, receiver = edge(driver)
    here, there = sent(5), torch.empty_like(sent(5))

    def words() -> list[list[int]]:
        return [memory[-WORDS:].view(torch.int32)[: 2 * HALVES].tolist() for memory in (sender._mine, sender._other)]

    before = words()
    assert before == [[0, 0, 1, 1]] * 2
    for step in range(5):
        here.copy_(sent(5) + step)
        at_once(lambda: sender.send(here), lambda: receiver.receive(there))
        assert torch.equal(there, sent(5) + step)
        odd = sent(0) + step, torch.empty_like(sent(0))
        at_once(lambda odd=odd: sender.send(odd[0]), lambda odd=odd: receiver.receive(odd[1]))
        assert torch.equal(*odd)
        assert words() == before


def test_pieces_cover_every_byte_once() -> None:
    sender, _ = edge(Memcpy())
    for number in range(len(SIZES)):
        tensor = sent(number)
        pieces = list(sender._pieces(tensor))
        found = torch.cat([tensor.new_empty(0).view(torch.uint8), *(piece for _, piece in pieces)])
        assert torch.equal(found.view(torch.float32), tensor)
        assert [half for half, _ in pieces] == [number % 2 for number in range(len(pieces))]

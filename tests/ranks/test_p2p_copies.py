"""Halves and flags of an edge of a pipeline, with threads in place of ranks: a queue does at once what it is given."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hocket.runtime.p2p_copies import _LAP, FLAG_BYTES, HALVES, HopCopies, _number, reset_flags
from tests.helpers.driver import Memcpy

HALF = 64
"""Bytes of a half."""
SIZES = [16, 7, 32, 33, 0, 200, 48, 16, 1, 128]
"""Elements of fp32: less than a half, whole halves, and several times both."""


def edge(driver: Memcpy) -> list[HopCopies]:
    memories = [torch.full((HALVES * HALF + FLAG_BYTES,), 77, dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        reset_flags(memory)
    return [HopCopies(rank, memories, driver, lambda: 0) for rank in range(2)]


def at_once(*work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(one) for one in work]:
            future.result(30.0)


def sent(number: int) -> Tensor:
    return torch.arange(SIZES[number % len(SIZES)], dtype=torch.float32) + 1000.0 * number


@pytest.mark.parametrize("late", ["neither", "the sender", "the receiver", "now this one, now that one"])
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
    sender.send(sent(2))  # two halves: returns before the receiver receives
    received = torch.empty_like(sent(2))
    receiver.receive(received)
    assert torch.equal(received, sent(2))


class Stepwise(Memcpy):
    """Says which flags were written and waited for, and what the receiver had got by then."""

    def __init__(self, received: Tensor) -> None:
        super().__init__()
        self.received, self.done = received, list[tuple[str, bool]]()

    def _note(self, what: str) -> None:
        self.done.append((what, bool(self.received.any())))

    def write(self, stream: int, flag: int, value: int) -> None:
        super().write(stream, flag, value)
        self._note("give" if value > 0 else "take")

    def wait(self, stream: int, flag: int, value: int) -> None:
        super().wait(stream, flag, value)
        self._note("wait")


def test_words_change_only_around_the_copy() -> None:
    """Its own flag is taken before the copy: one that was behind it could undo what the other rank says."""
    received = torch.zeros(16)
    driver = Stepwise(received)
    sender, receiver = edge(driver)
    sender.send(sent(0) + 1)
    assert driver.done == [("wait", False), ("take", False), ("give", False)]
    receiver.receive(received)
    assert driver.done[3:] == [("wait", False), ("take", False), ("give", True)]


def test_all_signs_are_as_they_were_so_that_a_step_can_be_replayed() -> None:
    """The same calls again, on the same addresses, as a replay makes them, and other steps between them."""
    driver = Memcpy()
    sender, receiver = edge(driver)
    here, there = sent(5), torch.empty_like(sent(5))

    def signs() -> list[list[int]]:
        return [memory[-FLAG_BYTES:].view(torch.int32)[: 2 * HALVES].sign().tolist() for memory in sender._memories]

    before = signs()
    assert before == [[-1, -1, 1, 1]] * 2
    for step in range(5):
        here.copy_(sent(5) + step)
        at_once(lambda: sender.send(here), lambda: receiver.receive(there))
        assert torch.equal(there, sent(5) + step)
        odd = sent(0) + step, torch.empty_like(sent(0))
        at_once(lambda odd=odd: sender.send(odd[0]), lambda odd=odd: receiver.receive(odd[1]))
        assert torch.equal(*odd)
        assert signs() == before


def test_pieces_cover_every_byte_once() -> None:
    sender, _ = edge(Memcpy())
    for number in range(len(SIZES)):
        tensor = sent(number)
        pieces = list(sender._pieces(tensor))
        found = torch.cat([tensor.new_empty(0).view(torch.uint8), *(piece for _, piece in pieces)])
        assert torch.equal(found.view(torch.float32), tensor)
        assert [half for half, _ in pieces] == [number % 2 for number in range(len(pieces))]


def progress(copies: HopCopies, marks: list[int], replayed: bool = False) -> tuple[object, ...]:
    found = copies.progress(marks, replayed)
    assert found is not None
    return found.done, found.absent


class Stuck(Exception):
    pass


class Impatient(Memcpy):
    """A stream that would wait for ever stops there."""

    def wait(self, stream: int, flag: int, value: int) -> None:
        if self.value(flag) < value:
            raise Stuck


def until_stuck(*work: Callable[[], object]) -> None:
    for one in work:
        with contextlib.suppress(Stuck):
            one()


@pytest.mark.parametrize("before", [0, 3, _LAP - 5], ids=["first step", "later", "numbers begin anew"])
def test_words_tell_what_has_arrived_and_who_is_waited_for(before: int) -> None:
    sender, receiver = edge(Impatient())
    for copies in (sender, receiver):
        copies._piece = before
    for memory in sender._memories:
        flags = memory[-FLAG_BYTES:].view(torch.int32)
        flags[:2], flags[2:4] = -_number(before), _number(before)
    marks = [copies.begin() for copies in (sender, receiver)]
    one, big = sent(0), sent(5)  # a piece, and thirteen
    arrives = [torch.empty_like(tensor) for tensor in (one, big, one)]

    sender.send(one)
    assert progress(sender, marks[0]) == (1, ())
    receiver.receive(arrives[0])
    assert progress(receiver, marks[1]) == (1, ())
    # A receiver that is early waits for the sender.
    until_stuck(lambda: receiver.receive(arrives[1]))
    receiver._piece, more = receiver._piece - 1, [*marks[1], before + 14, before + 15]  # as if a stream had taken all
    assert progress(receiver, more) == (1, (0,))
    # A sender whose second tensor finds no room waits for the receiver. The receiver waits for no rank then.
    until_stuck(lambda: sender.send(big))
    sender._piece, less = before + 15, [*marks[0], before + 14, before + 15]
    assert progress(sender, less) == (1, (1,))
    assert progress(receiver, more) == (1, ())


@pytest.mark.parametrize("between", [0, 1, 6])
def test_words_of_a_replayed_step_are_told_from_those_of_the_one_before(between: int) -> None:
    """Five tensors of one piece or two are issued, then others of another program, and the five are replayed."""
    sender, receiver = edge(Memcpy())
    sizes = [sent(number) for number in (0, 2, 0, 2, 2)]

    def issue(tensors: list[Tensor], numbers: int | None = None) -> Iterator[int]:
        """With `numbers`, as a replay does: pieces have the numbers from there on, and the host counts nothing."""
        for i, tensor in enumerate(tensors):
            for copies, call in ((sender, sender.send), (receiver, receiver.receive)):
                before = copies._piece
                copies._piece = before if numbers is None else numbers
                call(tensor.clone())
                then, copies._piece = copies._piece, copies._piece if numbers is None else before
                yield i
            numbers = None if numbers is None else then

    start, marks = sender._piece, (sender.begin(), receiver.begin())
    list(issue(sizes))
    marks = marks[0].copy(), marks[1].copy()
    list(issue([sent(2)] * between))
    for again in range(2):
        if not between or again:
            assert progress(sender, marks[0], True) == (None, ())
        for turn, i in enumerate(issue(sizes, start)):
            read = i + turn % 2
            if read < len(sizes):
                full = read == i and i + 1 < len(sizes)  # both begin with the first half
                assert progress(sender, marks[0], True) == (i + 1, (1,) if full else ())
                assert progress(receiver, marks[1], True) == (read, () if read == i else (0,))


def test_a_device_that_does_not_answer_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = edge(Memcpy())
    monkeypatch.setattr(Memcpy, "read", lambda driver, flags: None)
    assert sender.progress(sender.begin(), False) is None

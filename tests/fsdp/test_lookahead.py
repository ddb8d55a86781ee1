"""What is gathered ahead of the passes, with units that only say what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.fsdp.lookahead import Lookahead


class Asked:
    """A unit of one byte; `asked` are the names of those whose gather was started, oldest first."""

    contains_units = False

    def __init__(self, name: str, asked: list[str], full: bool = True) -> None:
        self.name, self.asked, self.full, self.full_bytes, self.room = name, asked, full, 1, True

    def prefetch(self) -> bool:
        self.asked += [self.name] * self.room
        return self.room


def made(count: int = 3, ahead: int = 1, free: bool = True) -> tuple[Lookahead, list[Any], list[str]]:
    asked: list[str] = []
    units: list[Any] = [Asked("abcdef"[i], asked) for i in range(count)]
    return Lookahead(units, ahead, free), units, asked


def forward(ahead: Lookahead, units: list[Any]) -> None:
    for unit in units:
        ahead.reach_forward(unit)
        ahead.leave_forward(unit)
    ahead.end_forward()


def backward(ahead: Lookahead, units: list[Any]) -> None:
    for unit in units:
        ahead.reach_backward(unit)
    ahead.end_backward()


def test_the_first_backward_is_expected_to_be_the_reverse_of_forward() -> None:
    ahead, units, asked = made()
    forward(ahead, units)
    assert asked == ["b", "c"]
    asked.clear()
    backward(ahead, units[::-1])
    assert asked == ["b", "a"]
    assert ahead.surprises == 0


def test_a_pass_is_expected_to_be_like_the_last_one() -> None:
    ahead, (a, b, c), asked = made()
    for _ in range(2):
        asked.clear()
        forward(ahead, [b, a, c])
        backward(ahead, [a, c, b])
    assert asked == ["a", "c", "c", "b"]
    assert ahead.order_of_use() == [b, a, c]


def test_a_pass_that_was_given_up_is_not_learnt_from() -> None:
    ahead, (a, b, c), asked = made()
    forward(ahead, [a, b, c])
    backward(ahead, [c, b, a])
    ahead.reach_forward(c)
    ahead.leave_forward(c)
    ahead.reach_backward(a)
    ahead.restart()
    asked.clear()
    forward(ahead, [a, b, c])
    backward(ahead, [c, b, a])
    assert asked == ["b", "c", "b", "a"]
    assert ahead.order_of_use() == [a, b, c]
    assert ahead.surprises == 2, "both in the passes that were given up"


def test_what_found_no_room_is_gathered_when_there_is_some() -> None:
    ahead, (a, b, c), asked = made(ahead=2)
    forward(ahead, [a, b, c])
    asked.clear()
    b.room = False
    ahead.reach_backward(c)
    assert asked == [], "in order: not a before b"
    b.room = True
    ahead.go_on_backward()
    assert asked == ["b", "a"]


@pytest.mark.parametrize(("free", "count"), [(True, 3), (False, 5)])
def test_as_much_is_gathered_before_a_forward_as_within(free: bool, count: int) -> None:
    """The first one, as many as are gathered ahead of it, and what needs no room."""
    ahead, units, _ = made(5, ahead=1, free=free)
    units[1].full = False
    assert ahead.to_gather_first(units) == units[:count]

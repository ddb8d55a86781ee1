"""Parameters that no rank has used since their gradients were forgotten: they have none, as without sharding.

Note: [Gradients that nobody has]
A unit is reduced whole, with zeros for what this rank has not used. If no rank has used a parameter, the sum is zeros,
too. An optimizer would take that for a gradient, decay the weight and go on with its momentum, where it leaves the
weight of an unsharded model alone. So `.grad` is None then.

A rank knows what it has used itself. Hosts tell each other the rest through the store of the process group, and wait
for each other, not for the device. A rank that *speaks* writes behind each backward how many reductions it has issued
so far, and what it has left out of each group from which reduction on. One that reads the gradient of a parameter that
it has left out waits until all others have written a number as large as its own.

A rank begins to speak when it leaves something out, or when it has heard that another rank speaks: within seconds, by
the thread that answers in `same_order.py`. Until then it is silent: it has used everything, and has written that once.
The store does not tell how far a silent rank is. So a reader waits for its device as long as it knows of a rank that
may be silent: behind the reductions all others have sent, and a silent rank that leaves something out writes that
before it sends.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.same_order import GIVE_UP
from hocket.runtime.queue import Passed

REMEMBERED = 32
"""How many changes of what it leaves out a rank tells of each group. It may be that many reductions ahead of others."""
LONGEST_PAUSE = 5e-3
"""Seconds between two looks at what others have written."""

Told = dict[str, list[tuple[int, list[int]]]]
"""By group: from which reduction on, and what."""


class Order(Protocol):
    """What is asked of the ranks of a model: `SameOrder`."""

    ranks: tuple[int, ...]
    rank: int
    speaks: bool

    @property
    def store(self) -> dist.Store: ...
    def speak(self) -> None: ...


class Unused:
    """What the ranks of one model leave out. See Note: [Gradients that nobody has]."""

    def __init__(self, order: Order | None, model: str, device: torch.device) -> None:
        self._order, self._device = order, device
        self._key = f"unused{model}"
        self._mine: dict[str, deque[tuple[int, list[int]]]] = {}  # as `Told`
        self._sent = 0  # reductions that were issued
        self._complete = 0  # of those, up to the last backward that is over
        self._written = self._speaks = self._all_speak = False

    def about_to_send(self, group: ParamGroup, written: Sequence[bool]) -> None:
        """A reduction is issued next, to which this rank contributes gradients of the members that are `written`."""
        left_out = group.uses.send(written)
        if self._order is None:
            return
        self._sent += 1
        told = self._mine.get(_name(group))
        if (told[-1][1] if told else []) != left_out:
            changes = self._mine.setdefault(_name(group), deque(maxlen=REMEMBERED))
            changes.append((group.uses.sent, left_out))
            if not self._speaks:
                self._speaks = True
                self._order.speak()
                self._written = False
        if not self._written:
            self._write()

    def all_sent(self) -> None:
        """A backward is over, or what was put off has been sent."""
        if self._order is None or self._complete == self._sent:
            return
        self._complete = self._sent
        self._speaks |= self._order.speaks
        if self._speaks:
            self._write()

    def _write(self) -> None:
        assert self._order is not None
        said = [self._complete if self._speaks else None, {name: list(told) for name, told in self._mine.items()}]
        self._order.store.set(f"{self._key} {self._order.rank}", json.dumps(said))
        self._written = True

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find out which members of some groups nobody has used. The caller's work is behind their reductions.

        Raises: ValueError while a CUDA graph is recorded, if this is not as it was before; and if a rank stays behind.
        """
        asking = [group for group in groups if not group.uses.known]
        if self._order is None or not asking:
            for group in asking:
                group.uses.answer(group.uses.left_out)
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _as_before(asking)
            return
        others = [rank for rank in self._order.ranks if rank != self._order.rank]
        told = self._hear(others)
        for group in asking:
            nobody = set(group.uses.left_out)
            for rank in group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else others:
                if rank in told:
                    nobody &= _at(group.uses.sent, told[rank].get(_name(group), []))
            group.uses.answer(nobody)

    def _hear(self, others: Sequence[int]) -> dict[int, Told]:
        """What other ranks have left out so far, of all reductions that this rank has issued."""
        assert self._order is not None
        self.all_sent()
        if not self._all_speak:
            passed = Passed(self._device)
            passed.note()
            passed.wait()  # then all ranks have sent, and written
        told, speak, late = dict[int, Told](), True, list(others)
        start, pause = time.monotonic(), 1e-4
        while True:
            values = self._order.store.multi_get([f"{self._key} {rank}" for rank in late])
            said = {rank: json.loads(value) for rank, value in zip(late, values, strict=True)}
            told |= {rank: left_out for rank, (_, left_out) in said.items()}
            speak &= all(complete is not None for complete, _ in said.values())
            late = [rank for rank, (complete, _) in said.items() if complete is not None and complete < self._sent]
            if not late:
                self._all_speak = speak
                return told
            if time.monotonic() - start > GIVE_UP.total_seconds():
                raise ValueError(
                    f"rank {self._order.rank} reads gradients, and ranks {late} have not ended that backward in "
                    f"{GIVE_UP}: all ranks run the same units in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _name(group: ParamGroup) -> str:
    return group.members[0].name


def _at(sent: int, changes: Sequence[tuple[int, list[int]]]) -> set[int]:
    """What a rank had left out with reduction number `sent`."""
    found = [left_out for since, left_out in changes if since <= sent]
    assert found or len(changes) < REMEMBERED, f"a rank is {REMEMBERED} changes ahead"
    return set(found[-1]) if found else set()


def _as_before(groups: Sequence[ParamGroup]) -> None:
    for group in groups:
        if not group.uses.answer_again():
            raise ValueError(
                f"parameters of the unit of {_name(group)} are unused, and other ones than in the step before, while a "
                f"CUDA graph is recorded, in which ranks can't tell each other: run the step once before"
            )

"""Parameters that no rank has used since their gradients were forgotten: they have none, as without sharding.

Note: [Gradients that nobody has]
A unit is reduced whole, with zeros for what this rank has not used. If no rank has used a parameter, the sum is zeros,
too. An optimizer would take that for a gradient, decay the weight and go on with its momentum, where it leaves the
weight of an unsharded model alone. So `.grad` is None then.

A rank knows what it has used itself. One that leaves out other parameters than the last time writes that down in the
store of the process group, before it sends. One that reads the gradient of a parameter that it has left out looks there
what the others leave out, behind the reductions: then all others have sent, and so have written. Who uses everything
writes once and never looks, and its host never waits for the device.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.queue import Passed

REMEMBERED = 32
"""How many changes of what it leaves out a rank tells of each group. It may be that many reductions ahead of others."""


class Order(Protocol):
    """What is asked of the ranks of a model: `SameOrder`."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def store(self) -> dist.Store: ...


class Unused:
    """What the ranks of one model leave out. See Note: [Gradients that nobody has]."""

    def __init__(self, order: Order | None, model: str, device: torch.device) -> None:
        self._order, self._device = order, device
        self._key = f"unused{model}"
        self._mine: dict[str, deque[tuple[int, list[int]]]] = {}  # by group: from which reduction on, and what
        self._told = False

    def about_to_send(self, group: ParamGroup, written: Sequence[bool]) -> None:
        """A reduction is issued next, to which this rank contributes gradients of the members that are `written`."""
        left_out = group.uses.send(written)
        if self._order is None or (not left_out and not self._mine and self._told):
            return
        told = self._mine.get(_name(group))
        if (told[-1][1] if told else []) != left_out:
            changes = self._mine.setdefault(_name(group), deque(maxlen=REMEMBERED))
            changes.append((group.uses.sent, left_out))
            self._told = False
        if not self._told:
            found = {name: list(changes) for name, changes in self._mine.items()}
            self._order.store.set(f"{self._key} {self._order.rank}", json.dumps(found))
            self._told = True

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find out which members of some groups nobody has used. The caller's work is behind their reductions.

        Raises: ValueError while a CUDA graph is recorded, if this is not as it was before.
        """
        asking = [group for group in groups if not group.uses.known]
        if self._order is None or not asking:
            for group in asking:
                group.uses.answer(group.uses.left_out)
            return
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                _as_before(asking)
                return
            passed = Passed(self._device)
            passed.note()
            passed.wait()  # then all ranks have sent
        others = [rank for rank in self._order.ranks if rank != self._order.rank]
        values = self._order.store.multi_get([f"{self._key} {rank}" for rank in others])
        told = {rank: json.loads(value) for rank, value in zip(others, values, strict=True)}
        for group in asking:
            nobody = set(group.uses.left_out)
            for rank in group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else others:
                if rank in told:
                    nobody &= _at(group.uses.sent, told[rank].get(_name(group), []))
            group.uses.answer(nobody)


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

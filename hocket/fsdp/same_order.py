"""Whether all ranks issue the same collectives of sharded models, in the same order.

Note: [Ranks that go apart]
A collective meets the one that other ranks issue next, whatever they mean by it. A rank that leaves a unit out, or
whose loss does not reach it, would get another unit's weights, add up another unit's gradients, and wait forever in the
end. So each rank expects what it issued the last time after the same collectives. Ranks expect alike as long as they
have issued alike. Where they part, at least one issues what it has not expected.

That one counts itself in the store of the default group, under the number of the collective and all that came before.
Before it waits for any collective, it looks whether everybody is counted there. In a first step everybody is. If some
are not, it asks. A thread on each rank answers, with the last collectives there, since the main thread waits for one
that never comes. The first difference is the error.

A step like those before it asks nobody, and pays a few look-ups in a table per collective.

Note: [Gradients that nobody has]
A unit is reduced whole, with zeros for what this rank has not used. If no rank has used a parameter, the sum is zeros,
too. An optimizer would take that for a gradient, decay the weight and go on with its momentum, where it leaves the
weight of an unsharded model alone. So `.grad` is None then.

A rank knows what it has used itself. After each backward it writes what it has left out to the store of the process
group. Who reads the gradient of a parameter that it has left out waits until all others have written. So hosts wait for
each other, and not for the device.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.fsdp.dtensors import ranks_of
from hocket.fsdp.param_group import ParamGroup

ASK_AFTER = 1.0
"""Seconds without everybody's count until a rank asks; and between looks of the thread that answers."""
GIVE_UP = dist.constants.default_pg_timeout
"""How long a rank waits for ranks that come later: as long as a collective would."""
TAIL = 512
"""How many collectives an answer tells."""

_LONG = 32
"""Of so many collectives each predicts the next one. Microbatches look alike: that tells where in a step they are."""
_MOST = 1 << 17
"""How many are remembered."""


class SameOrder:
    """The collectives of all models that are sharded over the same ranks. See Note: [Ranks that go apart]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks, self.rank, self.store = tuple(ranks), dist.get_rank(), store
        self.models = self.count = 0
        self.asked = 0
        """How often something was issued that was not expected."""
        self._past, self._next = list[int](), 0  # where in the past the next collective is expected
        self._followed: dict[int, int] = {}  # the last place behind some collectives, by their hash
        self._history = 0  # of all so far, as one number
        self._recent: deque[str] = deque(maxlen=TAIL)
        self._open = ""  # the key under which this rank has counted itself last, until all have

    def note(self, what: str) -> None:
        """A collective is about to be issued."""
        item = zlib.crc32(what.encode())
        self._history = hash((self._history, item))
        self._recent.append(what)
        self.count += 1
        if not self._expects(item):
            self.asked += 1
            self._open = f"{self.count} {self._history}"
            self.store.add(self._open, 1)

    def _expects(self, item: int) -> bool:
        """Whether `item` is what followed the last time. From where it is not, the longest memory goes on."""
        if len(self._past) >= _MOST:
            self._past, self._next, self._followed = [], 0, {}
        past, place = self._past, self._next
        expected = place < len(past) and past[place] == item
        past.append(item)
        last, alone = hash(tuple(past[-_LONG:])), hash((item,))
        self._next = place + 1 if expected else self._followed.get(last, self._followed.get(alone, len(past)))
        self._followed[last] = self._followed[alone] = len(past)
        return expected

    def settle(self) -> None:
        """Before this rank waits for a collective: see to it that all ranks have issued the same ones.

        Raises: ValueError naming the first that differs.
        """
        if not self._open:
            return
        start, pause, waited = time.monotonic(), 1e-4, 0.0
        while int(self.store.get(self._open)) < len(self.ranks):  # of the last one, and so of all before
            waited = time.monotonic() - start
            if waited > ASK_AFTER:
                self.store.set("ask", "")
                self._compare()
            if waited > GIVE_UP.total_seconds():
                raise ValueError(
                    f"rank {self.rank} is about to {self._recent[-1]}, and other ranks have not come there in "
                    f"{GIVE_UP}: all ranks run the same units in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._open = ""
        if waited > ASK_AFTER:
            self.store.delete_key("ask")

    def answer(self) -> None:
        """Tell what was issued last, if somebody asks. Called by a thread, while nothing is issued."""
        if self.store.check(["ask"]):
            self.store.set(f"answer {self.rank}", json.dumps([self.count, list(self._recent)]))

    def _compare(self) -> None:
        mine = self.count, list(self._recent)
        for other in self.ranks:
            if other == self.rank or not self.store.check([f"answer {other}"]):
                continue
            count, recent = json.loads(self.store.get(f"answer {other}"))
            first = max(mine[0] - len(mine[1]), count - len(recent))  # of those that both remember
            for n in range(first, min(mine[0], count)):
                here, there = mine[1][n - mine[0]], recent[n - count]
                if here != there:
                    raise ValueError(
                        f"ranks have gone apart: where rank {self.rank} is about to {here}, rank {other} is about to "
                        f"{there}. All ranks run the same units in the same order, forward and backward, and their "
                        f"losses reach the same units: one that only some ranks need can take part in the others' "
                        f"loss as 0 * output.sum()"
                    )


SLOTS = 32
"""How many backwards' keys a rank has in the store. It may be that many ahead of a rank that reads."""
LONGEST_PAUSE = 5e-3
"""Seconds between two looks at what others have written."""


class UnusedGradients:
    """What the ranks of one model leave out. See Note: [Gradients that nobody has]."""

    def __init__(self, order: SameOrder | None, model: str) -> None:
        self._order, self._key = order, f"unused{model}"
        self._sent = False  # whether reductions were issued since this rank has written last
        self._rounds = 0  # how often it has written
        self._left_out: dict[str, list[int]] = {}  # by group

    def about_to_send(self, group: ParamGroup, written: Sequence[bool]) -> None:
        """A reduction is issued next, to which this rank contributes gradients of the members that are `written`."""
        self._left_out[group.members[0].name] = group.usage.send(written)
        self._sent = True

    def all_sent(self) -> None:
        """A backward is over, or what was put off has been sent: write what is left out."""
        if self._order is not None and self._sent:
            self._sent, self._rounds = False, self._rounds + 1
            said = {name: left_out for name, left_out in self._left_out.items() if left_out}
            self._order.store.set(self._place_of(self._order.rank), json.dumps([self._rounds, said]))

    def _place_of(self, rank: int) -> str:
        return f"{self._key} {rank} {self._rounds % SLOTS}"

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find out which members of some groups nobody has used. Raises ValueError if a rank stays behind."""
        asking = [group for group in groups if not group.usage.known]
        if self._order is None or not asking:
            for group in asking:
                group.usage.answer(group.usage.left_out)
            return
        self.all_sent()
        others = [rank for rank in self._order.ranks if rank != self._order.rank]
        told = self._hear(self._order, others)
        for group in asking:
            nobody = set(group.usage.left_out)
            for rank in group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else others:
                if rank in told:
                    nobody &= set(told[rank].get(group.members[0].name, ()))
            group.usage.answer(nobody)

    def _hear(self, order: SameOrder, others: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """What other ranks have left out, by group, up to the end of this rank's last backward."""
        told, late = dict[int, dict[str, list[int]]](), list(others)
        start, pause = time.monotonic(), 1e-4
        while late:
            places = [self._place_of(rank) for rank in late]
            values = order.store.multi_get(places) if order.store.check(places) else ()
            for rank, (number, left_out) in zip(late, map(json.loads, values), strict=bool(values)):
                assert number <= self._rounds, f"rank {rank} is {SLOTS} backwards ahead"
                if number == self._rounds:
                    told[rank] = left_out
            late = [rank for rank in others if rank not in told]
            if time.monotonic() - start > GIVE_UP.total_seconds():
                raise ValueError(
                    f"rank {order.rank} reads gradients, and ranks {late} have not ended that backward in {GIVE_UP}: "
                    f"all ranks run the same units in the same order"
                )
            if late:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return told


_orders: dict[tuple[int, ...], SameOrder] = {}
_world: tuple[int, Any] = 0, None  # how many default groups there were, and the last
_watched: WeakSet[SameOrder] = WeakSet()


def order_over(mesh: DeviceMesh | None) -> SameOrder | None:
    """The order of collectives over the ranks of a mesh; None if that is one rank, which has nobody to differ from."""
    global _world
    if not dist.is_initialized():
        return None
    ranks = tuple(sorted(ranks_of(mesh)))
    if len(ranks) < 2:
        return None
    if dist.group.WORLD is not _world[1]:
        if not _world[0]:
            threading.Thread(target=_watch, name="hocket order", daemon=True).start()
        _world = _world[0] + 1, dist.group.WORLD
        _orders.clear()
    if ranks not in _orders:
        name = f"hocket order {_world[0]} {ranks[0]} {len(ranks)} {zlib.crc32(repr(ranks).encode())}"
        _orders[ranks] = SameOrder(ranks, dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
        _watched.add(_orders[ranks])
    return _orders[ranks]


def _watch() -> None:
    """Answer for ranks that wait. A store that is gone has nobody who asks."""
    counts: dict[int, int] = {}
    while True:
        time.sleep(ASK_AFTER)
        for order in list(_watched):
            with suppress(RuntimeError):
                if counts.get(id(order)) == order.count:
                    order.answer()
            counts[id(order)] = order.count

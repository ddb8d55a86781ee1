"""Checks that all ranks issue the same collectives of sharded models, in the same order.

Note: [Detecting diverged ranks]
Collectives match by order alone. A rank that skips a unit, or whose loss does not reach it, would receive another
unit's weights or gradients, and finally hang. So each rank expects what it did a period before. Ranks with equal
histories expect the same, so where they diverge at least one issues an unexpected collective. That rank increments a
counter in the default group's store, keyed by the collective's number and history. Before it waits for any collective,
it checks that all ranks are counted there, as in a first step. An expected collective costs a comparison and no
communication. Where a rank issues nothing for a second, a thread writes its last collectives to the store, since main
threads may hang. The rank that waits compares them with its own, and raises an error that names the first difference.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.fsdp.dtensors import ranks_of
from hocket.runtime.world import IDLE, waiting

LONGEST, TOLD, ALIKE = 1 << 13, 512, 32
"""Collectives that a rank remembers, that it tells, and by which it finds a period: they tell microbatches apart."""


class SameOrder:
    """The collectives of all models sharded over the same ranks. See Note: [Detecting diverged ranks]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store, number: int = 0) -> None:
        """`number` tells it from those of default groups before."""
        self.ranks, self.rank, self.store, self.number = tuple(ranks), dist.get_rank(), store, number
        self.world = dist.group.WORLD
        self.models = self.count = self.asked = self._history = 0
        self._past: list[str] = []  # the last ones
        self._period = 0  # the next one is expected to be that of so many before; 0: unknown
        self._open = ""  # key that the last rank sets where all were asked

    def note(self, what: str) -> None:
        """The next collective is issued."""
        self.count += 1  # before the list grows: `tell` compares it
        past, period = self._past, self._period
        expected = 0 < period <= len(past) and past[-period] == what
        past.append(what)
        self._history = hash((self._history, zlib.crc32(what.encode())))
        if not expected:
            self._period = self._last_time(ALIKE) or self._last_time(1)
            self.asked += 1
            self._open = f"all {self.count} {self._history}"
            if self.store.add(f"{self.count} {self._history}", 1) == len(self.ranks):
                self.store.set(self._open, "")
        if len(past) > 2 * LONGEST:
            del past[:LONGEST]

    def _last_time(self, length: int) -> int:
        """How many collectives ago the last `length` ones came in the same order; 0: not in memory."""
        past, tail = self._past, self._past[-length:]
        ends = (at for at in range(len(past) - 1, len(tail) - 1, -1) if past[at - 1] == tail[-1])
        return next((len(past) - at for at in ends if past[at - len(tail) : at] == tail), 0)

    def settle(self) -> None:
        """Before waiting for a collective: check that all ranks have issued the same ones.

        Raises: ValueError naming the first difference.
        """
        if not self._open:
            return
        late = f"rank {self.rank} is about to {self._past[-1]}, and other ranks have not come there"
        for _ in waiting(lambda: self.store.check([self._open]), lambda: late):  # covers all earlier ones
            for other in self.ranks:
                theirs = json.loads(self.store.get(f"{other}")) if self.store.check([f"{other}"]) else {}
                for number, what in self._last().items():
                    if theirs.get(number, what) != what:
                        raise ValueError(
                            f"ranks have gone apart: where rank {self.rank} is about to {what}, rank {other} is about "
                            f"to {theirs[number]}. All ranks run the same units in the same order, forward and "
                            f"backward, and their losses reach the same units: one that only some ranks need can take "
                            f"part in the others' loss as 0 * output.sum()"
                        )
        self._open = ""

    def _last(self) -> dict[str, str]:
        """Number -> collective, of the last ones."""
        past = self._past[-TOLD:]
        return {str(n): what for n, what in enumerate(past, self.count - len(past))}

    def tell(self) -> None:
        """In a thread: tell the other ranks the last collectives where none was issued for `IDLE` seconds."""
        told = 0
        with suppress(RuntimeError):  # the default group is gone
            while dist.group.WORLD is self.world:
                seen = self.count
                time.sleep(IDLE)
                last = self._last()
                if told != seen == self.count:  # the main thread has not gone on meanwhile
                    self.store.set(f"{self.rank}", json.dumps(last))
                    told = seen


_orders: dict[tuple[int, ...], SameOrder] = {}


def order_over(mesh: DeviceMesh | None) -> SameOrder | None:
    """The order of collectives over the ranks of a mesh; None for a single rank."""
    ranks = tuple(sorted(ranks_of(mesh)))
    if len(ranks) < 2:
        return None
    known = _orders.get(ranks)
    if known is None or known.world is not dist.group.WORLD:
        number = 0 if known is None else known.number + 1  # a store may hold the keys of a default group before
        name = f"hocket order {number} {ranks[0]} {len(ranks)} {zlib.crc32(repr(ranks).encode())}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        known = _orders[ranks] = SameOrder(ranks, store, number)
        threading.Thread(target=known.tell, name="hocket order", daemon=True).start()
    return known

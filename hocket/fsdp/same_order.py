"""Checks that all ranks issue the same collectives of sharded models, in the same order.

Note: [Detecting diverged ranks]
Collectives match by order alone. A rank that skips a unit, or whose loss does not reach it, would receive another
unit's weights or gradients, and finally hang. So each rank expects what it did a period before. Ranks with equal
histories expect the same, so where they diverge at least one issues an unexpected collective. That rank increments a
counter in the default group's store, keyed by the collective's number and history. Before it waits for any collective,
it checks that all ranks are counted there, as in a first step. An expected collective costs a comparison and no
communication. Where a rank issues nothing for a second, a thread writes its last collectives to the store, since main
threads may hang. The rank that waits compares them with its own, and raises an error that names the first difference.

Note: [Gradients that no rank has]
A unit is reduced whole, with zeros for parameters unused on this rank. If no rank has used a parameter, an optimizer
would take the zeros for a gradient and apply weight decay and momentum, unlike without sharding. So `.grad` is None
then. After each backward a rank writes its unused parameters to the store. Reading the gradient of a parameter unused
here waits for the other ranks' entries: hosts wait, devices do not.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.fsdp.dtensors import ranks_of
from hocket.fsdp.param_group import ParamGroup

IDLE = 1.0
"""Seconds after which a rank that issues nothing tells the others what it has issued."""
GIVE_UP = dist.constants.default_pg_timeout
"""How long a rank waits for late ranks: the timeout of a collective."""
LONGEST, TOLD, ALIKE = 1 << 13, 512, 32
"""Collectives that a rank remembers, that it tells, and by which it finds a period: they tell microbatches apart."""
LEAD = 128
"""Backwards whose unused parameters stay in the store: as far as a rank may be ahead of a reader."""


def _waiting(store: dist.Store, keys: list[str], late: Callable[[], str]) -> Iterator[None]:
    """Wait until all keys are in the store; yields once in `IDLE` seconds. ValueError, with what is `late`, at last."""
    start = yielded = time.monotonic()
    pause = 1e-4
    while not store.check(keys):
        now = time.monotonic()
        if now - start > GIVE_UP.total_seconds():
            raise ValueError(f"{late()} in {GIVE_UP}: all ranks run the same units in the same order")
        if now - yielded > IDLE:
            yielded = now
            yield
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)


class SameOrder:
    """The collectives of all models sharded over the same ranks. See Note: [Detecting diverged ranks]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks, self.rank, self.store = tuple(ranks), dist.get_rank(), store
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
        for _ in _waiting(self.store, [self._open], lambda: late):  # covers all earlier ones
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
        told = seen = 0
        with suppress(RuntimeError):  # the default group is gone
            while _orders.get(self.ranks) is self:
                if told != seen == self.count:
                    last = json.dumps(self._last())
                    if seen == self.count:  # else the main thread has gone on meanwhile
                        self.store.set(f"{self.rank}", last)
                        told = seen
                seen = self.count
                time.sleep(IDLE)


_orders: dict[tuple[int, ...], SameOrder] = {}
_world: tuple[int, Any] = 0, None  # (number of default groups so far, the last one)


def order_over(mesh: DeviceMesh | None) -> SameOrder | None:
    """The order of collectives over the ranks of a mesh; None for a single rank."""
    global _world
    ranks = tuple(sorted(ranks_of(mesh)))
    if len(ranks) < 2 or not dist.is_initialized():
        return None
    if dist.group.WORLD is not _world[1]:
        _world = _world[0] + 1, dist.group.WORLD
        _orders.clear()
    if ranks not in _orders:
        name = f"hocket order {_world[0]} {ranks[0]} {len(ranks)} {zlib.crc32(repr(ranks).encode())}"
        order = SameOrder(ranks, dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
        _orders[ranks] = order
        threading.Thread(target=order.tell, name="hocket order", daemon=True).start()
    return _orders[ranks]


class UnusedGradients:
    """Parameters unused on the ranks of one model. See Note: [Gradients that no rank has]."""

    def __init__(self, order: SameOrder | None, model: str, groups: Sequence[ParamGroup]) -> None:
        self._order, self._key, self._groups = order, f"unused{model}", groups
        self._sent = False  # whether reductions were issued since the last write
        self._rounds = 0  # writes so far

    def about_to_send(self, group: ParamGroup, written: Sequence[bool]) -> None:
        """A reduction is issued with gradients of the members in `written`."""
        group.usage.send(written)
        self._sent = True

    def all_sent(self) -> None:
        """After a backward or deferred reductions: write the unused members."""
        if self._order is not None and self._sent:
            self._sent, self._rounds = False, self._rounds + 1
            said = {g.members[0].name: sorted(g.usage.left_out) for g in self._groups if g.usage.left_out}
            self._order.store.set(self._entry(self._order.rank), json.dumps(said))
            self._order.store.delete_key(self._entry(self._order.rank, before=LEAD))

    def _entry(self, rank: int, before: int = 0) -> str:
        return f"{self._key} {rank} {self._rounds - before}"

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find the members that no rank has used. Raises ValueError if a rank does not arrive."""
        asking = [group for group in groups if group.usage.left_out and group.usage.by_none is None]
        heard = dict[int, dict[str, list[int]]]()
        if asking and self._order is not None:
            self.all_sent()
            heard = self._hear(self._order)
        for group in asking:
            holders = group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else heard
            theirs = [heard[rank].get(group.members[0].name, ()) for rank in holders if rank in heard]
            group.usage.by_none = group.usage.left_out.intersection(*theirs)

    def _hear(self, order: SameOrder) -> dict[int, dict[str, list[int]]]:
        """Unused members of other ranks by group, in this rank's last backward."""
        entries = {rank: self._entry(rank) for rank in order.ranks if rank != order.rank}

        def late() -> str:
            missing = [rank for rank, entry in entries.items() if not order.store.check([entry])]
            return f"rank {order.rank} reads gradients, and ranks {missing} have not ended that backward"

        for _ in _waiting(order.store, list(entries.values()), late):
            pass
        return dict(zip(entries, map(json.loads, order.store.multi_get(list(entries.values()))), strict=True))

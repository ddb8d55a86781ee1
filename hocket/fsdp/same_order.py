"""Checks that all ranks issue the same collectives of sharded models, in the same order.

Note: [Detecting diverged ranks]
Collectives match by order alone. A rank that skips a unit, or whose loss does not reach it, would receive another
unit's weights or gradients, and finally hang. So each rank expects what it did a period before. Ranks with equal
histories expect the same, so where they diverge at least one issues an unexpected collective. That rank increments a
counter in the default group's store, keyed by the collective's number and history. Before it waits for any collective,
it checks that all ranks are counted there, as in a first step. If not, it asks for the other ranks' recent collectives,
which a thread on each rank answers, since main threads may hang, and raises an error that names the first difference.
An expected collective costs a comparison and no communication.

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

ASK_AFTER = 1.0
"""Seconds to wait for all counts before asking; also the answering thread's period."""
GIVE_UP = dist.constants.default_pg_timeout
"""How long a rank waits for late ranks: the timeout of a collective."""
LONGEST = 1 << 13
"""Collectives that a rank remembers, at least: a longer period is not found."""
TOLD = 512
"""Collectives that it tells other ranks."""
ALIKE = 32
"""Collectives by which a period is found: they tell microbatches of a step apart."""


def _waiting(said: Callable[[], str], longest: float) -> Iterator[float]:
    """Seconds waited so far, after growing pauses. Raises ValueError, with what `said` returns, after too long."""
    start, pause = time.monotonic(), 1e-4
    while (waited := time.monotonic() - start) <= GIVE_UP.total_seconds():
        yield waited
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise ValueError(f"{said()} in {GIVE_UP}: all ranks run the same units in the same order")


class SameOrder:
    """The collectives of all models sharded over the same ranks. See Note: [Detecting diverged ranks]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks, self.rank, self.store = tuple(ranks), dist.get_rank(), store
        self.models = self.count = self.asked = 0
        self._past: list[str] = []  # the last ones
        self._period = 0  # the next one is expected to be that of so many before; 0: unknown
        self._history = 0  # hash of all so far
        self._open = ""  # key of an incomplete count

    def note(self, what: str) -> None:
        """The next collective is issued."""
        past, period = self._past, self._period
        expected = 0 < period <= len(past) and past[-period] == what
        past.append(what)
        self.count += 1
        self._history = hash((self._history, zlib.crc32(what.encode())))
        if not expected:
            self._period = self._last_time(ALIKE) or self._last_time(1)
            self.asked += 1
            self._open = f"{self.count} {self._history}"
            self.store.add(self._open, 1)
        if len(past) > 2 * LONGEST:
            del past[:LONGEST]

    def _last_time(self, length: int) -> int:
        """How many collectives ago the last `length` ones came in the same order; 0: not in memory."""
        past, end = self._past, len(self._past)
        tail = past[-length:]
        for at in range(end - 1, len(tail) - 1, -1):
            if past[at - 1] == tail[-1] and past[at - len(tail) : at] == tail:
                return end - at
        return 0

    def settle(self) -> None:
        """Before waiting for a collective: check that all ranks have issued the same ones.

        Raises: ValueError naming the first difference.
        """
        if not self._open:
            return
        waited = 0.0
        late = f"rank {self.rank} is about to {self._past[-1]}, and other ranks have not come there"
        for waited in _waiting(lambda: late, 0.05):
            if int(self.store.get(self._open)) >= len(self.ranks):  # covers all earlier ones
                break
            if waited > ASK_AFTER:
                self.store.set("ask", "")
                self._compare()
        self._open = ""
        if waited > ASK_AFTER:
            self.store.delete_key("ask")

    def answer(self) -> None:
        """Answer other ranks, in a thread, while nothing is issued."""
        if self.store.check(["ask"]):
            self.store.set(f"answer {self.rank}", json.dumps([self.count, self._past[-TOLD:]]))

    def _compare(self) -> None:
        for other in self.ranks:
            if other == self.rank or not self.store.check([f"answer {other}"]):
                continue
            count, theirs = json.loads(self.store.get(f"answer {other}"))
            mine = self._past[-TOLD:]
            first = max(self.count - len(mine), count - len(theirs))  # the first that both remember
            both = zip(mine[first - self.count :], theirs[first - count :], strict=False)
            for here, there in both if first < min(self.count, count) else ():
                if here != there:
                    raise ValueError(
                        f"ranks have gone apart: where rank {self.rank} is about to {here}, rank {other} is about to "
                        f"{there}. All ranks run the same units in the same order, forward and backward, and their "
                        f"losses reach the same units: one that only some ranks need can take part in the others' "
                        f"loss as 0 * output.sum()"
                    )


_orders: dict[tuple[int, ...], SameOrder] = {}
_world: tuple[int, Any] = 0, None  # (number of default groups so far, the last one)


def order_over(mesh: DeviceMesh | None) -> SameOrder | None:
    """The order of collectives over the ranks of a mesh; None for a single rank."""
    global _world
    if not dist.is_initialized():
        return None
    ranks = tuple(sorted(ranks_of(mesh)))
    if len(ranks) < 2:
        return None
    if dist.group.WORLD is not _world[1]:
        if not _world[0]:
            threading.Thread(target=_answer, name="hocket order", daemon=True).start()
        _world = _world[0] + 1, dist.group.WORLD
        _orders.clear()
    if ranks not in _orders:
        name = f"hocket order {_world[0]} {ranks[0]} {len(ranks)} {zlib.crc32(repr(ranks).encode())}"
        _orders[ranks] = SameOrder(ranks, dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
    return _orders[ranks]


def _answer() -> None:
    counts: dict[SameOrder, int] = {}
    while True:
        time.sleep(ASK_AFTER)
        orders = list(_orders.values())
        for order in orders:
            with suppress(RuntimeError):
                if counts.get(order) == order.count:
                    order.answer()
        counts = {order: order.count for order in orders}


SLOTS = 32
"""Backwards per rank in the store: the lead that a rank may have over a reader."""
LONGEST_PAUSE = 5e-3


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
            self._order.store.set(self._place_of(self._order.rank), json.dumps([self._rounds, said]))

    def _place_of(self, rank: int) -> str:
        return f"{self._key} {rank} {self._rounds % SLOTS}"

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find the members that no rank has used. Raises ValueError if a rank does not arrive."""
        asking = [group for group in groups if group.usage.left_out and group.usage.by_none is None]
        heard = dict[int, dict[str, list[int]]]()
        if asking and self._order is not None:
            self.all_sent()
            heard = self._hear(self._order, [rank for rank in self._order.ranks if rank != self._order.rank])
        for group in asking:
            holders = group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else heard
            theirs = [heard[rank].get(group.members[0].name, ()) for rank in holders if rank in heard]
            group.usage.by_none = group.usage.left_out.intersection(*theirs)

    def _hear(self, order: SameOrder, others: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """Unused members of other ranks by group, up to this rank's last backward."""
        heard, late = dict[int, dict[str, list[int]]](), list(others)
        said = f"rank {order.rank} reads gradients, and ranks {{}} have not ended that backward"
        for _ in _waiting(lambda: said.format([rank for rank in others if rank not in heard]), LONGEST_PAUSE):
            places = [self._place_of(rank) for rank in late]
            values = order.store.multi_get(places) if order.store.check(places) else ()
            for rank, (number, left_out) in zip(late, map(json.loads, values), strict=bool(values)):
                assert number <= self._rounds, f"rank {rank} is {SLOTS} backwards ahead"
                if number == self._rounds:
                    heard[rank] = left_out
            late = [rank for rank in others if rank not in heard]
            if not late:
                break
        return heard

"""Checks that all ranks issue the same collectives of sharded models, in the same order.

Note: [Detecting diverged ranks]
Collectives match by order alone. A rank that skips a unit, or whose loss does not reach it, would receive another
unit's weights or gradients, and finally hang. So each rank predicts its next collective from its history. Ranks with
equal histories predict alike, so where they diverge at least one issues an unpredicted collective. That rank increments
a counter in the default group's store, keyed by the collective's number and history. Before it waits for any
collective, it checks that all ranks are counted there, as in a first step. If not, it asks for the other ranks' recent
collectives, which a thread on each rank answers, since main threads may hang, and raises an error that names the first
difference. Predicted steps cost a few dict look-ups per collective and no communication.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.fsdp.dtensors import ranks_of
from hocket.fsdp.param_group import ParamGroup

ASK_AFTER = 1.0
"""Seconds to wait for all counts before asking; also the answering thread's period."""
GIVE_UP = dist.constants.default_pg_timeout
"""How long a rank waits for late ranks: the timeout of a collective."""
TAIL = 512

_LONG = 32
"""Length of the history that predicts the next collective: it tells microbatches of a step apart."""
_MOST = 1 << 17


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
        self.models = self.count = 0
        self.asked = 0
        self._past, self._next = list[int](), 0  # position in the past of the predicted collective
        self._followed: dict[int, int] = {}  # hash of some collectives -> position after them
        self._history = 0  # hash of all so far
        self._recent: deque[str] = deque(maxlen=TAIL)
        self._open = ""  # key of an incomplete count

    def note(self, what: str) -> None:
        item = zlib.crc32(what.encode())
        self._history = hash((self._history, item))
        self._recent.append(what)
        self.count += 1
        if not self._expects(item):
            self.asked += 1
            self._open = f"{self.count} {self._history}"
            self.store.add(self._open, 1)

    def _expects(self, item: int) -> bool:
        """Whether `item` was predicted. If not, the longest match in the history continues."""
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
        """Before waiting for a collective: check that all ranks have issued the same ones.

        Raises: ValueError naming the first difference.
        """
        if not self._open:
            return
        waited = 0.0
        late = f"rank {self.rank} is about to {self._recent[-1]}, and other ranks have not come there"
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
            self.store.set(f"answer {self.rank}", json.dumps([self.count, list(self._recent)]))

    def _compare(self) -> None:
        mine = self.count, list(self._recent)
        for other in self.ranks:
            if other == self.rank or not self.store.check([f"answer {other}"]):
                continue
            count, recent = json.loads(self.store.get(f"answer {other}"))
            first = max(mine[0] - len(mine[1]), count - len(recent))  # the first that both remember
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
"""Backwards per rank in the store: the lead that a rank may have over a reader."""
LONGEST_PAUSE = 5e-3


class UnusedGradients:
    """Parameters unused on the ranks of one model. See Note: [Gradients that no rank has]."""

    def __init__(self, order: SameOrder | None, model: str) -> None:
        self._order, self._key = order, f"unused{model}"
        self._sent = False  # whether reductions were issued since the last write
        self._rounds = 0  # writes so far
        self._left_out: dict[str, list[int]] = {}  # by group

    def about_to_send(self, group: ParamGroup, written: Sequence[bool]) -> None:
        """A reduction is issued with gradients of the members in `written`."""
        self._left_out[group.members[0].name] = group.usage.send(written)
        self._sent = True

    def all_sent(self) -> None:
        """After a backward or deferred reductions: write the unused members."""
        if self._order is not None and self._sent:
            self._sent, self._rounds = False, self._rounds + 1
            said = {name: left_out for name, left_out in self._left_out.items() if left_out}
            self._order.store.set(self._place_of(self._order.rank), json.dumps([self._rounds, said]))

    def _place_of(self, rank: int) -> str:
        return f"{self._key} {rank} {self._rounds % SLOTS}"

    def find(self, groups: Sequence[ParamGroup]) -> None:
        """Find the members that no rank has used. Raises ValueError if a rank does not arrive."""
        asking = [group for group in groups if not group.usage.known]
        if self._order is None or not asking:
            for group in asking:
                group.usage.answer(group.usage.left_out)
            return
        self.all_sent()
        others = [rank for rank in self._order.ranks if rank != self._order.rank]
        heard = self._hear(self._order, others)
        for group in asking:
            unused = set(group.usage.left_out)
            for rank in group.groups.holders if group.groups.part[1] == 1 and not group.is_divided else others:
                if rank in heard:
                    unused &= set(heard[rank].get(group.members[0].name, ()))
            group.usage.answer(unused)

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


_orders: dict[tuple[int, ...], SameOrder] = {}
_world: tuple[int, Any] = 0, None  # (number of default groups so far, the last one)
_watched: WeakSet[SameOrder] = WeakSet()


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
            threading.Thread(target=_watch, name="hocket order", daemon=True).start()
        _world = _world[0] + 1, dist.group.WORLD
        _orders.clear()
    if ranks not in _orders:
        name = f"hocket order {_world[0]} {ranks[0]} {len(ranks)} {zlib.crc32(repr(ranks).encode())}"
        _orders[ranks] = SameOrder(ranks, dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
        _watched.add(_orders[ranks])
    return _orders[ranks]


def _watch() -> None:
    counts: dict[int, int] = {}
    while True:
        time.sleep(ASK_AFTER)
        for order in list(_watched):
            with suppress(RuntimeError):
                if counts.get(id(order)) == order.count:
                    order.answer()
            counts[id(order)] = order.count

"""The sharding pass: where weights are gathered and released, where gradients are reduced, in which slots.

Note: [Gathers are paging]
Weights do not change within a step, so a gathered unit stays valid until its slot is needed for another one. Which unit
to evict is a paging problem, and since the plan knows the future it can be solved exactly: of the units that no op
reads soon, evict the one whose next reader is farthest away (Belady's rule, which needs the fewest gathers possible for
a given number of slots). Keeping the last layer from its forward to its backward, or sharing one gather between the two
halves of a merged step, are not special cases. `optim` and `optim_grads` are the same pass with a slot for every unit;
`optim_grads_params` takes the fewest slots that the prefetch distance needs. So the memory for gathered weights is
bounded by construction. Under `no_shard` every rank has all weights, and there is nothing to gather.

Note: [Gradients reduced once per step]
`no_shard` and `optim` reduce a unit's gradients once per step. The rank sums those of all microbatches but the last: an
`add` comes after the last weight gradient of the unit and microbatch, on the same lane, so the slot is free for the
next one without a wait. The reduce of the last microbatch includes the sum. In a group of one member nothing is
deferred: each reduce is local. In both cases the weight-gradient ops may accumulate themselves. Then an `add`, or a
local reduce, only marks a microbatch's gradients as complete.

Note: [Updates deferred to the next step]
With clipping an update needs the norm of all gradients, so at the end of a step it has nothing to overlap with. So
updates may be deferred to the next step. Each unit has one `update`, on a separate lane, in the order in which units
are read. It comes before the unit's first gather, or before its first reader if it is not sharded. These updates are
the first ops of their lane. So the first forward waits only for the updates and gathers of its own units; all others
overlap with it, and the first gathers overlap with updates. The step op at the end computes the gradients' norm, and
the gradients stay in memory.

Note: [Whole matrices of sharded units]
Muon's update of a matrix needs the whole matrix, and a rank has a part. So three ops come before the update of a
gathered unit: `collect` (each rank averages its shard, and all ranks gather the whole), `orthogonalise` (each matrix on
one rank) and `scatter` (each rank gets its part of the results). Exchanges are on the reduce lane, which is otherwise
idle until backward begins. Units alternate between two slots. While the update lane orthogonalises one unit's matrices,
the next unit's are collected, and the previous unit's results are scattered:

    reduce    collect 0, collect 1 | scatter 0, collect 2 | scatter 1, collect 3 | ...
    update                           orthogonalise 0      | orthogonalise 1, update 0 | orthogonalise 2, update 1 | ...

Slots need no extra waits. A collect comes after the scatter that read its slot, on the same lane. A scatter writes
where the update before last has read, and waits for the orthogonalise after that update, on the same lane.

Note: [One embedding on two ranks]
If embedding and head are tied and on two pipeline ranks, both ranks have the unit, with the final norm, and update it
alike. Each sums its own gradients of a step, those of the embedding or those of the head, over microbatches and ranks
like those of any other unit. After its last reduce each sends the other its shard of that sum, in fp32, and the step
adds the received sum to its own: `embedding's + head's` on one rank, `head's + embedding's` on the other, which are the
same bits. The rank of the head finishes first, so its send overlaps with the last backward of the other rank. The send
in the other direction overlaps only with what the embedding's rank has left to do.

If one rank has both ends, in one chunk or in several, it has the unit once. Then a microbatch's two gradients are
written to one slot, and are summed before they are added to those of other microbatches. If the ends are in different
chunks, the slot is in use from the head's backward to the embedding's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.config import Strategy
from hocket.program.ops import TIED, Layout, Op, Verb, tied_lane
from hocket.program.parts import END_UNITS, UNITS, Unit
from hocket.program.transformer import EMBED
from hocket.program.values import Meanings, UnitName, meanings, unit_moved

ALIGN = 64
"""Shards end at multiples of this many elements; 128 bytes of bf16."""
MATRIX_SLOTS = 2
"""Slots for whole matrices of each class of units: see Note: [Whole matrices of sharded units]."""


@dataclass(frozen=True)
class Sharding:
    """Group sizes for dense and expert units, and the strategy."""

    dense: int = 1
    experts: int = 1
    strategy: Strategy = "optim_grads_params"
    muon: bool = False
    """Whether Muon updates the units of layers."""

    def size(self, unit: Unit) -> int:
        return self.experts if unit == "experts" else self.dense

    def gathers(self, unit: Unit) -> bool:
        """Whether weights are gathered, because no rank has all of them."""
        return self.size(unit) > 1 and self.strategy != "no_shard"

    def collects(self, unit: Unit) -> bool:
        """Whether an update needs whole matrices of a sharded unit. See Note: [Whole matrices of sharded units]."""
        return self.muon and unit not in END_UNITS and self.gathers(unit)

    def adds_up(self, unit: Unit) -> bool:
        """Whether gradients stay whole until the last microbatch. See Note: [Gradients reduced once per step]."""
        return self.size(unit) > 1 and self.strategy in ("no_shard", "optim")


@dataclass(frozen=True)
class Sharded:
    """The ranks' ops with gathers, releases, reduces and the step inserted, and the number of slots."""

    ranks: list[list[Op]]
    weight_slots: Mapping[str, int]
    grad_slots: Mapping[str, int]


Inserted = dict[int, list[Op]]
"""Position -> ops to insert before, or after, the op there."""
Spans = dict[tuple[UnitName, int], tuple[int, int]]
"""(unit, microbatch) -> positions of its first and last weight gradient."""


@dataclass(slots=True)
class Visit:
    """One pass over a layer that reads a unit: positions of its first and last reader."""

    unit: UnitName
    start: int
    end: int


def shard(ranks: list[list[Op]], layout: Layout, sharding: Sharding, prefetch: int, updates: bool = False) -> Sharded:
    """Insert gather, release, add, reduce and step ops. Every rank gets the same number of slots of a class.

    A gather runs `prefetch` layer passes before its first reader. With `updates` a step applies the updates deferred by
    the last one: see Note: [Updates deferred to the next step].
    """
    weight_slots: dict[str, int] = {}
    grad_slots: dict[str, int] = {}
    known = [meanings(layout, rank) for rank in range(len(ranks))]
    visits = [_visits(ops, mine) for ops, mine in zip(ranks, known, strict=True)]
    spans = [_grad_spans(ops, mine) for ops, mine in zip(ranks, known, strict=True)]
    for unit in UNITS:
        mine = [[v for v in per_rank if v.unit[0] == unit] for per_rank in visits]
        if not any(mine):
            continue
        if sharding.gathers(unit):
            if sharding.strategy == "optim_grads_params":
                weight_slots[unit] = max(_slots_needed(per_rank, prefetch) for per_rank in mine)
            else:
                weight_slots[unit] = max(len({v.unit for v in per_rank}) for per_rank in mine)
    for written in spans:
        for name, count in _grad_slots_needed(written).items():
            grad_slots[name] = max(grad_slots.get(name, 0), count)
    out = []
    for ops, mine, per_rank, written in zip(ranks, known, visits, spans, strict=True):
        before: Inserted = defaultdict(list)
        after: Inserted = defaultdict(list)
        for unit in UNITS:
            same = [v for v in per_rank if v.unit[0] == unit]
            if unit in weight_slots:
                _page(same, weight_slots[unit], prefetch, before, after)
            if updates:
                _update(same, prefetch, before, sharding.collects(unit))
        placed = _reduce(ops, mine, written, sharding, grad_slots, after)
        chunk = layout.apart.get(len(out), -1) if written else -1
        last = _exchange(ops, written, layout, len(out), chunk, before, after) if chunk >= 0 else []
        step = Op("step", "norm" if updates else "all", -1, chunk)
        out.append([*insert_ops(placed, before, after), *last, step])
    return Sharded(out, weight_slots, grad_slots)


def _exchange(
    ops: Sequence[Op], spans: Spans, layout: Layout, rank: int, chunk: int, before: Inserted, after: Inserted
) -> list[Op]:
    """Send and receive a tied embedding's gradients: see Note: [One embedding on two ranks]. Returns the last ops."""
    (_, microbatch), (_, last) = max((span for span in spans.items() if span[0][0][0] == EMBED.unit), key=_end)
    first = layout.is_first(rank, chunk)
    after[last].append(Op("send", TIED, -1, chunk, -1, tied_lane("send", first)))
    receive = Op("recv", TIED, -1, chunk, -1, tied_lane("recv", first))
    if not first:
        return [receive]
    before[_backward(ops, microbatch, chunk)].append(receive)
    return []


def _end(span: tuple[object, tuple[int, int]]) -> int:
    return span[1][1]


def _backward(ops: Sequence[Op], microbatch: int, chunk: int) -> int:
    """Position at which a chunk's backward of a microbatch begins."""
    item = ("bwd", microbatch, chunk)
    return next(i for i, op in enumerate(ops) if (op.verb, op.microbatch, op.chunk) == item)


def _update(visits: Sequence[Visit], prefetch: int, before: dict[int, list[Op]], collects: bool) -> None:
    """Insert an update for each unit of a class, before its first gather or where that would be. After `_page`."""
    first: dict[UnitName, int] = {}
    for k, visit in enumerate(visits):
        first.setdefault(visit.unit, visits[max(0, k - prefetch)].start)
    units = list(first)

    def op(verb: Verb, n: int) -> list[Op]:
        """The op for unit number `n`, if there is one."""
        if not 0 <= n < len(units):
            return []
        unit, chunk, layer = units[n]
        lane = "reduce" if verb in ("collect", "scatter") else "update"
        return [Op(verb, unit, -1, chunk, layer, lane, n % MATRIX_SLOTS if collects else -1)]

    for n, (unit, position) in enumerate(first.items()):
        ops, found = before[position], op("update", n)
        if collects:  # see Note: [Whole matrices of sharded units]
            begun = [one for m, verb in _BEGIN for one in op(verb, m)] if n == 0 else []
            found = [*begun, *op("collect", n + 2), *op("orthogonalise", n + 1), *op("scatter", n + 1), *found]
        gather = (i for i, other in enumerate(ops) if other.verb == "gather" and unit_moved(other) == unit)
        place = next(gather, len(ops))
        ops[place:place] = found


_BEGIN: tuple[tuple[int, Verb], ...] = ((0, "collect"), (1, "collect"), (0, "orthogonalise"), (0, "scatter"))
"""(number of a unit, verb) of the ops before the first update."""


def insert_ops(ops: Sequence[Op], before: Mapping[int, list[Op]], after: Mapping[int, list[Op]]) -> list[Op]:
    """The ops with others inserted before and after some positions."""
    out, done = list[Op](), 0
    for i in sorted({*before, *after}):
        out += [*ops[done:i], *before.get(i, ()), ops[i], *after.get(i, ())]
        done = i + 1
    return [*out, *ops[done:]]


def _visits(ops: list[Op], known: Meanings) -> list[Visit]:
    """The passes over units, by first reader."""
    visits: dict[tuple[UnitName, str, int, int], Visit] = {}
    for i, op in enumerate(ops):
        name = known[op.verb, op.part, op.chunk, op.layer].unit_read
        if name is not None:
            direction = "fwd" if op.verb == "fwd" else "bwd"  # any second forward belongs to the backward
            key = (name, direction, op.microbatch, op.layer)
            if key in visits:
                visits[key].end = i
            else:
                visits[key] = Visit(name, i, i)
    return list(visits.values())


def _slots_needed(visits: list[Visit], prefetch: int) -> int:
    """Fewest slots with which a gather can run `prefetch` passes early: the most units pinned at once."""
    most, window = 0, deque[Visit]()
    for k, visit in enumerate(visits):
        issued_at = visits[max(0, k - prefetch)].start
        window.append(visit)
        while window and window[0].end < issued_at:
            window.popleft()
        most = max(most, len({v.unit for v in window if v.end >= issued_at}))
    return most


def _page(
    visits: list[Visit], slots: int, prefetch: int, before: dict[int, list[Op]], after: dict[int, list[Op]]
) -> None:
    """Choose gathers and releases for one class of units. See Note: [Gathers are paging]."""
    following = _next_visits(visits)
    resident: dict[UnitName, int] = {}  # unit -> its slot
    last_visit: dict[UnitName, int] = {}  # unit -> index of its latest visit so far
    last_reader: dict[UnitName, int] = {}  # not always in its latest visit: visits of one unit may be nested
    free = deque(range(slots))
    turns: dict[UnitName, int] = defaultdict(int)

    def release(unit: UnitName) -> int:
        slot = resident.pop(unit)
        name, chunk, layer = unit
        after[last_reader[unit]].append(Op("release", name, turns[unit] - 1, chunk, layer, "compute", slot))
        return slot

    for k, visit in enumerate(visits):
        if visit.unit not in resident:
            issued_at = visits[max(0, k - prefetch)].start
            if not free:
                idle = [u for u in resident if last_reader[u] < issued_at]
                assert idle, "fewer slots than _slots_needed asked for"
                free.append(release(max(idle, key=lambda u: following[last_visit[u]])))
            slot = free.popleft()
            name, chunk, layer = visit.unit
            before[issued_at].append(Op("gather", name, turns[visit.unit], chunk, layer, "gather", slot))
            turns[visit.unit] += 1
            resident[visit.unit] = slot
        last_visit[visit.unit] = k
        last_reader[visit.unit] = max(visit.end, last_reader.get(visit.unit, -1))
    for unit in list(resident):
        release(unit)


def _next_visits(visits: list[Visit]) -> list[int]:
    """Index of the next visit of the same unit, for every visit; past the end if there is none."""
    following, latest = [0] * len(visits), dict[UnitName, int]()
    for k in reversed(range(len(visits))):
        following[k] = latest.get(visits[k].unit, len(visits) + k)
        latest[visits[k].unit] = k
    return following


def _grad_spans(ops: list[Op], known: Meanings) -> Spans:
    """The spans of all units with weight gradients, ordered by the first one."""
    spans: Spans = {}
    for i, op in enumerate(ops):
        if op.verb == "wgrad" and (name := known[op.verb, op.part, op.chunk, op.layer].unit_written) is not None:
            first, _ = spans.get((name, op.microbatch), (i, i))
            spans[name, op.microbatch] = (first, i)
    return spans


def _grad_slots_needed(spans: Spans) -> dict[str, int]:
    """Gradient slots per class: the most that are written at the same time.

    Classes with many units get one more, so that one can be reduced while the next one is written.
    """
    needed: dict[str, int] = {}
    open_until: dict[str, list[int]] = defaultdict(list)
    for ((unit, _, _), _), (first, last) in spans.items():
        open_until[unit] = [end for end in open_until[unit] if end >= first] + [last]
        spare = 0 if unit in END_UNITS else 1
        needed[unit] = max(needed.get(unit, 0), len(open_until[unit]) + spare)
    return needed


def _reduce(
    ops: list[Op],
    known: Meanings,
    spans: Spans,
    sharding: Sharding,
    slots: Mapping[str, int],
    after: dict[int, list[Op]],
) -> list[Op]:
    """Give every weight gradient its slot and insert a reduce, or an add, after the last one of a unit and microbatch.

    See Note: [Gradients reduced once per step].
    """
    placed = list(ops)
    slot_of: dict[tuple[UnitName, int], int] = {}
    free = {unit: deque(range(count)) for unit, count in slots.items()}
    ends: dict[int, list[tuple[UnitName, int]]] = defaultdict(list)
    for key, (_, last) in spans.items():
        ends[last].append(key)
    final = dict(spans.keys())  # unit -> its last microbatch, since they are in order
    for i, op in enumerate(ops):
        if op.verb != "wgrad" or (name := known[op.verb, op.part, op.chunk, op.layer].unit_written) is None:
            continue
        key = (name, op.microbatch)
        if key not in slot_of:
            slot_of[key] = free[name[0]].popleft()
        placed[i] = Op(*op[:6], slot_of[key])
        for (unit, chunk, layer), m in ends.get(i, ()):
            slot = slot_of[(unit, chunk, layer), m]
            if sharding.adds_up(unit) and m != final[unit, chunk, layer]:
                after[i].append(Op("add", unit, m, chunk, layer, "compute", slot))
            else:
                after[i].append(Op("reduce", unit, m, chunk, layer, "reduce", slot))
            free[unit].append(slot)
    return placed

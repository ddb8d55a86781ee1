"""When every op starts and ends: one pass over the events of a step, in order of time.

Note: [What the simulator believes]
An op starts when the previous op on its lane and all its `deps` have ended, like a CUDA stream with events. A send
takes no lane time: it is posted, and its data may leave from then on. The matching recv starts when it is at the head
of its lane and the send is posted, and lasts one p2p transfer. The optimizer step begins with the norm of the whole
gradient, so no rank starts it before all have reached it. Data- and expert-parallel ranks run the same list on equal
loads, so a collective starts when this rank reaches it, and links don't queue. Stragglers are not predicted.

Further slowdowns of a real step are `Overheads`, which depend on the hardware (`overheads_of` in `cost.py`):

- Contention. While communication runs on a rank, its compute op runs at 1 / (1 + sum of the factors of the kinds that
  run). The factors add up, like the resources that they stand for: the SMs that NCCL kernels hold and the memory
  bandwidth of transfers. A p2p transfer runs on the receiver and on the sender. Communication is not slowed.
  Concurrent updates slow forwards the same way, nearly to a stop: they take power and bandwidth.
- The host. It issues a rank's ops one after the other, in the order of the list. An op can't start before the host
  reaches it, nor can a compute op (many kernels) end before it is issued completely. At a dispatch the host blocks
  until the ranks have exchanged their counts, `counts` seconds after the dispatch's start; only then does it go on
  issuing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush
from typing import Literal, NamedTuple, Protocol

from hocket.collector import without_collector
from hocket.program.offload import HOST_BLOCK, host_slots
from hocket.program.ops import COMPUTING, HOST, Key, Lane, Op, Program, stops_host
from hocket.program.values import Name, UnitName, meanings, unit_moved

Time = int | float | Fraction
"""Seconds, or any other unit of the costs."""

Kind = str
"""A kind of communication, as reports name it: `a2a`, `pp`, `gather`, `reduce`, `tp`, or the name of a part's lane."""

KINDS: tuple[Literal["a2a", "pp", "gather", "reduce"], ...] = ("a2a", "pp", "gather", "reduce")

KIND_OF: Mapping[Lane, Kind] = {
    "a2a": "a2a", "send_act": "pp", "recv_act": "pp", "send_grad": "pp", "recv_grad": "pp",
    "send_act_back": "pp", "send_grad_back": "pp", "gather": "gather", "reduce": "reduce",
}  # fmt: skip

UPDATES: Lane = "update"
"""The lane of updates that overlap forwards."""

CostKey = tuple[str, str, str]
"""(verb, part, kind of the layer): ops with the same key cost the same. The kind is empty outside layers."""


def cost_key(op: Op, kinds: Sequence[str]) -> CostKey:
    """The key of an op's cost; `kinds` are those of the layers."""
    return op.verb, op.part, kinds[op.layer] if op.layer >= 0 else ""


def kind_of(lane: Lane) -> Kind | None:
    """The kind of communication that a lane carries; None for a lane that computes."""
    return None if lane in COMPUTING else KIND_OF.get(lane, lane)


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op on one rank."""

    seconds: Time = 0.0
    """How long the op occupies its lane."""
    flops: float = 0.0
    wire_bytes: int = 0
    memory_bytes: int = 0
    """Traffic outside matmuls."""
    output_bytes: int = 0
    """Size of the value that the op produces."""
    saved_bytes: int = 0
    """Size of what the op keeps for the op that continues it: fwd for bwd, bwd for wgrad."""
    grad_bytes: int = 0
    """Size of the reduced gradients of a wgrad's unit, or of an add's separate sum."""
    handed_bytes: int = 0
    """Bytes added to the output if the forward is recomputed."""
    lent_bytes: int = 0
    """Of a reader: saved bytes that it drops if they are made again. Of the part that makes them: their size."""
    once_seconds: Time = 0.0
    """Seconds beyond `seconds` of a reduce in a step's last microbatch: see `once` in `cost.py`."""
    once_bytes: float = 0.0
    """Bytes that a rank moves in `once_seconds`."""
    inner_seconds: Time = 0.0
    """The part of `seconds` in which the op waits for tensor-parallel peers."""
    inner_bytes: int = 0
    """Bytes that the op gets from them."""


@dataclass(frozen=True)
class Overheads:
    """Slowdowns of a step beyond the costs of its ops. See Note: [What the simulator believes]."""

    contention: Mapping[Kind, Time] = field(default_factory=dict)
    """Relative slowdown of compute while that kind of communication, or `UPDATES`, runs: 0.1 is 10 %."""
    issue: Mapping[CostKey, Time] = field(default_factory=dict)
    """Seconds that the host needs to issue an op; missing ones need none."""
    counts: Time | None = None
    """Seconds from the start of a dispatch until the host goes on; None: it does not wait."""


NO_OVERHEADS = Overheads()


def schedule(program: Program, durations: Sequence[Time], overheads: Overheads) -> tuple[list[Time], list[Time]]:
    """Start and end of every op, numbered through all ranks; each as early as possible.

    Raises ValueError if the program cannot finish, naming the ops at which it stops.
    """
    if overheads == NO_OVERHEADS:
        return _longest_paths(program, durations)
    return _Schedule(program, durations, overheads).run()


def _longest_paths(program: Program, durations: Sequence[Time]) -> tuple[list[Time], list[Time]]:
    """The same without overheads: ops then do not influence each other's durations.

    Goes rank by rank, in list order, so that most dependencies of an op are already known. The others, such as another
    rank's send, are computed first.
    """
    before = _predecessors(program)
    starts: list[Time] = [0] * len(before)
    ends: list[Time | None] = [None] * len(before)
    for number in range(len(before)):
        path = [number] if ends[number] is None else []
        while path:
            top = path[-1]
            start: Time = 0
            for earlier in before[top]:
                end = ends[earlier]
                if end is None:
                    path.append(earlier)
                    if len(path) > len(before):
                        raise ValueError(_stuck(program, _never_run(before)))
                    break
                if end > start:
                    start = end
            else:
                starts[top] = start
                ends[top] = start + durations[top]
                path.pop()
    return starts, [end for end in ends if end is not None]


def _never_run(before: Sequence[Sequence[int]]) -> list[bool]:
    """Which ops are in a cycle of dependencies, or wait for one that is."""
    never, more = [True] * len(before), True
    while more:
        more = False
        for number, needed in enumerate(before):
            if never[number] and not any(never[earlier] for earlier in needed):
                never[number], more = False, True
    return never


def _successors(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ops that wait for each op, from the ops that each waits for."""
    after: list[list[int]] = [[] for _ in before]
    for number, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(number)
    return after


class _Rank:
    """The changing state of one pipeline rank."""

    def __init__(self, first: int, stop: int) -> None:
        self.next, self.stop = first, stop
        """The op that the host issues next, and the end of its list."""
        self.host: Time = 0
        """When the host has issued the ops before `next`."""
        self.running: dict[Kind, int] = {}
        """Number of running communication ops, by kind."""
        self.slowed: Time = 1
        """The current slowdown factor of compute."""
        self.compute = -1
        """The running compute op; -1 for none."""
        self.left: Time = 0
        """Its remaining seconds without contention, ..."""
        self.since: Time = 0
        """... at this time."""


class _Schedule:
    def __init__(self, program: Program, durations: Sequence[Time], overheads: Overheads) -> None:
        self._program, self._durations, self._overheads = program, durations, overheads
        self._ops = [(rank, op) for rank, _, op in program]
        kinds = program.layout.kinds
        self._issue_time = [overheads.issue.get(cost_key(op, kinds), 0) for _, op in self._ops]
        before = _predecessors(program)
        self._after = _successors(before)
        self._waiting = [len(needed) + 1 for needed in before]  # one more for the host
        self.starts: list[Time] = [0] * len(before)
        self.ends: list[Time] = [0] * len(before)
        self._issued: list[Time] = [0] * len(before)
        self._ranks: list[_Rank] = []
        for ops in program.ranks:
            first = self._ranks[-1].stop if self._ranks else 0
            self._ranks.append(_Rank(first, first + len(ops)))
        self._events: list[tuple[Time, int, bool, int]] = []
        """(time, op, whether it starts or ends, version). An end is void if the op has a later version."""
        self._version = [0] * len(before)

    def run(self) -> tuple[list[Time], list[Time]]:
        done = 0
        for rank in self._ranks:
            self._issue(rank)
        while self._events:
            now, number, starts, version = heappop(self._events)
            if starts:
                self._start(number, now)
            elif version == self._version[number]:
                self._end(number, now)
                done += 1
        if done < len(self._ops):
            raise ValueError(_stuck(self._program, self._waiting))
        return self.starts, self.ends

    def _issue(self, rank: _Rank) -> None:
        """Let the host issue ops until it has to wait for counts, or the list ends."""
        waits = False
        while rank.next < rank.stop and not waits:
            number = rank.next
            op = self._ops[number][1]
            begin = rank.host
            rank.next += 1
            rank.host += self._issue_time[number]
            self._issued[number] = rank.host
            self._satisfy(number, begin)
            waits = self._waits_for_counts(op)

    def _waits_for_counts(self, op: Op) -> bool:
        return self._overheads.counts is not None and stops_host(op, self._program.layout)

    def _satisfy(self, number: int, when: Time) -> None:
        """One dependency of an op is satisfied."""
        self.starts[number] = max(self.starts[number], when)
        self._waiting[number] -= 1
        if self._waiting[number] == 0:
            heappush(self._events, (self.starts[number], number, True, 0))

    def _start(self, number: int, now: Time) -> None:
        rank, op = self._ops[number]
        mine, duration = self._ranks[rank], self._durations[number]
        if self._waits_for_counts(op):
            assert self._overheads.counts is not None
            mine.host = max(mine.host, now + self._overheads.counts)
            self._issue(mine)
        if op.lane == "compute":
            mine.compute, mine.left, mine.since = number, duration, now
            duration = duration * mine.slowed
        elif duration:
            self._contend(rank, op, now, 1)
        self._plan_end(number, now + duration)

    def _plan_end(self, number: int, when: Time) -> None:
        if self._ops[number][1].lane in COMPUTING:
            when = max(when, self._issued[number])
        heappush(self._events, (when, number, False, self._version[number]))

    def _end(self, number: int, now: Time) -> None:
        rank, op = self._ops[number]
        self.ends[number] = now
        if op.lane == "compute":
            self._ranks[rank].compute = -1
        elif self._durations[number]:
            self._contend(rank, op, now, -1)
        for later in self._after[number]:
            self._satisfy(later, now)

    def _contend(self, rank: int, op: Op, now: Time, change: int) -> None:
        """One op more or less runs concurrently with compute, and changes its speed, on both ends of a transfer."""
        kind = UPDATES if op.lane == UPDATES else kind_of(op.lane)
        if kind is None or not self._overheads.contention.get(kind):
            return
        for where in {rank, self._program.layout.peer(op, rank)[0]} if op.verb == "recv" else {rank}:
            self._slow(self._ranks[where], kind, now, change)

    def _slow(self, rank: _Rank, kind: Kind, now: Time, change: int) -> None:
        rank.running[kind] = rank.running.get(kind, 0) + change
        slowed = 1 + sum(self._overheads.contention.get(kind, 0) for kind, count in rank.running.items() if count)
        if slowed != rank.slowed and rank.compute >= 0:
            gone = now - rank.since
            rank.left -= gone if rank.slowed == 1 else gone / rank.slowed
            rank.since = now
            self._version[rank.compute] += 1
            self._plan_end(rank.compute, now + max(rank.left, 0) * slowed)
        rank.slowed = slowed


def _predecessors(program: Program) -> list[list[int]]:
    """For each op, numbered through all ranks, the ops that must have ended before it starts."""
    before: list[list[int]] = []
    together: list[int] = []  # dependencies of the steps of all ranks
    sends: dict[tuple[int, Key], int] = {}
    receives: list[tuple[int, int, Op]] = []
    for rank, ops in enumerate(program.ranks):
        first = len(before)
        last_on_lane: dict[Lane, int] = {}
        for number, op in enumerate(ops, first):
            verb, _, _, _, _, lane, _, deps, _, _ = op
            needed = [first + dep for dep in deps]
            if lane in last_on_lane:
                needed.append(last_on_lane[lane])
            last_on_lane[lane] = number
            if verb == "send":
                sends[rank, op.key] = number
            elif verb == "recv":
                receives.append((number, rank, op))
            elif verb == "step":
                together += needed
                needed = together
            before.append(needed)
    for number, rank, op in receives:
        peer = program.layout.peer(op, rank)
        if peer not in sends:
            raise ValueError(f"rank {rank} waits at '{op}' for a send that rank {peer[0]} does not have")
        before[number].append(sends[peer])
    return before


def _stuck(program: Program, waiting: Sequence[int]) -> str:
    """Name the first op of every lane that never runs."""
    heads: dict[tuple[int, Lane], str] = {}
    for number, (rank, position, op) in enumerate(program):
        if waiting[number]:
            heads.setdefault((rank, op.lane), f"rank {rank} lane {op.lane}: '{op}' (position {position})")
    return "the program never finishes, its ops wait for each other in a circle; stuck at " + "; ".join(heads.values())


# ------------------------------------------------------------------------------------------------------------- simulate
#
# The predicted timeline of a step: when every op would run, given the cost of each.
#
# Pure arithmetic on the costs' own numbers (`int`, `float` or `Fraction`): no rounding, no tolerance. With fractions
# the result is exact. The costs themselves come from `cost.py`. See Note: [What the simulator believes].


class Costs(Protocol):
    """The interface of costs to the simulator."""

    def of(self, op: Op, /) -> OpCost:
        """The cost of an op. The recv of a p2p transfer has its seconds; those of the send are ignored."""
        ...

    def fixed_bytes(self, program: Program, rank: int, /) -> int:
        """Bytes held for the whole step: shards, optimizer state, weight and gradient slots."""
        ...


class Span(NamedTuple):
    """When one op runs."""

    rank: int
    position: int
    start: Time
    end: Time


@dataclass(frozen=True)
class Usage:
    """How one pipeline rank spends a step: busy + exposed_total + idle is the makespan.

    `exposed[kind]` is the time in which communication of that kind runs and no compute op does. If several kinds run at
    once, the time counts for the one that ends last, because compute would still wait for that one; so the kinds add up
    to `exposed_total`. Time in which compute ops wait for tensor-parallel peers is exposed too, as kind `tp`, which
    exists only if there is any. In `idle` nothing runs at all: the pipeline bubble. `peak_bytes` is the most memory
    held at any time, `host_bytes` the host memory of offloaded tensors.
    """

    busy: Time
    exposed: Mapping[Kind, Time]
    exposed_total: Time
    idle: Time
    peak_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """A predicted step. `spans[rank][position]` is the span of that op."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: Time
    ranks: tuple[Usage, ...]


@without_collector()
def simulate(program: Program, costs: Costs, overheads: Overheads = NO_OVERHEADS) -> Timeline:
    """Predict one step of every pipeline rank, in time linear in the number of ops (apart from sorting by time).

    Raises ValueError if the program cannot finish, naming the ops at which it stops.
    """
    starts, ends = schedule(program, _durations(program, costs), overheads)
    spans = [spans_of(program, rank, starts, ends) for rank in range(len(program.ranks))]
    last = max(ends, default=0)
    own = [kind for lane in program.layout.lanes if (kind := kind_of(lane)) and kind not in KINDS]
    ranks = [
        replace(
            _usage(ops, row, last, own),
            peak_bytes=peak_bytes(program, rank, row, costs),
            host_bytes=host_bytes(program, rank, costs),
        )
        for rank, (ops, row) in enumerate(zip(program.ranks, spans, strict=True))
    ]
    inside = [sum(costs.of(op).inner_seconds for op in ops) for ops in program.ranks]
    if any(inside):  # waits for tensor-parallel peers inside of compute ops are exposed
        ranks = [
            replace(use, busy=use.busy - w, exposed={**use.exposed, "tp": w}, exposed_total=use.exposed_total + w)
            for use, w in zip(ranks, inside, strict=True)
        ]
    return Timeline(tuple(spans), last, tuple(ranks))


def spans_of(program: Program, rank: int, starts: Sequence[Time], ends: Sequence[Time]) -> tuple[Span, ...]:
    """The spans of one rank's ops, from times that are numbered through all ranks."""
    first, count = sum(map(len, program.ranks[:rank])), len(program.ranks[rank])
    return tuple(Span(rank, p, starts[first + p], ends[first + p]) for p in range(count))


def times(program: Program, costs: Costs) -> tuple[list[Time], list[Time]]:
    """Starts and ends of all ops, numbered through all ranks."""
    return schedule(program, _durations(program, costs), NO_OVERHEADS)


def _durations(program: Program, costs: Costs) -> list[Time]:
    found = list[Time]()
    for op in (op for ops in program.ranks for op in ops):
        cost = costs.of(op)
        if cost.once_seconds and ends_step(op, program):
            cost = replace(cost, seconds=cost.seconds + cost.once_seconds)
        found.append(0 if op.verb == "send" else cost.seconds)
    return found


def ends_step(op: Op, program: Program) -> bool:
    """Whether an op is a reduce of a step's last microbatch."""
    return op.verb == "reduce" and op.microbatch == program.microbatches - 1


def _usage(ops: Sequence[Op], spans: Sequence[Span], makespan: Time, own: Sequence[Kind]) -> Usage:
    """Sweep over the times at which an op of this rank starts or ends. A lane runs one op at a time.

    `own` are kinds of communication on lanes that parts define.
    """
    moments: list[tuple[Time, bool, Lane, Time]] = []
    for op, span in zip(ops, spans, strict=True):
        if span.end > span.start:
            moments.append((span.start, True, op.lane, span.end))
            moments.append((span.end, False, op.lane, span.end))
    moments.sort()  # at equal times, ends come before starts
    running: dict[Lane, Time] = {}
    exposed: dict[Kind, Time] = dict.fromkeys((*KINDS, *own), 0)
    busy: Time = 0
    idle: Time = 0
    now: Time = 0
    for moment, starts, lane, end in moments:
        if moment > now:
            if not running.keys().isdisjoint(COMPUTING):
                busy += moment - now
            elif running:
                kind = kind_of(max(running, key=running.__getitem__))
                assert kind is not None, f"{running} compute"
                exposed[kind] += moment - now
            else:
                idle += moment - now
            now = moment
        if starts:
            running[lane] = end
        else:
            del running[lane]
    return Usage(busy, exposed, sum(exposed.values()), idle + makespan - now)


def peak_bytes(program: Program, rank: int, spans: Sequence[Span], costs: Costs) -> int:
    """The most bytes that a rank holds at any time: fixed memory, values, saved state, reduced gradients.

    A value lives from the start of the op that writes it to the end of the op that frees it. Saved state lives from the
    end of its op (until then the inputs it keeps still count as values) to the end of the op that continues it.
    Gradients live from the start of their unit's first wgrad to the end of the step, sums of them from the first add.
    Gradients for updates in the next step exist at its start. An offloaded tensor is its forward's saved state until
    the offload ends, and the offload's value from then on.
    """
    ops, known = program.ranks[rank], meanings(program.layout, rank)
    freed_by = {value: position for position, op in enumerate(ops) for value in op.frees}
    freed_by |= {value: position for position, op in enumerate(ops) for value in op.trims}  # nearly all of its bytes
    changes: list[tuple[Time, int]] = []
    written: set[tuple[str, UnitName]] = set()
    where: dict[tuple[Name, int], int] = {}
    for position, op in enumerate(ops):
        meaning = known[op.verb, op.part, op.chunk, op.layer]
        unit = unit_moved(op) if op.verb == "add" else meaning.unit_written
        if unit is not None and (op.verb, unit) not in written:
            written.add((op.verb, unit))
            changes.append((spans[position].start, costs.of(op).grad_bytes))
        size = costs.of(op).output_bytes
        if size:
            span = spans[position]
            begins = 0 if op.verb == "update" else span.end if op.verb == "offload" else span.start
            changes.append((begins, size))
            if position in freed_by:
                changes.append((spans[freed_by[position]].end, -size))
        if op.verb in ("fwd", "recompute", "bwd", *HOST):
            where[(op.verb, op.part, op.chunk, op.layer), op.microbatch] = position
        if meaning.follows is not None and (continued := where.get((meaning.follows, op.microbatch))) is not None:
            saved = costs.of(ops[continued]).saved_bytes
            changes.append((spans[continued].end, saved))
            changes.append((spans[position].end, -saved))
    changes.sort()  # at equal times, frees come first: their memory is reused
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return costs.fixed_bytes(program, rank) + peak


def host_bytes(program: Program, rank: int, costs: Costs) -> int:
    """Bytes of host memory that a rank's offloads need, with rows spread evenly over experts."""
    slots = host_slots(program.ranks[rank])
    largest = dict.fromkeys(slots, 0)
    for op in program.ranks[rank]:
        if op.verb == "offload":
            largest[op.part] = max(largest[op.part], costs.of(op).output_bytes)
    return sum(slots[part] * -(-nbytes // HOST_BLOCK) * HOST_BLOCK for part, nbytes in largest.items())

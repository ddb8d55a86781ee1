"""Simulated steps of candidates, the memory that they need, and the function that chooses among them.

Note: [A choice asks for no more than it needs]
A program takes longer to build than to simulate, and half of that time goes into placing the drops of values. So
choices share their programs and times (`Trials`). They ask for times first, because times need no drops. They ask for
memory only if it decides, one rank after the other.

Note: [The usual value wins ties]
`best` takes the shortest step that fits. Of steps of about the same time it takes the one that comes first, which is
the usual one, or the one that a key prefers. The simulation leaves out most of the cost of hidden communication and of
additional kernels. So a gain below `WORTH` does not justify an unusual choice.

Note: [What a graph holds]
The memory that a step allocates while it is recorded belongs to the graph as long as the graph lives. Code between
replays cannot use it. Inside the step values still reuse memory, so a graph holds the peak of a step. Validations need
additional memory of their own. The optimizer and the end of a step add nothing of that size.

Note: [Long steps are priced by their period]
In the steady state of a pipeline every group of microbatches takes the same time. So a step with many microbatches
takes as long as a step with just enough of them to reach the steady state, plus the periods in between. Two short steps
are simulated. They differ by one period, and have the same rest of microbatches as the whole step. They also reach the
peak of a rank's memory, unless all of the head's weight gradients wait for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from hocket.config import Config
from hocket.config.rule import Host, leaf, show
from hocket.config.schema import changed
from hocket.predict.arrivals import arrival_bytes
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import Time, cost_key, peak_bytes, simulate, spans_of, times
from hocket.program.lower import build_forward, build_program, choose_order, free_rank
from hocket.program.ops import Key, Layout, Op, Program
from hocket.program.pipeline import in_flight, warmup
from hocket.program.shard import Sharding
from hocket.program.stages import layout_of, sharding_of
from hocket.program.values import reads
from hocket.rules import few_microbatches, group_of
from hocket.sizes import duration

Price = Callable[[Config], CostTable]
"""Returns the costs of ops in a configuration."""
Changes = Mapping[str, Any]
"""Values of settings by dotted name."""

WORTH = 0.01
"""Share of a step that a value must save to be chosen instead of one that comes before it."""
USABLE = 0.9
"""Share of memory that predicted values may fill: the allocator and libraries need the rest."""
_NEAR = 1.02
"""If no step fits, those within this factor of the fewest bytes are weighed."""

_UNREAD = {
    "plan.graphs": "off",
    "plan.layers_per_stage": (),
    "plan.loss_pieces": 1,
    "plan.offload": (),
    "plan.recompute": (),
    "overlap.cp.method": "gather",
    "overlap.dp.strategy": "optim_grads_params",
    "overlap.ep.copies": "per_expert",
    "overlap.ep.splits": "host",
}
"""Settings that a program does not read, or only through layout and sharding -> a constant for cache keys."""
_OPEN = {
    "overlap.dp.update": "end",
    "overlap.ep.merge_ends": "off",
    "overlap.pp.defer_layers": "attn:1",
    "overlap.pp.defer_head": 0,
    "plan.layer_order": "literature",
}
"""Open settings -> the values that a program assumes for them. The costs of ops do not depend on them."""
_SENDS = "overlap.pp."
"""A program without sends reads nothing of this section."""


def model_costs(config: Config) -> CostTable:
    """Costs of ops by the cost model alone, on the hardware of the run."""
    return costs_of(config, hardware_of(config))


# -- Simulated steps ---------------------------------------------------------------------------------------------------


class Trials:
    """The steps of the compared configurations. It builds each program once, and computes each time once.

    It lives as long as the choices for one configuration. `_OPEN` says how it treats open settings.
    """

    def __init__(self, price: Price = model_costs) -> None:
        self._price = price
        self._tables: list[CostTable] = []
        """Distinct cost tables."""
        self._table_of: dict[Config, int] = {}
        self._programs: dict[_Plan, Program] = {}
        self._times: dict[tuple[_Plan, int], tuple[list[Time], list[Time]]] = {}
        self._peaks: dict[tuple[_Plan, int, int], int] = {}
        self._validations: dict[tuple[Any, ...], int] = {}

    def costs(self, c: Config) -> CostTable:
        """The costs of ops."""
        return self._tables[self._table(c)]

    def program(self, c: Config, microbatches: int) -> Program:
        """The program of a step, without drops of values."""
        return self._built(_plan(c, microbatches))

    def times(self, c: Config, microbatches: int) -> tuple[list[Time], list[Time]]:
        """Starts and ends of a step's ops, numbered through all ranks."""
        key = plan, table = _plan(c, microbatches), self._table(c)
        if key not in self._times:
            self._times[key] = times(self._built(plan), self._tables[table])
        return self._times[key]

    def seconds(self, c: Config, microbatches: int) -> float:
        """Duration of a step."""
        return float(max(self.times(c, microbatches)[1]))

    def peak(self, c: Config, microbatches: int, rank: int) -> int:
        """Peak bytes of a rank in a step, without `extra_bytes`."""
        key = plan, table, _ = _plan(c, microbatches), self._table(c), rank
        if key not in self._peaks:
            program = free_rank(self._built(plan), rank)
            spans = spans_of(program, rank, *self.times(c, microbatches))
            self._peaks[key] = peak_bytes(program, rank, spans, self._tables[table])
        return self._peaks[key]

    def extra_bytes(self, c: Config, microbatches: int) -> int:
        """Bytes that a rank holds and that the simulator does not count in a step."""
        validates = c.plan.graphs == "on" and c.train.eval_batches > 0
        return arrival_bytes(c) + (self._validation(c, microbatches) if validates else 0)

    def _validation(self, c: Config, microbatches: int) -> int:
        """Bytes of values that a validation holds in the slots of a step, in addition to its graph."""
        plan, table = _plan(c, microbatches), self._table(c)
        program, costs = self._built(plan), self._tables[table]
        key = (*plan[:3], table, c.overlap.dp.prefetch, *program.weight_slots.items())
        if key not in self._validations:
            forward = build_forward(program, c, sharding_of(c))
            ranks = enumerate(simulate(forward, costs).ranks)
            self._validations[key] = max(use.peak_bytes - costs.fixed_bytes(forward, rank) for rank, use in ranks)
        return self._validations[key]

    def step(self, c: Config) -> Predicted:
        """A step of a few microbatches."""
        return Predicted(c, self)

    def _table(self, c: Config) -> int:
        """The index of a configuration's costs in `_tables`."""
        key = priced_as(c)
        if key not in self._table_of:
            costs = self._price(c)
            if costs not in self._tables:
                self._tables.append(costs)
            self._table_of[key] = self._tables.index(costs)
        return self._table_of[key]

    def _built(self, plan: _Plan) -> Program:
        if plan not in self._programs:
            layout, microbatches, sharding, config = plan
            self._programs[plan] = build_program(layout, microbatches, config, sharding, frees=False)
        return self._programs[plan]


def priced_as(c: Config) -> Config:
    """Key of costs: equal keys have equal tables."""
    return changed(Config(**{field.name: getattr(c, field.name) for field in fields(Config)}), _OPEN)


_Plan = tuple[Layout, int, Sharding, Config]
"""Everything that a program is built from: layout, microbatches, sharding, and the sections that it reads."""


def _plan(c: Config, microbatches: int) -> _Plan:
    """Key of a program: equal keys have equal programs. `build_program` reads the sections `plan` and `overlap`."""
    read = Config(plan=c.plan, overlap=c.overlap)
    alone = c.mesh.pp == 1
    taken = {name: v for name, v in _OPEN.items() if leaf(c, name) == "auto" or (alone and name.startswith(_SENDS))}
    return layout_of(c), microbatches, sharding_of(c), changed(read, _UNREAD | taken)


class Predicted:
    """A step of a few microbatches: time of the slowest rank, memory of the largest. Computed lazily."""

    def __init__(self, c: Config, trials: Trials) -> None:
        # A rank reaches its peak after two groups; in a merged V after half of them.
        self.microbatches = min(c.train.microbatches, max(few_microbatches(c), 2 * group_of(c)))
        self._holding = min(self.microbatches, group_of(c)) if c.plan.order == "merged_v" else self.microbatches
        self._config, self._trials = c, trials

    @cached_property
    def seconds(self) -> float:
        return self._trials.seconds(self._config, self.microbatches)

    @cached_property
    def nbytes(self) -> int:
        """Peak bytes of the largest rank."""
        return max(map(self.peak, range(self._config.mesh.pp)))

    def peak(self, rank: int) -> int:
        """Peak bytes of a rank."""
        c, trials, count = self._config, self._trials, self._holding
        return trials.peak(c, count, rank) + trials.extra_bytes(c, count)

    def fits(self, memory: int) -> bool:
        """Whether ranks with this much memory can hold it."""
        return fits(self.least, memory) and all(fits(self.peak(rank), memory) for rank in range(self._config.mesh.pp))

    @cached_property
    def least(self) -> int:
        """A lower bound that needs no program: main weights, and chunks between their forward and backward."""
        layout, costs, least = layout_of(self._config), self._trials.costs(self._config), 0
        for rank, steps in enumerate(choose_order(layout, self._holding, self._config)[0]):
            smallest = min(activation(layout, costs, rank, chunk) for chunk in range(layout.chunks))
            state = costs.state_bytes[rank] if costs.state_bytes else 0
            least = max(least, state + (in_flight(steps) - 1) * smallest)
        return least

    @cached_property
    def moved(self) -> int:
        """Bytes of gathers and reduces."""
        table, program = self._trials.costs(self._config).table, self._program
        return max(
            sum(table[cost_key(op, program.layout.kinds)].wire_bytes for op in ops if op.verb in ("gather", "reduce"))
            for ops in program.ranks
        )

    @cached_property
    def ops(self) -> int:
        """Ops that a host issues, on the rank with the most."""
        return max(map(len, self._program.ranks))

    @property
    def _program(self) -> Program:
        return self._trials.program(self._config, self.microbatches)


# -- Memory ------------------------------------------------------------------------------------------------------------


def activation(layout: Layout, costs: CostTable, rank: int, chunk: int) -> int:
    """Bytes that a chunk's forward keeps for its backward: inputs of recomputed parts, nothing of offloaded ones."""
    total, inputs = 0, set[Key]()
    for layer in layout.layers(rank, chunk):
        for part in layout.forward_parts(layer):
            if not layout.offloads(part, layer):
                total += costs.of(Op("fwd", part, layer=layer)).saved_bytes
            if layout.recomputes(part, layer):
                inputs |= set(reads(Op("recompute", part, 0, chunk, layer), layout, rank))
    return total + sum(costs.of(Op(*key)).output_bytes for key in inputs if key[0] != "recompute")  # pyrefly: ignore


def memory_of(c: Config, host: Host) -> int:
    """Bytes that one rank can use, on the host's GPUs or on the predicted hardware; 0: unknown."""
    return host.memory or hardware_of(c).memory


def fits(nbytes: int, memory: int) -> bool:
    """Whether a rank with this much memory can hold the predicted bytes."""
    return nbytes <= room(memory)


def room(memory: int) -> int:
    """Bytes of a rank's memory that predicted values may fill."""
    return int(USABLE * memory)


def gib(size: float) -> str:
    """A size as text in GiB."""
    return f"{size / 2**30:.0f} GiB"


# -- The choice --------------------------------------------------------------------------------------------------------


class Step(Protocol):
    """A priced step."""

    @property
    def seconds(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    def fits(self, memory: int, /) -> bool: ...


def best(
    steps: Sequence[Step],
    memory: int,
    worth: float,
    prefer: Callable[[Any], float] = lambda step: 0.0,
    near: float = _NEAR,
) -> tuple[int, list[int]]:
    """Index of the best step, and of shorter ones that do not fit. The usual step comes first in `steps`.

    See Note: [The usual value wins ties]. If none fits, the steps within `near` times the fewest bytes are weighed.
    """
    left, large = list(range(len(steps))), list[int]()

    def first(of: Sequence[int]) -> int:
        longest = min(steps[n].seconds for n in of) / (1 - worth)
        return min((n for n in of if steps[n].seconds <= longest), key=lambda n: (prefer(steps[n]), n))

    while left:
        found = first(left)
        if not memory or steps[found].fits(memory):
            return found, large
        large.append(found)
        left.remove(found)
    least = near * min(step.nbytes for step in steps)
    return first([n for n, step in enumerate(steps) if step.nbytes <= least]), large


def weigh(
    c: Config,
    ways: Sequence[Changes],
    trials: Trials,
    memory: int = 0,
    worth: float = WORTH,
    prefer: Callable[[Predicted], float] = lambda step: 0.0,
) -> tuple[Changes, str]:
    """The best of the candidates, the usual one first, with simulated times and bytes as the reason."""
    steps = [trials.step(changed(c, way)) for way in ways]
    found, large = best(steps, memory, worth, prefer)
    return ways[found], explain(ways, steps, found, large, memory)


def explain(ways: Sequence[Changes], steps: Sequence[Predicted], found: int, large: Sequence[int], memory: int) -> str:
    """The reason of a choice: its time and bytes, compared with the usual value, or the best of the others."""
    other = 0 if found else min(range(1, len(ways)), key=lambda n: steps[n].seconds, default=0)
    mine, rival = steps[found], steps[other]
    count = f"{mine.microbatches} microbatches take" if mine.microbatches > 1 else "1 microbatch takes"
    text = f"{count} {duration(mine.seconds)}"
    if found:
        more = mine.nbytes - rival.nbytes if memory else 0
        than = f"with {_name(ways[other], ways[found])}"
        if duration(mine.seconds) == duration(rival.seconds):  # the bytes moved decided
            text += f", as {than}, and move {gib(mine.moved)} instead of {gib(rival.moved)}"
        else:
            text += f" instead of {duration(rival.seconds)} {than}"
        text += f", in {gib(abs(more))} {'more' if more > 0 else 'less'} memory" if abs(more) >= 2**30 else ""
    elif other:
        text += f", with {_name(ways[other], ways[found])} {duration(rival.seconds)}"
    if found in large:
        return f"{text}; nothing fits, and this needs {gib(mine.nbytes)} of {gib(room(memory))}"
    return text + (too_large(_name(ways[large[0]], ways[found]), steps[large[0]], memory) if large else "")


def too_large(what: str, step: Predicted, memory: int) -> str:
    """The end of a reason: what does not fit."""
    return f"; {what} does not fit: {gib(step.nbytes)} of {gib(room(memory))}"


def _name(way: Changes, other: Changes) -> str:
    """The values of a candidate that differ from another's, in words."""
    return ", ".join(f"{name.split('.')[-1]} = {show(value)}" for name, value in way.items() if other[name] != value)


# -- Long steps, by shorter ones ---------------------------------------------------------------------------------------


def steady(config: Config) -> tuple[int, int]:
    """Two numbers of microbatches that reach the steady state, a period apart, with the same rest as the whole step."""
    plan, pp, count = config.plan, config.mesh.pp, config.train.microbatches
    group, merge, late = group_of(config), config.overlap.ep.merge == "on", config.overlap.pp.defer_head
    assert late != "auto"
    warm = warmup(pp, plan.chunks, count, group, 0, merge)
    period = group if plan.chunks > 1 else 1
    few = period * (1 - -(warm + max(0, late) * plan.chunks) // (plan.chunks * period)) + count % period
    return few, few + period


def repeats(config: Config) -> bool:
    """Whether two shorter steps can stand for the whole one, with at most half its microbatches together."""
    bounded = config.overlap.pp.defer_head != -1
    return bounded and sum(steady(config)) <= config.train.microbatches // 2


def continued(short: Any, long: Any, periods: float) -> Any:
    """Extrapolate a float that grows by the same amount per period, `periods` periods after the shorter step.

    Of a mapping or dataclass each float is extrapolated; all else is the longer step's.
    """
    if isinstance(short, Mapping):
        return {key: continued(value, long[key], periods) for key, value in short.items()}
    if is_dataclass(short):
        names = [field.name for field in fields(short)]
        return replace(long, **{name: continued(getattr(short, name), getattr(long, name), periods) for name in names})
    return short + periods * (long - short) if isinstance(short, float) else long

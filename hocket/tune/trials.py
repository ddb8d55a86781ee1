"""Simulated steps, for choices that compare several of them.

Note: [A choice asks for no more than it needs]
A program takes longer to build than to simulate, and half of that time goes into placing the drops of values. So
choices share their programs and times (`Trials`). They ask for times first, because times need no drops. They ask for
memory only if it decides, one rank after the other. To move the head's weight gradients to the end they reuse a
program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any

from hocket.config import Config
from hocket.program.cost import CostTable
from hocket.program.hardware import hardware_of
from hocket.program.lower import build_forward, build_program, choose_order, free_rank, with_late_heads
from hocket.program.ops import Layout, Program
from hocket.program.pipeline import in_flight
from hocket.program.shard import Sharding
from hocket.program.simulate import Time, cost_key, peak_bytes, simulate, spans_of, times
from hocket.program.stages import arrival_bytes, costs_of, layout_of, sharding_of
from hocket.settings.derived import few_microbatches, group_of, separate_wgrads
from hocket.settings.rule import Host
from hocket.settings.schema import changed, leaf
from hocket.tune.held import at_least, at_most, forwards_at_most

Price = Callable[[Config], CostTable]
"""Gives the costs of ops in a configuration."""

USABLE = 0.9
"""Share of the memory that values may fill as predicted: the allocator and libraries need the rest."""

_TOLD = {
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
"""Settings that a program does not read, or reads only from layout and sharding -> one value for all their values."""
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


class Trials:
    """The steps of compared configurations. It builds each program once, and finds each time once.

    It lives as long as the choices for one configuration. `_OPEN` says how it treats open settings.
    """

    def __init__(self, price: Price = model_costs) -> None:
        self._price = price
        self._tables: list[CostTable] = []
        """Different cost tables."""
        self._table_of: dict[Config, int] = {}
        self._programs: dict[_Plan, Program] = {}
        self._times: dict[tuple[_Plan, int], tuple[list[Time], list[Time]]] = {}
        self._peaks: dict[tuple[_Plan, int, int], int] = {}
        self._validations: dict[tuple[Any, ...], int] = {}

    def costs(self, c: Config) -> CostTable:
        """What ops cost."""
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
        """How long a step takes."""
        return float(max(self.times(c, microbatches)[1]))

    def peak(self, c: Config, microbatches: int, rank: int) -> int:
        """Peak bytes of a rank in a step, without the bytes that lie beside steps."""
        key = plan, table, _ = _plan(c, microbatches), self._table(c), rank
        if key not in self._peaks:
            program = free_rank(self._built(plan), rank)
            spans = spans_of(program, rank, *self.times(c, microbatches))
            self._peaks[key] = peak_bytes(program, rank, spans, self._tables[table])
        return self._peaks[key]

    def beside(self, c: Config, microbatches: int) -> int:
        """Bytes that a rank holds and that the simulator does not count in a step."""
        return arrival_bytes(c) + (self._validation(c, microbatches) if _validates(c) else 0)

    def _validation(self, c: Config, microbatches: int) -> int:
        """Bytes of values that a validation holds in the slots of a step."""
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
        """The index of its costs in `_tables`."""
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
            late = config.overlap.pp.defer_head
            if isinstance(late, int) and late and layout.pp > 1 and config.overlap.defer_wgrad != "off":
                plain = layout, microbatches, sharding, changed(config, {"overlap.pp.defer_head": 0})
                self._programs[plan] = with_late_heads(self._built(plain), late)
            else:
                self._programs[plan] = build_program(layout, microbatches, config, sharding, frees=False)
        return self._programs[plan]


def priced_as(c: Config) -> Config:
    """Key of costs: equal keys make equal tables."""
    return changed(Config(**{field.name: getattr(c, field.name) for field in fields(Config)}), _OPEN)


_Plan = tuple[Layout, int, Sharding, Config]
"""Everything that a program is made from: layout, microbatches, sharding, and the sections that it reads."""


def _plan(c: Config, microbatches: int) -> _Plan:
    """Key of a program: equal keys make equal programs. `build_program` reads the sections `plan` and `overlap`."""
    read = Config(plan=c.plan, overlap=c.overlap)
    alone = c.mesh.pp == 1
    taken = {name: v for name, v in _OPEN.items() if leaf(c, name) == "auto" or (alone and name.startswith(_SENDS))}
    return layout_of(c), microbatches, sharding_of(c), changed(read, _TOLD | taken)


class Predicted:
    """A step of a few microbatches: time of the slowest rank, memory of the largest. Computed when asked for.

    Note: [What a graph holds]
    The memory that a step allocates while it is recorded belongs to the graph as long as the graph lives. Code between
    replays cannot use it. Inside the step values still reuse memory, so a graph holds the peak of a step. Validations
    need their memory beside it. The optimizer and the end of a step add nothing of that size.
    """

    def __init__(self, c: Config, trials: Trials) -> None:
        self.microbatches = enough_microbatches(c)
        # A rank of a merged V reaches its peak after half of them.
        self._holding = min(self.microbatches, group_of(c)) if c.plan.order == "merged_v" else self.microbatches
        self._config, self._trials = c, trials

    @cached_property
    def seconds(self) -> float:
        return self._trials.seconds(self._config, self.microbatches)

    @cached_property
    def nbytes(self) -> int:
        """Peak bytes of the rank that holds most."""
        peak = 0
        for rank in self._by_bound:
            if self._bounds[rank] > peak or not self._bounded:
                peak = max(peak, self._trials.peak(self._config, self._holding, rank))
        return peak + self._beside

    def fits(self, memory: int) -> bool:
        """Whether ranks with this much memory can hold it. Simulates only if bounds do not decide."""
        c, costs = self._config, self._trials.costs(self._config)
        if not self.may_fit(memory):
            return False
        beside = arrival_bytes(c) + (forwards_at_most(layout_of(c), costs) if _validates(c) else 0)
        for rank in self._by_bound:
            if self._bounded and fits(self._bounds[rank] + beside, memory):
                return True
            peak = self._trials.peak(c, self._holding, rank)
            if not fits(peak + beside, memory) and not fits(peak + self._beside, memory):
                return False
        return True

    def may_fit(self, memory: int) -> bool:
        """False if ranks with this much memory cannot hold it, by a bound that needs no program."""
        layout = layout_of(self._config)
        order, _ = choose_order(layout, self._holding, self._config)
        held = at_least(layout, [in_flight(steps) for steps in order], self._trials.costs(self._config))
        return fits(held, memory)

    @cached_property
    def moved(self) -> int:
        """Bytes of gathers and reduces."""
        table, kinds = self._trials.costs(self._config).table, self._program.layout.kinds
        return max(
            sum(table[cost_key(op, kinds)].wire_bytes for op in ops if op.verb in ("gather", "reduce"))
            for ops in self._program.ranks
        )

    @cached_property
    def ops(self) -> int:
        """Ops that a host issues, on the rank with the most."""
        return max(map(len, self._program.ranks))

    @cached_property
    def _beside(self) -> int:
        return self._trials.beside(self._config, self._holding)

    @property
    def _bounded(self) -> bool:
        """Whether `_bounds` are valid upper bounds."""
        return not separate_wgrads(self._config)

    @property
    def _by_bound(self) -> list[int]:
        """Ranks in the order of their bounds, the largest first."""
        return sorted(self._bounds, key=self._bounds.__getitem__, reverse=True)

    @cached_property
    def _bounds(self) -> dict[int, int]:
        """Rank -> an upper bound on its bytes, if weight gradients have no steps of their own."""
        late, costs = self._config.overlap.pp.defer_head, self._trials.costs(self._config)
        late = 0 if late == "auto" else late if late >= 0 else self._holding
        program = self._trials.program(self._config, self._holding)
        return {rank: at_most(program, costs, rank, late) for rank in range(self._config.mesh.pp)}

    @property
    def _program(self) -> Program:
        return self._trials.program(self._config, self.microbatches)


def enough_microbatches(c: Config) -> int:
    """Microbatches of a simulated step. After two groups a rank has reached its peak."""
    return min(c.train.microbatches, max(few_microbatches(c), 2 * group_of(c)))


def _validates(c: Config) -> bool:
    """Whether validations need memory beside a graph."""
    return c.plan.graphs == "on" and c.train.eval_batches > 0


def memory_of(c: Config, host: Host) -> int:
    """Bytes that one rank can use, on the host's GPUs or on the predicted hardware; 0: not known."""
    return host.memory or hardware_of(c).memory


def fits(nbytes: int, memory: int) -> bool:
    """Whether a rank with this much memory can hold the predicted bytes."""
    return nbytes <= room(memory)


def room(memory: int) -> int:
    """Bytes of a rank's memory that values may fill as predicted."""
    return int(USABLE * memory)


def gib(size: float) -> str:
    """A size as text in GiB."""
    return f"{size / 2**30:.0f} GiB"

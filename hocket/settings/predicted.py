"""Steps as the simulator expects them, for choices that compare several.

Note: [A choice asks for no more than it needs]
A program takes longer to build than to simulate, and where values are dropped is half of that. So choices share their
programs and times (`Trials`); they ask for times first, which need no drops; and for memory only where it decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.parallel.capacity import rows_allowed
from hocket.parallel.stages import costs_of, layout_of, sharding_of
from hocket.plan.cost import CostTable
from hocket.plan.lower import build_forward, build_program, freed
from hocket.plan.ops import Layout, Program
from hocket.plan.schedule import cost_key
from hocket.plan.shard import Sharding
from hocket.plan.simulate import makespan, simulate
from hocket.settings.leaves import changed, leaf
from hocket.settings.plan_rules import few_microbatches, group_of
from hocket.settings.rule import Host

Price = Callable[[Config], CostTable]
"""What ops cost in a configuration."""

_USABLE = 0.9
"""Share of the memory that values may fill as predicted: the allocator and libraries need the rest."""

_TOLD = {
    "plan.graphs": "off",
    "plan.layers_per_stage": (),
    "plan.recompute": (),
    "overlap.dp.strategy": "optim_grads_params",
    "overlap.ep.copies": "per_expert",
    "overlap.ep.splits": "host",
}
"""Settings that a program does not read, or reads from layout and sharding alone, with a value for all of theirs."""
_OPEN = {
    "overlap.dp.gather_in_update": "off",
    "overlap.ep.merge_ends": "off",
    "overlap.pp.backward_lane": "on",
    "overlap.pp.defer_layers": 1,
    "overlap.pp.defer_parts": "attn",
    "overlap.pp.defer_head": 0,
}
"""As what a program takes settings that are still open. On none of them depends what an op costs."""


def model_costs(config: Config) -> CostTable:
    """What ops cost by the cost model alone, on the hardware that fits the run."""
    return costs_of(config, hardware_of(config))


class Trials:
    """The steps of the configurations that are compared: each program is built once, each time is found once.

    Lives as long as the choices for one configuration. What is open in a configuration is taken as it comes.
    """

    def __init__(self, price: Price = model_costs) -> None:
        self._price = price
        self._tables: list[CostTable] = []
        """Costs that differ."""
        self._table_of: dict[Config, int] = {}
        self._programs: dict[_Plan, Program] = {}
        self._seconds: dict[tuple[_Plan, int], float] = {}
        self._peaks: dict[tuple[_Plan, int], tuple[int, ...]] = {}

    def costs(self, c: Config) -> CostTable:
        """What ops cost."""
        return self._tables[self._table(c)]

    def program(self, c: Config, microbatches: int) -> Program:
        """A step, without what is dropped where."""
        return self._built(_plan(c, microbatches))

    def seconds(self, c: Config, microbatches: int) -> float:
        """How long a step takes."""
        key = plan, table = _plan(c, microbatches), self._table(c)
        if key not in self._seconds:
            self._seconds[key] = float(makespan(self._built(plan), self._tables[table]))
        return self._seconds[key]

    def peaks(self, c: Config, microbatches: int) -> tuple[int, ...]:
        """The most bytes that each rank holds in a step, without what lies beside steps."""
        key = plan, table = _plan(c, microbatches), self._table(c)
        if key not in self._peaks:
            timeline = simulate(freed(self._built(plan)), self._tables[table])
            self._peaks[key] = tuple(use.peak_bytes for use in timeline.ranks)
        return self._peaks[key]

    def step(self, c: Config) -> Predicted:
        """A step of a few microbatches."""
        return Predicted(c, self)

    def _table(self, c: Config) -> int:
        """The place of its costs in `_tables`."""
        key = changed(Config(**{field.name: getattr(c, field.name) for field in fields(Config)}), _OPEN)
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


_Plan = tuple[Layout, int, Sharding, Config]
"""All that a program is made from. Microbatches are the second."""


def _plan(c: Config, microbatches: int) -> _Plan:
    """Equal ones make equal programs. Of the configuration `build_program` reads the sections `plan` and `overlap`."""
    read = Config(plan=c.plan, overlap=c.overlap)
    taken = {name: value for name, value in _OPEN.items() if leaf(c, name) == "auto"}
    return layout_of(c), microbatches, sharding_of(c), changed(read, _TOLD | taken)


class Predicted:
    """A step of a few microbatches, on the slowest rank, or the one that needs most. Found out when asked for.

    Note: [What a graph holds]
    What a step allocates while it is recorded is the graph's own as long as it lives, and lies beside all that runs
    between replays. Within the step it is handed on as ever, so a graph holds what a step needs at its most. Beside it
    lie what validations compute with; the optimizer and the end of a step add nothing of that size.
    """

    def __init__(self, c: Config, trials: Trials) -> None:
        self.microbatches = enough_microbatches(c)
        self._config, self._trials = c, trials

    @cached_property
    def seconds(self) -> float:
        return self._trials.seconds(self._config, self.microbatches)

    @cached_property
    def nbytes(self) -> int:
        """Memory."""
        peaks = self._trials.peaks(self._config, self.microbatches)
        program, costs = self._trials.program(self._config, self.microbatches), self._trials.costs(self._config)
        return max(peaks) + beside_steps(self._config, program, costs)

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
        """What a host issues."""
        return max(map(len, self._program.ranks))

    @property
    def _program(self) -> Program:
        return self._trials.program(self._config, self.microbatches)


def beside_steps(c: Config, program: Program, costs: CostTable) -> int:
    """Bytes that a rank holds beside what the simulator counts of a step."""
    return _arrivals(c) + _beside_a_graph(c, program, costs)


def enough_microbatches(c: Config) -> int:
    """Microbatches of a simulated step. After two groups a rank has held as much as it ever does."""
    return min(c.train.microbatches, max(few_microbatches(c), 2 * group_of(c)))


def _arrivals(c: Config) -> int:
    """Bytes of the two buffers in which rows arrive that no host counts."""
    placed = c.overlap.ep.splits == "device" and c.mesh.ep > 1
    return 2 * rows_allowed(c) * c.model.hidden * c.element_bytes if placed else 0


def _beside_a_graph(c: Config, program: Program, costs: CostTable) -> int:
    """Bytes that cannot lie in a graph's memory."""
    if c.plan.graphs != "on" or not c.train.eval_batches:
        return 0
    forward = build_forward(program, c, sharding_of(c))
    ranks = enumerate(simulate(forward, costs).ranks)
    return max(use.peak_bytes - costs.fixed_bytes(forward, rank) for rank, use in ranks)


def memory_of(c: Config, host: Host) -> int:
    """Bytes that one rank can use, of the host's GPUs or of the hardware that is predicted for; 0: not known."""
    return host.memory or hardware_of(c).memory


def fits(nbytes: int, memory: int) -> bool:
    """Whether a rank can hold as much as was predicted."""
    return nbytes <= room(memory)


def room(memory: int) -> int:
    """Bytes of a rank's memory that values may fill as predicted."""
    return int(_USABLE * memory)


def gib(size: float) -> str:
    """Memory in words."""
    return f"{size / 2**30:.0f} GiB"

"""A step as the simulator expects it, for choices that compare several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.parallel.capacity import rows_allowed
from hocket.parallel.stages import costs_of, layout_of, sharding_of
from hocket.plan.cost import CostTable
from hocket.plan.lower import build_forward, build_program
from hocket.plan.ops import Program
from hocket.plan.schedule import cost_key
from hocket.plan.simulate import simulate
from hocket.settings.plan_rules import few_microbatches, group_of
from hocket.settings.rule import Host

_USABLE = 0.9
"""Share of the memory that values may fill as predicted: the allocator and libraries need the rest."""


@dataclass(frozen=True)
class Predicted:
    """A step of a few microbatches, on the slowest rank, or the one that needs most."""

    microbatches: int
    seconds: float
    nbytes: int
    """Memory."""
    moved: int
    """Bytes of gathers and reduces."""
    ops: int
    """What a host issues."""


def model_costs(config: Config) -> CostTable:
    """What ops cost by the cost model alone, on the hardware that fits the run."""
    return costs_of(config, hardware_of(config))


def predicted(c: Config, price: Callable[[Config], CostTable]) -> Predicted:
    """The step that a configuration makes; what is still open in it is taken as it comes.

    Note: [What a graph holds]
    What a step allocates while it is recorded is the graph's own as long as it lives, and lies beside all that runs
    between replays. Within the step it is handed on as ever, so a graph holds what a step needs at its most. Beside it
    lie what validations compute with; the optimizer and the end of a step add nothing of that size.
    """
    count = enough_microbatches(c)
    layout, costs = layout_of(c), price(c)
    program = build_program(layout, count, c, sharding_of(c))
    timeline = simulate(program, costs)
    moved = [
        sum(costs.table[cost_key(op, layout.kinds)].wire_bytes for op in ops if op.verb in ("gather", "reduce"))
        for ops in program.ranks
    ]
    held = max(use.peak_bytes for use in timeline.ranks) + beside_steps(c, program, costs)
    ops = max(map(len, program.ranks))
    return Predicted(count, float(timeline.makespan), held, max(moved), ops)


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

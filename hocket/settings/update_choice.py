"""How `overlap.dp.update` is chosen where it is `auto`: by what the first gathers of a step would cost.

They are exposed if weights are updated when a step ends, and hidden if each unit is gathered while others are updated,
for as long as these updates last. In a step of many microbatches that is little. A step that was to become shorter by
4.6 % became so by 1.8 % on copy engines, and on NCCL's kernels by nothing that was more than noise, 2.4 % (two H200,
`benchmarks/results/gather_in_update.json`, when no forward began before all updates were done).

That forwards run beside updates counts for nothing here: both want the same SMs and the same memory bandwidth, and what
is left of the gain has not been measured.
"""

from __future__ import annotations

from hocket.config import COPIED, Config, Update
from hocket.plan.cost import CostTable
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.plan_rules import shares_units
from hocket.settings.predicted import Trials
from hocket.settings.rule import Host

_WORTH = 0.02
"""Share of a step from which on they are hidden: somewhat less than half of it was gained."""
_COMPUTE = ("fwd", "recompute", "bwd", "wgrad")


def choose_update(c: Config, host: Host, trials: Trials) -> tuple[Update, str]:
    if c.train.device != "cuda":
        return "end", "on CPUs nothing runs beside an update"
    if c.plan.graphs == "on":
        return "end", "a recorded step has no update in it (plan.graphs = on)"
    if not shares_units(c) or c.overlap.dp.strategy == "no_shard":
        return "end", "nothing is gathered, and what forwards lose beside updates has not been measured"
    hidden, step = _seconds(c, trials.costs(c))
    what = f"a step's first gathers take {duration(hidden)}, {hidden / step:.1%} of a step"
    if hidden < _WORTH * step:
        return "end", f"{what}: less than {_WORTH:.0%} is not worth it"
    if c.train.transport not in COPIED:
        return "end", f"{what}; beside updates NCCL's kernels gain nothing, copies do (train.transport = copy_engine)"
    return "next_step", f"{what}, and run beside the updates of other units"


def _seconds(c: Config, costs: CostTable) -> tuple[float, float]:
    """What is exposed before the first layer and could be hidden, and the compute of a rank's step, about."""
    layout = layout_of(c)
    kinds = layout.kinds
    compute = updates = 0.0
    for (verb, part, kind), cost in costs.table.items():
        times = kinds.count(kind) / c.mesh.pp if kind else 1 / c.mesh.pp
        if verb in _COMPUTE and part not in ("dispatch", "combine"):
            compute += times * c.train.microbatches * float(cost.seconds)
        if verb == "update":
            updates += times * float(cost.seconds)
    embed, layer = costs.table["gather", "embed", ""], costs.table["gather", "dense", kinds[0]]
    return min(float(embed.seconds + layer.seconds), updates), compute + updates

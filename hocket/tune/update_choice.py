"""How `overlap.dp.update` is chosen where it is `auto`: by what updates in the next step are sure to hide.

A step is simulated with both. What is left to the next step runs beside its first gathers, in the bubble at its start,
and beside forwards. The simulator takes nothing from forwards for that, but both want the same SMs and the same memory
bandwidth. So all time in which a rank does both counts as lost.

A step of which about 2 % are to be hidden by that count became shorter by 2.1 % on copy engines, and on NCCL's kernels
by 0.8 %, which is no more than noise there (two H200, `benchmarks/results/updates.json`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.config import COPIED, Config, Update
from hocket.plan.cost import CostTable
from hocket.plan.ops import COMPUTING, Lane, Program
from hocket.plan.schedule import Time
from hocket.plan.stages import layout_of
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.rule import Host
from hocket.tune.trials import Trials, enough_microbatches

_SETTING = "overlap.dp.update"
_WORTH = 0.02
"""Share of a step from which on it is taken."""


def choose_update(c: Config, host: Host, trials: Trials) -> tuple[Update, str]:
    if c.train.device != "cuda":
        return "end", "on CPUs nothing runs beside an update"
    if c.plan.graphs == "on":
        return "end", "a recorded step has no update in it (plan.graphs = on)"
    updates, compute = _updates(trials.costs(c)), _compute(c, trials.costs(c))
    if updates < _WORTH * compute:  # no more can be hidden, and no step is shorter
        what = f"all updates take {duration(updates)}, {updates / compute:.1%} of other compute"
        return "end", f"{what}: that is little"
    count = enough_microbatches(c)
    end = trials.seconds(changed(c, {_SETTING: "end"}), count)
    hidden = _hidden(changed(c, {_SETTING: "next_step"}), count, end, trials)
    share = hidden * count / (end * c.train.microbatches)
    what = f"the next step hides {duration(hidden)} of updates beside first gathers and in its bubble"
    what = f"{what}, {share:.1%} of a step"
    if share < _WORTH:
        return "end", f"{what}; that is little, and forwards share SMs and bandwidth with the rest"
    if c.train.transport not in COPIED:
        return "end", f"{what}; beside NCCL's kernels no more than noise was gained, unlike beside copies"
    return "next_step", f"{what}, and more if forwards gain beside them"


def _updates(costs: CostTable) -> float:
    """Seconds of a step's updates, one after the other, of the rank that has most."""
    return float(costs.table["step", "all", ""].seconds - costs.table["step", "norm", ""].seconds)


def _compute(c: Config, costs: CostTable) -> float:
    """Seconds of a step's other compute, as a mean over pipeline ranks."""
    kinds, total = layout_of(c).kinds, 0.0
    for (verb, part, kind), cost in costs.table.items():
        if verb in ("fwd", "recompute", "bwd", "wgrad") and part not in ("dispatch", "combine"):
            total += (kinds.count(kind) if kind else 1) * float(cost.seconds)
    return total * c.train.microbatches / c.mesh.pp


def _hidden(later: Config, count: int, end: float, trials: Trials) -> float:
    """Seconds that are hidden even if forwards gain nothing, in a step that lasts `end` without."""
    starts, ends = trials.times(later, count)
    hidden = end - float(max(ends)) - _beside(trials.program(later, count), starts, ends)
    return max(round(hidden, 9), 0.0)


def _beside(program: Program, starts: Sequence[Time], ends: Sequence[Time]) -> float:
    """Seconds in which a rank updates weights while it computes with others; of the rank that does so most."""
    spans: list[dict[Lane, list[tuple[float, float]]]] = [{lane: [] for lane in COMPUTING} for _ in program.ranks]
    for number, (rank, _, op) in enumerate(program):
        if op.lane in COMPUTING:
            spans[rank][op.lane].append((float(starts[number]), float(ends[number])))
    most = 0.0
    for mine in spans:
        last = max((end for _, end in mine["update"]), default=0.0)
        compute = [span for span in mine["compute"] if span[0] < last]
        both = (min(b, d) - max(a, c) for a, b in mine["update"] for c, d in compute)
        most = max(most, sum(length for length in both if length > 0))
    return most

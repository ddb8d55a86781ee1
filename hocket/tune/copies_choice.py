"""How `overlap.ep.copies` is chosen where it is `auto`: by what is not hidden, then by bytes.

One copy for each rank moves fewer bytes, and needs more kernels, whose launches cost the host. So it is for all-to-alls
that compute does not cover: where nothing is merged, or where they take as long as much of the compute beside them.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.plan.copies import copies_of, elements_sent
from hocket.plan.cost import CostTable
from hocket.plan.timeline import duration
from hocket.settings.leaves import changed
from hocket.settings.rule import Host
from hocket.settings.rules import has_experts
from hocket.tune.trials import Trials

_FEWER = 0.97
"""Share of the bytes to which one copy per rank must bring them to be worth its kernels."""
_HIDDEN = 0.6
"""Share of the compute of a merged layer step that its all-to-alls may take and still be hidden."""


def choose_copies(c: Config, host: Host, trials: Trials) -> tuple[str, str]:
    if not has_experts(c) or c.mesh.ep == 1:
        return "per_expert", "all experts are on every rank, so nothing is sent"
    if c.overlap.ep.splits == "device":
        return "per_expert", "overlap.ep.splits = device places every choice's row"
    per_expert, per_rank = (copies_of(c.model, c.mesh.ep, way, c.element_bytes) for way in (False, True))
    before, after = elements_sent(c.model, per_expert), elements_sent(c.model, per_rank)
    where = f"a token's {c.model.top_k} experts are on {per_rank.count:.1f} of {c.mesh.ep} ranks on average"
    if after > _FEWER * before:
        return "per_expert", f"{where}, and what rows must say about them eats up what is saved"
    fewer = f"{where}: one copy for each is {1 - after / before:.0%} fewer bytes"
    exchanges, compute = _layer(trials.costs(changed(c, {"overlap.ep.copies": "per_expert"})))
    if c.overlap.ep.merge != "on":
        return "per_rank", fewer
    beside = f"all-to-alls of a merged layer take {duration(exchanges)} beside {duration(compute)} of compute"
    if exchanges <= _HIDDEN * compute:
        return "per_expert", f"{beside}, so they are hidden; {fewer}, but more kernels"
    return "per_rank", f"{beside}; {fewer}"


def _layer(costs: CostTable) -> tuple[float, float]:
    """Seconds of all-to-alls, and of compute, of forward and backward of a MoE layer."""
    seconds = {"exchange": 0.0, "compute": 0.0}
    for (verb, part, kind), cost in costs.table.items():
        if kind == "moe" and verb in ("fwd", "bwd", "wgrad", "recompute"):
            what = "exchange" if part in ("dispatch", "combine") else "compute"
            seconds[what] += float(cost.seconds)
    return seconds["exchange"], seconds["compute"]

"""Long steps from shorter ones: what repeats in the middle of a pipeline.

Note: [Long steps are priced by their period]
In the steady state of a pipeline every group of microbatches takes the same time. So the time of a step with many is
that of one with a few, just enough to reach the steady state, and so many periods more. Two steps are simulated, a
period apart, with the same rest as the whole one. What a rank holds at most is reached there too, unless all of the
head's weight gradients wait for the end.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.program.pipeline import warmup
from hocket.settings.plan_rules import group_of


def steady(config: Config) -> tuple[int, int]:
    """Two numbers of microbatches that reach the steady state, a period apart, with the same rest as the whole step."""
    plan, pp, count = config.plan, config.mesh.pp, config.train.microbatches
    group, merge, late = group_of(config), config.overlap.ep.merge == "on", config.overlap.pp.defer_head
    assert late != "auto"
    warm = warmup(pp, plan.chunks, count, group, 0, merge, plan.stride)
    period = group if plan.chunks > 1 else 1
    few = period * (1 - -(warm + max(0, late) * plan.chunks) // (plan.chunks * period)) + count % period
    return few, few + period


def repeats(config: Config) -> bool:
    """Whether the two shorter steps say all of the whole one, and take half as long to simulate, or less."""
    bounded = config.overlap.pp.defer_head != -1
    return bounded and sum(steady(config)) <= config.train.microbatches // 2


def continued(short: float, long: float, periods: float) -> float:
    """What grows by the same with every period, so many periods behind the shorter step."""
    return short + periods * (long - short)

"""Prices long steps by shorter ones, because the middle of a pipeline's step repeats itself.

Note: [Long steps are priced by their period]
In the steady state of a pipeline every group of microbatches takes the same time. So a step with many microbatches
takes as long as a step with just enough of them to reach the steady state, plus the periods in between. Two short steps
are simulated. They differ by one period, and have the same rest of microbatches as the whole step. They also reach the
peak of a rank's memory, unless all of the head's weight gradients wait for the end.
"""

from __future__ import annotations

from hocket.config import Config
from hocket.program.pipeline import warmup
from hocket.settings.derived import group_of


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
    """Whether two shorter steps can stand for the whole one, and together have at most half its microbatches."""
    bounded = config.overlap.pp.defer_head != -1
    return bounded and sum(steady(config)) <= config.train.microbatches // 2


def continued(short: float, long: float, periods: float) -> float:
    """A quantity that grows by the same amount with every period, `periods` periods after the shorter step."""
    return short + periods * (long - short)

"""How many layers every virtual stage gets, so that ranks compute for equally long: embedding and head count too."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hocket.plan.ops import Layout, Op, Part, Verb
from hocket.plan.simulate import Costs

_VERBS: tuple[Verb, ...] = ("fwd", "recompute", "bwd", "wgrad")


def balanced(layout: Layout, costs: Costs) -> tuple[int, ...]:
    """Layers per virtual stage, from those of a layout on.

    As long as it makes the longest rank shorter, a layer goes from its longest stage, which mostly is that of the head,
    to the first stage of the shortest rank. In an interleaved order the backward of the last stage and the forward of
    the first one stand side by side, so they may add up to what two others do.
    """
    sizes = tuple(hi - lo for lo, hi in pairwise(layout.bounds))
    owners = [layout.owner(stage)[0] for stage in range(layout.stages)]
    layers = [_seconds(costs, layout.forward_parts(layer), layer) for layer in range(len(layout.kinds))]
    ends = _seconds(costs, ("embed",), -1), _seconds(costs, ("head",), -1)
    while True:
        stages = _stage_seconds(sizes, layers, ends)
        ranks = _by_rank(stages, owners)
        longest, shortest = ranks.index(max(ranks)), ranks.index(min(ranks))
        donors = [stage for stage, owner in enumerate(owners) if owner == longest and sizes[stage] > 1]
        if not donors:
            return sizes
        donor = max(donors, key=stages.__getitem__)
        taker = owners.index(shortest)
        moved = tuple(size + (stage == taker) - (stage == donor) for stage, size in enumerate(sizes))
        if max(_by_rank(_stage_seconds(moved, layers, ends), owners)) >= max(ranks):
            return sizes
        sizes = moved


def _seconds(costs: Costs, parts: tuple[Part, ...], layer: int) -> float:
    """Compute of one microbatch in some parts."""
    ops = (Op(verb, part, 0, 0, layer) for part in parts if part not in ("dispatch", "combine") for verb in _VERBS)
    return sum(float(costs.seconds(0, op)) for op in ops)


def _stage_seconds(sizes: tuple[int, ...], layers: list[float], ends: tuple[float, float]) -> list[float]:
    bounds = [0, *accumulate(sizes)]
    found = [sum(layers[lo:hi]) for lo, hi in pairwise(bounds)]
    found[0] += ends[0]
    found[-1] += ends[1]
    return found


def _by_rank(stages: list[float], owners: list[int]) -> list[float]:
    ranks = [0.0] * (max(owners) + 1)
    for seconds, owner in zip(stages, owners, strict=True):
        ranks[owner] += seconds
    return ranks

"""Chooses the layers of every virtual stage: all ranks compute for the same time, embedding and head included."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from hocket.program.ops import Layout, Op, Verb
from hocket.program.simulate import Costs

_VERBS: tuple[Verb, ...] = ("fwd", "bwd", "wgrad")


def balanced(layout: Layout, costs: Costs) -> tuple[int, ...]:
    """The balanced layers per virtual stage: the last split of `towards_balance`."""
    return towards_balance(layout, costs)[-1]


def towards_balance(layout: Layout, costs: Costs) -> list[tuple[int, ...]]:
    """Splits of layers over virtual stages: the layout's own split, and the split after each layer that moves.

    A layer moves from the longest stage of the longest rank, mostly the stage with the head, to the first stage of the
    shortest rank. This goes on while it makes the longest rank shorter. In an interleaved order the backward of the
    last stage and the forward of the first one run side by side, so they may take as long as two other stages.
    """
    splits = [tuple(hi - lo for lo, hi in pairwise(layout.bounds))]
    owners = [layout.owner(stage)[0] for stage in range(layout.stages)]
    fewest = [0, *[1] * (layout.stages - 2), 0] if layout.stages > 1 else [1]
    seconds = _Seconds(layout, costs)
    while True:
        sizes = splits[-1]
        stages, ranks = seconds.stages(sizes), seconds.ranks(sizes)
        longest, shortest = ranks.index(max(ranks)), ranks.index(min(ranks))
        donors = [s for s, owner in enumerate(owners) if owner == longest and sizes[s] > fewest[s]]
        if not donors:
            return splits
        donor = max(donors, key=stages.__getitem__)
        taker = owners.index(shortest)
        moved = tuple(size + (stage == taker) - (stage == donor) for stage, size in enumerate(sizes))
        if max(seconds.ranks(moved)) >= max(ranks):
            return splits
        splits.append(moved)


def longest_rank(layout: Layout, costs: Costs, sizes: tuple[int, ...]) -> float:
    """Seconds that the rank with most to compute computes for a microbatch, with so many layers per stage."""
    return max(_Seconds(layout, costs).ranks(sizes))


class _Seconds:
    """What stages and ranks compute for a microbatch."""

    def __init__(self, layout: Layout, costs: Costs) -> None:
        self._layout = layout
        self._owners = [layout.owner(stage)[0] for stage in range(layout.stages)]
        self._layers = [
            _seconds(costs, tuple(part.name for part in layout.type_of(n).parts if not part.communicates), n)
            for n in range(len(layout.kinds))
        ]
        self._again = [
            {part: _seconds(costs, (part,), n, ("recompute",)) for part in layout.forward_parts(n)}
            for n in range(len(layout.kinds))
        ]
        self._ends = _seconds(costs, ("embed",), -1), _seconds(costs, ("head",), -1)

    def stages(self, sizes: tuple[int, ...]) -> list[float]:
        """By stage, with so many layers each."""
        layout = replace(self._layout, bounds=tuple(accumulate(sizes, initial=0)))
        again = [
            sum(seconds for part, seconds in parts.items() if layout.recomputes(part, n))
            for n, parts in enumerate(self._again)
        ]
        layers = [sum(both) for both in zip(self._layers, again, strict=True)]
        found = [sum(layers[lo:hi]) for lo, hi in pairwise(layout.bounds)]
        found[0] += self._ends[0]
        found[-1] += self._ends[1]
        return found

    def ranks(self, sizes: tuple[int, ...]) -> list[float]:
        """By rank."""
        ranks = [0.0] * (max(self._owners) + 1)
        for seconds, owner in zip(self.stages(sizes), self._owners, strict=True):
            ranks[owner] += seconds
        return ranks


def _seconds(costs: Costs, parts: tuple[str, ...], layer: int, verbs: tuple[Verb, ...] = _VERBS) -> float:
    """Compute of one microbatch in some parts."""
    ops = (Op(verb, part, 0, 0, layer) for part in parts for verb in verbs)
    return sum(float(costs.seconds(0, op)) for op in ops)

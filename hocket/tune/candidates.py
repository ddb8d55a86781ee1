"""Candidates of two settings that have too many values to simulate all: splits of layers over stages, and orders of
parts in a merged layer step. Small models of a step find those that are worth a simulation.

Note: [The rank with the head]
A head over a large vocabulary takes as long as several layers. With even stages the rank of the head takes longest for
every microbatch, and all other ranks wait. So `towards_balance` moves layers one by one from that rank to ranks with
less work. Ranks that take more layers hold more weights and activations. This includes the first rank, which holds
most. So all splits on the way are candidates. In merged steps uneven stages leave layers without a partner, and nothing
hides the all-to-alls of such layers. So the simulator decides whether a gain is real.

Note: [All orders, one per pair of lanes]
Lanes run in order, so two host orders that agree lane by lane are equally good. That leaves a seventh of all orders. Of
equal orders the one that issues the forward dispatch as late as its lanes allow is kept, because the dispatch stops the
host. If even then no compute runs between attention and dispatch, `order_problem` rules the order out.

Note: [The model of a merged step]
Two lanes, compute and all-to-alls, run one step of a chunk after the other. The first values of each step are there
when it starts, as in the steady state of a pipeline. The model leaves out contention, the host, p2p transfers and
gathers, so a thousand orders take hundredths of a second. Its result is a suggestion: `choose.py` and `search.py` price
whole programs with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from hocket.program.layer import CHAINS, MERGED, order_problem, spelt
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


USUAL = "literature"
_SIMULATED = 3
"""Number of unnamed orders for which whole steps are simulated."""
_WORTH = 0.999
"""A suggested order takes at most this share of the time of every named order."""
_LONGER = 1.25
"""Factor on all-to-alls. Of orders of equal time the one that is fastest with this factor comes first."""
_NEEDS = {behind: before for chain in CHAINS for before, behind in pairwise(chain)}
_EARLIER = {"aF": "uF", "cB": "uB"}
"""The op that the first op of each half needs: the last op of the layer before."""

Words = tuple[str, ...]


@cache
def all_orders() -> tuple[Words, ...]:
    """Every order that can run, one per pair of lanes. See Note: [All orders, one per pair of lanes]."""
    found: dict[tuple[Words, Words], Words] = {}
    for order in _extensions((), tuple(sorted({word for chain in CHAINS for word in chain}))):
        lanes = _lanes(order)
        if lanes not in found or order.index("dF") > found[lanes].index("dF"):
            found[lanes] = order
    return tuple(sorted(order for order in found.values() if not order_problem(" ".join(order))))


def _extensions(begun: Words, left: Words) -> Iterator[Words]:
    """Every way to complete an order."""
    if not left:
        yield begun
    for word in left:
        if _NEEDS.get(word) not in left:
            yield from _extensions((*begun, word), tuple(other for other in left if other != word))


def _is_transfer(word: str) -> bool:
    return word[0] in "dc"


def _lanes(order: Words) -> tuple[Words, Words]:
    transfers = tuple(word for word in order if _is_transfer(word))
    return tuple(word for word in order if word not in transfers), transfers


def step_seconds(order: Sequence[str], seconds: Mapping[str, float], layers: int) -> float:
    """Time of one merged step of a chunk of `layers` layers. See Note: [The model of a merged step]."""
    steps = [(word, _NEEDS.get(word) or _EARLIER[word], _is_transfer(word), seconds[word]) for word in order]
    compute = transfers = 0.0
    ends = []
    for _ in range(3):
        compute += seconds["uB"]  # of the chunk's last layer
        end = {**dict.fromkeys(seconds, 0.0), "uB": compute}
        for layer in range(layers):
            for word, needed, transfer, length in steps:
                if transfer:
                    transfers = end[word] = max(transfers, end[needed]) + length
                elif word != "uB" or layer < layers - 1:
                    compute = end[word] = max(compute, end[needed]) + length
        ends.append(compute)
    return ends[2] - ends[1]


def layer_seconds(costs: Costs, layout: Layout) -> dict[str, float]:
    """Seconds of the twelve ops of a merged step of a layer with experts; empty if none has all of these ops.

    Backward includes the time of parts that the layer recomputes.
    """
    order = MERGED["literature"]
    letters = {letter for _, letter in order}
    found = (n for n in range(len(layout.kinds)) if letters == {part.letter for part in layout.type_of(n).parts})
    layer = next(found, None)
    if layer is None:
        return {}
    parts = {part.letter: part.name for part in layout.type_of(layer).parts}

    def seconds(verb: Verb, part: str) -> float:
        return float(costs.seconds(0, Op(verb, part, 0, 0, layer)))

    times = (
        seconds(verb, part) + (seconds("recompute", part) if verb == "bwd" and layout.recomputes(part, layer) else 0.0)
        for verb, part in ((verb, parts[letter]) for verb, letter in order)
    )
    return dict(zip(spelt(order).split(), times, strict=True))


def better_orders(seconds: Mapping[str, float], layers: int, count: int) -> list[str]:
    """Up to `count` orders that the model finds faster than all named orders, the fastest first."""
    named = min(step_seconds(spelt(order).split(), seconds, layers) for order in MERGED.values())
    longer = {word: value * (_LONGER if _is_transfer(word) else 1) for word, value in seconds.items()}
    faster = []
    for order in all_orders():
        found = step_seconds(order, seconds, layers)
        if found < _WORTH * named:
            faster.append((round(found / named, 3), step_seconds(order, longer, layers), " ".join(order)))
    return [text for _, _, text in sorted(faster)[:count]]


def orders(costs: Costs, layout: Layout, worth: float) -> list[str]:
    """The literature's order, the best named one, and those that the model finds fastest.

    None where no layers exchange rows, or where the literature's hides all but a share of `worth`.
    """
    seconds = layer_seconds(costs, layout)
    if not seconds:
        return []
    layers = max(stop - start for start, stop in pairwise(layout.bounds))
    named = sorted(MERGED, key=lambda name: step_seconds(spelt(MERGED[name]).split(), seconds, layers))
    compute = layers * sum(value for word, value in seconds.items() if not _is_transfer(word))
    if step_seconds(spelt(MERGED[USUAL]).split(), seconds, layers) <= (1 + worth) * compute:
        return []
    fastest = sorted(all_orders(), key=lambda order: (step_seconds(order, seconds, layers), order))[:_SIMULATED]
    return list(dict.fromkeys((USUAL, named[0], *map(" ".join, fastest))))

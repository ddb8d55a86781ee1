"""Finds the best order of parts in a merged layer step: it compares all orders on a small model of the step.

Note: [All orders, one per pair of lanes]
Lanes run in order, so two host orders that agree lane by lane are equally good. That leaves a seventh of all orders. Of
equal orders the one that issues the forward dispatch as late as its lanes allow is kept, because the dispatch stops the
host. If even then no compute runs between attention and dispatch, `order_problem` rules the order out.

Note: [The model of a merged step]
Two lanes, compute and all-to-alls, run one step of a chunk after the other. The first values of each step are there
when it starts, as in the steady state of a pipeline. The model leaves out contention, the host, p2p transfers and
gathers, so a thousand orders take hundredths of a second. Its result is a suggestion: `search.py` prices whole programs
with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from hocket.program.layer import CHAINS, MERGED, order_problem, spelt
from hocket.program.ops import Layout, Op, Verb
from hocket.program.simulate import Costs

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

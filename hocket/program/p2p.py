"""What hides the p2p transfer of a gradient between pipeline ranks: chosen from costs.

Note: [What a merged step waits for]
A rank sends the gradient of a chunk and, in the next step, needs one from the rank behind it, which sent it at about
the same time. So each merged step is as long as its compute up to the send, plus the p2p transfer, unless compute is
left to do behind the send: `exposed = max(0, p2p transfer - weight gradients behind the send)`. Weight gradients that
stand behind the send keep what they work on for longer, so as few as cover the p2p transfer are moved there. Where all
of a chunk do not, neighbours that are three steps apart at the start instead of two (`plan.stride`) give the p2p
transfer a step of its own, and keep more activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hocket.program.cost import CostTable
from hocket.program.ops import Key, Layout, Op
from hocket.program.transformer import HEAD
from hocket.program.values import reads

Parts = Literal["attn", "all"]


@dataclass(frozen=True)
class Cover:
    """Weight gradients behind the send: of the last `layers` backward layers of a chunk: first parts' or all."""

    layers: int
    parts: Parts
    seconds: float
    """What they take, in the chunk where they take least."""
    p2p: float
    """What they are to hide, in seconds."""

    @property
    def setting(self) -> int | str:
        """The value of `overlap.pp.defer_layers` that puts them there."""
        if self.parts == "all" or not self.layers:
            return self.layers
        return "attn" if self.layers < 0 else f"attn:{self.layers}"

    @property
    def exposed(self) -> float:
        """What of a p2p transfer they don't hide, in seconds."""
        return max(0.0, self.p2p - self.seconds)


def smallest_cover(
    layout: Layout, costs: CostTable, layers: Sequence[int] = (), parts: Sequence[Parts] = ("attn", "all")
) -> Cover:
    """The fewest weight gradients that take at least as long as a gradient's p2p transfer; if none do, those that take
    longest.

    `layers` are the numbers of layers to choose from, by default 1 to as many as a chunk has.
    """
    p2p = float(costs.table["recv", "grad", ""].seconds)
    most = max([1, *map(len, _sending(layout))])
    choices = [
        Cover(count, kind, min(_behind_send(layout, costs, chunk, count, kind) for chunk in _sending(layout)), p2p)
        for count in layers or range(1, most + 1)
        for kind in parts
    ]
    enough = [choice for choice in choices if not choice.exposed]
    return min(enough, key=_size) if enough else max(choices, key=lambda choice: (choice.seconds, -choice.layers))


def _size(cover: Cover) -> tuple[float, int, bool]:
    return cover.seconds, cover.layers, cover.parts == "all"


def _sending(layout: Layout) -> Iterator[range]:
    """The layers of every chunk whose gradient is sent to another rank."""
    for rank in range(layout.pp):
        for chunk in range(layout.chunks):
            if not layout.is_first(rank, chunk):
                yield layout.layers(rank, chunk)


def _behind_send(layout: Layout, costs: CostTable, chunk: range, layers: int, parts: Parts) -> float:
    """Seconds of the weight gradients of a chunk's last backward layers, its first in forward order.

    Without layers it is the chunk of the head, whose weight gradient is behind the send in any case.
    """
    if not chunk:
        return float(costs.seconds(0, Op("wgrad", HEAD.name)))
    late = chunk if layers < 0 else chunk[:layers]
    return sum(
        float(costs.seconds(0, Op("wgrad", part, layer=layer)))
        for layer in late
        for part in layout.weighted_parts(layer)
        if parts == "all" or part == layout.type_of(layer).entry.name
    )


def activation(layout: Layout, costs: CostTable, rank: int, chunk: int) -> int:
    """Bytes that a chunk's forward keeps for its backward; of what is recomputed, its inputs; of what is away, none."""
    total, inputs = 0, set[Key]()
    for layer in layout.layers(rank, chunk):
        for part in layout.forward_parts(layer):
            if not layout.offloads(part, layer):
                total += costs.saved_bytes(rank, Op("fwd", part, layer=layer))
            if layout.recomputes(part, layer):
                inputs |= set(reads(Op("recompute", part, 0, chunk, layer), layout, rank))
    return total + sum(costs.output_bytes(rank, Op(*key)) for key in inputs if key[0] != "recompute")  # pyrefly: ignore

"""The ops of a step with two items of one kind: two forwards or two backwards, layer by layer.

Both are of one chunk, so they run through the same layers, and one gather serves both. The order inside a layer is a
template in `layer.py`; when such steps stand in an order is in `pipeline.py`, Note: [Pairs at the ends].

Note: [Two of what is big are kept apart]
The gradients of head and embedding have one slot each. Between the two weight gradients that write it stands other
compute, under which the first one is reduced: the other half's backward of the head, or what is left of the last layer.
"""

from __future__ import annotations

from itertools import pairwise

from hocket.program.layer import BACKWARDS, FORWARDS, FULL, LATE, Half, Token, pair_at_once, part_of
from hocket.program.ops import Layout, Op, Verb
from hocket.program.parts import Part
from hocket.program.pipeline import Item, Step
from hocket.program.transformer import EMBED, HEAD


def op_of(verb: Verb, part: Part, item: Item, layer: int = -1) -> Op:
    """A part of one item's forward or backward."""
    return Op(verb, part.name, item[0], item[1], layer, part.lane)


def ops_of(token: Token, item: Item, layer: int, layout: Layout) -> list[Op]:
    """What a template's token means for one layer of an item; nothing for a part that the layer does not have.

    A recomputation stands right ahead of its backward. It waits for no gradient, so it runs while one is on its way. If
    it communicates it stands ahead of the layer's backward, which it runs beside; if it computes what a reader does not
    keep, ahead of that one's. A weight gradient that cannot wait stands right behind it.
    """
    ops: list[Op] = []
    for verb, part in part_of(token, layout, layer):
        if verb == "wgrad" and not part.deferrable:
            continue
        kind = layout.type_of(layer)
        again = [p for p in kind.parts if p.communicates] if verb == "bwd" and part is kind.exit else []
        if verb == "bwd" and not part.communicates:
            again += [p for p in kind.parts if p.lends and not p.communicates and p.name in part.sources]
            again += [] if part.lends else [part]
        ops.extend(op_of("recompute", p, item, layer) for p in again if layout.recomputes(p.name, layer))
        ops.append(op_of(verb, part, item, layer))
        if verb == "bwd" and part.unit is not None and not part.deferrable:
            ops.append(op_of("wgrad", part, item, layer))
    return ops


def is_early(token: Token, layout: Layout) -> bool:
    """Whether a token is a backward that runs in the layer step before: see Note: [uB' belongs to the next layer]."""
    there = [part for kind in layout.layer_types if (part := kind.with_letter(token[1]))]
    return token[0] == "bwd" and (any(part.early for part in there) if there else token[1] == FULL.exit.letter)


def early_ops(item: Item, layer: int, layout: Layout) -> list[Op]:
    """The backward of a layer that runs in the step before, or at the start."""
    last = layout.type_of(layer).exit
    return ops_of(("bwd", last.letter), item, layer, layout) if last.early else []


def expand_pair(step: Step, layout: Layout, rank: int, defer: bool) -> list[Op]:
    """The parts of a step of two forwards or two backwards in host order. `defer` leaves weight gradients where the
    template has them; else each stands right behind its input gradient.
    """
    if step.forwards:
        return _forwards(step.forwards, layout, rank)
    return _backwards(step.backwards, layout, rank, BACKWARDS if defer else pair_at_once(BACKWARDS))


def _forwards(items: tuple[Item, ...], layout: Layout, rank: int) -> list[Op]:
    """Embeddings, layers, heads. The first half's head covers the second half's last combine."""
    chunk = items[0][1]
    layers = layout.layers(rank, chunk)
    ops = [op_of("fwd", EMBED, item) for item in items if layout.is_first(rank, chunk)]
    for layer in layers:
        for half, token in FORWARDS:
            where = layer - 1 if (half, token) == LATE else layer
            if where in layers:
                ops += ops_of(token, items[half], where, layout)
    heads = [[op_of("fwd", HEAD, item)] if layout.is_last(rank, chunk) else [] for item in items]
    late = ops_of(LATE[1], items[1], layers[-1], layout) if layers else []
    return [*ops, *heads[0], *late, *heads[1]]


def _backwards(items: tuple[Item, ...], layout: Layout, rank: int, order: tuple[Half, ...]) -> list[Op]:
    """Heads, layers, embeddings. See Note: [Two of what is big are kept apart]."""
    chunk = items[0][1]
    layers = layout.layers(rank, chunk)[::-1]
    ops: list[Op] = []
    for item in items:
        head = layout.is_last(rank, chunk)
        ops += [op_of("bwd", HEAD, item)] if head else []
        ops += early_ops(item, layers[0], layout) if layers else []
        ops += [op_of("wgrad", HEAD, item)] if head else []
    if not layers and layout.is_first(rank, chunk):
        ops += _embedding(items[0])
    for layer, after in pairwise([*layers, None]):
        assert layer is not None
        for half, token in order:
            if not is_early(token, layout):
                ops += ops_of(token, items[half], layer, layout)
            elif after is not None:
                ops += ops_of(token, items[half], after, layout)
            elif layout.is_first(rank, chunk) and half == 0:
                ops += _embedding(items[0])
    return [*ops, *_embedding(items[1])] if layout.is_first(rank, chunk) else ops


def _embedding(item: Item) -> list[Op]:
    return [op_of("bwd", EMBED, item), op_of("wgrad", EMBED, item)]

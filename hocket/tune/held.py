"""Two bounds on the bytes that ranks hold in a step, `simulate.peak_bytes`, without a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.program.cost import CostTable
from hocket.program.ops import Layout, Op, Program
from hocket.program.p2p import activation
from hocket.program.values import reads

_STARTS = ("act", "grad", "embed")
"""Values that a chunk's forward and backward start from. They may live until its backward is done."""


def at_least(layout: Layout, in_flight: Sequence[int], costs: CostTable) -> int:
    """A lower bound for the largest rank: its main weights, and its chunks that have run forward and not backward.

    `in_flight` is that of a program, but no program needs to be built.
    """
    held = 0
    for rank, count in enumerate(in_flight):
        smallest = min(activation(layout, costs, rank, chunk) for chunk in range(layout.chunks))
        state = costs.state_bytes[rank] if costs.state_bytes else 0
        held = max(held, state + (count - 1) * smallest)
    return held


def at_most(program: Program, costs: CostTable, rank: int, late_heads: int) -> int:
    """An upper bound, if weight gradients have no steps of their own. `late_heads` counts those at a step's end.

    It adds up: all chunks in flight and one more, at the size of the largest chunk, with the values that it starts from
    and forward's values that backward reads; everything else that two chunks hold; what six layer passes have on their
    way to the host's memory and back; and all gradients.
    """
    layout = program.layout
    grads = {(op.verb, op.part, op.chunk, op.layer): op for op in program.ranks[rank] if op.verb in ("wgrad", "add")}
    kept = rest = 0
    for chunk in range(layout.chunks):
        ops = _ops(layout, rank, chunk)
        values = {op: costs.output_bytes(rank, op) for op in ops}
        later = {key for op in ops if op.verb == "bwd" for key in reads(op, layout, rank)}
        lasting = sum(values[op] for op in ops if op.verb != "bwd" and (op.part in _STARTS or op.key in later))
        kept = max(kept, activation(layout, costs, rank, chunk) + lasting)
        saved = (costs.saved_bytes(rank, op) for op in ops if op.verb == "bwd" or op.part == "head")
        rest = max(rest, sum(saved) + sum(values.values()))
    return (
        costs.fixed_bytes(program, rank)
        + (program.in_flight[rank] + 1) * kept
        + 2 * rest
        + 6 * max((_on_the_way(layout, costs, layer) for layer in range(len(layout.kinds))), default=0)
        + late_heads * costs.saved_bytes(rank, Op("bwd", "head"))
        + sum(costs.grad_bytes(rank, op) for op in grads.values())
    )


def _on_the_way(layout: Layout, costs: CostTable, layer: int) -> int:
    """What a layer offloads in a pass. See Note: [A layer step ahead, and two behind]."""
    parts = (part for part in layout.forward_parts(layer) if layout.offloads(part, layer))
    return sum(costs.saved_bytes(0, Op("fwd", part, 0, 0, layer)) for part in parts)


def forwards_at_most(layout: Layout, costs: CostTable) -> int:
    """An upper bound for a rank that only runs forwards: values of two chunks, and activations that wait."""
    most = 0
    for rank in range(layout.pp):
        waiting = layout.pp * costs.output_bytes(rank, Op("recv", "act"))
        for chunk in range(layout.chunks):
            values = sum(costs.output_bytes(rank, op) for op in _ops(layout, rank, chunk) if op.verb != "bwd")
            most = max(most, 2 * values + waiting)
    return most


def _ops(layout: Layout, rank: int, chunk: int) -> list[Op]:
    """The ops of forward and backward for one microbatch of a chunk."""
    parts: list[tuple[str, int]] = [
        (part, layer) for layer in layout.layers(rank, chunk) for part in layout.forward_parts(layer)
    ]
    if layout.is_first(rank, chunk):
        parts.append(("embed", -1))
    if layout.is_last(rank, chunk):
        parts.append(("head", -1))
    both = [Op(verb, part, 0, chunk, layer) for part, layer in parts for verb in ("fwd", "bwd")]
    return [*both, Op("recv", "act", 0, chunk), Op("recv", "grad", 0, chunk)]

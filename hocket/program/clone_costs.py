"""What cloned experts cost: the exchanges of their weights and gradients, and the room that they have in all buffers.

A rank gets the weights of as many experts as it has room for, and returns as many gradients; an owner of several hot
experts sends more. A clone packs rows and unpacks them: 4 times its bytes are read or written. A home packs them,
zeroes the room, and adds: 6 times. Shards have the room too, so gathers, reduces, main weights and their gradients
grow by the share that clones are of a rank's experts. Updates skip the room, and there are no averages of it. That
products of weight gradients write zeros or sums of clones as well is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hocket.config import ModelConfig, Purpose
from hocket.program.clone_ops import CLONED
from hocket.program.cost import CostTable, OpCost, unit_weights, units_of
from hocket.program.hardware import Hardware
from hocket.program.ops import Layout
from hocket.program.schedule import CostKey
from hocket.program.shard import Sharding


def with_clones(
    costs: CostTable, model: ModelConfig, layout: Layout, sharding: Sharding, hardware: Hardware, dtype_bytes: int
) -> CostTable:
    """The costs of a step with room for `layout.clones` clones on each rank."""
    table, state = dict(costs.table), list(costs.state_bytes)
    share = layout.clones * layout.ep / model.experts
    summed = sharding.size(CLONED) == 1 or sharding.adds_up(CLONED)
    wire = 4 if summed else sharding.wire_bytes or dtype_bytes
    for key, cost in costs.table.items():
        table[key] = _longer(cost, key, layout, 1 + share)
    for rank in range(layout.pp):
        for (unit, kind), count in Counter(units_of(layout, rank)).items():
            if unit != CLONED:
                continue
            room = round(share * unit_weights(model, layout, unit, kind))
            table["clone", unit, kind] = _exchange(hardware, "clones", room * dtype_bytes, 4)
            table["home", unit, kind] = _exchange(hardware, "clone_grads", room * wire, 6)
            ranks = sharding.size(unit) if sharding.gathers(unit) else 1
            cast = dtype_bytes if ranks == 1 and dtype_bytes != 4 else 0
            more = 2 * sharding.averages_bytes * _more_than_even(unit_weights(model, layout, unit, kind), share, ranks)
            state[rank] += count * ((4 + cast) * -(-room // ranks) + more)
    slots = tuple(
        {unit: _scaled(sizes, 1 + share) if unit == CLONED else sizes for unit, sizes in of_rank.items()}
        for of_rank in costs.slot_bytes
    )
    return replace(costs, table=table, slot_bytes=slots, state_bytes=tuple(state))


def _more_than_even(weights: int, share: float, ranks: int) -> int:
    """Weights of the rank that keeps most of a unit, over the mean: shards are as long, and some have more room.

    A unit has two matrices of each expert, of which the first has twice as many elements, and room behind either.
    """
    ends, most = (0.0, (1 + share) * weights * 2 / 3), 0.0
    for rank in range(ranks):
        low, high = ((1 + share) * weights * n / ranks for n in (rank, rank + 1))
        inside = (
            min(high, end + size) - max(low, end)
            for end, size in zip(ends, (weights * 2 / 3, weights / 3), strict=True)
        )
        most = max(most, sum(part for part in inside if part > 0))
    return max(0, round(most - weights / ranks))


def _longer(cost: OpCost, key: CostKey, layout: Layout, factor: float) -> OpCost:
    """The cost of an op on buffers that are longer by a factor."""
    verb, part, _ = key
    if verb == "wgrad" and layout.unit(part) == CLONED:
        return replace(cost, grad_bytes=round(factor * cost.grad_bytes))
    if (verb, part) == ("update", CLONED):
        return replace(cost, output_bytes=round(factor * cost.output_bytes))
    if part != CLONED or verb not in ("gather", "reduce", "add"):
        return cost
    sizes = {"wire_bytes": cost.wire_bytes, "memory_bytes": cost.memory_bytes, "grad_bytes": cost.grad_bytes}
    changed = {name: round(factor * nbytes) for name, nbytes in sizes.items()}
    return replace(cost, seconds=factor * cost.seconds, **changed)


def _exchange(hardware: Hardware, purpose: Purpose, nbytes: int, times: int) -> OpCost:
    seconds = hardware.link(purpose).seconds(nbytes) + times * nbytes / hardware.memory_bandwidth + hardware.gap
    return OpCost(seconds, 0.0, nbytes, times * nbytes)


def _scaled(sizes: tuple[int, int], factor: float) -> tuple[int, int]:
    weight, gradient = sizes
    return round(factor * weight), round(factor * gradient)

"""What Muon's updates cost: averages, iterations, and the exchanges around them, in the place of AdamW's.

A unit's matrices are shared out over the ranks of its group, each as much as the others, and what is sent is bf16. An
average reads gradient and average and writes the average and what is sent: 14 bytes an element. The update reads the
result and the weight and writes the weight: 12. Of AdamW's two averages one is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hocket.config import ModelConfig
from hocket.program.copies import copies_of
from hocket.program.cost import CostTable, OpCost, groups_of, size_of, unit_weights, units_of
from hocket.program.formulas import STOCK, orthogonal_flops
from hocket.program.hardware import Hardware
from hocket.program.ops import Layout
from hocket.program.part_sizes import Shapes
from hocket.program.parts import Unit
from hocket.program.schedule import CostKey, Time
from hocket.program.shard import MATRIX_SLOTS, Sharding


def with_muon(
    costs: CostTable, model: ModelConfig, layout: Layout, sharding: Sharding, hardware: Hardware, dtype_bytes: int
) -> CostTable:
    """The costs of a step whose layers Muon updates. The step op has all of it, if no update is left to the next."""
    table, state = dict(costs.table), list(costs.state_bytes)
    longest: Time = 0.0
    for rank in range(layout.pp):
        slots: dict[Unit, int] = {}
        longer: Time = 0.0
        for (unit, kind), count in Counter(units_of(layout, rank)).items():
            if not kind:
                continue
            weights = unit_weights(model, layout, unit, kind)
            ranks = sharding.size(unit) if sharding.gathers(unit) else 1
            shard = -(-weights // ranks)
            adamw = costs.table["update", unit, kind]
            cast = (4 + dtype_bytes) * shard if ranks == 1 and dtype_bytes != 4 else 0
            made = _of_unit((unit, kind), (weights, ranks), cast, _flops(model, layout, unit, kind), hardware)
            made["update", unit, kind] = replace(made["update", unit, kind], output_bytes=adamw.output_bytes)
            table |= made
            longer += count * (sum(cost.seconds for cost in made.values()) - adamw.seconds)
            state[rank] -= count * shard * sharding.averages_bytes
            held = MATRIX_SLOTS if sharding.collects(unit) else 1
            slots[unit] = max(slots.get(unit, 0), held * (2 * weights + 4 * shard))
        state[rank] += sum(slots.values())
        longest = max(longest, longer)
    step = table["step", "all", ""]
    table["step", "all", ""] = replace(step, seconds=step.seconds + longest)
    return replace(costs, table=table, state_bytes=tuple(state))


def _of_unit(
    named: tuple[Unit, str], sizes: tuple[int, int], cast: int, flops: float, hardware: Hardware
) -> dict[CostKey, OpCost]:
    """The ops of a unit, by its class and kind, its weights and the ranks that share them, and the FLOPs of all."""
    (unit, kind), (weights, ranks) = named, sizes
    shard = -(-weights // ranks)

    def local(nbytes: int, flops: float = 0.0) -> OpCost:
        seconds = nbytes / hardware.memory_bandwidth + flops / hardware.gemm_flops + hardware.gap
        return OpCost(seconds, flops, memory_bytes=nbytes)

    def exchange(nbytes: int) -> OpCost:
        wire = 2 * shard * (ranks - 1)
        seconds = hardware.link(groups_of(unit)[1]).seconds(wire) + nbytes / hardware.memory_bandwidth
        return OpCost(seconds, 0.0, wire, nbytes)

    average, iterate, move = 14 * shard, 10 * weights, 12 * shard + cast
    if ranks == 1:
        return {("update", unit, kind): local(average + iterate + move, flops)}
    return {
        ("collect", unit, kind): exchange(average),
        ("orthogonalise", unit, kind): local(iterate, flops / ranks),
        ("scatter", unit, kind): exchange(2 * weights + 4 * shard),
        ("update", unit, kind): local(move),
    }


def _flops(model: ModelConfig, layout: Layout, unit: Unit, kind: str) -> float:
    """Of the iterations of all matrices of a unit; those of attention are taken as square."""
    shapes = Shapes(model, 1, layout.ep, copies_of(model, layout.ep, False, 1), STOCK)
    widths = {"experts": model.expert_ffn, "mlp": model.ffn}
    return sum(
        orthogonal_flops(size_of(part, shapes).weights, model.hidden, widths.get(part.name, model.hidden))
        for part in layout.by_kind[kind].parts
        if layout.unit(part.name) == unit
    )

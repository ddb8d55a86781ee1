"""Costs of ops where documents share sequences, and so of microbatches whose attention differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hocket.config import Config
from hocket.program.attending import Lengths, merged
from hocket.program.clock import at_clock
from hocket.program.cost import CORE, CostTable, clock_with, parts_of, shapes_of, size_of, sizes_of
from hocket.program.hardware import Hardware
from hocket.program.ops import Op
from hocket.program.part_sizes import Shapes
from hocket.program.schedule import Time
from hocket.program.stages import costs_of, layout_of, sharding_of
from hocket.program.tensor_costs import model_of_ranks


@dataclass(frozen=True)
class Varied(CostTable):
    """Costs where each microbatch has documents of its own. Memory does not depend on them. Made by `varied`."""

    microbatches: Sequence[CostTable] = ()
    """Of each."""

    def seconds(self, rank: int, op: Op) -> Time:
        if op.verb not in ("fwd", "bwd", "recompute"):
            return super().seconds(rank, op)
        return self.microbatches[op.microbatch].seconds(rank, op)


def varied(whole: CostTable, config: Config, hardware: Hardware, documents: Sequence[Lengths]) -> Varied:
    """The costs of microbatches with these documents, beside `whole`, which are those of whole sequences.

    All run at the clock of documents as they are on average: see Note: [Power sets the clock]. Measured costs stay
    those of the documents that there were.
    """
    layout, sizes = layout_of(config), (config.tokens, sharding_of(config), hardware, config.element_bytes)
    model = config.model if config.mesh.tp == 1 else model_of_ranks(config)
    shapes = shapes_of(model, layout, config.data.sequence_length, hardware, config.element_bytes)
    average = replace(shapes, documents=merged(documents))
    clock, base, rates = clock_with(sizes_of(layout, average), layout, *sizes), whole, hardware
    if clock:
        rates = at_clock(hardware, clock)
        base = costs_of(config, rates)
        measured = {key: whole.table[key] for key in whole.timed}
        base = replace(base, table={**base.table, **measured}, timed=whole.timed, clock=clock)
    same: dict[str, Any] = {field.name: getattr(base, field.name) for field in fields(CostTable)}
    return Varied(**same, microbatches=[_with_documents(base, config, rates, shapes, each) for each in documents])


def _with_documents(
    whole: CostTable, config: Config, hardware: Hardware, shapes: Shapes, lengths: Lengths
) -> CostTable:
    """The costs of a microbatch with such documents: each part that attends does less, as its kind of layer does."""
    tokens, packed, table = config.tokens, replace(shapes, documents=lengths), dict(whole.table)
    for part, kind in parts_of(layout_of(config)):
        before, after = size_of(part, shapes), size_of(part, packed)
        less, kernels = before.core - after.core, before.core + before.masked - after.core - after.masked
        for verb, like, rate in (
            ("fwd", "fwd", hardware.attention_fwd_flops),
            ("recompute", "fwd", hardware.attention_fwd_flops),
            ("bwd", "bwd", hardware.attention_bwd_flops),
        ):
            cost = whole.table.get((verb, part.name, kind))
            if kernels and cost is not None and (verb, part.name, kind) not in whole.timed:
                times = CORE[like] * tokens
                changed = replace(cost, seconds=cost.seconds - times * kernels / rate, flops=cost.flops - times * less)
                table[verb, part.name, kind] = changed
    return replace(whole, table=table)

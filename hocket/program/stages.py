"""From settings to what the planner asks for: where layers live, how many ranks share a unit, what ops cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hocket.config import COPIED, Config, Purpose, Strategy
from hocket.program.cost import (
    CORE,
    CostTable,
    Measurement,
    OpCost,
    clock_with,
    groups_of,
    op_costs,
    parts_of,
    shapes_of,
    size_of,
    sizes_of,
    with_muon,
)
from hocket.program.documents import Lengths, merged
from hocket.program.hardware import Hardware, at_clock
from hocket.program.mesh import Mesh
from hocket.program.ops import HOST, Layout, Op
from hocket.program.part_sizes import Fp8, Shapes
from hocket.program.shard import Sharding
from hocket.program.simulate import CostKey, Time
from hocket.program.tensor_costs import model_of_rank, model_of_ranks, with_tensors


def mesh_of(config: Config) -> Mesh:
    """The grid of ranks that a configuration asks for."""
    m, keys = config.mesh, config.model.heads if config.model.latent else config.model.kv_heads
    return Mesh(**vars(m), turning=config.plan.turning, sharing=max(1, m.tp // keys))


def layout_of(config: Config) -> Layout:
    """Which virtual stage holds which layers. `plan.layers_per_stage` overrides the even split."""
    bounds = [0]
    for count in config.plan.split:
        bounds.append(bounds[-1] + count)
    away, per_rank = config.mesh.ep > 1, config.overlap.ep.copies == "per_rank"
    uncounted = away and config.overlap.ep.splits == "device"
    written = config.train.transport == "null" or "a2a" in COPIED.get(config.train.transport, ())
    layout = Layout(
        kinds=config.model.layer_kinds(),
        pp=config.mesh.pp,
        chunks=config.plan.chunks,
        ep=config.mesh.ep,
        cp=config.mesh.cp,
        heads=config.mesh.cp > 1 and config.overlap.cp.method == "heads",
        bounds=tuple(bounds) if config.plan.split else (),
        tied=config.model.tied,
        turning=config.plan.turning,
        placed=uncounted or (away and written and not per_rank),
        uncounted=uncounted,
        recompute=tuple(part for part in config.plan.recompute if part != "auto"),
        offload=tuple(part for part in config.plan.offload if part != "auto"),
        per_rank=away and per_rank,
    )
    if config.model.norms == "before":
        return layout
    return replace(layout, types=tuple(kind.keeping_input() for kind in layout.layer_types))


def sharding_of(config: Config) -> Sharding:
    """Over how many ranks weights and gradients are spread, and what of them is: all, while that is open."""
    strategy = config.overlap.dp.strategy
    kept: Strategy = "optim_grads_params" if strategy == "auto" else strategy
    sizes = config.mesh.members("reduce_dense"), config.mesh.members("reduce_experts")
    averages = 2 if config.precision.averages == "bf16" else 4
    muon = config.optimizer.name == "muon"
    return Sharding(*sizes, kept, config.wire_bytes, config.mesh.tp, averages, fp8_of(config), muon)


def fp8_of(config: Config) -> Fp8 | None:
    """Which products run in fp8; None: none. Weights are cast whenever they are gathered, or once a step."""
    p, keeps = config.precision, config.overlap.dp.strategy not in ("auto", "optim_grads_params")
    if p.compute != "fp8":
        return None
    casts = 1 / config.train.microbatches if keeps or config.mesh.data == 1 else 2.0
    return Fp8(p.fp8_products, p.fp8_ends, casts, gathered_units(config) if p.gather == "fp8" else ())


def gathered_units(config: Config) -> tuple[str, ...]:
    """Of the units whose products may run in fp8, those that are gathered."""
    if config.overlap.dp.strategy == "no_shard":
        return ()
    units = ("dense", "experts") if "moe" in config.model.kinds() else ("dense",)
    return tuple(unit for unit in units if config.mesh.members(groups_of(unit)[0]) > 1)


def costs_of(config: Config, hardware: Hardware, measured: Measurement | None = None) -> CostTable:
    """What every op of the plan costs on that hardware: on the imitated network, if the transport is the slow one.

    Measured seconds take the place of modelled ones.
    """
    length, layout = config.data.sequence_length, layout_of(config)
    sizes = layout, config.tokens, length, sharding_of(config), hardware, config.element_bytes
    costs = op_costs(config.model if config.mesh.tp == 1 else model_of_ranks(config), *sizes)
    if config.mesh.tp > 1:
        costs = with_tensors(costs, op_costs(model_of_rank(config), *sizes), config, hardware, layout)
    if config.optimizer.name == "muon":
        costs = with_muon(costs, config.model, layout, sharding_of(config), hardware, config.element_bytes)
    if config.mesh.replicas > 1:
        costs = _with_replicas(costs, config, hardware)
    if layout.placed:
        costs = _with_placed_rows(costs, config)
    if config.plan.pieces > 1:
        costs = _with_loss_in_pieces(costs, config, hardware)
    if config.plan.offload:
        costs = _with_offload(costs, layout, hardware)
    if config.train.transport == "slow":
        links = config.train.slow_links()
        late = {key: links[purpose] for key in costs.table if (purpose := carried_by(key, layout)) in links}
        for key, (latency, bandwidth) in late.items():
            cost = costs.table[key]
            if cost.wire_bytes:
                cost = replace(cost, seconds=cost.seconds + latency + cost.wire_bytes / bandwidth)
                costs = replace(costs, table={**costs.table, key: cost})
    return costs if measured is None else costs.measured(measured.seconds)


def _with_replicas(costs: CostTable, config: Config, hardware: Hardware) -> CostTable:
    """The costs with what sums a step's gradients over replicas of the weights, in fp32.

    That is once a step, behind the reduces of the last microbatch. Here every microbatch's has its share, so what a
    step's end has of it is underrated.
    """
    link, replicas, table = hardware.link("replicas"), config.mesh.replicas, dict(costs.table)
    for key, cost in costs.table.items():
        if key[0] == "reduce":
            kept = costs.table["update", *key[1:]].output_bytes  # the rank's gradients of the unit
            seconds = link.seconds(2 * kept * (replicas - 1) / replicas)
            table[key] = replace(cost, seconds=cost.seconds + seconds / config.train.microbatches)
    return replace(costs, table=table)


def _with_placed_rows(costs: CostTable, config: Config) -> CostTable:
    """The costs if rows arrive where products read them, with more room than they fill where no host counts them.

    Experts keep no rows of their own then, nor gradients of them: the values of the exchanges live as long. What is not
    filled takes no time.
    """
    times, rows = 1.0, rows_evenly(config) * config.model.hidden
    if layout_of(config).uncounted:
        times = rows_allowed(config) / rows_evenly(config)
    table = dict(costs.table)
    for kind in layout_of(config).layer_types:
        for part in kind.parts:
            if part.way == "out":
                reader = kind.readers[part.name][0]
                kept = {("fwd", part.name): 0, ("fwd", reader): 1, ("recompute", reader): 1, ("bwd", reader): 2}
                kept |= {("recompute", part.name): 0}
            elif part.way == "back":
                kept = {("bwd", part.name): 0}
            else:
                continue
            for (verb, name), times_kept in kept.items():
                cost = table.get((verb, name, kind.name))
                if cost is not None:
                    arrived = rows * config.element_bytes * times_kept
                    saved = max(cost.saved_bytes - arrived, 0) if cost.saved_bytes else 0
                    sizes = {"output_bytes": cost.output_bytes, "handed_bytes": cost.handed_bytes, "saved_bytes": saved}
                    changed = {what: round(times * nbytes) for what, nbytes in sizes.items()}
                    table[verb, name, kind.name] = replace(cost, **changed, lent_bytes=0)
    return replace(costs, table=table)


def _with_loss_in_pieces(costs: CostTable, config: Config, hardware: Hardware) -> CostTable:
    """The costs if tokens go through the head in pieces. See `layers/vocabulary.py`.

    Backward makes logits and reads them once more, and has the product of the weight gradient, which it keeps in fp32.
    What a piece takes inside of an op counts as kept.
    """
    m, rates = config.model, at_clock(hardware, costs.clock) if costs.clock else hardware
    logits, weights = config.tokens * m.vocab * config.element_bytes, m.vocab * m.hidden
    piece, flops = logits // config.plan.pieces, 2.0 * config.tokens * weights
    fwd, bwd, wgrad = (costs.table[verb, "head", ""] for verb in ("fwd", "bwd", "wgrad"))
    more = 2 * flops / rates.gemm_flops + (2 * logits + 4 * weights) / rates.kernel_bandwidth
    moved = (4 + config.wire_bytes) * weights
    table = {
        ("fwd", "head", ""): replace(
            fwd, saved_bytes=fwd.saved_bytes - hardware.formulas.loss_saved * logits + piece + 4 * config.tokens
        ),
        ("bwd", "head", ""): replace(
            bwd, seconds=bwd.seconds + more, flops=bwd.flops + 2 * flops,
            saved_bytes=bwd.saved_bytes - logits + piece + 4 * weights,
        ),
        ("wgrad", "head", ""): replace(
            wgrad, seconds=moved / rates.memory_bandwidth + rates.gap, flops=0.0, memory_bytes=moved
        ),
    }  # fmt: skip
    return replace(costs, table={**costs.table, **table})


def _with_offload(costs: CostTable, layout: Layout, hardware: Hardware) -> CostTable:
    """The costs with copies to the host's memory, and back, of what the forwards of parts keep."""
    table = dict(costs.table)
    for part, layer in layout.offloaded:
        kind = layout.kinds[layer]
        saved = table["fwd", part, kind].saved_bytes
        for verb in HOST:
            table[verb, part, kind] = OpCost(hardware.host.seconds(saved), wire_bytes=saved, output_bytes=saved)
    return replace(costs, table=table)


def carried_by(key: CostKey, layout: Layout) -> Purpose | None:
    """What the group is for that an op communicates on; None for compute."""
    verb, part, kind = key
    match verb, part:
        case "recv", "act":
            return "pp_fwd"
        case "recv", _:
            return "pp_bwd"
        case (("gather" | "reduce" | "collect" | "scatter"), _):
            return groups_of(part)[verb != "gather"]
    found = layout.by_kind[kind].by_name.get(part) if kind else None
    return found.purpose if found else None


# ------------------------------------------------------------------------------------------------------------- capacity
#
# How many rows a rank has room for, where no host knows how many come. Imports no torch.


MORE = 1.25
"""Room that is made, as a multiple of the rows that found none."""


def rows_evenly(c: Config) -> int:
    """Rows that arrive at every rank if the load is even: as many as it sends."""
    return c.tokens * c.model.top_k


def rows_at_most(c: Config) -> int:
    """Rows that may arrive at one rank: all tokens of all ranks choose as many of its experts as there are."""
    tokens = c.tokens
    return tokens * min(c.model.top_k, c.model.experts // c.mesh.ep) * c.mesh.ep


def rows_allowed(c: Config) -> int:
    """Rows that a rank has room for: `overlap.ep.room` times those of an even load, and never more than needed."""
    return min(math.ceil(c.overlap.ep.room * rows_evenly(c)), rows_at_most(c))


def rows_grown(c: Config, rows: int) -> int:
    """Rows that a rank has room for from then on, after so many came and found none."""
    return min(math.ceil(MORE * rows), rows_at_most(c))


def lack(c: Config, rows: int, grown: bool) -> str:
    """What a user is told of a step in which so many rows came to one rank and found no room, and whether it grew."""
    came, now = (count / rows_evenly(c) for count in (rows, rows_grown(c, rows)))
    after = (
        f"there is room for {now:.2f} times from now on"
        if grown
        else f"room for {now:.2f} times does not fit, so from now on hosts know the splits and issue every step"
    )
    why = f"made twice, since {came:.2f} times the rows of an even load came to one rank in a layer"
    return f"{why}; {after} (overlap.ep.room = {c.overlap.ep.room:g})"


# --------------------------------------------------------------------------------------------------------------- varied
#
# Costs of ops where documents share sequences, and so of microbatches whose attention differs.


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

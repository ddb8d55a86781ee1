"""From settings to what the planner asks for: where layers live, how many ranks share a unit, what ops cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hocket.config import COPIED, Config, Purpose, Strategy
from hocket.config.overlap import DIRECTIONS, ROLES
from hocket.program.cost import (
    CostTable,
    Measurement,
    OpCost,
    clock_with,
    groups_of,
    op_costs,
    shapes_of,
    sizes_of,
    units_of,
    with_muon,
)
from hocket.program.documents import Lengths, merged
from hocket.program.hardware import Hardware, at_clock
from hocket.program.mesh import HALF, Mesh
from hocket.program.ops import HOST, Layout, Op
from hocket.program.part_sizes import Fp8, copies_of
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


def costs_of(
    config: Config, hardware: Hardware, measured: Measurement | None = None, documents: Lengths = ()
) -> CostTable:
    """What every op of the plan costs on that hardware: on the imitated network, if the transport is the slow one.

    Measured seconds take the place of modelled ones. Without `documents` each sequence is one.
    """
    length, layout = config.data.sequence_length, layout_of(config)
    sizes = layout, config.tokens, length, sharding_of(config), hardware, config.element_bytes
    costs = op_costs(config.model if config.mesh.tp == 1 else model_of_ranks(config), *sizes, documents)
    if config.mesh.tp > 1:
        costs = with_tensors(costs, op_costs(model_of_rank(config), *sizes), config, hardware, layout)
    if config.optimizer.name == "muon":
        costs = with_muon(costs, config.model, layout, sharding_of(config), hardware, config.element_bytes)
    table, rates = dict(costs.table), at_clock(hardware, costs.clock) if costs.clock else hardware
    if config.mesh.replicas > 1:
        _sum_over_replicas(table, config, hardware)
    if layout.placed:
        _place_rows(table, config, layout)
    if config.plan.pieces > 1:
        _cut_loss(table, config, rates)
    for part, layer in layout.offloaded:  # what forwards keep goes to the host's memory and back
        saved = table["fwd", part, layout.kinds[layer]].saved_bytes
        away = OpCost(hardware.host.seconds(saved), wire_bytes=saved, output_bytes=saved)
        table |= {(verb, part, layout.kinds[layer]): away for verb in HOST}
    links = config.train.slow_links() if config.train.transport == "slow" else {}
    for key, cost in table.items():
        if cost.wire_bytes and (purpose := carried_by(key, layout)) in links:
            latency, bandwidth = links[purpose]
            table[key] = replace(cost, seconds=cost.seconds + latency + cost.wire_bytes / bandwidth)
    costs = replace(costs, table=table)
    return costs if measured is None else costs.measured(measured.seconds)


def _sum_over_replicas(table: dict[CostKey, OpCost], config: Config, hardware: Hardware) -> None:
    """Add what sums a step's gradients over replicas of the weights, in fp32.

    That is once a step, behind the reduces of the last microbatch. Here every microbatch's has its share, so what a
    step's end has of it is underrated.
    """
    link, replicas = hardware.link("replicas"), config.mesh.replicas
    for key, cost in table.items():
        if key[0] == "reduce":
            kept = table["update", *key[1:]].output_bytes  # the rank's gradients of the unit
            seconds = link.seconds(2 * kept * (replicas - 1) / replicas)
            table[key] = replace(cost, seconds=cost.seconds + seconds / config.train.microbatches)


def _place_rows(table: dict[CostKey, OpCost], config: Config, layout: Layout) -> None:
    """Rows arrive where products read them, with more room than they fill where no host counts them.

    Experts keep no rows of their own then, nor gradients of them: the values of the exchanges live as long. What is not
    filled takes no time.
    """
    rows = rows_evenly(config) * config.model.hidden * config.element_bytes
    times = rows_allowed(config) / rows_evenly(config) if layout.uncounted else 1.0
    for kind in layout.layer_types:
        kept: dict[tuple[str, str], int] = {}  # op -> how often it would have kept the rows
        for part in kind.parts:
            if part.way == "out":
                reader = kind.readers[part.name][0]
                kept |= {("fwd", part.name): 0, ("recompute", part.name): 0}
                kept |= {("fwd", reader): 1, ("recompute", reader): 1, ("bwd", reader): 2}
            elif part.way == "back":
                kept |= {("bwd", part.name): 0}
        for (verb, name), count in kept.items():
            cost = table.get((verb, name, kind.name))
            if cost is not None:
                saved = max(cost.saved_bytes - rows * count, 0) if cost.saved_bytes else 0
                sizes = {"output_bytes": cost.output_bytes, "handed_bytes": cost.handed_bytes, "saved_bytes": saved}
                changed = {what: round(times * nbytes) for what, nbytes in sizes.items()}
                table[verb, name, kind.name] = replace(cost, **changed, lent_bytes=0)


def _cut_loss(table: dict[CostKey, OpCost], config: Config, rates: Hardware) -> None:
    """Tokens go through the head in pieces. See `layers/vocabulary.py`.

    Backward makes logits and reads them once more, and has the product of the weight gradient, which it keeps in fp32.
    What a piece takes inside of an op counts as kept.
    """
    m = config.model
    logits, weights = config.tokens * m.vocab * config.element_bytes, m.vocab * m.hidden
    piece, flops = logits // config.plan.pieces, 2.0 * config.tokens * weights
    fwd, bwd, wgrad = (table[verb, "head", ""] for verb in ("fwd", "bwd", "wgrad"))
    more = 2 * flops / rates.gemm_flops + (2 * logits + 4 * weights) / rates.kernel_bandwidth
    moved = (4 + config.wire_bytes) * weights
    saved = fwd.saved_bytes - rates.formulas.loss_saved * logits + piece + 4 * config.tokens
    table["fwd", "head", ""] = replace(fwd, saved_bytes=saved)
    saved = bwd.saved_bytes - logits + piece + 4 * weights
    table["bwd", "head", ""] = replace(bwd, seconds=bwd.seconds + more, flops=bwd.flops + 2 * flops, saved_bytes=saved)
    seconds = moved / rates.memory_bandwidth + rates.gap
    table["wgrad", "head", ""] = replace(wgrad, seconds=seconds, flops=0.0, memory_bytes=moved)


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


# ------------------------------------------------------------------------------------------------------------- arrivals
#
# Memory into which other ranks write what they send: how much of it a rank has.
#
# Copy engines, and kernels that store into a peer's memory, need a place there. It is made with the groups and stays,
# so it lies beside all that a step holds.


_P2P = 64 << 20
"""Most bytes that wait at an edge of a pipeline for their receiver."""
_SLACK = 1.25
"""Rows that one round of an exchange has room for, as a multiple of an even load: none is ever quite even."""


def rows_bytes(c: Config) -> int:
    """Bytes of a microbatch's rows that a rank has room for in one round of an exchange; there are two such buffers."""
    layout = layout_of(c)
    copies = copies_of(c.model, c.mesh.ep, layout.per_rank, c.element_bytes)
    rows = math.ceil(_SLACK * c.tokens * copies.count)
    if layout.uncounted:
        rows = max(rows, rows_allowed(c))
    return rows * (c.model.hidden + copies.label) * c.element_bytes


def tokens_bytes(c: Config) -> int:
    """Bytes of all tokens of a microbatch, which tensor-parallel ranks write; 0 if none do. There are two buffers."""
    tokens = c.train.sequences * c.data.sequence_length
    return tokens * c.model.hidden * c.element_bytes if by_pieces(c) else 0


def p2p_bytes(c: Config) -> int:
    """Bytes that a rank has room for in each direction of an edge of a pipeline."""
    return min(c.tokens * c.model.hidden * c.element_bytes, _P2P)


def halves_bytes(c: Config, rank: int) -> int:
    """Bytes through which copy engines move what a pipeline rank gathers and reduces: `runtime/collective_copies.py`.

    Units of a kind have two groups, one that gathers and one that reduces. Where weights are whole, the latter gathers
    sums.
    """
    copied, sharding = COPIED.get(c.train.transport, ()), sharding_of(c)
    kinds = {
        "experts" if unit == "experts" else "dense"
        for unit, _ in units_of(layout_of(c), rank)
        if sharding.size(unit) > 1
    }
    served = sum(f"{way}_{kind}" in copied for kind in kinds for way in ("gather", "reduce"))
    keys = "cp" in copied and c.mesh.cp > 1 and c.overlap.cp.method == "gather"  # gathered, and sums of their gradients
    return (served + 2 * keys) * 2 * HALF


def by_pieces(c: Config) -> bool:
    """Whether some layer moves tokens piece by piece."""
    ways = {c.overlap.tp.way(role, direction) for role in ROLES for direction in DIRECTIONS}
    return c.mesh.tp > 1 and bool(ways & {"ring", "pipeline"})


def arrival_bytes(c: Config) -> int:
    """Bytes of all such memory of a rank, of the pipeline rank that has most. There is none without GPUs."""
    if c.train.device != "cuda" or c.train.transport == "null":
        return 0
    copied = COPIED.get(c.train.transport, ())
    rows = c.mesh.ep > 1 and (layout_of(c).uncounted or "a2a" in copied)
    edges = mesh_of(c).edges if "pp_fwd" in copied else ()
    of_rank = (
        2 * sum(rank in edge for edge in edges) * p2p_bytes(c) + halves_bytes(c, rank) for rank in range(c.mesh.pp)
    )
    return 2 * (rows_bytes(c) if rows else 0) + 2 * tokens_bytes(c) + max(of_rank)


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
    length = config.data.sequence_length
    average = replace(shapes_of(model, layout, length, hardware, config.element_bytes), documents=merged(documents))
    clock, base, rates = clock_with(sizes_of(layout, average), layout, *sizes), whole, hardware
    measured = {key: whole.table[key] for key in whole.timed}
    if clock:
        rates = at_clock(hardware, clock)
        base = costs_of(config, rates)
        base = replace(base, table={**base.table, **measured}, timed=whole.timed, clock=clock)
    each = {lengths: costs_of(config, rates, documents=lengths) for lengths in dict.fromkeys(documents)}
    same: dict[str, Any] = {field.name: getattr(base, field.name) for field in fields(CostTable)}
    full = {lengths: replace(one, table={**one.table, **measured}) for lengths, one in each.items()}
    return Varied(**same, microbatches=[full[lengths] for lengths in documents])

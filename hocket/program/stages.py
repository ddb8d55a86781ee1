"""From settings to what the planner asks for: where layers live, how many ranks share a unit, what ops cost."""

from __future__ import annotations

from dataclasses import replace

from hocket.config import COPIED, Config, Purpose, Strategy
from hocket.program.capacity import rows_allowed, rows_evenly
from hocket.program.clock import at_clock
from hocket.program.cost import CostTable, Measurement, OpCost, groups_of, op_costs
from hocket.program.fp8_costs import Fp8
from hocket.program.hardware import Hardware
from hocket.program.mesh import Mesh
from hocket.program.muon_costs import with_muon
from hocket.program.ops import HOST, Layout
from hocket.program.schedule import CostKey
from hocket.program.shard import Sharding
from hocket.program.tensor_costs import model_of_rank, model_of_ranks, with_tensors


def mesh_of(config: Config) -> Mesh:
    """The grid of ranks that a configuration asks for."""
    m, keys = config.mesh, config.model.heads if config.model.latent else config.model.kv_heads
    sharing = max(1, m.tp // keys)
    shared = {"sharing": sharing, "shard": m.shard, "cp": m.cp}
    return Mesh(m.pp, m.dp, m.ep, m.tp, turning=config.plan.turning, **shared)


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
    """The costs if tokens go through the head in pieces. See `parallel/loss_in_pieces.py`.

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

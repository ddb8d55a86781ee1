"""From settings to the planner's inputs: which stage has which layers, how many ranks share a unit."""

from __future__ import annotations

from dataclasses import replace

from hocket.config import COPIED, Config, Strategy
from hocket.program.mesh import Mesh, groups_of
from hocket.program.ops import Layout
from hocket.program.shard import Sharding


def mesh_of(config: Config) -> Mesh:
    """The mesh of a configuration."""
    m, keys = config.mesh, config.model.heads if config.model.latent else config.model.kv_heads
    return Mesh(**vars(m), turning=config.plan.turning, sharing=max(1, m.tp // keys))


def layout_of(config: Config) -> Layout:
    """Which virtual stage has which layers. `plan.layers_per_stage` overrides the even split."""
    bounds = [0]
    for count in config.plan.split:
        bounds.append(bounds[-1] + count)
    across_ranks, per_rank = config.mesh.ep > 1, config.overlap.ep.copies == "per_rank"
    uncounted = across_ranks and config.overlap.ep.splits == "device"
    writes_to_peers = config.train.transport == "null" or "a2a" in COPIED.get(config.train.transport, ())
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
        placed=uncounted or (across_ranks and writes_to_peers and not per_rank),
        uncounted=uncounted,
        recompute=tuple(part for part in config.plan.recompute if part != "auto"),
        offload=tuple(part for part in config.plan.offload if part != "auto"),
        per_rank=across_ranks and per_rank,
    )
    if config.model.norms == "before":
        return layout
    return replace(layout, types=tuple(kind.keeping_input() for kind in layout.layer_types))


def sharding_of(config: Config) -> Sharding:
    """Group sizes for dense and expert units, and the strategy; `auto` counts as optim_grads_params."""
    strategy = config.overlap.dp.strategy
    kept: Strategy = "optim_grads_params" if strategy == "auto" else strategy
    sizes = config.mesh.members("reduce_dense"), config.mesh.members("reduce_experts")
    return Sharding(*sizes, kept, config.optimizer.name == "muon")


def gathered_units(config: Config) -> tuple[str, ...]:
    """The classes of units that are gathered and whose products may run in fp8."""
    if config.overlap.dp.strategy == "no_shard":
        return ()
    units = ("dense", "experts") if "moe" in config.model.kinds() else ("dense",)
    return tuple(unit for unit in units if config.mesh.members(groups_of(unit)[0]) > 1)

"""From settings to what the planner asks for: the layout of layers over ranks, the sizes of sharding groups."""

from __future__ import annotations

from hocket.config import Config
from hocket.parallel.mesh import Mesh
from hocket.plan.ops import Layout
from hocket.plan.shard import Sharding


def mesh_of(config: Config) -> Mesh:
    """The grid of ranks that a configuration asks for."""
    return Mesh(config.mesh.pp, config.mesh.dp, config.mesh.ep)


def layout_of(config: Config) -> Layout:
    """Which virtual stage holds which layers. `plan.layers_per_stage` overrides the even split."""
    bounds = [0]
    for count in config.plan.layers_per_stage:
        bounds.append(bounds[-1] + count)
    return Layout(
        kinds=config.model.kinds(),
        pp=config.mesh.pp,
        chunks=config.plan.chunks,
        ep=config.mesh.ep,
        bounds=tuple(bounds) if config.plan.layers_per_stage else (),
        tied=config.model.tied,
    )


def sharding_of(config: Config) -> Sharding:
    """Over how many ranks weights and gradients are spread."""
    return Sharding(dense=config.mesh.dp, experts=config.mesh.dp // config.mesh.ep)

"""Memory into which other ranks write what they send: how much of it a rank has. Imports no torch.

Copy engines, and kernels that store into a peer's memory, need a place there. It is made with the groups and stays, so
it lies beside all that a step holds.
"""

from __future__ import annotations

import math

from hocket.config import COPIED, Config
from hocket.config.overlap import DIRECTIONS, ROLES
from hocket.program.cost import units_of
from hocket.program.mesh import HALF
from hocket.program.part_sizes import copies_of
from hocket.program.stages import layout_of, mesh_of, rows_allowed, sharding_of

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

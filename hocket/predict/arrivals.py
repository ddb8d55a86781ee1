"""Memory of a rank that other ranks write into: rows whose number no host knows, and what copy engines move."""

from __future__ import annotations

import math

from hocket.config import COPIED, Config
from hocket.predict.part_sizes import copies_of
from hocket.predict.tensor_costs import by_pieces
from hocket.program.mesh import HALF
from hocket.program.stages import layout_of, mesh_of, sharding_of

GROWTH = 1.25
"""New room after an overflow, as a multiple of the rows that did not fit."""


def rows_evenly(c: Config) -> int:
    """Rows that arrive at every rank if the load is even: as many as it sends."""
    return c.tokens * c.model.top_k


def rows_at_most(c: Config) -> int:
    """Most rows that may arrive at one rank: every token of all ranks chooses as many of its experts as possible."""
    tokens = c.tokens
    return tokens * min(c.model.top_k, c.model.experts // c.mesh.ep) * c.mesh.ep


def rows_allowed(c: Config) -> int:
    """Rows that a rank has room for: `overlap.ep.room` times those of an even load, and never more than possible."""
    return min(math.ceil(c.overlap.ep.room * rows_evenly(c)), rows_at_most(c))


def rows_grown(c: Config, rows: int) -> int:
    """Rows that a rank has room for after an overflow with `rows` rows."""
    return min(math.ceil(GROWTH * rows), rows_at_most(c))


def overflow_note(c: Config, rows: int, grown: bool) -> str:
    """The message about a step in which one rank had no room for `rows` rows, and whether the room has grown."""
    came, now = (count / rows_evenly(c) for count in (rows, rows_grown(c, rows)))
    after = (
        f"there is room for {now:.2f} times from now on"
        if grown
        else f"room for {now:.2f} times does not fit, so from now on hosts know the splits and issue every step"
    )
    why = f"made twice, since {came:.2f} times the rows of an even load came to one rank in a layer"
    return f"{why}; {after} (overlap.ep.room = {c.overlap.ep.room:g})"


# -- Memory into which other ranks write -------------------------------------------------------------------------------
#
# Copy engines, and kernels that store into a peer's memory, need buffers there. They are allocated with the process
# groups and stay, in addition to everything that a step holds.


_P2P = 64 << 20
"""Most bytes buffered at an edge of a pipeline for their receiver."""
_SLACK = 1.25
"""Rows that one round of an exchange has room for, as a multiple of an even load, since no load is quite even."""


def rows_bytes(c: Config) -> int:
    """Bytes of a microbatch's rows that a rank has room for in one round of an exchange. There are two such buffers."""
    layout = layout_of(c)
    copies = copies_of(c.model, c.mesh.ep, layout.per_rank, c.element_bytes)
    rows = math.ceil(_SLACK * c.tokens * copies.count)
    if layout.uncounted:
        rows = max(rows, rows_allowed(c))
    return rows * (c.model.hidden + copies.label) * c.element_bytes


def tokens_bytes(c: Config) -> int:
    """Bytes of a microbatch's tokens that tensor-parallel ranks write; 0 if they do not. There are two buffers."""
    tokens = c.train.sequences * c.data.sequence_length
    return tokens * c.model.hidden * c.element_bytes if by_pieces(c) else 0


def p2p_bytes(c: Config) -> int:
    """Bytes that a rank has room for in each direction of a pipeline edge."""
    return min(c.tokens * c.model.hidden * c.element_bytes, _P2P)


def halves_bytes(c: Config, rank: int) -> int:
    """Bytes of buffers through which copy engines gather and reduce on a pipeline rank: `runtime/collective_copies.py`.

    Units of a kind have two groups, one to gather and one to reduce. With unsharded weights the second gathers sums.
    """
    copied, sharding = COPIED.get(c.train.transport, ()), sharding_of(c)
    kinds = {
        "experts" if unit == "experts" else "dense" for unit, _ in layout_of(c).units(rank) if sharding.size(unit) > 1
    }
    served = sum(f"{way}_{kind}" in copied for kind in kinds for way in ("gather", "reduce"))
    keys = "cp" in copied and c.mesh.cp > 1 and c.overlap.cp.method == "gather"  # gathered, and sums of their gradients
    return (served + 2 * keys) * 2 * HALF


def arrival_bytes(c: Config) -> int:
    """Bytes of all such memory, on the pipeline rank with the most. 0 without GPUs."""
    if c.train.device != "cuda" or c.train.transport == "null":
        return 0
    copied = COPIED.get(c.train.transport, ())
    rows = c.mesh.ep > 1 and (layout_of(c).uncounted or "a2a" in copied)
    edges = mesh_of(c).edges if "pp_fwd" in copied else ()
    of_rank = (
        2 * sum(rank in edge for edge in edges) * p2p_bytes(c) + halves_bytes(c, rank) for rank in range(c.mesh.pp)
    )
    return 2 * (rows_bytes(c) if rows else 0) + 2 * tokens_bytes(c) + max(of_rank)

"""Duration of one direction of a tensor-parallel layer on the GPU, by the way it communicates, and of its issue.

A model of `layers/tensor.py` for the layer's own shapes. `tests/plan/test_tensor_times.py` compares it with
measurements (benchmarks/results/tensor_parallel.json and tensor_parallel_as_8.json).

Note: [Crowded receivers]
Copies leave a rank one after the other. Those of a gather begin with the previous rank and go on from there, so each
rank receives from one peer at a time. The same holds for a sum in pieces of one rank each. In pieces of W neighbours,
the W ranks of a group send to the same peer at the same time, then all to the next one: each gets a W-th of that peer's
bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from hocket.config import Config, ModelConfig
from hocket.config.overlap import COLUMNS, DIRECTIONS, ROLES, Direction, Method, Role, possible
from hocket.predict.hardware import Hardware, Link, hardware_of
from hocket.predict.part_sizes import into_heads, mostly_deltas
from hocket.predict.simulate import CostKey, OpCost
from hocket.program.ops import Layout

LIKE: Mapping[str, Role] = {"shared_fc1": "fc1", "shared_fc2": "fc2", "head": "fc1"}
"""Roles of other products -> the role that communicates in the same way."""
TILE = 128
"""Rows and columns that one SM computes at a time. If the last tiles of a piece leave SMs free, the first tiles of the
next piece run on them. So a piece is slower only if two pieces have fewer tiles than there are SMs."""
PAIR = 2 / 3
"""Share of a collective's bandwidth that a group of two ranks reaches."""
COPY_OUT = 3.0
"""Slowdown, against memory bandwidth, of copying tokens out of the arrival buffers during a product."""
ISSUE: dict[tuple[Direction, Method], float] = {
    ("forward", "ring"): 195e-6,
    ("forward", "pipeline"): 250e-6,
    ("backward", "bulk"): 420e-6,
    ("backward", "ring"): 545e-6,
    ("backward", "pipeline"): 680e-6,
}
"""Seconds that a shared host takes to issue a layer, without its pieces: up to twice the usual time, because a method
is slower than no overlap if the host is late."""
PIECE = 70e-6
"""Seconds to issue a piece."""


@dataclass(frozen=True)
class Cell:
    """One direction of a layer on one of several ranks: a product of T rows, and the tokens that are moved for it.

    T x inner times inner x columns; in backward, the product of the input gradient. The product of the weight gradient,
    which follows, takes as long.
    """

    role: Role
    direction: Direction
    ranks: int
    rows: int
    inner: int
    columns: int
    moved: int
    """Bytes of all tokens, of which a rank sends or receives all but its own share."""

    @property
    def backward(self) -> bool:
        return self.direction == "backward"

    @property
    def gathers_again(self) -> bool:
        """Whether the input is gathered once more, for the weight gradient."""
        return self.backward and self.role in COLUMNS


def pieces(rank: int, size: int, splits: int) -> list[tuple[int, int]]:
    """Ranges of ranks, in the order in which a rank multiplies their tokens as they arrive.

    Its own first; then the rest of its group of `size / splits` neighbours, and the other groups, from the next one on.
    """
    width = size // (splits or size)
    start = rank // width * width
    found = [(rank, rank + 1), (start, rank), (rank + 1, start + width)]
    found += [((start + step) % size, (start + step) % size + width) for step in range(width, size, width)]
    return [(low, high) for low, high in found if low < high]


def product(cell: Cell, rows: int, hardware: Hardware) -> float:
    """Seconds of `rows` rows of the product."""
    if not hardware.processors:
        return 2.0 * rows * cell.inner * cell.columns / hardware.gemm_flops
    tiles = math.ceil(rows / TILE) * math.ceil(cell.columns / TILE)
    return 2.0 * cell.inner * TILE**2 * max(tiles, hardware.processors / 2) / hardware.wave_flops


def products(cell: Cell, hardware: Hardware) -> float:
    """Seconds of all products without any transfers."""
    return product(cell, cell.rows, hardware) * (2 if cell.backward else 1)


def seconds(cell: Cell, method: Method, splits: int, hardware: Hardware) -> float:
    """Seconds of the direction, with all its products. `splits` counts only for products in pieces."""
    alone = product(cell, cell.rows, hardware)
    gradient = alone if cell.backward else 0.0
    if method == "ring":
        return _ring(cell, splits, hardware) + gradient
    if method == "pipeline":
        return _pipeline(cell, splits, hardware) + gradient
    missing = cell.moved * (cell.ranks - 1) / cell.ranks
    collective = hardware.links["tp"].seconds(missing / (PAIR if cell.ranks == 2 and hardware.processors else 1.0))
    if method == "off":
        return alone + collective * (2 if cell.gathers_again else 1) + gradient
    # The sum follows the gather on the same link. Without copy engines, the gather is a collective too.
    return max(alone, min(collective, _copies(cell, hardware))) + collective + gradient


def issued(cell: Cell, method: Method, splits: int, hardware: Hardware) -> float:
    """Seconds until a late host has issued everything; 0 for method `off`, and on CPUs."""
    if method == "off" or not hardware.processors:
        return 0.0
    most = max(len(pieces(rank, cell.ranks, splits)) for rank in range(cell.ranks)) if method != "bulk" else 0
    return ISSUE[cell.direction, method] + PIECE * most


def _copies(cell: Cell, hardware: Hardware) -> float:
    """Seconds until a rank's tokens have reached all its peers."""
    return (cell.ranks - 1) * hardware.copies.seconds(cell.moved / cell.ranks)


def _copy_out(cell: Cell, hardware: Hardware) -> float:
    """Seconds to copy arrived tokens to where they stay: read and written."""
    return COPY_OUT * 2 * cell.moved / hardware.memory_bandwidth


def _ring(cell: Cell, splits: int, hardware: Hardware) -> float:
    """A gather and the product of arrived tokens, on the slowest rank. In backward, the weight gradient waits for all.

    The next rank's tokens arrive first. A piece begins when the previous one is done and all its tokens have arrived.
    """
    copy = hardware.copies.seconds(cell.moved / cell.ranks)
    worst = 0.0
    for rank in range(cell.ranks):
        now = 0.0
        for low, high in pieces(rank, cell.ranks, splits):
            steps = max((source - rank) % cell.ranks for source in range(low, high))
            now = max(now, steps * copy) + product(cell, cell.rows // cell.ranks * (high - low), hardware)
        worst = max(worst, now)
    return max(worst, _copies(cell, hardware) + _copy_out(cell, hardware)) if cell.backward else worst


def _pipeline(cell: Cell, splits: int, hardware: Hardware) -> float:
    """A product whose pieces are sent as they are computed, on the slowest rank, and then the sum.

    In backward, the input that is gathered again is sent first. See Note: [Crowded receivers].
    """
    share, width = cell.moved / cell.ranks, cell.ranks // splits
    free = _copies(cell, hardware) + _copy_out(cell, hardware) if cell.backward else 0.0
    worst = 0.0
    for rank in range(cell.ranks):
        now, sent = 0.0, free
        for low, high in reversed(pieces(rank, cell.ranks, splits)):
            now += product(cell, cell.rows // cell.ranks * (high - low), hardware)
            crowd = 1 if low // width == rank // width else width
            if (low, high) != (rank, rank + 1):
                sent = max(sent, now) + (high - low) * hardware.copies.seconds(crowd * share)
        worst = max(worst, now, sent)
    return worst + (cell.ranks + 1) * share / hardware.memory_bandwidth


# ------------------------------------------------------------------------------------------------------- tensor methods
#
# How the layers of a run can communicate: their products, the number of pieces, and whether the host keeps up. Times
# are those of the model above. `tune/rules.py` chooses the method.


def cell_of(c: Config, role: Role, direction: Direction) -> Cell:
    """The product that overlaps with the moved tokens: forward, or of the input gradient."""
    m, tp = c.model, c.mesh.tp
    rows = c.tokens * tp
    hidden, made = into_heads(replace(m, kv_heads=max(tp, m.kv_heads)))
    hidden, heads = hidden if role == "qkv" else m.hidden, m.heads * (m.v_head_dim if m.latent else m.head_dim)
    heads = m.delta_heads * m.delta_value_dim if mostly_deltas(m) else heads
    ffn = m.ffn if "dense" in m.kinds() else m.shared_ffn
    spread = {"qkv": made, "proj": heads, "fc1": 2 * ffn, "fc2": ffn}[role] // tp
    inner, columns = hidden, spread
    if (role in COLUMNS) != (direction == "forward"):
        inner, columns = columns, inner
    return Cell(role, direction, tp, rows, inner, columns, rows * hidden * c.element_bytes)


def time_of(c: Config, role: Role, direction: Direction, hardware: Hardware) -> tuple[float, int]:
    """Seconds in which a resolved layer's products wait for tokens, and how often all tokens are moved for them."""
    cell, way = cell_of(c, role, direction), c.overlap.tp.way(role, direction)
    takes = seconds(cell, way, splits_of(c, role, direction), hardware)
    return max(0.0, takes - products(cell, hardware)), 2 if cell.gathers_again else 1


def splits_of(c: Config, role: Role, direction: Direction) -> int:
    """Number of pieces of a resolved layer's product; 0 if it is not split."""
    way = c.overlap.tp.way(role, direction)
    return splits_for(c, cell_of(c, role, direction), way) if way in ("ring", "pipeline") else 0


def splits_for(c: Config, cell: Cell, method: Method) -> int:
    """The fastest number of pieces that the host issues in time; of equally fast ones, the largest.

    With more pieces, late peers delay less.
    """
    every = [n for n in range(2, cell.ranks + 1) if cell.ranks % n == 0]
    some = [n for n in every if in_time(c, cell, method, n)] or every
    return min(some, key=lambda n: (round(seconds(cell, method, n, hardware_of(c)), 9), -n))


def without_pieces(c: Config, cell: Cell) -> Method:
    """The best method without pieces."""
    return "bulk" if "bulk" in possible(cell.role, cell.direction) and in_time(c, cell, "bulk") else "off"


def in_time(c: Config, cell: Cell, method: Method, splits: int = 0) -> bool:
    """Whether a busy host issues a method faster than the GPU runs without it. Recorded steps always are."""
    without: Method = "off" if method == "bulk" else without_pieces(c, cell)
    hardware = hardware_of(c)
    return c.plan.graphs == "on" or issued(cell, method, splits, hardware) <= seconds(cell, without, 0, hardware)


# --------------------------------------------------------------------------------------------------------- tensor costs
#
# What tensor parallelism adds to the costs of a plan's ops, and takes from them.
#
# An op of a tensor-parallel rank computes on its share of tokens, or on all tokens with its share of the weights:
# either way 1 / tp of the work, which the cost model gets from that fraction of the tokens. Gathers and sums of tokens
# are added, unless products hide them. Units are those of a model with a rank's share of heads, MLPs and vocabulary.


_SPREAD = ("heads", "ffn", "shared_ffn", "vocab", "delta_heads", "delta_key_heads")
"""Sizes of the model that are divided among ranks."""


def by_pieces(c: Config) -> bool:
    """Whether some layer moves tokens in pieces."""
    ways = {c.overlap.tp.way(role, direction) for role in ROLES for direction in DIRECTIONS}
    return c.mesh.tp > 1 and bool(ways & {"ring", "pipeline"})


def model_of_rank(c: Config) -> ModelConfig:
    """The model with the weights of one tensor-parallel rank."""
    m, tp = c.model, c.mesh.tp
    narrow = {name: getattr(m, name) // tp for name in _SPREAD}
    return replace(m, **narrow, kv_heads=max(1, m.kv_heads // tp))


def models_of(c: Config) -> tuple[ModelConfig, ModelConfig, int]:
    """The model for the costs of parts, the model of a rank's units, and the number of ranks that share a product.

    Parts are those of all tensor-parallel ranks together: heads that several ranks hold count several times.
    """
    return replace(c.model, kv_heads=max(c.mesh.tp, c.model.kv_heads)), model_of_rank(c), c.mesh.tp


def add_waits(table: dict[CostKey, OpCost], c: Config, hardware: Hardware, layout: Layout) -> None:
    """Add ops' waits for tensor-parallel peers to the costs of a rank's own work."""
    if c.mesh.tp == 1:
        return
    hardware = _emulated(c, hardware)
    for key, cost in table.items():
        waits, received = _waits(c, key, hardware, layout)
        if received:
            table[key] = replace(cost, seconds=cost.seconds + waits, inner_seconds=waits, inner_bytes=received)


def _emulated(c: Config, hardware: Hardware) -> Hardware:
    """The hardware, slowed by the emulated network for transfers of tokens."""
    if c.train.transport != "slow" or "tp" not in c.train.slow_links():
        return hardware
    latency, bandwidth = c.train.slow_links()["tp"]

    def slower(link: Link) -> Link:
        return Link(link.latency + latency, 1 / (1 / link.bandwidth + 1 / bandwidth))

    return replace(
        hardware, links={**hardware.links, "tp": slower(hardware.links["tp"])}, copies=slower(hardware.copies)
    )


def _waits(c: Config, key: CostKey, hardware: Hardware, layout: Layout) -> tuple[float, int]:
    """Seconds in which an op waits for tensor-parallel peers, and bytes that it gets from them."""
    verb, part, kind = key
    if verb not in ("fwd", "bwd", "recompute"):
        return 0.0, 0
    direction: Direction = "backward" if verb == "bwd" else "forward"
    moved = cell_of(c, "fc1", "forward").moved * (c.mesh.tp - 1) // c.mesh.tp
    described = layout.by_kind[kind].by_name[part] if kind else layout.part(part)
    roles = [role for role in described.products if c.model.shared_ffn or not role.startswith("shared_")]
    times = [
        (hardware.links["tp"].seconds(moved), 1)
        if role == "embed"
        else time_of(c, LIKE.get(role, cast(Role, role)), direction, hardware)
        for role in roles
    ]
    summed = _sums_of_norms(c) if "qkv" in described.products else 0
    waits = hardware.links["tp"].seconds(summed) if summed else 0.0
    return waits + sum(waits for waits, _ in times), summed + sum(count for _, count in times) * moved


def _sums_of_norms(c: Config) -> int:
    """Bytes that a rank gets for norms over whole queries and keys: one fp32 number of each per token."""
    if not c.model.qk_norm or c.model.qk_norm_over == "head":
        return 0
    return 2 * 4 * 2 * c.tokens * (c.mesh.tp - 1)

"""How long one direction of a tensor-parallel layer takes a GPU, by the way it communicates, and how long the host.

A model of what `parallel/tensor.py` does, on the layer's own shapes. `tests/plan/test_tensor_times.py` holds it beside
what was measured (benchmarks/results/tensor_parallel.json and tensor_parallel_as_8.json).

Note: [Crowded receivers]
Copies leave a rank one after the other. Those of a gather begin with the rank before and go on from there, so each
rank receives from one peer at a time. So do those of a sum in pieces of one rank each. In pieces of W neighbours, the W
ranks of a group send to the same peer at the same time, then all to the next one: each gets a W-th of that peer's
bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hocket.config.overlap import COLUMNS, Direction, Method, Role
from hocket.program.hardware import Hardware

LIKE: Mapping[str, Role] = {"shared_fc1": "fc1", "shared_fc2": "fc2", "head": "fc1"}
"""Roles of other products -> the role that they communicate like."""
TILE = 128
"""Rows and columns that one processor computes at a time. Where the last tiles of a piece leave processors free, the
first ones of the next piece run; only pieces that two of together are too few tiles compute worse than the whole."""
PAIR = 2 / 3
"""Share of a collective's bandwidth that two ranks alone reach."""
KEEPING = 3.0
"""How much longer than memory allows it takes to copy tokens out of the arrival buffers, beside a product."""
ISSUE: dict[tuple[Direction, Method], float] = {
    ("forward", "ring"): 195e-6,
    ("forward", "pipeline"): 250e-6,
    ("backward", "bulk"): 420e-6,
    ("backward", "ring"): 545e-6,
    ("backward", "pipeline"): 680e-6,
}
"""Seconds that a host which others use too takes to issue a layer, beside those of its pieces: up to twice what it
takes otherwise, since where it is late a way is slower than one thing after the other."""
PIECE = 70e-6
"""And those of a piece."""


@dataclass(frozen=True)
class Cell:
    """One direction of a layer on one of several ranks: a product of T rows, and the tokens that are moved for it.

    T x inner times inner x columns; backward, that of the input gradient. The one of the weight gradient, which
    follows, is as long.
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
    """The ranks, as ranges, in the order in which a rank multiplies their tokens as they arrive.

    First its own; then the rest of its group of `size / splits` neighbours, and the other groups, from the next one on.
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
    """Seconds of all products, if nothing has to be moved."""
    return product(cell, cell.rows, hardware) * (2 if cell.backward else 1)


def seconds(cell: Cell, method: Method, splits: int, hardware: Hardware) -> float:
    """Seconds of the direction, with all its products. `splits` counts where the product is done in pieces."""
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
    # The sum is behind the gather on the same link. Where there are no copies, that is a collective, too.
    return max(alone, min(collective, _copies(cell, hardware))) + collective + gradient


def issued(cell: Cell, method: Method, splits: int, hardware: Hardware) -> float:
    """Seconds in which the host has issued it all, if it is late; 0 for one thing after the other, and on CPUs."""
    if method == "off" or not hardware.processors:
        return 0.0
    most = max(len(pieces(rank, cell.ranks, splits)) for rank in range(cell.ranks)) if method != "bulk" else 0
    return ISSUE[cell.direction, method] + PIECE * most


def _copies(cell: Cell, hardware: Hardware) -> float:
    """Seconds in which a rank's tokens are with all its peers."""
    return (cell.ranks - 1) * hardware.copies.seconds(cell.moved / cell.ranks)


def _kept(cell: Cell, hardware: Hardware) -> float:
    """Seconds in which arrived tokens are copied to where they stay: read and written."""
    return KEEPING * 2 * cell.moved / hardware.memory_bandwidth


def _ring(cell: Cell, splits: int, hardware: Hardware) -> float:
    """A gather, and the product of what has arrived, on the slowest rank. Backward, the weight gradient waits for all.

    Tokens of the next rank arrive first; a piece begins when the one before is done and all its tokens are here.
    """
    copy = hardware.copies.seconds(cell.moved / cell.ranks)
    worst = 0.0
    for rank in range(cell.ranks):
        now = 0.0
        for low, high in pieces(rank, cell.ranks, splits):
            steps = max((source - rank) % cell.ranks for source in range(low, high))
            now = max(now, steps * copy) + product(cell, cell.rows // cell.ranks * (high - low), hardware)
        worst = max(worst, now)
    return max(worst, _copies(cell, hardware) + _kept(cell, hardware)) if cell.backward else worst


def _pipeline(cell: Cell, splits: int, hardware: Hardware) -> float:
    """A product, whose pieces leave as they are made, on the slowest rank, and then the sum.

    Backward, the input that is gathered again leaves first. See Note: [Crowded receivers].
    """
    share, width = cell.moved / cell.ranks, cell.ranks // splits
    free = _copies(cell, hardware) + _kept(cell, hardware) if cell.backward else 0.0
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

"""Splits that only the devices know: rows that arrive where their experts want them, in room of a fixed size.

The other maker of splits is `dispatch.exchange_counts`, which stops the host until it knows the counts. Here nobody
waits: see `runtime/blocks.py`, and its Note: [A fixed capacity, and never silently].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from hocket.config import Config
from hocket.parallel.routing import Routing
from hocket.runtime.blocks import Blocks, Room, lay_out

if TYPE_CHECKING:
    from hocket.parallel.dispatch import CountExchange


@dataclass(frozen=True, eq=False)
class PlacedSplits:
    """Where rows go, in tensors. Rows arrive in grouped order, and those behind the last one mean nothing."""

    table: Blocks
    ends_L: Tensor
    """End of every local expert's rows, int32; of the lane that exchanges."""

    @cached_property
    def offsets_L(self) -> Tensor:
        """End of every local expert's rows, int32.

        Copied at first use, on the lane that uses it: weight gradients keep it longer than the exchanging lane knows.
        """
        return self.ends_L.clone()

    @property
    def count(self) -> Tensor:
        """Rows that have arrived: int32 [1]."""
        return self.offsets_L[-1:]


def place_counts(routing: Routing, group: CountExchange, room: Room) -> PlacedSplits:
    """Tell every device how many rows go from whom to whom. No host waits."""
    assert routing.pairs is None, "devices place rows that are sent once per expert"
    every_PPL = group.all_counts(routing.counts_E.view(group.size, -1))
    return PlacedSplits(*lay_out(every_PPL, group.rank, routing.tokens * routing.top_k, room))


def rows_at_most(c: Config) -> int:
    """Rows that may arrive at one rank in any exchange: all tokens of all ranks choose as many of its experts as can
    be chosen.
    """
    tokens = c.train.sequences * c.data.sequence_length
    return tokens * min(c.model.top_k, c.model.experts // c.mesh.ep) * c.mesh.ep


def lack(c: Config, rows: int) -> str:
    """What a user is told of a step in which so many rows came to one rank and found no room."""
    even = c.train.sequences * c.data.sequence_length * c.model.top_k
    enough = math.ceil(11 * rows / even) / 10
    return (
        f"made twice, since {rows} rows of a layer came to one rank, {rows / even:.2f} times those of an even load; "
        f"overlap.ep.capacity = {enough:g} would leave room for them, overlap.ep.splits = host for any"
    )


def rows_allowed(c: Config) -> int:
    """Rows that a rank has room for: `overlap.ep.capacity` times those of an even load, and never more than needed."""
    tokens = c.train.sequences * c.data.sequence_length
    return min(math.ceil(c.overlap.ep.capacity * tokens * c.model.top_k), rows_at_most(c))

"""Splits that only the devices know: rows that arrive where their experts want them, in room of a fixed size.

The other maker of splits is `dispatch.exchange_counts`, which stops the host until it knows the counts. Here nobody
waits: see `runtime/blocks.py`, and its Note: [A fixed capacity, and never silently].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from hocket.parallel.routing import CountExchange, Routing
from hocket.runtime.blocks import Blocks, Room, lay_out


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

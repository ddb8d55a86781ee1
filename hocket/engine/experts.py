"""Fixed capacity for experts' rows whose number the host does not know, and the router biases that balance loads.

A caller that runs a program with a `RowRoom` does this, on all ranks alike:

1. issue the ops; the device places rows in `now`: see Note: [Fixed capacity without dropped rows];
2. after all ops, before weights change, ask `check_overflow` whether any rank received more rows than the capacity;
3. if so, drop the results and issue the ops again through `rerun`, which also raises the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hocket.config import Config
from hocket.layers.routing import balance_bias
from hocket.model.moe import MoELayer
from hocket.model.transformer import Chunk
from hocket.predict.arrivals import rows_allowed, rows_at_most, rows_evenly, rows_grown
from hocket.program.stages import layout_of
from hocket.runtime.blocks import Room
from hocket.runtime.comm import Groups

T = TypeVar("T")

ARRIVALS = 2
"""Arrival buffers for rows; see `runtime/peer_rows.py`."""

_USABLE = 0.95
"""Share of a rank's memory that tensors may fill; the rest allows for the allocator's fragmentation."""


class Held(NamedTuple):
    """Bytes of a GPU's memory, as measured."""

    usable: int
    """What the caching allocator has and can still get; libraries hold the rest."""
    at_rest: int
    """Tensors that exist between steps."""
    at_most: int
    """Peak of all tensors so far."""

    def fits(self, factor: float, more: int) -> bool:
        """Whether a step fits whose activations grow by `factor`, with `more` bytes beside them.

        An upper bound: not all values of a step grow with the experts' rows.
        """
        return self.at_rest + factor * (self.at_most - self.at_rest) + more <= _USABLE * self.usable


def _measured(device: torch.device) -> Held | None:
    """Measures this rank's GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Held(free + torch.cuda.memory_reserved(device), held, most)


class RowRoom:
    """The row capacity of one rank, equal on all ranks."""

    def __init__(self, config: Config, groups: Groups, device: torch.device) -> None:
        self._config, self._groups, self._device = config, groups, device
        self.now: Room | None = None
        """The current capacity; None where the host reads the row counts."""
        self.lacked = 0
        """Rows that one rank received, if more than the capacity, so that the last step ran again; else 0."""
        self.measure: Callable[[], Held | None] = partial(_measured, device)
        if layout_of(config).uncounted:
            self.now = Room(rows_allowed(config), torch.zeros(1, dtype=torch.int64, device=device))

    def check_overflow(self) -> int:
        """The most rows that any rank received since the last call, if over capacity. Syncs only if that can be."""
        self.lacked = 0
        if self.now is not None and self.now.capacity < rows_at_most(self._config):
            self._groups.control.all_reduce(self.now.needed, "max").wait()
            most = int(self.now.needed)
            self.forget()
            self.lacked = most if most > self.now.capacity else 0
        return self.lacked

    def rerun(self, run: Callable[[], T]) -> T:
        """Runs `run`, which issues the ops that overflowed, with row counts read by the host.

        Then raises the capacity. If some rank lacks memory for that, sets it to None: the host reads counts from then.
        """
        room, lacked, self.now = self.now, self.lacked, None
        assert room is not None
        assert lacked
        try:
            result = run()
        finally:
            self.now = room
        self.now, self.lacked = self._grown(room, lacked), lacked
        return result

    def forget(self) -> None:
        """Reset the device's maximum of needed rows."""
        if self.now is not None:
            self.now.needed.zero_()

    def _grown(self, room: Room, rows: int) -> Room | None:
        """A capacity for `rows` with a margin; None if steps would not fit in memory."""
        config, capacity = self._config, rows_grown(self._config, rows)
        arrival = max(capacity, rows_evenly(config)) * config.model.hidden * config.element_bytes
        if not self._would_fit(capacity / room.capacity, ARRIVALS * arrival):
            return None
        self._groups.a2a.make_room(arrival)
        return replace(room, capacity=capacity)

    def _would_fit(self, factor: float, more: int) -> bool:
        """Whether steps with `factor` times the rows and `more` bytes of arrival buffers fit in memory on all ranks."""
        held = self.measure()
        agreed = torch.tensor([held is None or held.fits(factor, more)], dtype=torch.int64, device=self._device)
        self._groups.control.all_reduce(agreed, "min").wait()
        return bool(agreed)


# ------------------------------------------------------------------------------------------------------------- balance
#
# Loads of a rank's experts, and what they update: balance biases, and row shares for the load-balancing loss.


class Balance:
    """Loads of one rank's MoE layers in a step, and the balance biases of their routers."""

    def __init__(self, chunks: Sequence[Chunk], groups: Groups, rate: float) -> None:
        """`rate`: how far biases move in each step."""
        self._groups, self._rate = groups, rate
        layers = ((int(name), layer) for chunk in chunks for name, layer in chunk.layers.items())
        self.layers = {number: layer for number, layer in layers if isinstance(layer, MoELayer)}
        """By layer number."""
        self.loads: dict[int, Tensor] = {}
        """Rows per expert and layer in the last step, summed over data-parallel ranks: int64 [E]."""

    def update(self, mine: dict[int, Tensor], stay: Tensor) -> None:
        """Sum this rank's loads with those of other ranks, update the biases, and clear `mine`.

        `stay` is a bool on the device: where true, biases do not change.
        """
        if mine:
            numbers = sorted(mine)
            total = torch.stack([mine[n] for n in numbers])
            self._groups.sum_over_dp(total)
            self._groups.tp.all_reduce(total).wait()
            self.loads = dict(zip(numbers, total.unbind(), strict=True))
            mine.clear()
        for number, layer in self.layers.items():
            if layer.router.bias is not None:
                moved = balance_bias(layer.router.bias, self.loads[number], self._rate)
                layer.router.bias.copy_(torch.where(stay, layer.router.bias, moved))
            if layer.router.share is not None:
                load = self.loads[number]
                share = load / load.sum().clamp(min=1)
                layer.router.share.copy_(torch.where(stay, layer.router.share, share))

    def shares(self) -> dict[str, Tensor]:
        """Each expert's share of the last step's rows, by layer: live tensors, fp32 [E]. Only if a loss uses it."""
        layers = self.layers.items()
        return {str(n): layer.router.share for n, layer in layers if layer.router.share is not None}

    def biases(self) -> dict[str, Tensor]:
        """The biases by checkpoint name: live tensors, fp32 [E]. Empty if the rate is 0."""
        layers = self.layers.items()
        return {f"layers.{n}.router.bias": layer.router.bias for n, layer in layers if layer.router.bias is not None}

"""What experts are sent: room for rows of which no host knows how many come, and the loads that move biases.

Whoever runs a program with a `RowRoom` does this, on all ranks alike:

1. ops are issued, and devices lay rows out in `now`: see Note: [Fixed capacity without dropped rows];
2. after all of them, and before weights change, `look` says how many rows of one rank lacked room;
3. if any did, what was computed is thrown away, `again` issues the ops once more, and there is more room from then on.
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
"""Buffers in which rows arrive; see `runtime/peer_rows.py`."""

_USABLE = 0.95
"""Share of a rank's memory that tensors may fill: between them the allocator leaves gaps."""


class Held(NamedTuple):
    """Bytes of a GPU's memory, as measured."""

    usable: int
    """What the caching allocator has, and what it can still get: libraries hold the rest."""
    at_rest: int
    """Of tensors that are there between steps."""
    at_most: int
    """Of tensors, at any moment so far."""

    def fits(self, factor: float, more: int) -> bool:
        """Whether a step fits whose values take `factor` times as much, with `more` bytes beside it.

        Not all values of a step grow with the rows that experts get, so this asks for more than is needed.
        """
        return self.at_rest + factor * (self.at_most - self.at_rest) + more <= _USABLE * self.usable


def _measured(device: torch.device) -> Held | None:
    """What this rank's GPU holds; None on a CPU, whose memory nobody measures."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Held(free + torch.cuda.memory_reserved(device), held, most)


class RowRoom:
    """The room that one rank has, always as much as all others have."""

    def __init__(self, config: Config, groups: Groups, device: torch.device) -> None:
        self._config, self._groups, self._device = config, groups, device
        self.now: Room | None = None
        """What ops lay rows out in; None where hosts know how many come."""
        self.lacked = 0
        """Rows of one rank that found no room when ops were issued last: it was done again, with room for all."""
        self.measure: Callable[[], Held | None] = partial(_measured, device)
        if layout_of(config).uncounted:
            self.now = Room(rows_allowed(config), torch.zeros(1, dtype=torch.int64, device=device))

    def look(self) -> int:
        """Rows of one rank that found no room since the last look. Waits for the device, but only where some may."""
        self.lacked = 0
        if self.now is not None and self.now.capacity < rows_at_most(self._config):
            self._groups.control.all_reduce(self.now.needed, "max").wait()
            most = int(self.now.needed)
            self.forget()
            self.lacked = most if most > self.now.capacity else 0
        return self.lacked

    def again(self, run: Callable[[], T]) -> T:
        """What `run` returns, which issues the ops whose rows `lacked` room: inside, hosts know how many rows come.

        After it there is more room, or if that would not fit on some rank, none: hosts know from then on.
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
        """Forget what ops have needed that nobody has looked at."""
        if self.now is not None:
            self.now.needed.zero_()

    def _grown(self, room: Room, rows: int) -> Room | None:
        """Room for so many rows and some more; None if steps would not fit."""
        config, capacity = self._config, rows_grown(self._config, rows)
        arrival = max(capacity, rows_evenly(config)) * config.model.hidden * config.element_bytes
        if not self._would_fit(capacity / room.capacity, ARRIVALS * arrival):
            return None
        self._groups.a2a.make_room(arrival)
        return replace(room, capacity=capacity)

    def _would_fit(self, factor: float, more: int) -> bool:
        """Whether all ranks have memory for steps of `factor` times the room, with `more` bytes of arrival buffers."""
        held = self.measure()
        agreed = torch.tensor([held is None or held.fits(factor, more)], dtype=torch.int64, device=self._device)
        self._groups.control.all_reduce(agreed, "min").wait()
        return bool(agreed)


# ------------------------------------------------------------------------------------------------------------- balance
#
# The loads of a rank's experts, and what they move: biases, and shares for the load-balancing loss over a batch.


class Balance:
    """What all MoE layers of one rank were sent in a step, and the balance biases of their routers."""

    def __init__(self, chunks: Sequence[Chunk], groups: Groups, rate: float) -> None:
        """Biases move by `rate` in each step."""
        self._groups, self._rate = groups, rate
        layers = ((int(name), layer) for chunk in chunks for name, layer in chunk.layers.items())
        self.layers = {number: layer for number, layer in layers if isinstance(layer, MoELayer)}
        """By number."""
        self.loads: dict[int, Tensor] = {}
        """Rows per expert and layer in the last step, summed over data-parallel ranks: int64 [E]."""

    def update(self, mine: dict[int, Tensor], stay: Tensor) -> None:
        """Sum this rank's loads with those of the others, and move the biases. Takes them out of `mine`.

        `stay` is a bool on the device: biases do not move where it is true.
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
        """The shares of the last step's rows by layer: live tensors, fp32 [E]. There are none where no loss asks."""
        layers = self.layers.items()
        return {str(n): layer.router.share for n, layer in layers if layer.router.share is not None}

    def biases(self) -> dict[str, Tensor]:
        """The biases by name, as in a checkpoint: live tensors, fp32 [E]. There are none where the rate is 0."""
        layers = self.layers.items()
        return {f"layers.{n}.router.bias": layer.router.bias for n, layer in layers if layer.router.bias is not None}

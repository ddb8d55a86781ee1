"""Room for experts' rows of which no host knows how many come, and what follows where rows find none.

Whoever runs a program with a `RowRoom` does this, on all ranks alike:

1. ops are issued, and devices lay rows out in `now`: see Note: [A fixed capacity, and never silently];
2. behind all of them, and before weights change, `look` says how many rows of one rank lacked room;
3. if any did, what was computed is thrown away, `again` issues the ops once more, and there is more room from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from hocket.config import Config
from hocket.plan.capacity import rows_allowed, rows_at_most, rows_evenly, rows_grown
from hocket.plan.stages import layout_of
from hocket.runtime.blocks import Room
from hocket.runtime.comm import Groups
from hocket.settings.leaves import changed
from hocket.tune.trials import Trials, fits

T = TypeVar("T")


class RowRoom:
    """The room that one rank has, always as much as all others have."""

    def __init__(self, config: Config, groups: Groups, device: torch.device) -> None:
        self._config, self._groups, self._device = config, groups, device
        self.now: Room | None = None
        """What ops lay rows out in; None where hosts know how many come."""
        self.lacked = 0
        """Rows of one rank that found no room when ops were issued last: it was done again, with room for all."""
        self.memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        """Bytes that this rank can use; 0: not known."""
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

        Behind it there is more room, or if that would not fit on some rank, none: hosts know from then on.
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
        if not self._would_fit(capacity):
            return None
        most = max(capacity, rows_evenly(config))
        self._groups.a2a.make_room(most * config.model.hidden * config.element_bytes)
        return replace(room, capacity=capacity)

    def _would_fit(self, capacity: int) -> bool:
        """Whether steps with room for so many rows are predicted to fit on the GPUs of all ranks."""
        grown = changed(self._config, {"overlap.ep.room": capacity / rows_evenly(self._config)})
        fit = not self.memory or fits(Trials().step(grown).nbytes, self.memory)
        agreed = torch.tensor([fit], dtype=torch.int64, device=self._device)
        self._groups.control.all_reduce(agreed, "min").wait()
        return bool(agreed)

"""SIGINT and SIGTERM ask a run to save and end; the trainer looks at the end of every step.

A signal reaches ranks at different times, so the flag is only this rank's wish: the trainer combines the wishes of all
ranks (a maximum over the control group), and all stop after the same step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Set by the first SIGINT or SIGTERM. The second one ends the process at once.

    Use as a context manager, which puts the former handlers back.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that asked, 0 if none has."""
        self._former: dict[int, Handler] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number

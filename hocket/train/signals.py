"""SIGINT, SIGTERM and SIGHUP (a closed terminal) ask a run to save and stop.

The trainer checks at the end of every step. A signal reaches ranks at different times, so the flag is only this rank's
request. The trainer reduces it over all ranks (a maximum over the control group), and all stop after the same step.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from types import FrameType

SAME = 1.0
"""Seconds in which signals count as one: systemd and Slurm signal every process, and a launcher forwards its own."""

Handler = Callable[[int, FrameType | None], object] | int | None


def stop_signals() -> list[int]:
    """The signals that stop a run. Under `nohup`, which ignores SIGHUP, a closed terminal does not."""
    stays = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if stays else (signal.SIGHUP,))]


def hang_up() -> None:
    """Drop output to a closed terminal from now on, without an error. Files and pipes are unaffected."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class StopRequest:
    """Set by the first stop signal. Another one more than `SAME` seconds later ends the process at once.

    Use as a context manager, which restores the previous handlers.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal, 0 if there was none."""
        self._since = 0.0
        self._former: dict[int, Handler] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._former[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            hang_up()
        if self.signal:
            if time.monotonic() > self._since + SAME:
                os._exit(128 + number)
            return
        self.signal, self._since = number, time.monotonic()

"""SIGINT, SIGTERM and a terminal that is closed (SIGHUP) ask a run to save and end.

The trainer looks at the end of every step. A signal reaches ranks at different times, so the flag is only this rank's
wish: the trainer combines the wishes of all ranks (a maximum over the control group), and all stop after the same step.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from types import FrameType

SAME = 1.0
"""Seconds in which signals are one wish: systemd and Slurm signal every process, and a launcher passes its own on."""

Handler = Callable[[int, FrameType | None], object] | int | None


def asking() -> list[int]:
    """The signals that ask a run to end. Under `nohup`, which ignores it, a closed terminal asks for nothing."""
    stays = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if stays else (signal.SIGHUP,))]


def hang_up() -> None:
    """The terminal is gone. Output to it is dropped from now on, without an error. Files and pipes stay."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class StopRequest:
    """Set by the first signal that asks. One that comes more than `SAME` seconds later ends the process at once.

    Use as a context manager, which puts the former handlers back.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that asked, 0 if none has."""
        self._since = 0.0
        self._former: dict[int, Handler] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> StopRequest:
        for number in asking():
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

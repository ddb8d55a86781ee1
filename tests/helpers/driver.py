"""A driver without a GPU: threads in place of ranks, and queues that do at once what they are given."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hocket.runtime.driver import FlagStep


class Memcpy:
    """A driver of which every operation is over when it returns."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def value(self, flag: int) -> int:
        return ctypes.c_int32.from_address(flag).value

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        ctypes.memmove(into, source, nbytes)

    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        """In any order, as a GPU may."""
        assert (nbytes > 0).all()
        for each in np.random.default_rng(0).permutation(np.stack([into, sources, nbytes], 1)).tolist():
            self.copy(stream, *each)

    def write(self, stream: int, flag: int, value: int) -> None:
        with self.changed:
            ctypes.c_int32.from_address(flag).value = value
            self.changed.notify_all()

    def wait(self, stream: int, flag: int, value: int) -> None:
        with self.changed:
            reached = self.changed.wait_for(lambda: self.value(flag) >= value, 10.0)
        assert reached, "the awaited flag was not written"

    def prepared(self, steps: Sequence[FlagStep]) -> Callable[[int], None]:
        def issue(stream: int) -> None:
            for what, flag, value in steps:
                (self.wait if what == "wait" else self.write)(stream, flag, value)

        return issue

    def read(self, flags: Sequence[int]) -> list[int] | None:
        return [self.value(flag) for flag in flags]

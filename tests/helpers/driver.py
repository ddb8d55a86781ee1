"""A driver without a GPU: threads in place of ranks, and queues that do at once what they are given."""

from __future__ import annotations

import ctypes
import threading


class Memcpy:
    """A driver of which every operation is over when it returns."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def value(self, word: int) -> int:
        return ctypes.c_uint32.from_address(word).value

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        ctypes.memmove(into, source, nbytes)

    def write(self, stream: int, word: int, value: int) -> None:
        with self.changed:
            ctypes.c_uint32.from_address(word).value = value
            self.changed.notify_all()

    def wait(self, stream: int, word: int, value: int) -> None:
        with self.changed:
            reached = self.changed.wait_for(lambda: self.value(word) >= value, 10.0)
        assert reached, "nobody has written what is waited for"

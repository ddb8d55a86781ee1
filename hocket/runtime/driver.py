"""Operations of a stream that torch has no words for: the driver copies, writes a word, and waits for one.

They are operations of the stream, not kernels: they need no SM, and a wait does not take one from products.
"""

from __future__ import annotations

import ctypes
from typing import Protocol


class Driver(Protocol):
    """Operations of a stream, given by its handle, on addresses. Each costs the host a microsecond or two."""

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None: ...
    def write(self, stream: int, word: int, value: int) -> None: ...
    def wait(self, stream: int, word: int, value: int) -> None:
        """Until the word is at least the value."""
        ...


class Cuda:
    """The driver of GPUs."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._copy, self._write, self._wait = (
            getattr(library, name)
            for name in ("cuMemcpyDtoDAsync_v2", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2")
        )
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        _check(self._copy(into, source, nbytes, stream))

    def write(self, stream: int, word: int, value: int) -> None:
        _check(self._write(stream, word, value, 0))

    def wait(self, stream: int, word: int, value: int) -> None:
        _check(self._wait(stream, word, value, 0))


def _check(error: int) -> None:
    assert error == 0, f"the driver refuses an operation of a stream: error {error}"

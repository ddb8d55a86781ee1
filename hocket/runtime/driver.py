"""Operations of a stream that torch has no words for: the driver copies, writes a word, and waits for one.

They are operations of the stream, not kernels: they need no SM, and a wait does not take one from products.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np


class Driver(Protocol):
    """Operations of a stream, given by its handle, on addresses. Each costs the host a microsecond or two."""

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None: ...
    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        """Many copies, of which none needs another one: arrays [N] of int64, at least one byte each."""
        ...

    def write(self, stream: int, word: int, value: int) -> None: ...
    def wait(self, stream: int, word: int, value: int) -> None:
        """Until the word is at least the value."""
        ...


class _Attributes(ctypes.Structure):
    """How a batch of copies is done (`CUmemcpyAttributes`)."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("into_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1
"""Asks for copy engines, also where an SM would be faster: inside of one GPU."""


class Cuda:
    """The driver of GPUs."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._batch: Any = getattr(library, "cuMemcpyBatchAsync", None)  # of CUDA 12.8
        self._how = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._copy, self._write, self._wait = (
            getattr(library, name)
            for name in ("cuMemcpyDtoDAsync_v2", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2")
        )
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        _check(self._copy(into, source, nbytes, stream))

    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        if self._batch is None or not stream:  # nor may the default stream have a batch
            for each in zip(into.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
                self.copy(stream, *each)
            return
        arrays = [np.ascontiguousarray(numbers, dtype=np.uint64) for numbers in (into, sources, nbytes)]
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        addresses = (ctypes.c_void_p(numbers.ctypes.data) for numbers in arrays)
        count = ctypes.c_size_t(len(into))
        how = ctypes.byref(self._how), ctypes.byref(first), ctypes.c_size_t(1)
        _check(self._batch(*addresses, count, *how, ctypes.byref(failed), ctypes.c_void_p(stream)))

    def write(self, stream: int, word: int, value: int) -> None:
        _check(self._write(stream, word, value, 0))

    def wait(self, stream: int, word: int, value: int) -> None:
        _check(self._wait(stream, word, value, 0))


def _check(error: int) -> None:
    assert error == 0, f"the driver refuses an operation of a stream: error {error}"

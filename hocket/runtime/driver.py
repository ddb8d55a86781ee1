"""Operations of a stream that torch has no flags for: the driver copies, writes a flag, and waits for one.

They are operations of the stream, not kernels: they need no SM, and a wait does not take one from products.

Note: [Who asks a GPU that stands still]
Streams that wait keep others from nothing, so a stream of its own can bring flags to the host. But the thread that
issues work may itself be blocked, in a call for which the driver has no room left, and then the driver may answer
nobody. So what is asked here is asked through ctypes, which lets go of the interpreter, on memory and a stream that
were made before, and whoever asks does so in a thread that nobody has to wait for (`recorder.Watchdog`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np

FLAGS_AT_ONCE = 256
"""Flags that are read at once at most."""
PATIENCE = 2.0
"""Seconds in which flags must have come to the host."""
_NOT_READY = 600


FlagStep = tuple[Literal["wait", "write"], int, int]
"""What is done with a flag, its address, and the value."""


class Driver(Protocol):
    """Operations of a stream, given by its handle, on addresses. Each costs the host a microsecond or two."""

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None: ...
    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        """Many copies, of which none needs another one: arrays [N] of int64, at least one byte each."""
        ...

    def write(self, stream: int, flag: int, value: int) -> None:
        """Give a flag of 32 bits a value, which may be negative."""
        ...

    def wait(self, stream: int, flag: int, value: int) -> None:
        """Until the flag, read as a number that may be negative, is at least the value."""
        ...

    def prepared(self, steps: Sequence[FlagStep]) -> Callable[[int], None]:
        """Issues these writes and waits, in this order, on a stream: in one call of the driver, however many."""
        ...

    def read(self, flags: Sequence[int]) -> list[int] | None:
        """What these flags are now, beside all streams; None if the device does not answer."""
        ...


class _Step(ctypes.Structure):
    """One write or wait of a batch (`CUstreamBatchMemOpParams`, of 48 bytes)."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


_OPERATIONS = {"wait": 1, "write": 2}


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
        self._copy, self._write, self._wait, self._steps = (
            getattr(library, f"{name}_v2")
            for name in ("cuMemcpyDtoDAsync", "cuStreamWriteValue32", "cuStreamWaitValue32", "cuStreamBatchMemOp")
        )
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._steps.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._reader = reader()

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

    def write(self, stream: int, flag: int, value: int) -> None:
        _check(self._write(stream, flag, value & 0xFFFFFFFF, 0))

    def wait(self, stream: int, flag: int, value: int) -> None:
        _check(self._wait(stream, flag, value & 0xFFFFFFFF, 0))  # "at least" compares the signed difference

    def prepared(self, steps: Sequence[FlagStep]) -> Callable[[int], None]:
        batch = (_Step * len(steps))(
            *(_Step(_OPERATIONS[what], flag, value & 0xFFFFFFFF, 0) for what, flag, value in steps)
        )
        return lambda stream: _check(self._steps(stream, len(batch), batch, 0))

    def read(self, flags: Sequence[int]) -> list[int] | None:
        return self._reader.read(flags)


class Reader:
    """Asks the current GPU what is in its memory and what is over. See Note: [Who asks a GPU that stands still].

    Made while the GPU is the current one and answers.
    """

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        self._context, self._stream, self._flags = (ctypes.c_void_p() for _ in range(3))
        _check(library.cuCtxGetCurrent(ctypes.byref(self._context)))
        beside_the_default_stream = 1  # CU_STREAM_NON_BLOCKING
        _check(library.cuStreamCreate(ctypes.byref(self._stream), beside_the_default_stream))
        _check(library.cuMemAllocHost_v2(ctypes.byref(self._flags), ctypes.c_size_t(4 * FLAGS_AT_ONCE)))
        library.cuMemcpyDtoHAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._turn, self._answers = threading.Lock(), True

    def read(self, flags: Sequence[int]) -> list[int] | None:
        """Flags at addresses of the GPU's own or of mapped memory, as signed numbers."""
        assert len(flags) <= FLAGS_AT_ONCE, f"{len(flags)} flags at once"
        assert self._flags.value is not None
        with self._turn:
            self._answers = self._answers and self._bring(flags)
            # Flags that come later would come into the answers to others, so nobody asks again.
            return list((ctypes.c_int32 * len(flags)).from_address(self._flags.value)) if self._answers else None

    def _bring(self, flags: Sequence[int]) -> bool:
        """Copy flags to the host; whether they have come."""
        assert self._flags.value is not None
        failed = self._library.cuCtxSetCurrent(self._context)  # of this thread
        for i, flag in enumerate(flags):
            failed = failed or self._library.cuMemcpyDtoHAsync_v2(self._flags.value + 4 * i, flag, 4, self._stream)
        deadline = time.monotonic() + PATIENCE
        while not failed and time.monotonic() < deadline:
            state = self._library.cuStreamQuery(self._stream)
            if state != _NOT_READY:
                return state == 0
            time.sleep(0.001)
        return False

    def over(self, event: int) -> bool | None:
        """Whether the work before an event, given by its handle, is over; None if that cannot be told."""
        failed = self._library.cuCtxSetCurrent(self._context) or self._library.cuEventQuery(ctypes.c_void_p(event))
        return {0: True, _NOT_READY: False}.get(failed)


@cache
def reader() -> Reader:
    """That of this process, which has one GPU."""
    return Reader()


def _check(error: int) -> None:
    assert error == 0, f"the driver refuses an operation of a stream: error {error}"

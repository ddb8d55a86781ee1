"""CUDA driver operations that torch does not expose: stream copies, flag writes and flag waits.

They are stream operations, not kernels: they need no SM.

Note: [Reading from a GPU that hangs]
Streams of a hung GPU may wait for ever, so flags are read on a separate stream. The thread that issues work may be
blocked inside the driver, which then may not answer other calls. So reads use ctypes, which releases the GIL, with
memory and a stream allocated in advance, and run in a thread that no other thread has to join (`hangs.Watchdog`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.autograd import profiler

FLAGS_AT_ONCE = 256
PATIENCE = 2.0
_NOT_READY = 600


FlagStep = tuple[Literal["wait", "write"], int, int]
"""(operation, address of the flag, value)."""


class Driver(Protocol):
    """Stream operations on addresses; streams are given by their handles. Each call costs the host 1 to 2 us."""

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None: ...
    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        """Independent copies: contiguous arrays [N] of 64-bit integers, at least one byte each."""
        ...

    def write(self, stream: int, flag: int, value: int) -> None:
        """Write a 32-bit flag; the value may be negative."""
        ...

    def wait(self, stream: int, flag: int, value: int) -> None:
        """Wait until the flag, a signed number, is at least the value."""
        ...

    def prepared(self, steps: Sequence[FlagStep]) -> Callable[[int], None]:
        """Return a function that issues these steps on a stream, in order, in one driver call."""
        ...

    def read(self, flags: Sequence[int]) -> list[int] | None:
        """Current values of the flags, independent of all other streams; None if the device does not answer."""
        ...


class _Step(ctypes.Structure):
    """`CUstreamBatchMemOpParams`, 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


_OPERATIONS = {"wait": 1, "write": 2}


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("into_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1
"""Prefers copy engines, also within one GPU where SMs would be faster."""


_BY_ADDRESS = 4
"""Kind of a copy: the addresses say from which device to which."""


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Profiles show what launched its copies, not those of the driver."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


class Cuda:
    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._batch: Any = getattr(library, "cuMemcpyBatchAsync", None)  # since CUDA 12.8
        if self._batch is not None:
            self._batch.argtypes = (
                *[ctypes.c_uint64] * 3,
                ctypes.c_size_t,
                *[ctypes.c_void_p] * 2,
                ctypes.c_size_t,
                *[ctypes.c_void_p] * 2,
            )
        self._how = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._of_all = (*(ctypes.addressof(one) for one in (self._how, self._first)), 1, ctypes.addressof(self._failed))
        """Attributes, the first copy that has them, their number, and where a failed call writes which copy it was."""
        self._write, self._wait, self._steps = (
            getattr(library, f"{name}_v2")
            for name in ("cuStreamWriteValue32", "cuStreamWaitValue32", "cuStreamBatchMemOp")
        )
        self._copy = _runtime().cudaMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._steps.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._reader = reader()

    def copy(self, stream: int, into: int, source: int, nbytes: int) -> None:
        _check(self._copy(into, source, nbytes, _BY_ADDRESS, stream))

    def copies(self, stream: int, into: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
        if not len(into):
            return
        # A batch is not allowed on the default stream nor in a CUDA graph, and profiles do not show what launched it.
        if (
            not stream
            or self._batch is None
            or profiler._is_profiler_enabled
            or torch.cuda.is_current_stream_capturing()
        ):
            for each in zip(into.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
                self.copy(stream, *each)
            return
        addresses = (numbers.__array_interface__["data"][0] for numbers in (into, sources, nbytes))
        _check(self._batch(*addresses, len(into), *self._of_all, stream))

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
    """Reads GPU memory and queries events. See Note: [Reading from a GPU that hangs].

    Must be made while that GPU is current and responsive.
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
        """Signed 32-bit values at addresses of device or mapped memory; None if the device does not answer."""
        assert len(flags) <= FLAGS_AT_ONCE, f"{len(flags)} flags at once"
        assert self._flags.value is not None
        with self._turn:
            self._answers = self._answers and self._bring(flags)
            # A late copy would overwrite later answers, so never read again.
            return list((ctypes.c_int32 * len(flags)).from_address(self._flags.value)) if self._answers else None

    def _bring(self, flags: Sequence[int]) -> bool:
        """Copy flags to the host; False on error or timeout."""
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
        """Whether the work before an event, given by its handle, is done; None if unknown."""
        failed = self._library.cuCtxSetCurrent(self._context) or self._library.cuEventQuery(ctypes.c_void_p(event))
        return {0: True, _NOT_READY: False}.get(failed)


@cache
def reader() -> Reader:
    return Reader()


def _check(error: int) -> None:
    assert error == 0, f"the driver refuses an operation of a stream: error {error}"

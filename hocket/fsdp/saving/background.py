"""Asynchronous saves, and how their errors are reported.

Note: [Saving while training goes on]
An asynchronous save copies what this rank writes to host memory (`HostMemory`); when `save_behind` returns, weights may
change. One thread then runs DCP's save on the copy, with a gloo group of its own, since collectives of two threads in
one group would mix. So saves are sequential, in the same order on all ranks, and a save starts its copy after the
previous one is written: there is one copy at a time. Runs of `hocket train`, planned steps and sharded modules all save
this way.

Note: [No error of a save is lost]
The result of a `Saving` raises its error. An error not asked for becomes a warning: at the next save, when the `Saving`
is dropped, or at exit. Not an exception, since a rank that raises alone would leave others waiting.

Note: [Several threads touch pinned memory]
The OS maps pages when first touched, which is slow with the one thread of `cudaHostAlloc`. So several threads touch the
memory, and CUDA then pins it. One allocation, without an allocator's rounding, holds all copies of a rank and is reused
by the next save.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hocket.fsdp.saving.boxes import local_of, with_local
from hocket.runtime.world import host_group

TOUCHING = 8
ALIGNED = 64


def copied_bytes(state: Any) -> int:
    """Bytes of the tensors that this rank writes of a state dict."""

    def size(value: Any) -> int:
        return -(-local_of(value).nbytes // ALIGNED) * ALIGNED if isinstance(value, Tensor) else 0

    return sum(map(size, tree_leaves(state)))


class HostMemory:
    """Memory for the copy of a save; the next copy overwrites it."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A complete copy of what this rank writes of a state dict. Pinned if CUDA is in use."""
        nbytes, on_gpu = copied_bytes(state), torch.cuda.is_available() and torch.cuda.is_initialized()
        if not on_gpu:
            return on_host(state, lambda tensor: torch.empty_like(tensor, device="cpu"))
        if nbytes > len(self._whole):
            self._grow(nbytes)
        used = 0

        def room_for(tensor: Tensor) -> Tensor:
            nonlocal used
            if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in (Tensor, nn.Parameter):
                return torch.empty_like(tensor, device="cpu")
            begin, used = used, used + copied_bytes(tensor)
            return self._whole[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return on_host(state, room_for)

    def _grow(self, nbytes: int) -> None:
        self.let_go()
        self._whole = torch.empty(nbytes, dtype=torch.uint8)
        with ThreadPoolExecutor(TOUCHING) as pool:
            list(pool.map(Tensor.zero_, self._whole.chunk(TOUCHING)))
        error = int(_runtime().cudaHostRegister(self._whole.data_ptr(), nbytes, 0))
        self._pinned = not error
        if error:
            with contextlib.suppress(RuntimeError):  # clears the sticky CUDA error
                torch.zeros(1, device="cuda")
            warnings.warn(
                f"CUDA cannot pin {nbytes} bytes for copies of checkpoints (error {error}): copying takes longer",
                RuntimeWarning,
                stacklevel=2,
            )

    def let_go(self) -> None:
        """Free the memory. No copy may be in use."""
        if self._pinned:
            _runtime().cudaHostUnregister(self._whole.data_ptr())
        self._whole, self._pinned = torch.empty(0, dtype=torch.uint8), False


def _runtime() -> Any:
    return torch.cuda.cudart()


def on_host(state: Any, room_for: Callable[[Tensor], Tensor]) -> Any:
    """A copy in host memory of what this rank writes of a state dict."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        local = local_of(value)
        return with_local(value, room_for(local).copy_(local))

    return tree_map(copied, state)


class Saving(Future[Path]):
    """A save in progress: `result()` waits for the folder and returns it, or raises the error.

    It can't be cancelled: the other ranks would wait. See Note: [No error of a save is lost].
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._asked = folder, False
        self.copy_seconds = self.write_seconds = 0.0
        """Seconds to copy on this rank, while training waits, and to write on all ranks."""
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        """The folder, once it exists. Raises the save's error, or TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        finally:
            self._asked |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The save's error, once it has ended. Raises TimeoutError after `timeout` seconds."""
        try:
            return super().exception(timeout)
        finally:
            self._asked |= self.done()

    @property
    def written(self) -> bool:
        """Whether the folder exists. Does not count as asking for an error."""
        return self.done() and super().exception() is None

    def timed(self, write: Callable[[], Path]) -> Path:
        begun = time.perf_counter()
        try:
            return write()
        finally:
            self.write_seconds = time.perf_counter() - begun

    def settle(self, written: Future[Path]) -> None:
        error = written.exception()
        if error is None:
            self.set_result(written.result())
            return
        cause: BaseException | None = error
        while cause is not None:  # its frames hold copies as large as the model
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self.set_exception(error)

    def tell(self) -> None:
        """Warn of an error that was not asked for."""
        if not self._asked and self.done() and (error := self.exception()) is not None:
            warnings.warn(
                f"an asynchronous save failed, and nobody asked for its result(): {self._folder}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __del__(self) -> None:
        self.tell()


_under_way: weakref.WeakSet[Saving] = weakref.WeakSet()


@atexit.register
def tell_all() -> None:
    """Warn of errors of earlier saves that were not asked for; also at exit, when saves have ended."""
    for saving in list(_under_way):
        saving.tell()


def save_behind(
    folder: Path,
    state: dict[str, Any],
    write: Callable[[dict[str, Any], dist.ProcessGroup | None], Path],
    timeout: float | None = None,
) -> Saving:
    """After the previous save is written, copy what this rank writes of a state dict, and write the copy in a thread.

    All ranks call this. `write` gets the copy and the thread's group, with a timeout in seconds.
    """
    group = _group_of_thread(timeout)
    wait(list(_under_way))
    begun = time.perf_counter()
    copied = [_memory.copy(state)]  # in a list, so that only the thread holds the copy
    seconds = time.perf_counter() - begun
    saving = in_background(folder, lambda: write(copied.pop(), group))
    saving.copy_seconds = seconds
    return saving


def in_background(folder: Path, write: Callable[[], Path]) -> Saving:
    """Queue writing a folder on the thread."""
    saving = Saving(folder)
    _under_way.add(saving)
    thread().submit(saving.timed, write).add_done_callback(saving.settle)
    return saving


_memory = HostMemory()


@cache
def thread() -> ThreadPoolExecutor:
    """The saving thread. See Note: [Saving while training goes on]."""
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


def wait_for_thread() -> None:
    wait([thread().submit(int)])


_groups: dict[object, dist.ProcessGroup] = {}


def _group_of_thread(timeout: float | None) -> dist.ProcessGroup | None:
    """The thread's group, made once; None without a process group."""
    if not dist.is_initialized():
        return None
    key = dist.group.WORLD, timeout
    if key not in _groups:
        _groups[key] = host_group(timeout)
    return _groups[key]

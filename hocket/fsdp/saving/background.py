"""Asynchronous saves, and how their errors are reported.

Note: [Saving while training goes on]
An asynchronous save copies what this rank writes to host memory (`HostMemory`); when `saved` returns, weights may
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
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hocket.fsdp.piece import local_of, with_local
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
        if on_gpu and nbytes > len(self._whole):
            self._grow(nbytes)
        used = 0

        def copied(value: Any) -> Any:
            nonlocal used
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            local = local_of(value)
            usual = local.layout == torch.strided and not local.is_quantized and type(local) is Tensor
            if on_gpu and usual:
                begin, used = used, used + copied_bytes(local)
                room = self._whole[begin : begin + local.nbytes].view(local.dtype).view(local.shape)
            else:
                room = torch.empty_like(local, device="cpu")
            return with_local(value, room.copy_(local))

        return tree_map(copied, state)

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

    def run(self, write: Callable[[], Path]) -> None:
        """Write, and settle."""
        begun, error, path = time.perf_counter(), None, self._folder
        try:
            path = write()
        except BaseException as raised:
            error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
        del write  # frames hold a copy as large as the model
        self.write_seconds, cause = time.perf_counter() - begun, error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        if error is None:
            self.set_result(path)
        else:
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
_memory = HostMemory()
_groups: dict[object, dist.ProcessGroup] = {}


@atexit.register
def tell_all() -> None:
    """Warn of errors of earlier saves that were not asked for; also at exit, when saves have ended."""
    for saving in list(_under_way):
        saving.tell()


@cache
def thread() -> ThreadPoolExecutor:
    """The saving thread. See Note: [Saving while training goes on]."""
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


def wait_for_thread() -> None:
    wait([thread().submit(int)])


Write = Callable[[dict[str, Any], dist.ProcessGroup | None], Path]
"""Writes a state dict on all ranks of a group; None is all ranks. Returns the folder."""


def saved(folder: Path, state: dict[str, Any], write: Write, behind: bool, timeout: float | None = None) -> Saving:
    """Write a state dict now; or, `behind`, copy it after the previous save, and write the copy in the thread.

    All ranks call this. `timeout` is that of the thread's group, in seconds.
    """
    tell_all()
    saving = Saving(folder)
    if not behind:
        saving.set_result(write(state, None))
        return saving
    group = _group_of_thread(timeout)
    wait(list(_under_way))
    begun = time.perf_counter()
    copied = [_memory.copy(state)]  # in a list, so that only the thread holds the copy
    saving.copy_seconds = time.perf_counter() - begun
    in_background(saving, lambda: write(copied.pop(), group))
    return saving


def in_background(saving: Saving, write: Callable[[], Path]) -> None:
    """Queue writing a folder on the thread."""
    _under_way.add(saving)
    held = [write]  # which frames of an error would keep
    thread().submit(lambda: saving.run(held.pop()))


def _group_of_thread(timeout: float | None) -> dist.ProcessGroup | None:
    """The thread's group, made once; None without a process group."""
    if not dist.is_initialized():
        return None
    key = dist.group.WORLD, timeout
    if key not in _groups:
        _groups[key] = host_group(timeout)
    return _groups[key]

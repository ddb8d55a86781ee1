"""Saves that run while training goes on, and how their errors come out.

Note: [Saving while training goes on]
An asynchronous save first copies what this rank writes into memory of the host (`HostMemory`). When
`save_behind` returns, weights may change. A thread then runs DCP's save on the copy. What DCP sends between ranks
meanwhile goes over a gloo group of its own: sends of two threads in one group would meet each other's. There is one
such thread, so saves happen one after the other, on all ranks in the same order. A save waits for the one before it to
be written before it copies, so there is one copy at a time. Runs of `hocket train`, planned steps and sharded modules
all save this way.

Note: [No error of a save is lost]
Whoever asks a `Saving` for its result gets its error raised. If nobody has asked, a warning tells it: at the next save,
when the `Saving` is dropped, or when the program ends, whichever comes first. It is no exception there, because a rank
that raises at a place where others go on would leave them waiting.

Note: [Several threads touch pinned memory]
An operating system gives a page when it is first touched, which takes one thread long, and `cudaHostAlloc` has one. So
several threads touch memory here, and CUDA pins what is there already. One piece of memory holds all copies of a rank,
without the rounding that an allocator needs, and stays for the next save.
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

from hocket.fsdp.saving.inventory import FlatTensor
from hocket.runtime.world import host_group

TOUCHING = 8
"""Threads."""
ALIGNED = 64
"""Where a copy begins: a multiple of so many bytes."""


def copied_bytes(value: Any) -> int:
    """Bytes of host memory that copies of a state dict take: of what this rank writes."""
    if isinstance(value, FlatTensor):
        return copied_bytes(value.flat) if value.writes else 0
    if isinstance(value, Tensor):
        return -(-value.nbytes // ALIGNED) * ALIGNED
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(copied_bytes, items))


class HostMemory:
    """Memory of one kind of saves, of which there is one at a time: the next copy overwrites the last one."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of what this rank writes of a state dict, once it is there. Pinned, where something is on a GPU."""
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
            with contextlib.suppress(RuntimeError):  # CUDA tells it once more at the next launch, which is this one
                torch.zeros(1, device="cuda")
            warnings.warn(
                f"CUDA cannot pin {nbytes} bytes for copies of checkpoints (error {error}): copying takes longer",
                RuntimeWarning,
                stacklevel=2,
            )

    def let_go(self) -> None:
        """Give the memory back. No copy may be in use."""
        if self._pinned:
            _runtime().cudaHostUnregister(self._whole.data_ptr())
        self._whole, self._pinned = torch.empty(0, dtype=torch.uint8), False


def _runtime() -> Any:
    return torch.cuda.cudart()


def on_host(value: Any, room_for: Callable[[Tensor], Tensor]) -> Any:
    """A copy in host memory of what this rank writes of a state dict."""
    if isinstance(value, FlatTensor):
        return value.with_elements(on_host(value.flat, room_for)) if value.writes else value
    if isinstance(value, Tensor):
        return room_for(value).copy_(value.detach())
    if isinstance(value, dict):
        return {key: on_host(item, room_for) for key, item in value.items()}
    if isinstance(value, list):
        return [on_host(item, room_for) for item in value]
    return copy.deepcopy(value)


class Saving(Future[Path]):
    """A save under way: `result()` waits until the folder is there and returns it, or raises what went wrong.

    It cannot be cancelled: the other ranks would wait. See Note: [No error of a save is lost].
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._asked = folder, False
        self.copy_seconds = self.write_seconds = 0.0
        """How long this rank took to copy, in which training waited, and to write, until all ranks had written."""
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        """The folder, once it is there. Raises: what went wrong; TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        finally:
            self._asked |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, once the save has ended. Raises: TimeoutError after `timeout` seconds."""
        try:
            return super().exception(timeout)
        finally:
            self._asked |= self.done()

    @property
    def written(self) -> bool:
        """Whether the folder is there. Nobody has asked for an error by this."""
        return self.done() and super().exception() is None

    def timed(self, write: Callable[[], Path]) -> Path:
        """The thread's work."""
        begun = time.perf_counter()
        try:
            return write()
        finally:
            self.write_seconds = time.perf_counter() - begun

    def settle(self, written: Future[Path]) -> None:
        """Take the outcome of the thread's work."""
        error = written.exception()
        if error is None:
            self.set_result(written.result())
            return
        cause: BaseException | None = error
        while cause is not None:  # what its frames hold is as large as the model
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self.set_exception(error)

    def tell(self) -> None:
        """Warn of an error that nobody has asked for."""
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
    """Warn of the errors of earlier saves that nobody has asked for. When a program ends, its saves have ended."""
    for saving in list(_under_way):
        saving.tell()


def save_behind(
    folder: Path,
    state: dict[str, Any],
    write: Callable[[dict[str, Any], dist.ProcessGroup | None], Path],
    of: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Saving:
    """Copy what this rank writes of a state dict, once the save before is written, and have a thread write the copy.

    All ranks of the group `of` call this. `write` gets the copy, and the group for what the thread sends, whose ranks
    wait up to `timeout` seconds for each other.
    """
    group = _group_of_thread(of, timeout)
    wait(list(_under_way))
    begun = time.perf_counter()
    copied = [_memory.copy(state)]  # in a list, from which the thread takes it: no frame here holds it meanwhile
    seconds = time.perf_counter() - begun
    saving = in_background(folder, lambda: write(copied.pop(), group))
    saving.copy_seconds = seconds
    return saving


def in_background(folder: Path, write: Callable[[], Path]) -> Saving:
    """Have a thread write a folder, behind what it has to do already."""
    saving = Saving(folder)
    _under_way.add(saving)
    thread().submit(saving.timed, write).add_done_callback(saving.settle)
    return saving


_memory = HostMemory()


@cache
def thread() -> ThreadPoolExecutor:
    """The thread that saves. See Note: [Saving while training goes on]."""
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


def wait_for_thread() -> None:
    """Wait until the thread that saves has nothing to do."""
    wait([thread().submit(int)])


_groups: dict[object, dist.ProcessGroup] = {}


def _group_of_thread(of: dist.ProcessGroup | None, timeout: float | None) -> dist.ProcessGroup | None:
    """The group for a thread's traffic, made once for each group of callers; None without any."""
    if not dist.is_initialized():
        return None
    key = of or dist.group.WORLD, timeout
    if key not in _groups:
        _groups[key] = host_group(of, timeout)
    return _groups[key]

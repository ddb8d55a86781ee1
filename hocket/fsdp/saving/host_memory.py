"""Memory of the host for copies of what a rank saves.

Note: [Several threads touch pinned memory]
An operating system gives a page when it is first touched, which takes one thread long, and `cudaHostAlloc` has one. So
several threads touch memory here, and CUDA pins what is there already. One piece of memory holds all copies of a rank,
without the rounding that an allocator needs, and stays for the next save.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hocket.fsdp.saving.archives import is_plain
from hocket.fsdp.saving.flat_tensor import FlatTensor

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
            if not is_plain(tensor):
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

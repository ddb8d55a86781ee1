"""Memory of a CPU in place of what NCCL allocates: a window knows what was allocated inside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Allocations(TorchDispatchMode):
    """Keeps the storage of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.storages.append(result.untyped_storage())
        return result


class CpuPool:
    """A `hocket.runtime.copy_engine.Pool`. `log` gets what happens to it, in order."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self._allocations = _Allocations()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        with self._allocations:
            yield

    def register(self) -> list[tuple[int, int]]:
        self.log.append("register")
        ranges = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in self._allocations.storages}
        return sorted(ranges)

    def deregister(self) -> None:
        self.log.append("deregister")

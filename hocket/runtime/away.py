"""What a segment keeps for its backward, in the host's memory meanwhile.

Note: [What goes away]
All that functions of the segment save, by storage, so that views of one tensor stay views of one. What stays is what
another lane has made, whose memory the plan keeps for the backward anyway (`Part.kept`), and what is too small to be
worth a copy. Weights are never saved: functions look them up (`runtime/weights.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hocket.program.offload import HOST_BLOCK

SMALLEST = 512
"""Bytes of the smallest storage that goes away."""


class HostMemory:
    """Slots in the host's memory, pinned if tensors are on a GPU. They grow as they are used, and are never moved."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slots: dict[tuple[str, int], list[Tensor]] = {}

    def store(self, slot: tuple[str, int], tensors: Sequence[Tensor]) -> None:
        """Issue copies of bytes [n] to a slot, one behind the other."""
        for theirs, ours in self._pairs(slot, tensors):
            ours.copy_(theirs, non_blocking=True)

    def load(self, slot: tuple[str, int], tensors: Sequence[Tensor]) -> None:
        """Issue copies of a slot to bytes [n], of the sizes that were stored."""
        for theirs, ours in self._pairs(slot, tensors):
            theirs.copy_(ours, non_blocking=True)

    def _pairs(self, slot: tuple[str, int], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of tensors, each with its place in a block."""
        blocks, used = self._slots.setdefault(slot, []), 0
        for tensor in tensors:
            done = 0
            while done < len(tensor):
                number, start = divmod(used, HOST_BLOCK)
                if number == len(blocks):
                    blocks.append(torch.empty(HOST_BLOCK, dtype=torch.uint8, pin_memory=self._pinned))
                count = min(len(tensor) - done, HOST_BLOCK - start)
                yield tensor[done : done + count], blocks[number][start : start + count]
                done, used = done + count, used + count


class Away:
    """What one segment has saved, while it is elsewhere. A `Saver` of `runtime/segment.py`."""

    def __init__(self, device: torch.device, stay: Collection[Tensor] = ()) -> None:
        """What is on `device` goes away, but for the tensors in `stay`."""
        self._device = device
        self._stay = {tensor.untyped_storage()._cdata for tensor in stay}
        self._index: dict[int, int] = {}
        self._there: list[Tensor] = []  # bytes of each storage, while they are here
        self._sizes: list[int] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the segment's forward."""
        with torch.autograd.graph.saved_tensors_hooks(self._put, self._found):
            yield
        self._stay.clear()
        self._index.clear()

    def _put(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        if storage._cdata in self._stay or storage.nbytes() < SMALLEST or saved.device.type != self._device.type:
            return saved
        if storage._cdata not in self._index:
            self._index[storage._cdata] = len(self._there)
            self._there.append(_bytes_of(storage))
        view = saved.storage_offset(), saved.shape, saved.stride()
        return self._index[storage._cdata], saved.dtype, view

    def _found(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        number, dtype, view = saved
        assert self._there, "what is away comes back before backward"
        whole = self._there[number]
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *view)

    def take(self) -> list[Tensor]:
        """Behind forward: all that goes away, bytes [n] each. From now on it is the caller's."""
        there, self._there = self._there, []
        self._sizes = [len(whole) for whole in there]
        return there

    def place(self) -> list[Tensor]:
        """Ahead of backward: new memory for what was taken, bytes [n] each, for the caller to fill.

        With deterministic algorithms `torch.empty` would fill it too, on a queue that does not wait for the caller's.
        """
        self._there = [_bytes_of(torch.UntypedStorage(size, device=self._device)) for size in self._sizes]
        return self._there

    def end(self) -> None:
        """Backward is done."""
        self._there = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))

"""Two helpers of a group's gradients: those added up without communication, and those that readers see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.fsdp.layout import FlatLayout


def put(gradient: Tensor, view: Tensor, add: bool) -> None:
    """Write a gradient to where it is collected, or add it to what is there."""
    if add:
        view.add_(gradient)
    else:
        view.copy_(gradient)


class LocalSum:
    """Gradients of microbatches that send nothing, added up at full size. The memory is made on first use, and kept."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._dtype, self._device = layout, dtype, device
        self._views: list[Tensor] = []
        self._has = [False] * len(layout.entries)

    def __bool__(self) -> bool:
        """Whether something was added since the last `merge`."""
        return any(self._has)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, if it is there."""
        return self._layout.total * self._dtype.itemsize if self._views else 0

    def target(self, index: int) -> tuple[Tensor, bool]:
        """Where the gradient of an entry goes, shaped like it; True if it must be added to what is there."""
        if not self._views:
            flat = torch.zeros(self._layout.total, dtype=self._dtype, device=self._device)
            self._views = self._layout.views(flat)
        already, self._has[index] = self._has[index], True
        return self._views[index], already

    def add(self, index: int, grad: Tensor) -> None:
        """Add a whole gradient of an entry."""
        put(grad, *self.target(index))

    def merge(self, into: Sequence[Tensor]) -> None:
        """Add everything to `into`, views like the entries; rounded once. Nothing is left here."""
        for i, view in enumerate(into):
            if self._has[i]:
                view.copy_(self._views[i].add_(view))
        self.clear()

    def forget(self, index: int) -> None:
        """Forget what was added to an entry."""
        self._has[index] = False

    def clear(self) -> None:
        """Forget what was added."""
        self._has = [False] * len(self._has)


class ReadableGrads:
    """A shard's gradients as readers see them: views of `grads`, or of a copy in the dtype that optimizers expect.

    Readers may write: clipping does. What they wrote into a copy goes back before `grads` changes.
    """

    def __init__(self, grads: Tensor, dtype: torch.dtype, ranges: Sequence[slice]) -> None:
        self._grads, self._dtype, self._ranges = grads, dtype, ranges
        self._copy: Tensor | None = None
        self._views = [grads[here] for here in ranges] if grads.dtype == dtype else []
        self._versions = (-1, -1)  # of grads and of the copy, when the copy was made

    def views(self) -> list[Tensor]:
        """One tensor per range, the same objects every time."""
        if self._grads.dtype == self._dtype:
            return self._views
        if self._copy is None:
            self._copy = torch.empty_like(self._grads, dtype=self._dtype)
            self._views = [self._copy[here] for here in self._ranges]
        if self._versions[0] != self._grads._version:
            self._copy.copy_(self._grads)
            self._versions = self._grads._version, self._copy._version
        return self._views

    def take_back(self) -> None:
        """Before `grads` changes: take over what readers wrote."""
        if self._copy is not None and self._versions[0] == self._grads._version:
            if self._copy._version != self._versions[1]:
                self._grads.copy_(self._copy)
        self.drop()

    def drop(self) -> None:
        """Forget the copy; the next reader gets a new one."""
        self._versions = (-1, -1)

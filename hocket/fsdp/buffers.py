"""Full-size buffers: where gathered weights lie, and where gradients wait to be reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hocket.runtime.queue import Ticket


class FullBuffer:
    """The memory of a group's gathered weights: `flat`, whose views stay bound to parameters for good.

    A `dynamic` one is there between `allocate` and `free` only. On a GPU call both inside work of the queue that
    gathers: memory is then handed on in the order of that queue, without events. A `fixed` one is always there. Views
    can only be made while it is there.
    """

    def __init__(self, flat: Tensor, is_fixed: bool) -> None:
        self.flat, self.is_fixed = flat, is_fixed
        self.behind: tuple[Ticket, ...] = ()
        """What the next gather into it has to come behind: its last readers, whichever unit they read."""
        self._bytes = flat.nbytes

    @classmethod
    def dynamic(cls, numel: int, dtype: torch.dtype, device: torch.device) -> FullBuffer:
        """A buffer with a storage of its own, which is not there yet."""
        buffer = cls(torch.empty(numel, dtype=dtype, device=device), is_fixed=False)
        buffer.free()
        return buffer

    @classmethod
    def fixed(cls, numel: int, dtype: torch.dtype, device: torch.device) -> FullBuffer:
        """A buffer that stays, at one address. Normal numbers, so that a run without communication computes on some."""
        return cls(torch.empty(numel, dtype=dtype, device=device).normal_(std=0.02), is_fixed=True)

    @property
    def nbytes(self) -> int:
        """Bytes while it is there."""
        return self._bytes

    @property
    def allocated(self) -> bool:
        """Whether the memory is there."""
        return self.flat.untyped_storage().nbytes() == self._bytes

    def allocate(self) -> None:
        """Get the memory, if it is not there; its content is arbitrary."""
        if not self.allocated:
            self.flat.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Give the memory back; a fixed buffer keeps it. Views stay, and must not be read."""
        if not self.is_fixed:
            self.flat.untyped_storage().resize_(0)


class StagingRing:
    """`count` buffers of `numel` elements in which units collect gradients until these are reduced.

    They are made when first needed, or all at once by `allocate`. When all are in use, `grow` says whether one more is
    made (counted in `grown`) or that is an error.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device, grow: bool) -> None:
        if count < 1:
            raise ValueError(
                f"staging={count}: gradients need at least 1 buffer; 2 let reductions overlap with backward"
            )
        self.count, self.numel, self.dtype, self.device, self.grow = count, numel, dtype, device, grow
        self.grown = 0
        self._free: list[Tensor] = []
        self._reducing: list[tuple[Tensor, Ticket]] = []  # given back, oldest first
        self._holders: dict[int, object] = {}  # by address, oldest first

    @property
    def made(self) -> int:
        """How many buffers there are."""
        return len(self._free) + len(self._reducing) + len(self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers there are."""
        return self.made * self.numel * self.dtype.itemsize

    def allocate(self, window: AbstractContextManager[object] | None = None) -> None:
        """Make all `count` buffers now, inside `window` if their group needs its memory in one."""
        with window or nullcontext():
            while self.made < self.count:
                self._free.append(self._new())

    def take(self, unit: object) -> Tensor:
        """A buffer for `unit`, with arbitrary content.

        A free one, or a new one. Only if there is neither, the one that was given back first, and the caller's
        following work comes behind its reduction.
        """
        if self._free:
            buffer = self._free.pop()
        elif self.made < self.count and not (self._reducing and self._reducing[0][1].done):
            buffer = self._new()
        elif self._reducing:
            buffer, ticket = self._reducing.pop(0)
            ticket.wait()
        elif self.grow:
            self.grown += 1
            buffer = self._new()
        else:
            holders = ", ".join(dict.fromkeys(map(str, self._holders.values())))
            raise ValueError(
                f"{unit} needs a staging buffer for its gradients, but all {self.made} hold unreduced gradients of "
                f"{holders}: reduce these first, or use more than staging={self.count}"
            )
        self._holders[buffer.data_ptr()] = unit
        return buffer

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        """Give a buffer back. It is written again behind `ticket`, at once without one."""
        self._holders.pop(buffer.data_ptr())
        if ticket is None or ticket.done:
            self._free.append(buffer)
        else:
            self._reducing.append((buffer, ticket))

    def _new(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

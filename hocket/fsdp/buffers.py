"""Full-size buffers: where gathered weights lie, and where gradients wait to be reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.queue import Ticket
from hocket.runtime.weights import put


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


class Staging(Protocol):
    """Where units collect gradients until these are reduced: for `count` units at a time."""

    fixed: bool
    """Whether buffers stay, at the same addresses."""
    count: int

    def take(self, unit: object, numel: int) -> Tensor:
        """`numel` elements for `unit`, with arbitrary content.

        If as many as may be are on their way, the caller's following work comes behind the oldest reduction.
        """
        ...

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        """Give a buffer back. It is written again behind `ticket`, at once without one."""
        ...

    def settle(self) -> None:
        """The caller's following work comes behind all reductions."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that were there at once, at most so far."""
        ...


class StagingMemory:
    """Staging memory that comes and goes, each buffer as long as its unit needs.

    It is the caller's: made in the order of the caller's work, and given back once that comes behind the reduction. On
    another stream than the one that made it, it stays for now: the allocator would hand it on in that one's order.
    Units that have not sent their gradients can't give theirs up: then there are more than `count`.
    """

    fixed = False

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, caller: Callable[[], int]) -> None:
        """`caller` says on which stream the caller issues its work."""
        self.count, self.dtype, self.device = count, dtype, device
        self.nbytes = 0
        self._caller = caller
        self._held = 0
        self._bytes = 0
        self._reducing: list[tuple[Tensor, Ticket, int]] = []  # and the stream that made it; oldest first
        self._made_on: dict[int, int] = {}  # by identity

    def take(self, unit: object, numel: int) -> Tensor:
        self._make_room()
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._made_on[id(buffer)] = self._caller()
        self._held += 1
        self._bytes += buffer.nbytes
        self.nbytes = max(self.nbytes, self._bytes)
        return buffer

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        self._held -= 1
        made_on = self._made_on.pop(id(buffer))
        if ticket is None or ticket.done:
            self._bytes -= buffer.nbytes
        else:
            self._reducing.append((buffer, ticket, made_on))

    def settle(self) -> None:
        for entry in [entry for entry in self._reducing if entry[2] == self._caller()]:
            self._drop(entry)

    def _make_room(self) -> None:
        """For one more. A function of its own, since a local variable would keep the last buffer that goes."""
        mine = [entry for entry in self._reducing if entry[2] == self._caller()]
        for entry in mine[: max(0, self._held + len(self._reducing) + 1 - self.count)]:
            entry[1].wait()
            self._drop(entry)

    def _drop(self, entry: tuple[Tensor, Ticket, int]) -> None:
        self._reducing = [other for other in self._reducing if other is not entry]
        self._bytes -= entry[0].nbytes


class StagingRing:
    """Staging memory that stays: `count` buffers of `numel` elements, made when first needed."""

    fixed = True

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.numel, self.dtype, self.device = count, numel, dtype, device
        self._free: list[Tensor] = []
        self._reducing: list[tuple[Tensor, Ticket]] = []  # given back, oldest first
        self._holders: dict[int, tuple[Tensor, object]] = {}  # by identity of what was handed out, oldest first

    @property
    def made(self) -> int:
        """How many buffers there are."""
        return len(self._free) + len(self._reducing) + len(self._holders)

    @property
    def nbytes(self) -> int:
        return self.made * self.numel * self.dtype.itemsize

    def take(self, unit: object, numel: int) -> Tensor:
        """A free buffer, or a new one; only if there is neither, the one that was given back first.

        Raises: ValueError if all hold gradients that nobody has sent.
        """
        assert numel <= self.numel
        if self._free:
            buffer = self._free.pop()
        elif self.made < self.count and not (self._reducing and self._reducing[0][1].done):
            buffer = self._new()
        elif self._reducing:
            buffer, ticket = self._reducing.pop(0)
            ticket.wait()
        else:
            holders = ", ".join(dict.fromkeys(str(unit) for _, unit in self._holders.values()))
            raise ValueError(
                f"{unit} needs a staging buffer for its gradients, but all {self.made} hold unreduced gradients of "
                f"{holders}: reduce these first, or use more than staging={self.count}"
            )
        handed_out = buffer[:numel]
        self._holders[id(handed_out)] = buffer, unit
        return handed_out

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        whole, _ = self._holders.pop(id(buffer))
        if ticket is None or ticket.done:
            self._free.append(whole)
        else:
            self._reducing.append((whole, ticket))

    def settle(self) -> None:
        """Nothing to do: buffers stay, and waiting for a ticket that the caller has come behind costs nothing."""

    def _new(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)


class Staged:
    """The gradients of one group of a unit between backward and their reduction, in staging memory."""

    def __init__(self, group: ParamGroup, staging: Staging, unit: object) -> None:
        self.group, self._staging = group, staging
        self.flat = staging.take(unit, group.layout.total)
        self.views = group.grad_views(self.flat, keep=staging.fixed)
        """Where each parameter's gradient goes."""
        self.written = [False] * len(self.views)
        """Which parameters have a gradient here."""
        self._arrived = [False] * len(self.views)
        self.unfinished = group.learning
        """How many parameters have not written all of their gradient yet."""

    def target(self, index: int) -> tuple[Tensor, bool]:
        """Where parameter `index` writes its gradient; True if one is there already, to which it must be added."""
        already, self.written[index] = self.written[index], True
        return self.views[index], already

    def add(self, index: int, grad: Tensor) -> None:
        """Take over a gradient of parameter `index`; a second one is added to the first."""
        put(grad, *self.target(index))

    def arrived(self, index: int) -> None:
        """Autograd is done with parameter `index`; layers may have written its gradient before, piece by piece."""
        if self.written[index] and not self._arrived[index]:
            self._arrived[index] = True
            self.unfinished -= 1

    def fill_gaps(self) -> None:
        """Zero what nobody wrote: parameters without a gradient, and padding."""
        self.group.fill_gaps(self.flat, self.views, self.written)

    def give(self, ticket: Ticket) -> None:
        """Give the memory back; it may be written again behind `ticket`."""
        self._staging.give(self.flat, ticket)

    def drop(self) -> None:
        """Give the memory back without having sent it."""
        self._staging.give(self.flat, None)

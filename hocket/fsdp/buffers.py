"""Full-size buffers: where gathered weights lie, and where gradients wait to be reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.queue import Ticket
from hocket.runtime.weights import put


class FullBuffer:
    """The memory of a group's gathered weights: `flat`, whose views stay bound to parameters for good.

    It is there between `allocate` and `free` only, and not at first. On a GPU call both inside work of the queue that
    gathers: memory is then handed on in the order of that queue, without events. Views can only be made while it is
    there.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self.behind: tuple[Ticket, ...] = ()
        """What the next gather into it has to come behind: its last readers."""
        self.nbytes = self.flat.nbytes
        """Bytes while it is there."""
        self.free()

    @property
    def allocated(self) -> bool:
        """Whether the memory is there."""
        return self.flat.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        """Get the memory, if it is not there; its content is arbitrary."""
        if not self.allocated:
            self.flat.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back. Views stay, and must not be read."""
        self.flat.untyped_storage().resize_(0)


class StagingMemory:
    """Where units collect gradients until these are reduced: `count` buffers, each as long as its unit needs.

    They come and go. A buffer is the caller's: made in the order of the caller's work, and given back once that comes
    behind the reduction. On another stream than the one that made it, it stays for now: the allocator would hand it on
    in that one's order. Units that have not sent their gradients give none up: then there are more than `count`.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, caller: Callable[[], int]) -> None:
        """`caller` says on which stream the caller issues its work."""
        self.count, self.dtype, self.device = count, dtype, device
        self.nbytes = 0
        """Bytes that were there at once, at most so far."""
        self._caller = caller
        self._held = 0
        self._bytes = 0
        self._reducing: list[tuple[Tensor, Ticket, int]] = []  # and the stream that made it; oldest first
        self._made_on: dict[int, int] = {}  # by identity

    def take(self, numel: int) -> Tensor:
        """`numel` elements with arbitrary content.

        If as many as may be are on their way, the caller's following work comes behind the oldest reduction.
        """
        self._make_room()
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._made_on[id(buffer)] = self._caller()
        self._held += 1
        self._bytes += buffer.nbytes
        self.nbytes = max(self.nbytes, self._bytes)
        return buffer

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        """Give a buffer back. It is written again behind `ticket`, at once without one."""
        self._held -= 1
        made_on = self._made_on.pop(id(buffer))
        if ticket is None or ticket.done:
            self._bytes -= buffer.nbytes
        else:
            self._reducing.append((buffer, ticket, made_on))

    def settle(self) -> None:
        """The caller's following work comes behind all reductions: give back what was waited for."""
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


class Staged:
    """The gradients of one group of a unit between backward and their reduction, in staging memory."""

    def __init__(self, group: ParamGroup, staging: StagingMemory) -> None:
        self.group, self._staging = group, staging
        self.flat = staging.take(group.layout.total)
        self.views = group.layout.views(self.flat)
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

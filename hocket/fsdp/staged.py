"""The gradients of one group of a unit between backward and their reduction."""

from __future__ import annotations

from torch import Tensor

from hocket.fsdp.buffers import Staging
from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.queue import Ticket
from hocket.runtime.weights import put


class Staged:
    """Staging memory in the hands of one group, and which parameters have written their gradient into it."""

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

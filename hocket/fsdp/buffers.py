"""Full-size buffers: gathered weights, and gradients that wait to be reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard_grads import WholeGrads
from hocket.runtime.queue import Ticket


class FullBuffer:
    """The memory of a group's gathered weights. Views of `flat` stay bound to parameters permanently.

    The storage exists between `allocate` and `free` only, initially not. On a GPU call both inside work of the
    gathering queue, so that memory is reused in that stream's order, without events. Make views only while allocated.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = self.flat.nbytes
        self.free()

    @property
    def allocated(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        if not self.allocated:
            self.flat.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Free the storage. Views stay bound but must not be read."""
        self.flat.untyped_storage().resize_(0)


class StagingMemory:
    """Buffers in which units collect gradients until these are reduced: up to `count`, each sized for its unit.

    A buffer is allocated on the caller's stream, and dropped once that stream has waited for the reduction; not from
    another stream, since the allocator reuses memory in the order of the allocating one. Units that have not sent their
    gradients keep their buffers, so there may be more than `count`.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, caller: Callable[[], int]) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self.nbytes = 0
        """Peak bytes so far."""
        self._caller = caller
        self._kept: dict[int, tuple[Tensor, int, Ticket | None]] = {}
        """id of a buffer -> the buffer, the stream that allocated it, and its reduction once that is under way."""

    def take(self, numel: int) -> Tensor:
        """`numel` elements, uninitialized. At the limit, the caller waits for the oldest reduction."""
        for key in self._reducing()[: max(0, len(self._kept) + 1 - self.count)]:
            self._wait(key)
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._kept[id(buffer)] = buffer, self._caller(), None
        self.nbytes = max(self.nbytes, sum(kept.nbytes for kept, *_ in self._kept.values()))
        return buffer

    def give(self, buffer: Tensor, ticket: Ticket | None) -> None:
        """Return a buffer, which may be reused after `ticket`, or at once without one."""
        _, made_on, _ = self._kept.pop(id(buffer))
        if ticket is not None and not ticket.done:
            self._kept[id(buffer)] = buffer, made_on, ticket

    def settle(self) -> None:
        """The caller has waited for all reductions: drop their buffers."""
        for key in self._reducing():
            del self._kept[key]

    def _reducing(self) -> list[int]:
        """Keys of the buffers of the caller's stream that are being reduced, oldest first."""
        mine = self._caller()
        return [key for key, (_, made_on, ticket) in self._kept.items() if ticket is not None and made_on == mine]

    def _wait(self, key: int) -> None:
        """Drop a buffer after its reduction; no local variable keeps it alive."""
        ticket = self._kept[key][2]
        assert ticket is not None
        ticket.wait()
        del self._kept[key]


class Staged(WholeGrads):
    """Gradients of one group of a unit between backward and reduction."""

    def __init__(self, group: ParamGroup, staging: StagingMemory) -> None:
        self.group, self._staging = group, staging
        self.flat = staging.take(group.layout.total)
        super().__init__(group.layout.views(self.flat), len(group.members))
        self.missing = group.learning
        """How many trainable parameters have not contributed."""

    def add(self, index: int, grad: Tensor) -> None:
        self.missing -= not self.has[index]
        super().add(index, grad)

    def give(self, ticket: Ticket | None) -> None:
        """Return the memory, which may be reused after `ticket`; None if it was not sent."""
        self._staging.give(self.flat, ticket)

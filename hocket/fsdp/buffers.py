"""Memory of a group of parameters: gathered weights, whole gradients, and its shards with their gradients.

Note: [Shards in host memory]
With `ShardOptions(offload=...)` a rank keeps the weights, gradients and optimizer state of its shards in host memory,
and the optimizer runs on the CPU. Copies overlap with compute, on the gathering and reducing queues:

    main  --cast, once a step, by the host-->  weight  --copy-->  gathered weights      before the gather
    main_grad  <--copy--  reduced gradients                                             after the reduction

Unsharded weights are copied too, as if gathered from one rank.

The host must not change memory that is still being copied out: that is `weight`, which only `refresh` writes, while
`main` may change at any time. And it must not read gradients before they arrive: readers call `wait_for_copies_in`. A
gradient that adds to an earlier microbatch's is added on the device, so the host need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.options import Offload
from hocket.kernels import usable
from hocket.runtime.queue import HostEvent, Ticket
from hocket.runtime.transports import Pending
from hocket.runtime.weights import put

# ------------------------------------------------------------------------------------------------------------ full size


class FullBuffer:
    """The memory of a group's gathered weights. Views of `flat` stay bound to parameters permanently.

    The storage exists between `allocate` and `free` only, initially not. On a GPU call both inside work of the
    gathering queue, so that memory is reused in that stream's order, without events. Make views only while allocated.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.keep(self.flat)
        self.free()

    def keep(self, *tensors: Tensor) -> None:
        """Free and allocate the memory of these, too."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._storages.setdefault(storage._cdata, (storage, storage.nbytes()))

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(storage.nbytes() for storage, _ in self._storages.values())

    @property
    def addresses(self) -> set[int]:
        """Where its memory begins, if it is allocated."""
        return {storage.data_ptr() for storage, _ in self._storages.values()} - {0}

    def allocate(self) -> None:
        for storage, size in self._storages.values():
            if storage.nbytes() != size:
                storage.resize_(size)

    def free(self) -> None:
        """Free the storage. Views stay bound but must not be read."""
        for storage, _ in self._storages.values():
            storage.resize_(0)


class WholeGrads:
    """Gradients of a group at full size: `views`, one per parameter, of which those in `has` are written."""

    def __init__(self, views: list[Tensor], count: int) -> None:
        self.views, self.has = views, [False] * count

    def add(self, index: int, grad: Tensor) -> None:
        """Copy a gradient of parameter `index`, or add it to an earlier one."""
        put(grad, self.views[index], self.has[index])
        self.has[index] = True


class LocalSum(WholeGrads):
    """Gradients of microbatches that reduce nothing, added up. Allocated on first use and kept."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([], len(layout.entries))
        self._layout, self._dtype, self._device = layout, dtype, device

    def __bool__(self) -> bool:
        """Whether anything was added since the last `merge`."""
        return any(self.has)

    @property
    def nbytes(self) -> int:
        return self._layout.total * self._dtype.itemsize if self.views else 0

    def add(self, index: int, grad: Tensor) -> None:
        if not self.views:
            self.views = self._layout.views(torch.zeros(self._layout.total, dtype=self._dtype, device=self._device))
        super().add(index, grad)

    def merge(self, into: Sequence[Tensor]) -> None:
        """Add everything to `into`, complete views of the entries, rounded once; then clear. On the caller's stream,
        like `add`.
        """
        for i, view in enumerate(into):
            if self.has[i]:
                view.copy_(self.views[i].add_(view))
        self.clear()

    def clear(self) -> None:
        self.has = [False] * len(self.has)


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

    def __init__(self, layout: FlatLayout, staging: StagingMemory, missing: int) -> None:
        self._staging = staging
        self.flat = staging.take(layout.total)
        super().__init__(layout.views(self.flat), len(layout.entries))
        self.missing = missing
        """How many trainable parameters have not contributed."""

    def add(self, index: int, grad: Tensor) -> None:
        self.missing -= not self.has[index]
        super().add(index, grad)

    def give(self, ticket: Ticket | None) -> None:
        """Return the memory, which may be reused after `ticket`; None if it was not sent."""
        self._staging.give(self.flat, ticket)


# --------------------------------------------------------------------------------------------------------------- shards


CPU = torch.device("cpu")


class ShardMemory:
    """Allocates a group's shards, and copies between them and the device."""

    def __init__(self, device: torch.device, offload: Offload = "none") -> None:
        self.device = device
        self.on_host = offload != "none"
        """Whether shards are offloaded to host memory."""
        self._where = CPU if self.on_host else device
        self._pinned = offload == "pinned"
        self._crosses = self.on_host and device.type == "cuda"
        self._out, self._in = (HostEvent(device if self._crosses else CPU) for _ in range(2))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, uninitialized."""
        return torch.empty(numel, dtype=dtype, device=self._where, pin_memory=self._pinned)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D zeros."""
        return self.empty(numel, dtype).zero_()

    def on_device(self, kept: Tensor) -> Tensor:
        """A shard's memory on the device: itself, or a copy in the order of the caller's stream."""
        if not self._crosses:
            return kept
        copied = kept.to(self.device, non_blocking=True)
        self._out.record()
        return copied

    def wait_for_copies_out(self) -> None:
        """Make the host wait for copies to the device."""
        self._out.synchronize()

    def wait_for_copies_in(self) -> None:
        """Make the host wait for copies to the host."""
        self._in.synchronize()

    def reduced(self, kept: Tensor, add: bool, reduce: Callable[[Tensor, bool], Pending]) -> Pending:
        """Let `reduce(into, add)` write or add to `kept`, through a device buffer if that is in host memory."""
        if not self.on_host:
            return reduce(kept, add)
        into = torch.zeros_like(kept, device=self.device, pin_memory=False)  # gaps stay zero
        if add:
            into.copy_(kept, non_blocking=self._crosses)

        def bring() -> None:
            kept.copy_(into, non_blocking=self._crosses)
            self._in.record()

        return reduce(into, add).then(bring)


class ShardGrads:
    """The reduced gradients of a group's shards.

    Allocated from the first reduction until all gradients are forgotten; activations use the memory in between.
    Allocated and freed in the order of the caller's work (`Unit`), or of a plan's compute lane (`PlannedUnit`). A view
    keeps the memory alive.

    Readers get views, or views of a copy in the optimizer's dtype. They may write, as clipping does; writes to the copy
    are taken over before the gradients change.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, readable: torch.dtype, position: int, shard_memory: ShardMemory
    ) -> None:
        self._numel, self._dtype, self._readable, self._shard_memory = layout.shard, dtype, readable, shard_memory
        self._ranges, self._gaps = layout.slices(position), layout.pieces.gaps
        self.flat: Tensor | None = None
        """All gradients, in the accumulate dtype."""
        self.stays = False
        """Whether the memory is kept for a recorded step."""
        self._copy: Tensor | None = None
        self._views: list[Tensor] = []
        self._versions = (-1, -1)  # versions of flat and of the copy, when it was made
        self._written = False

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.flat, self._copy) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)

    def make(self) -> None:
        """Allocate the memory, uninitialized but for gaps, unless it is there."""
        if self.flat is None:
            self.flat = self._new(self._dtype)
            for lo, hi in self._gaps:
                self.flat[lo:hi].zero_()

    def _new(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # gradients may be read in that mode, and must be writable afterwards
            return self._shard_memory.empty(self._numel, dtype)

    def let_go(self) -> None:
        if not self.stays:
            self.flat, self._copy, self._views = None, None, []

    def views(self) -> list[Tensor]:
        """One tensor per range, the same objects while the memory is allocated."""
        assert self.flat is not None
        if self._dtype == self._readable:
            self._views = self._views or [self.flat[here] for here in self._ranges]
            return self._views
        if self._copy is None:
            self._copy = self._new(self._readable)
            self._views = [self._copy[here] for here in self._ranges]
            self._versions = (-1, -1)
        if self._versions[0] != self.flat._version:
            self._copy.copy_(self.flat)
            self._versions, self._written = (self.flat._version, self._copy._version), False
        return self._views

    def wrote(self) -> None:
        """A reader has written to a view in a way that its version does not show."""
        self._written = True

    def take_back(self) -> None:
        """Before the gradients change: take over readers' writes."""
        if self.flat is not None and self._copy is not None and self._versions[0] == self.flat._version:
            if self._written or self._copy._version != self._versions[1]:
                self.flat.copy_(self._copy)
        self.drop()

    def drop(self) -> None:
        self._versions = (-1, -1)


def zero_others(flat: Tensor, ranges: Sequence[slice], keep: Sequence[bool]) -> None:
    """Zero the ranges that are not kept; all of `flat` if none is."""
    if not any(keep):
        flat.zero_()
        return
    for here, kept in zip(ranges, keep, strict=True):
        if not kept:
            flat[here].zero_()


def squares_of(grads: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each gradient, fp64 [n].

    torch converts fp32 to fp64 by a copy, 20 bytes per element; the GPU kernel reads 4.
    """
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    if grads and all(_for_kernel(grad) for grad in grads):
        from hocket.kernels.sums import squares

        return squares(grads)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(norms[0].device) for norm in norms]) ** 2  # some may be in host memory


def _for_kernel(grad: Tensor) -> bool:
    return grad.dtype in (torch.float32, torch.bfloat16) and grad.is_contiguous() and usable(grad)

"""A group's gradients at rest, those added up without communication and those that were reduced, and where shards lie.

Note: [Shards in the host's memory]
With `ShardOptions(offload=...)` a rank keeps weights, gradients and the optimizer's state of its shards on the host,
and the optimizer runs there. Copies go both ways beside compute: they are work of the queues that gather and reduce.

    main  --cast, once a step, by the host-->  weight  --copy-->  gathered weights      ahead of the gather
    main_grad  <--copy--  what was reduced                                              behind the reduction

Weights that are not sharded are copied so, too, and "gathered" from one rank. With two levels of shards, what the outer
one gathers and adds up (`weight` and `partial`) stays on the device, and crosses once a step.

The host goes on while copies run, and there are two things that it must not do meanwhile. It must not change what is
still being copied out: so that is `weight`, which only `refresh` writes, and `main` may change at any time. And it must
not read what has not arrived: so who reads gradients waits for their copies (`wait_for_copies_in`). A gradient
that is added to one of an earlier microbatch meets it on the device, where that is copied first, so that no host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.options import Offload
from hocket.kernels import usable
from hocket.runtime.queue import HostEvent
from hocket.runtime.transports import Pending
from hocket.runtime.weights import put

CPU = torch.device("cpu")


class ShardMemory:
    """Memory for what a rank keeps of a group, and the copies between it and the device that computes."""

    def __init__(self, device: torch.device, offload: Offload = "none") -> None:
        self.device = device
        self.on_host = offload != "none"
        """Whether it is the host's memory, also of a device that is the host."""
        self._where = CPU if self.on_host else device
        self._pinned = offload == "pinned"
        self._crosses = self.on_host and device.type == "cuda"
        self._out, self._in = (HostEvent(device if self._crosses else CPU) for _ in range(2))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, with arbitrary content."""
        return torch.empty(numel, dtype=dtype, device=self._where, pin_memory=self._pinned)

    def zeros(self, numel: int, dtype: torch.dtype, on_device: bool = False) -> Tensor:
        """1-D; `on_device` even if this home is the host's memory."""
        if on_device:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return self.empty(numel, dtype).zero_()

    def copy_to_device(self, kept: Tensor, into: Tensor) -> None:
        """Copy to the device, on the current stream."""
        into.copy_(kept, non_blocking=self._crosses)
        self._out.record()

    def on_device(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy on the device in another dtype, made on the current stream; `kept` may change at once."""
        if not self.on_host:
            return kept.to(dtype)
        cast = self.empty(kept.numel(), dtype).copy_(kept)  # pinned memory goes only when it has been read
        into = torch.empty_like(cast, device=self.device, pin_memory=False)
        self.copy_to_device(cast, into)
        return into

    def wait_for_copies_out(self) -> None:
        """Have the host wait until what it has copied out has been read."""
        self._out.synchronize()

    def wait_for_copies_in(self) -> None:
        """Have the host wait until what was copied in is here."""
        self._in.synchronize()

    def reduced(self, kept: Tensor, add: bool, reduce: Callable[[Tensor, bool], Pending]) -> Pending:
        """Have `reduce(into, add)` write to `kept`, or add to it: by way of the device, if it lies elsewhere."""
        if not self.on_host:
            return reduce(kept, add)
        into = torch.empty_like(kept, device=self.device, pin_memory=False)
        if add:
            into.copy_(kept, non_blocking=self._crosses)

        def bring() -> None:
            kept.copy_(into, non_blocking=self._crosses)
            self._in.record()

        return reduce(into, add).then(bring)


class LocalSum:
    """Gradients of microbatches that send nothing, added up at full size. The memory is made on first use, and kept."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._dtype, self._device = layout, dtype, device
        self._views: list[Tensor] = []
        self.has = [False] * len(layout.entries)
        """Which entries something was added to since the last `merge`."""

    def __bool__(self) -> bool:
        """Whether something was added since the last `merge`."""
        return any(self.has)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, if it is there."""
        return self._layout.total * self._dtype.itemsize if self._views else 0

    def target(self, index: int) -> tuple[Tensor, bool]:
        """Where the gradient of an entry goes, shaped like it; True if it must be added to what is there."""
        if not self._views:
            flat = torch.zeros(self._layout.total, dtype=self._dtype, device=self._device)
            self._views = self._layout.views(flat)
        already, self.has[index] = self.has[index], True
        return self._views[index], already

    def add(self, index: int, grad: Tensor) -> None:
        """Add a whole gradient of an entry."""
        put(grad, *self.target(index))

    def merge(self, into: Sequence[Tensor]) -> None:
        """Add everything to `into`, views like the entries, all of them written; rounded once. Nothing is left here.

        Part of the caller's work, as adding up is, so that both are in order.
        """
        for i, view in enumerate(into):
            if self.has[i]:
                view.copy_(self._views[i].add_(view))
        self.clear()

    def forget(self, index: int) -> None:
        """Forget what was added to an entry."""
        self.has[index] = False

    def clear(self) -> None:
        """Forget what was added."""
        self.has = [False] * len(self.has)


class ShardGrads:
    """The reduced gradients of a group's shards: where reductions add up, and what readers see.

    The memory is there from the first reduction until all gradients are forgotten, so that activations have it in
    between. It is the caller's: made and given back in the order of the caller's work (`Unit`), or of a plan's compute
    lane (`PlannedUnit`). Who still holds a view keeps it.

    Readers get views, or views of a copy in the dtype that optimizers expect. They may write: clipping does. What they
    wrote into a copy goes back before the gradients change.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, readable: torch.dtype, ranges: Sequence[slice], shard_memory: ShardMemory
    ) -> None:
        self._numel, self._dtype, self._readable, self._shard_memory = numel, dtype, readable, shard_memory
        self._ranges = ranges
        self.flat: Tensor | None = None
        """All of them, in the dtype in which they are added up."""
        self.stays = False
        """Whether the memory is kept, since a recorded step reads and writes it."""
        self._copy: Tensor | None = None
        self._views: list[Tensor] = []
        self._versions = (-1, -1)  # of flat and of the copy, when the copy was made

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The memory that is there."""
        return tuple(tensor for tensor in (self.flat, self._copy) if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is there."""
        return sum(tensor.nbytes for tensor in self.memory)

    def make(self) -> None:
        """Get the memory, if it is not there; its content is arbitrary."""
        if self.flat is None:
            self.flat = self._new(self._dtype)

    def _new(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # where gradients may be read, and must be writable afterwards
            return self._shard_memory.empty(self._numel, dtype)

    def let_go(self) -> None:
        """Give the memory back, unless it stays."""
        if not self.stays:
            self.flat, self._copy, self._views = None, None, []

    def views(self) -> list[Tensor]:
        """One tensor per range, the same objects for as long as the memory is there."""
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
            self._versions = self.flat._version, self._copy._version
        return self._views

    def take_back(self) -> None:
        """Before the gradients change: take over what readers wrote."""
        if self.flat is not None and self._copy is not None and self._versions[0] == self.flat._version:
            if self._copy._version != self._versions[1]:
                self.flat.copy_(self._copy)
        self.drop()

    def drop(self) -> None:
        """Forget the copy; the next reader gets a new one."""
        self._versions = (-1, -1)


def zero_others(flat: Tensor, ranges: Sequence[slice], keep: Sequence[bool]) -> None:
    """Zero the ranges that are not to be kept; all of `flat` if none is."""
    if not any(keep):
        flat.zero_()
        return
    for here, kept in zip(ranges, keep, strict=True):
        if not kept:
            flat[here].zero_()


class Usage:
    """To which gradients of a group ranks have contributed since they were forgotten.

    Before the first `send`, and where nobody calls it, all count as used. See Note: [Gradients that nobody has].
    """

    def __init__(self, learns: Sequence[bool]) -> None:
        self._learns = learns
        self._mine = set[int]()
        self.left_out: list[int] = []
        """What this rank has left out of the gradients that were sent last."""
        self._nobody: set[int] | None = None
        self.ask: Callable[[], None] = lambda: None
        """Has somebody call `answer`, if it is known by now."""

    def send(self, written: Sequence[bool]) -> list[int]:
        """A reduction is issued with gradients of these. Returns `left_out`."""
        self._mine.update(i for i, has in enumerate(written) if has)
        self.left_out = [i for i, learns in enumerate(self._learns) if learns and i not in self._mine]
        self._nobody = None
        return self.left_out

    @property
    def known(self) -> bool:
        """Whether there is nothing to ask."""
        return not self.left_out or self._nobody is not None

    def answer(self, nobody: Iterable[int]) -> None:
        """Nobody has used these."""
        self._nobody = set(nobody)

    def unused_by_all(self, index: int) -> bool:
        """Whether it is known that no rank has used a member."""
        if index not in self.left_out:
            return False
        if self._nobody is None:
            self.ask()
        return self._nobody is not None and index in self._nobody

    def add(self, index: int) -> None:
        """The member has a gradient by hand."""
        self._mine.add(index)
        self.left_out = [i for i in self.left_out if i != index]

    def forget(self, index: int) -> None:
        """The gradient of a member is forgotten."""
        self._mine.discard(index)
        self.left_out = [i for i in self.left_out if i != index]


def squares_of(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each gradient, fp64 [n].

    torch reads fp32 as fp64 by way of a copy: 20 bytes for each element, and 8 of memory. On a GPU a kernel reads 4.
    """
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    if grads and all(_for_kernel(grad) for grad in grads):
        from hocket.kernels.sums import squares

        return squares(grads)
    return powers_of(grads, 2.0)


def powers_of(grads: Sequence[Tensor], p: float) -> Tensor:
    """The sum of |x|^p of each gradient, fp64 [n], by torch."""
    norms = [torch.linalg.vector_norm(grad, p, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(norms[0].device) for norm in norms]) ** p  # some may be in the host's memory


def _for_kernel(grad: Tensor) -> bool:
    return grad.dtype in (torch.float32, torch.bfloat16) and grad.is_contiguous() and usable(grad)

"""One part of one layer, for one microbatch, as an autograd graph of its own.

Note: [What a segment holds]
Between forward and backward a segment holds only the tensors that its functions saved: no outputs (only the graph edges
at which gradients enter) and no unsaved inputs (an ordinary leaf would be held by its AccumulateGrad node). So the
plan, not the graph, decides how long a tensor lives.

Note: [The same sums as one graph]
Autograd runs nodes in reverse order of creation and sums gradients of a tensor with several readers in that order.
Cutting the graph keeps order and sums if all readers of a tensor are in its segment, or there is one reader. A part
returns several outputs instead of letting a later part read its inner tensors, so each has one reader.

Note: [Backward stays on its thread]
For a graph on a GPU the engine wakes a worker thread and waits for it. A whole-model backward pays that once;
segments would pay it thousands of times per step, and waking a thread in a VM takes longer than issuing a part. So
segments run backward on the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.program.offload import HOST_BLOCK
from hocket.runtime.weights import WgradQueue, collecting

_ANCHOR = torch.empty(0, requires_grad=True)
"""Makes the entry nodes of every segment require gradients. No gradient ever reaches it."""


class _Enter(torch.autograd.Function):
    """Detached inputs that require gradients, without leaves that hold them."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("a segment's gradients are taken at its entry")


class Saver(Protocol):
    """Decides what happens to a segment's saved tensors between forward and backward."""

    def forward(self) -> AbstractContextManager[None]: ...

    def end(self) -> None:
        """After backward."""


class RebuiltTensor:
    """A tensor that a segment does not keep until backward, because the plan rebuilds it.

    Functions of the segment name it with `rebuild_in_backward`. Saved views of it are not kept: in backward they are
    taken from the rebuilt tensor.
    """

    _now = threading.local()

    def __init__(self) -> None:
        self._make: Callable[[Tensor], Tensor] | None = None
        self._on_device: Tensor | None = None

    def made(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        """In forward: `tensor` is what `make` makes of the value that `give` will be given."""
        self._on_device, self._make = tensor, make

    @classmethod
    def current(cls) -> RebuiltTensor | None:
        """The one of the segment whose forward runs on this thread, if any."""
        return getattr(cls._now, "rebuilt", None)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the segment's forward. Keeps the tensor until its end, so that its memory is not reused meanwhile."""
        RebuiltTensor._now.rebuilt = self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            RebuiltTensor._now.rebuilt = self._on_device = None
        assert self._make is not None, "forward makes something of what is rebuilt"

    def _pack(self, saved: Tensor) -> Any:
        there = self._on_device
        if there is None or saved.untyped_storage()._cdata != there.untyped_storage()._cdata:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self._on_device is not None, "what was rebuilt is given before backward"
        return self._on_device.as_strided(*saved)

    def give(self, value: Tensor) -> None:
        """Rebuild the tensor, before the segment's backward."""
        assert self._make is not None, "what is rebuilt is given once, after forward"
        with torch.no_grad():
            self._on_device, self._make = self._make(value), None

    def end(self) -> None:
        self._on_device = None


def rebuild_in_backward(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    """Declare that `make` rebuilds `tensor` from a value available in backward, so it need not be kept."""
    if (rebuilt := RebuiltTensor.current()) is not None:
        rebuilt.made(tensor, make)


class Segment:
    """Runs a function forward once and backward once, as a graph of its own."""

    __slots__ = ("_inputs", "_outputs", "queue", "saver")

    def __init__(self, saver: Saver | None = None) -> None:
        self.queue = WgradQueue()
        self.saver = saver
        self._inputs: list[GradientEdge | None] | None = None
        self._outputs: list[GradientEdge | None] = []

    def forward(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(*inputs)` and return its outputs, detached.

        Floating-point tensor inputs get gradients; other inputs are passed as they are. `fn` returns one value or a
        tuple: tensors, None, or objects without tensors that have a graph.
        """
        assert self._inputs is None, "this segment already ran forward"
        floating = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
        with torch.enable_grad(), collecting(self.queue):
            entered = _Enter.apply(_ANCHOR, *(inputs[i].detach() for i in floating)) if floating else ()
            args = list(inputs)
            for i, x in zip(floating, entered, strict=True):
                args[i] = x
            self._inputs = [_edge(x) for x in args]
            with self.saver.forward() if self.saver is not None else nullcontext():
                result = fn(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        self._outputs = [_edge(y) for y in outputs]
        detached = tuple(y.detach() if isinstance(y, Tensor) else y for y in outputs)
        return detached if isinstance(result, tuple) else detached[0]

    def backward(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, given gradients of the outputs, both in order.

        None for an output: unused; None for an input: no gradient. Weight gradients are left in `queue`; the rest of
        the graph is freed.
        """
        assert self._inputs is not None, "a segment runs backward once, after its forward"
        assert len(grads) == len(self._outputs), f"{len(grads)} gradients for {len(self._outputs)} outputs"
        pairs = [(edge, g) for edge, g in zip(self._outputs, grads, strict=True) if g is not None]
        assert all(edge is not None for edge, _ in pairs), "a gradient was given for an output that has none"
        wanted: list[Any] = [edge for edge in self._inputs if edge is not None]
        if self.queue.anchor is not None:
            wanted.append(self.queue.anchor)
        roots, root_grads = [edge for edge, _ in pairs], [g for _, g in pairs]
        with torch.autograd.set_multithreading_enabled(False):  # Note: [Backward stays on its thread]
            found = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))  # pyrefly: ignore
        if self.saver is not None:
            self.saver.end()
        result = tuple(None if edge is None else next(found) for edge in self._inputs)
        self.queue.anchor, self._inputs, self._outputs = None, None, []
        return result


def _edge(y: Any) -> GradientEdge | None:
    return get_gradient_edge(y) if isinstance(y, Tensor) and y.requires_grad else None


# ----------------------------------------------------------------------------------------------------------------- away
#
# Saved tensors of a segment, offloaded to the host.
#
# Note: [What is offloaded]
# Everything that the segment's functions save, by storage, so that views keep sharing one. Exceptions: tensors of other
# lanes, which the plan keeps for backward anyway (`Part.kept`), and small storages. Weights are never saved: functions
# look them up (`runtime/weights.py`).


SMALLEST = 512
"""Bytes of the smallest storage that is offloaded."""


class HostMemory:
    """Slots in host memory, pinned if tensors are on a GPU. They grow on use and never move."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slots: dict[tuple[str, int], list[Tensor]] = {}

    def store(self, slot: tuple[str, int], tensors: Sequence[Tensor]) -> None:
        """Issue copies of bytes [n] to a slot, back to back."""
        for theirs, ours in self._pairs(slot, tensors):
            ours.copy_(theirs, non_blocking=True)

    def load(self, slot: tuple[str, int], tensors: Sequence[Tensor]) -> None:
        """Issue copies of a slot to bytes [n], of the stored sizes."""
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


class OffloadedTensors:
    """Saved tensors of one segment while they are offloaded. A `Saver`."""

    def __init__(self, device: torch.device, stay: Collection[Tensor] = ()) -> None:
        """Offloads saved tensors on `device`, except those in `stay`."""
        self._device = device
        self._stay = {tensor.untyped_storage()._cdata for tensor in stay}
        self._index: dict[int, int] = {}
        self._on_device: list[Tensor] = []  # bytes of each storage, while on the device
        self._sizes: list[int] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._stay.clear()
        self._index.clear()

    def _pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        if storage._cdata in self._stay or storage.nbytes() < SMALLEST or saved.device.type != self._device.type:
            return saved
        if storage._cdata not in self._index:
            self._index[storage._cdata] = len(self._on_device)
            self._on_device.append(_bytes_of(storage))
        view = saved.storage_offset(), saved.shape, saved.stride()
        return self._index[storage._cdata], saved.dtype, view

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        number, dtype, view = saved
        assert self._on_device, "what is away comes back before backward"
        whole = self._on_device[number]
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *view)

    def take(self) -> list[Tensor]:
        """After forward: hand over the offloaded storages, bytes [n] each."""
        there, self._on_device = self._on_device, []
        self._sizes = [len(whole) for whole in there]
        return there

    def place(self) -> list[Tensor]:
        """Before backward: allocate memory for what was taken, bytes [n] each, for the caller to fill.

        Not by `torch.empty`: with deterministic algorithms that fills it too, on a stream not ordered with the
        caller's.
        """
        self._on_device = [_bytes_of(torch.UntypedStorage(size, device=self._device)) for size in self._sizes]
        return self._on_device

    def end(self) -> None:
        self._on_device = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))

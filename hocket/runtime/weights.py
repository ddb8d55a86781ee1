"""Weights as values: what a parameter holds right now, and weight gradients that wait in a queue.

A managed parameter never enters autograd. Its `Weight` says where its value lies at this moment, which
changes when the unit is gathered into another slot; a function looks the value up when it runs, in forward
and again in backward. Its gradient is no tensor either, but a piece of work, `write(out)`, that a `wgrad`
op runs later, straight into the unit's gradient slot.

Note: [How a later contribution is added]
Autograd rounds a product to the gradient's dtype and adds it then. On a GPU the product is added inside its own
kernel instead, before it is rounded (`addmm`), also into a float32 buffer from bfloat16 operands: that is faster
and never less exact, but not always the same bits. On a CPU, where no kernel does that for all dtypes, it is
autograd's way and autograd's bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.transports import local_sum

Write = Callable[[Tensor], object]
"""Computes one weight gradient and overwrites its argument, a tensor of the weight's shape, with it."""


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A `Write` that can also add to what is there, in fp32 and without a copy, as kernels of matrix products can.

    `put(out, add, scale)` writes the gradient, multiplied by `scale`, or adds it.
    """

    put: Callable[[Tensor, bool, float], None]

    def __call__(self, out: Tensor) -> None:
        self.put(out, False, 1.0)


_ATTRIBUTE = "hocket_weight"


@dataclass(eq=False, slots=True)
class Weight:
    """One parameter that hocket manages. Compared and hashed by identity."""

    name: str
    """Name of the parameter in the whole model, as in a checkpoint."""
    shape: torch.Size
    value: Tensor | None = None
    """What holds the weight right now, a view into a slot in the compute dtype; None while it is nowhere."""
    scale: Tensor | None = None
    """Of a value that is gathered in fp8: the scale of each of its rows."""
    cast: Any = None
    """What products in another format read of it, made from the value (`runtime/fp8.py`); None until somebody asks."""

    def tensor(self) -> Tensor:
        """The value; asserts that the weight is resident."""
        assert self.value is not None, f"{self.name} is read while it is not gathered"
        return self.value


def manage(param: nn.Parameter, name: str) -> Weight:
    """Put a parameter under hocket's management; from now on hocket's functions read its `Weight` instead."""
    weight = Weight(name, param.shape)
    setattr(param, _ATTRIBUTE, weight)
    return weight


def weight_of(param: Tensor) -> Weight | None:
    """The `Weight` of a managed parameter, None for an ordinary one."""
    return getattr(param, _ATTRIBUTE, None)


class WgradQueue:
    """Weight gradients that one segment's backward left to compute, oldest first.

    The work holds the activations and output gradients it needs, so a queue is memory until it is drained.
    """

    __slots__ = ("_work", "anchor")

    def __init__(self) -> None:
        self._work: list[tuple[Weight, Write]] = []
        self.anchor: Tensor | None = None
        """A leaf without elements, made when a function of the segment has no input that requires a gradient."""

    def __len__(self) -> int:
        return len(self._work)

    def push(self, weight: Weight, write: Write) -> None:
        self._work.append((weight, write))

    def anchored(self) -> Tensor:
        """The anchor. Autograd calls no backward below an output that requires no gradient, as token ids make it."""
        if self.anchor is None:
            self.anchor = torch.empty(0, requires_grad=True)
        return self.anchor

    def drain(
        self,
        target: Callable[[Weight], Tensor],
        written: set[Weight] | None = None,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
    ) -> set[Weight]:
        """Run all work, each weight's into `target(weight)`, and forget it. Returns `written`, grown.

        The first contribution to a weight overwrites its target; one to a weight that is already in `written`
        adds to it, as autograd would. A weight of the unit that is in no queue had no contribution: its
        gradient is zero, and zeroing it is the caller's part, since only the caller knows the unit's weights.

        Contributions are multiplied by `scale`. They are computed in `dtype`, by default that of the target; if it is
        another one, a `Product` adds its own, on a GPU without rounding to it.
        """
        written = set() if written is None else written
        work, self._work = self._work[::-1], []
        while work:
            # Popping drops this piece's activations before the next piece runs.
            weight, write = work.pop()
            _put(write, target(weight), weight in written, dtype, scale)
            written.add(weight)
        return written


def put(gradient: Tensor, view: Tensor, add: bool, scale: float = 1.0) -> None:
    """Write a gradient, multiplied by `scale`, to where it is collected, or add it to what is there."""
    if scale != 1.0:
        local_sum(gradient.reshape(1, -1), view.view(-1), scale, add)
    elif add:
        view.add_(gradient)
    else:
        view.copy_(gradient)


def write_product(a_FR: Tensor, b_RD: Tensor, out_FD: Tensor, add: bool, scale: float = 1.0) -> None:
    """Write `scale * a @ b` to `out`, or add it. See `Note: [How a later contribution is added]`."""
    same = out_FD.dtype == a_FR.dtype
    wider = out_FD.dtype is torch.float32 and a_FR.dtype in (torch.bfloat16, torch.float16)
    if same and not add and scale == 1.0:
        torch.mm(a_FR, b_RD, out=out_FD)
    elif not out_FD.is_cuda or not (same or wider) or not b_RD.shape[0]:
        put(a_FR @ b_RD, out_FD, add, scale)
    elif add or scale != 1.0:  # with beta = 0, what is in `out` is not read
        torch.addmm(out_FD, a_FR, b_RD, out_dtype=out_FD.dtype, beta=int(add), alpha=scale, out=out_FD)
    else:
        torch.mm(a_FR, b_RD, out_dtype=out_FD.dtype, out=out_FD)


def sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None) -> Tensor:
    """Sum of `a @ b` over the pairs, in their order."""
    (a, b), *rest = pairs
    total = torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    for a, b in rest:
        total.addmm_(a, b)
    return total


def _put(write: Write, out: Tensor, add: bool, dtype: torch.dtype | None, scale: float) -> None:
    widened = dtype not in (None, out.dtype)
    if widened and isinstance(write, Product):
        write.put(out, add, scale)
    elif widened or add or scale != 1.0:
        more = torch.empty_like(out, dtype=dtype)
        write(more)
        put(more, out, add, scale)
    else:
        write(out)


def write_to(write: Write, out: Tensor, add: bool) -> None:
    """Run one piece of work: overwrite `out`, or add to it."""
    if isinstance(write, Product):
        write.put(out, add, 1.0)
    elif add:
        more = torch.empty_like(out)
        write(more)
        out.add_(more)
    else:
        write(out)


class _Current(threading.local):
    queue: WgradQueue | None = None


_current = _Current()


@contextmanager
def collecting(queue: WgradQueue) -> Iterator[None]:
    """Have functions that run inside send the weight gradients of their backward to `queue`.

    They take the queue along in forward, because backward may run in a thread of the autograd engine.
    """
    before, _current.queue = _current.queue, queue
    try:
        yield
    finally:
        _current.queue = before


def current_queue() -> WgradQueue | None:
    """The queue of the segment whose forward is running, None outside of any."""
    return _current.queue

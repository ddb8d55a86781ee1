"""Managed weights: where a parameter's value currently is, and weight gradients deferred to a queue.

A managed parameter never enters autograd. Its `Weight` refers to the current value, which moves when the unit is
gathered into another slot; functions look it up in forward and again in backward. Its gradient is a function
`write(out)` that a `wgrad` op runs later, straight into the unit's gradient slot.

Note: [How a later contribution is added]
Autograd rounds a product to the gradient's dtype, then adds it. On a GPU the matrix product adds in its own kernel
before rounding (`addmm`), also bf16 operands into fp32: faster and never less exact, but not always the same bits. A
CPU has no such product for all dtypes and gives autograd's bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.kernels import refuse_graph
from hocket.runtime.transports import local_sum

Write = Callable[[Tensor], object]
"""Overwrites its argument, a tensor of the weight's shape, with one weight gradient."""


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A `Write` that can also add in fp32 without a copy, as matrix-product kernels can.

    `put(out, add, scale)` writes or adds the gradient times `scale`.
    """

    put: Callable[[Tensor, bool, float], None]

    def __call__(self, out: Tensor) -> None:
        self.put(out, False, 1.0)


_ATTRIBUTE = "hocket_weight"


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter managed by hocket. Compared and hashed by identity."""

    name: str
    """The parameter's name in the whole model and in checkpoints."""
    shape: torch.Size
    value: Tensor | None = None
    """The current value, a view into a slot in the compute dtype; None while not gathered."""
    scale: Tensor | None = None
    """One scale per row, for a value gathered in fp8."""
    cast: Any = None
    """The value cast for products in another format (`layers/fp8.py`); made on demand."""

    def tensor(self) -> Tensor:
        """The value; asserts that it is gathered."""
        assert self.value is not None, f"{self.name} is read while it is not gathered"
        return self.value


def manage(param: nn.Parameter, name: str) -> Weight:
    """Manage a parameter: from now on hocket's functions read its `Weight`."""
    weight = Weight(name, param.shape)
    setattr(param, _ATTRIBUTE, weight)
    return weight


def weight_of(param: Tensor) -> Weight | None:
    """The `Weight` of a managed parameter, None for others."""
    return getattr(param, _ATTRIBUTE, None)


class WgradQueue:
    """Weight gradients that a segment's backward left to compute, oldest first.

    The work holds its activations and output gradients until drained.
    """

    __slots__ = ("_work", "anchor")

    def __init__(self) -> None:
        self._work: list[tuple[Weight, Write]] = []
        self.anchor: Tensor | None = None
        """An empty leaf for functions without an input that requires a gradient."""

    def __len__(self) -> int:
        return len(self._work)

    def push(self, weight: Weight, write: Write) -> None:
        self._work.append((weight, write))

    def anchored(self) -> Tensor:
        """The anchor. Without it autograd skips backward of functions of token ids only."""
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
        """Run all work, each weight's into `target(weight)`. Returns `written`, extended.

        The first contribution to a weight overwrites its target; later ones, for weights in `written`, add to it.
        Weights without work have a zero gradient, which the caller must write.

        Contributions are computed in `dtype`, by default the target's, and multiplied by `scale`; a `Product` on a GPU
        adds to another dtype without rounding.
        """
        written = set() if written is None else written
        work, self._work = self._work[::-1], []
        while work:
            # Frees this work's activations before the next runs.
            weight, write = work.pop()
            _put(write, target(weight), weight in written, dtype, scale)
            written.add(weight)
        return written


def put(gradient: Tensor, view: Tensor, add: bool, scale: float = 1.0) -> None:
    """Write a gradient times `scale` to `view`, or add it."""
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
    elif add or scale != 1.0:  # beta = 0 ignores `out`
        torch.addmm(out_FD, a_FR, b_RD, out_dtype=out_FD.dtype, beta=int(add), alpha=scale, out=out_FD)
    else:
        torch.mm(a_FR, b_RD, out_dtype=out_FD.dtype, out=out_FD)


def sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None) -> Tensor:
    """Sum of `a @ b` over the pairs, in order."""
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


class _Current(threading.local):
    queue: WgradQueue | None = None


_current = _Current()


@contextmanager
def collecting(queue: WgradQueue) -> Iterator[None]:
    """Inside, functions send weight gradients of their backward to `queue`.

    They capture the queue in forward, because backward may run in a thread of the autograd engine.
    """
    before, _current.queue = _current.queue, queue
    try:
        yield
    finally:
        _current.queue = before


def current_queue() -> WgradQueue | None:
    """The queue of the segment whose forward is running, if any."""
    return _current.queue


# --------------------------------------------------------------------------------------------------------- destinations
#
# Where a weight's gradient goes. Functions ask in forward; backward contributes there: that of a managed weight goes to
# its segment's queue (`Queued`), that of an ordinary parameter to autograd (`Ordinary`).


@dataclass(slots=True, eq=False)
class Queued:
    """Destination of a managed weight: a segment's queue."""

    weight: Weight
    queue: WgradQueue | None
    """None outside of segments: no backward follows."""

    @property
    def autograd_input(self) -> Tensor | None:
        """The function's autograd input for the weight."""
        return None

    def value(self) -> Tensor:
        return self.weight.tensor()

    value_in_backward = value

    def contribute(self, ctx: Any, index: int, write: Write) -> None:
        assert self.queue is not None, f"{self.weight.name} is managed: its forward must run inside collecting(queue)"
        self.queue.push(self.weight, write)


class Ordinary:
    """Destination of an ordinary parameter: autograd.

    The parameter is an input of the function, so that backward runs even if no other input requires a gradient. It is
    not saved by autograd: saved-tensor hooks may offload or compress activations, and a sharded unit gathers the weight
    for backward anyway.
    """

    __slots__ = ("_version", "autograd_input")

    def __init__(self, param: Tensor) -> None:
        self.autograd_input, self._version = param, param._version

    def value(self) -> Tensor:
        return self.autograd_input

    def value_in_backward(self) -> Tensor:
        """The value in backward; raises RuntimeError where autograd would for a saved tensor."""
        if self.autograd_input._version != self._version:
            raise RuntimeError("a weight of a layer was modified in place between its forward and its backward")
        return self.autograd_input

    def contribute(self, ctx: Any, index: int, write: Write) -> Tensor | None:
        """The gradient to return for input `index` of the function, None if not needed."""
        if not ctx.needs_input_grad[index]:
            return None
        refuse_graph()
        gradient = torch.empty_like(self.autograd_input)
        write(gradient)
        return gradient


Destination = Queued | Ordinary


def queued(x: Tensor, weight: Weight) -> Queued:
    """The current queue; refuses an input through which the weight would get no gradient."""
    queue = current_queue()
    if queue is not None and torch.is_grad_enabled():
        assert x.requires_grad, f"{weight.name}: the input requires no gradient, so its weight would get none"
    return Queued(weight, queue)


def destination(x: Tensor, param: Tensor) -> Destination:
    """Where the gradient of a weight multiplied with `x` goes."""
    weight = weight_of(param)
    return Ordinary(param) if weight is None else queued(x, weight)


def value_of(param: Tensor) -> Tensor:
    """The current value of a parameter."""
    weight = weight_of(param)
    return param if weight is None else weight.tensor()


def apply(function: Any, x: Tensor, param: Tensor, *args: Any) -> Any:
    """Apply an autograd function to (x, autograd input of the weight, destination, *args)."""
    dest = destination(x, param)
    return function.apply(x, dest.autograd_input, dest, *args)


def save_input(ctx: Any, x: Tensor, dest: Destination) -> Tensor:
    """Save what backward needs; returns the weight's value."""
    ctx.save_for_backward(x)
    ctx.dest = dest
    return dest.value()


def saved_input(ctx: Any) -> tuple[Tensor, Tensor]:
    """The saved input and the weight's value, in a backward made of kernels."""
    refuse_graph()
    (x,) = ctx.saved_tensors
    return x, ctx.dest.value_in_backward()


# --------------------------------------------------------------------------------------------------------------- dtypes


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

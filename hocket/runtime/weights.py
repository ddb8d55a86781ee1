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
from torch.autograd import forward_ad

from hocket.kernels import refuse_graph
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
    """What products in another format read of it, made from the value (`layers/fp8.py`); None until somebody asks."""

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


# --------------------------------------------------------------------------------------------------------- destinations
#
# Where a weight's gradient goes. A function that reads a weight asks once, in forward, and backward contributes there.
#
# A managed weight's gradient is left to the queue of the segment (`Queued`). An ordinary parameter's is a tensor that
# autograd hands on; or, if a sharded unit has given the parameter a *sink*, it is written where the reduction reads it
# (`Ordinary`). Autograd would compute it into a tensor of its own, from which it would be copied into the buffer that
# is sent, or added to it. With a sink the matrix product writes or adds to that buffer itself: no gradient tensor, no
# copy. Forward, input gradient and the first contribution of a backward have the bits of autograd, because the formulas
# and the layout of their operands are autograd's own. A later one is added as `Note: [How a later contribution is
# added]` says.


_SINK = "hocket_sink"

Sink = Callable[[], tuple[Tensor, bool]]
"""Where the gradient of one full parameter goes: a contiguous view to write, shaped like the parameter, and True if it
holds a contribution to add to. Called once for each contribution, in backward, on the stream that computes it."""


def set_sink(param: Tensor, sink: Sink | None) -> None:
    """Have the functions that can do it write the gradient of this full parameter to `sink`; None is autograd's way."""
    setattr(param, _SINK, sink)


def sink_of(param: Tensor) -> Sink | None:
    """The sink of a full parameter in a sharded unit; None for any other tensor."""
    return getattr(param, _SINK, None)


@dataclass(slots=True, eq=False)
class Queued:
    """The queue of a segment, for a managed weight."""

    weight: Weight
    queue: WgradQueue | None
    """None outside of any segment: then there is a forward and no backward."""

    @property
    def given(self) -> Tensor | None:
        """What autograd is given of the weight: nothing."""
        return None

    def value(self) -> Tensor:
        """What the weight is right now."""
        return self.weight.tensor()

    again = value

    def keep(self, x: Tensor) -> Tensor:
        """A saved activation for the queue, without the graph that made it."""
        return x.detach()

    def contribute(self, ctx: Any, index: int, write: Write, compute: Callable[[], Tensor] | None = None) -> None:
        """Leave a gradient to the queue."""
        assert self.queue is not None, f"{self.weight.name} is managed: its forward must run inside collecting(queue)"
        self.queue.push(self.weight, write)


class Ordinary:
    """A parameter's sink, or autograd where it has none.

    The parameter is an input of the function, so that backward runs for it even if no other input requires a gradient.
    It is not among the saved tensors: hooks for those may move or compress activations, and a sharded unit gathers the
    weight for backward anyway.
    """

    __slots__ = ("_sink", "_version", "given")

    def __init__(self, param: Tensor, sink: Sink | None = None) -> None:
        self.given, self._sink, self._version = param, sink, param._version

    def value(self) -> Tensor:
        """What the weight is right now."""
        return self.given

    def again(self) -> Tensor:
        """What the weight is in backward; raises RuntimeError where autograd would for a saved tensor."""
        if self.given._version != self._version:
            raise RuntimeError("a weight of a layer was modified in place between its forward and its backward")
        return self.given

    def keep(self, x: Tensor) -> Tensor:
        """A saved activation, as it is."""
        return x

    def contribute(
        self, ctx: Any, index: int, write: Write, compute: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """The gradient to return for input `index`: None if nobody asks for it, or once it is written into the sink.

        torch then still runs the hooks of the parameter, which find no gradient. With `create_graph=True`, and for
        `torch.autograd.grad` of this parameter, the gradient is a tensor of the caller's: what `compute` makes. Tensor
        inputs of the function come first, so that autograd counts them as `index` does.
        """
        if not ctx.needs_input_grad[index]:
            return None
        if self._sink is None or torch.is_grad_enabled():
            return self._made(write, compute)
        try:
            if not torch._C._will_engine_execute_node(ctx.next_functions[index][0]):
                return None  # a backward for other tensors alone
        except RuntimeError:  # how torch says that this is `torch.autograd.grad` of the parameter
            return self._made(write, compute)
        write_to(write, *self._sink())
        return None

    def _made(self, write: Write, compute: Callable[[], Tensor] | None) -> Tensor:
        if compute is not None:
            return compute()
        gradient = torch.empty_like(self.given)
        write(gradient)
        return gradient


Destination = Queued | Ordinary


def queued(x: Tensor, weight: Weight) -> Queued:
    """The current queue; refuses an input through which the weight's gradient could never be reached."""
    queue = current_queue()
    if queue is not None and torch.is_grad_enabled():
        assert x.requires_grad, f"{weight.name}: the input requires no gradient, so its weight would get none"
    return Queued(weight, queue)


def destination(x: Tensor, param: Tensor) -> Destination:
    """Where the gradient of a weight goes that meets `x`, of a function that leaves sinks alone."""
    weight = weight_of(param)
    return Ordinary(param) if weight is None else queued(x, weight)


def writes_itself(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the gradient of a weight goes to its sink.

    It does not where nothing is to be written (no gradients, no sink), and where others must see or change each
    operation or gradient: under autocast, `torch.compile` and function transforms, for tensor subclasses, and for
    parameters with gradient hooks.
    """
    if torch.compiler.is_compiling():  # first, for the rest cannot be traced
        return False
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and sink_of(weight) is not None
        and type(x) in (Tensor, nn.Parameter)
        and x.dim() >= 2
        and not (weight._backward_hooks or (bias is not None and bias._backward_hooks))
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def value_of(param: Tensor) -> Tensor:
    """What the parameter is right now."""
    weight = weight_of(param)
    return param if weight is None else weight.tensor()


def apply(function: Any, x: Tensor, param: Tensor, *args: Any) -> Any:
    """Call a function of (x, what autograd is given of the weight, its destination, *args)."""
    where = destination(x, param)
    return function.apply(x, where.given, where, *args)


def keep(ctx: Any, x: Tensor, where: Destination) -> Tensor:
    """Keep what backward needs, and return the weight's value."""
    ctx.save_for_backward(x)
    ctx.where = where
    return where.value()


def kept(ctx: Any) -> tuple[Tensor, Tensor]:
    """The input and the weight's value, for a backward made of kernels."""
    refuse_graph()
    (x,) = ctx.saved_tensors
    return x, ctx.where.again()


# --------------------------------------------------------------------------------------------------------------- dtypes
#
# The dtypes that settings name.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

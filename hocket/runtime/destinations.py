"""Where a weight's gradient goes. A function that reads a weight asks once, in forward, and backward contributes there.

A managed weight's gradient is left to the queue of the segment (`Queued`). An ordinary parameter's is a tensor that
autograd hands on; or, if a sharded unit has given the parameter a *sink*, it is written where the reduction reads it
(`Ordinary`). Autograd would compute it into a tensor of its own, from which it would be copied into the buffer that is
sent, or added to it. With a sink the matrix product writes or adds to that buffer itself: no gradient tensor, no copy.
Forward, input gradient and the first contribution of a backward have the bits of autograd, because the formulas and the
layout of their operands are autograd's own. A later one is added as `Note: [How a later contribution is added]` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hocket.kernels.usable import refuse_graph
from hocket.runtime.weights import Weight, WgradQueue, Write, current_queue, weight_of, write_to

_ATTRIBUTE = "hocket_sink"

Sink = Callable[[], tuple[Tensor, bool]]
"""Where the gradient of one full parameter goes: a contiguous view to write, shaped like the parameter, and True if it
holds a contribution to add to. Called once for each contribution, in backward, on the stream that computes it."""


def set_sink(param: Tensor, sink: Sink | None) -> None:
    """Have the functions that can do it write the gradient of this full parameter to `sink`; None is autograd's way."""
    setattr(param, _ATTRIBUTE, sink)


def sink_of(param: Tensor) -> Sink | None:
    """The sink of a full parameter in a sharded unit; None for any other tensor."""
    return getattr(param, _ATTRIBUTE, None)


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

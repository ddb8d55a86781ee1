"""Where a weight's gradient goes. A function that reads a weight asks once, in forward, and backward contributes there.

A managed weight's gradient is left to the queue of the segment (`Queued`). An ordinary parameter's is a tensor that
autograd hands on (`Ordinary`). Forward, input gradient and the first contribution of a backward have the bits of
autograd, because the formulas and the layout of their operands are autograd's own. A later one is added as
`Note: [How a later contribution is added]` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph
from hocket.runtime.weights import Weight, WgradQueue, Write, current_queue, weight_of


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
    """A parameter that autograd knows.

    It is an input of the function, so that backward runs for it even if no other input requires a gradient.
    It is not among the saved tensors: hooks for those may move or compress activations, and a sharded unit gathers the
    weight for backward anyway.
    """

    __slots__ = ("_version", "given")

    def __init__(self, param: Tensor) -> None:
        self.given, self._version = param, param._version

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
        """The gradient to return for input `index`: None if nobody asks. `compute` makes it where that is given.

        Tensor inputs of the function come first, so that autograd counts them as `index` does.
        """
        if not ctx.needs_input_grad[index]:
            return None
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
    """Where the gradient of a weight goes that meets `x`."""
    weight = weight_of(param)
    return Ordinary(param) if weight is None else queued(x, weight)


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

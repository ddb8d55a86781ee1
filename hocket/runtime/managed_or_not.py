"""What functions of a weight share, be it managed or an ordinary parameter: its value, and where its gradient goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph
from hocket.runtime.weights import Weight, WgradQueue, Write, current_queue, weight_of


def value_of(param: Tensor) -> Tensor:
    """What the parameter is right now."""
    return value_now(weight_of(param) or param)


def value_now(weight: Weight | Tensor) -> Tensor:
    """What a function's weight is right now: an ordinary parameter is its own."""
    return weight.tensor() if isinstance(weight, Weight) else weight


def apply(function: Any, x: Tensor, param: Tensor, *args: Any) -> Any:
    """Call a function of (x, weight, queue, *args). An ordinary parameter is its own weight, and has no queue."""
    weight = weight_of(param)
    return function.apply(x, param, None, *args) if weight is None else apply_managed(function, x, weight, *args)


def apply_managed(function: Any, x: Tensor, weight: Weight, *args: Any) -> Any:
    """Apply a managed function."""
    return function.apply(x, weight, queue_of(x, weight), *args)


def queue_of(x: Tensor, weight: Weight) -> WgradQueue | None:
    """The current queue; refuses an input through which the weight's gradient could never be reached."""
    queue = current_queue()
    if queue is not None and torch.is_grad_enabled():
        assert x.requires_grad, f"{weight.name}: the input requires no gradient, so its weight would get none"
    return queue


def push(queue: WgradQueue | None, weight: Weight, write: Write) -> None:
    """Leave a weight gradient to the queue."""
    assert queue is not None, f"{weight.name} is managed: its forward must run inside collecting(queue)"
    queue.push(weight, write)


def keep(ctx: Any, x: Tensor, weight: Weight | Tensor, queue: WgradQueue | None) -> Tensor:
    """Keep what backward needs, and return the weight's value. An ordinary weight is saved, as autograd would."""
    managed = isinstance(weight, Weight)
    ctx.save_for_backward(*((x,) if managed else (x, weight)))
    ctx.weight, ctx.queue = weight if managed else None, queue
    return value_now(weight)


def kept(ctx: Any) -> tuple[Tensor, Tensor]:
    """The input and the weight's value, for a backward made of kernels."""
    refuse_graph()
    x, *ordinary = ctx.saved_tensors
    return x, ordinary[0] if ordinary else ctx.weight.tensor()


def contribute(ctx: Any, value: Tensor, write: Write) -> Tensor | None:
    """Queue the gradient of a managed weight; return that of an ordinary one, if somebody wants it."""
    if ctx.weight is not None:
        push(ctx.queue, ctx.weight, write)
        return None
    if not ctx.needs_input_grad[1]:
        return None
    gradient = torch.empty_like(value)
    write(gradient)
    return gradient

"""Weight gradients written where the reduction reads them: linear layers of parameters that have a sink.

Autograd computes a weight gradient into a tensor of its own and hands it to the parameter; from there it would be
copied into the buffer that is sent, or added to it. Here the matrix product writes or adds to that buffer itself:
no gradient tensor, no copy. Forward, input gradient and the first contribution of a backward have the bits of
autograd, because the formulas and the layout of their operands are autograd's own.

A later contribution is added as `Note: [How a later contribution is added]` says. `table_rows.py` does the same for the
rows of a table.

Shapes: R rows (all leading dimensions together), D input width, F output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from hocket.runtime.weights import put, write_product

_ATTRIBUTE = "hocket_sink"


Sink = Callable[[], tuple[Tensor, bool]]
"""Where the gradient of one full parameter goes: a contiguous view to write, shaped like the parameter, and True if it
holds a contribution to add to. Called once for each contribution, in backward, on the stream that computes it."""


def set_sink(param: Tensor, sink: Sink) -> None:
    """Have linear layers write the gradient of this full parameter to `sink`."""
    setattr(param, _ATTRIBUTE, sink)


def drop_sink(param: Tensor) -> None:
    """Leave the gradient of this full parameter to autograd from now on."""
    if sink_of(param) is not None:
        delattr(param, _ATTRIBUTE)


def sink_of(param: Tensor) -> Sink | None:
    """The sink of a full parameter in a sharded unit; None for any other tensor."""
    return getattr(param, _ATTRIBUTE, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, [..., D] -> [..., F], whose backward writes the gradients of weight and bias to their sinks.

    It is `F.linear` itself where nothing is to be written (no gradients, no sink), and where others must see or change
    each operation or gradient: under autocast, `torch.compile` and function transforms, for tensor subclasses,
    and for parameters with gradient hooks.
    """
    if not writes_itself(x, weight, bias):
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return _Linear.apply(x, weight, bias)
    # Views are made out here: what a Function returns must be no view, or nobody could change it in place.
    x_RD, shape = x.flatten(0, -2), (*x.shape[:-1], weight.shape[0])
    if bias is None or x.is_contiguous():
        return _Linear.apply(x_RD, weight, bias).view(shape)
    # To the product with an input of any other layout torch adds the bias in an operation of its own.
    return _Linear.apply(x_RD, weight, None).view(shape) + bias


def linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    """`linear` with the module's weight and bias."""
    return linear(x, module.weight, module.bias)


def writes_itself(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the gradient of a weight goes to its sink; see `linear`."""
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


class _Linear(torch.autograd.Function):
    """Weight and bias are inputs, so that backward runs for them even if `x` requires no gradient.

    Their gradient is None once it has been written. torch then still runs the hooks of the parameter, which find no
    gradient. The weight is not among the saved tensors: hooks for those may move or compress activations, and the unit
    gathers the weight for backward anyway.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RD)
        ctx.weight, ctx.bias, ctx.versions = weight, bias, versions([weight])
        return F.linear(x_RD, weight, bias)

    @staticmethod
    def backward(ctx: Any, g_RF: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x_RD,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        unchanged([weight], ctx.versions)
        dx = _input_gradient(g_RF, x_RD, weight) if ctx.needs_input_grad[0] else None
        dw = contribute_product(ctx, 1, weight, g_RF, x_RD)
        db = contribute(ctx, 2, bias, lambda: g_RF.sum(0), partial(_write_sum, g_RF))
        return dx, dw, db


def versions(weights: Sequence[object]) -> list[int]:
    """Of those that are tensors, for `unchanged`."""
    return [weight._version for weight in weights if isinstance(weight, Tensor)]


def unchanged(weights: Sequence[object], before: list[int]) -> None:
    """What autograd says of saved tensors."""
    if versions(weights) != before:
        raise RuntimeError("a weight of a linear layer was modified in place between its forward and its backward")


def _input_gradient(g_RF: Tensor, x_RD: Tensor, weight_FD: Tensor) -> Tensor:
    """`g @ weight`, laid out like `x`, as autograd does it: bits may depend on the layout of the operands."""
    if x_RD.stride() == (1, x_RD.shape[0]):
        return (weight_FD.t() @ g_RF.t()).t()
    return g_RF @ weight_FD


def contribute_product(ctx: Any, index: int, param: Tensor, g_RF: Tensor, x_RD: Tensor) -> Tensor | None:
    """The gradient of a linear layer's weight, as `contribute` says."""
    return contribute(ctx, index, param, lambda: g_RF.t() @ x_RD, partial(write_product, g_RF.t(), x_RD))


def contribute(
    ctx: Any, index: int, param: Tensor, compute: Callable[[], Tensor], write: Callable[[Tensor, bool], None]
) -> Tensor | None:
    """The gradient to return for input `index`: None if nobody asks for it, or once `write` has put it into the sink.

    With `create_graph=True`, and for `torch.autograd.grad` of this parameter, the gradient is a tensor of the caller's.
    """
    if not ctx.needs_input_grad[index]:
        return None
    sink = sink_of(param)
    if sink is None or torch.is_grad_enabled():
        return compute()
    try:
        if not torch._C._will_engine_execute_node(ctx.next_functions[index][0]):
            return None  # a backward for other tensors alone
    except RuntimeError:  # how torch says that this is `torch.autograd.grad` of the parameter
        return compute()
    write(*sink())
    return None


def _write_sum(g_RF: Tensor, out_F: Tensor, add: bool) -> None:
    """Write the sum of the rows of `g` to `out`, or add it."""
    if add or out_F.dtype != g_RF.dtype:
        put(g_RF.sum(0), out_F, add)
    else:
        torch.sum(g_RF, 0, out=out_F)

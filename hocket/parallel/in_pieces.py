"""A function of tokens that goes through them in pieces, so that what it makes of one piece alone is in memory.

Forward keeps the input. Backward runs the function once more for each piece, and then its backward. Weight gradients
are added up over pieces in fp32 at least, and wait as such for the op that writes them where they belong: by then the
weights may be gone, of which they would need the function again. `loss_in_pieces.py` is the same for logits.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import refuse_graph
from hocket.runtime.destinations import Destination, destination
from hocket.runtime.weights import Product, Weight, WgradQueue, collecting, put, weight_of


def in_pieces(function: Callable[[Tensor], Tensor], x_TD: Tensor, params: Sequence[Tensor], pieces: int) -> Tensor:
    """`function(x)`, which takes each token apart from others and reads no parameters but `params`: [T, ...]."""
    wheres = [destination(x_TD, param) for param in params]
    told = function, tuple(params), wheres, pieces
    return _Pieces.apply(x_TD, *(where.given for where in wheres), told)  # pyrefly: ignore[bad-return]


Told = tuple[Callable[[Tensor], Tensor], Sequence[Tensor], Sequence[Destination], int]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *given: Any) -> Tensor:
        ctx.told = function, _, _, pieces = given[-1]
        ctx.save_for_backward(x_TD)
        first, *others = x_TD.chunk(pieces)
        made = function(first)
        out_TD = made.new_empty(x_TD.shape[0], *made.shape[1:])
        into, *behind = out_TD.chunk(pieces)
        into.copy_(made)
        del made
        for x, into in zip(others, behind, strict=True):
            into.copy_(function(x))
        return out_TD

    @staticmethod
    def backward(ctx: Any, g_TD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        (x_TD,) = ctx.saved_tensors
        function, params, wheres, pieces = ctx.told
        sums, dx_TD = _Sums(params), torch.empty_like(x_TD)
        for x, g, into in zip(x_TD.chunk(pieces), g_TD.chunk(pieces), dx_TD.chunk(pieces), strict=True):
            into.copy_(sums.backward(function, x, g))
        grads = []
        for index, (param, where) in enumerate(zip(params, wheres, strict=True), 1):
            total = sums.of(param)
            grads.append(None if total is None else where.contribute(ctx, index, Product(partial(put, total))))
        return dx_TD, *grads, None


class _Sums:
    """Gradients of parameters, summed up over pieces."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._plain = [param for param in params if weight_of(param) is None and param.requires_grad]
        self._totals: dict[Weight | int, Tensor] = {}
        self._written: set[Weight] = set()

    def backward(self, function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
        """The gradient of a piece's input, from that of what the function makes of it."""
        queue, x = WgradQueue(), x.detach().requires_grad_()
        with torch.enable_grad(), collecting(queue):
            y = function(x)
        anchors = [] if queue.anchor is None else [queue.anchor]  # of functions with no other input that has a gradient
        # On the thread that asks, as a segment's: Note: [Backward stays on its thread].
        with torch.autograd.set_multithreading_enabled(False):
            dx, *grads = torch.autograd.grad(y, [x, *self._plain, *anchors], g, allow_unused=True)
        del y
        for param, grad in zip(self._plain, grads, strict=False):
            if grad is None:
                continue
            first = id(param) not in self._totals
            put(grad, self._total(id(param), grad), not first)
        queue.drain(lambda weight: self._total(weight, weight.tensor()), self._written, x.dtype)
        return dx

    def of(self, param: Tensor) -> Tensor | None:
        """The sum for a parameter; None if it needs none."""
        weight = weight_of(param)
        return self._totals.get(id(param) if weight is None else weight)

    def _total(self, key: Weight | int, like: Tensor) -> Tensor:
        if key not in self._totals:
            exact = torch.promote_types(like.dtype, torch.float32)
            self._totals[key] = torch.empty(like.shape, dtype=exact, device=like.device)
        return self._totals[key]

"""The functions that read weights: linear, score, grouped linear, scale, embedding; `norms.py` has the norms.

For an ordinary parameter each of them is the stock torch function; in a module sharded by `fully_shard`, backward of
`linear` writes the weight gradient where it is sent from (`sinks.py`). For a managed parameter
(`runtime/weights.py`) only activations enter autograd: the weight is looked up when forward runs and again when
backward runs, and the weight gradient is pushed onto the island's queue. On a CPU all ways compute the same bits,
because the formulas and their operand order are those of torch's own derivatives. On a GPU gradients that products add
up are rounded less often, and experts' weight gradients have a product of their own (`kernels/grouped.py`).

Note: [Nothing but activations is saved]
A weight that autograd saves would pin its slot, and after a release the slot holds another layer's weights.
So no function here saves a weight; `Weight.tensor()` is called once per direction. The work that a function
queues holds its activation detached, for a saved activation still knows the graph that made it, and would
keep all of it alive until the queue is drained.

Shapes: T tokens or any leading dimensions, R rows grouped by expert, D input width, F output width,
E local experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.usable import refuse_graph, usable
from hocket.runtime import sinks, table_rows
from hocket.runtime.managed_or_not import (
    apply,
    apply_managed,
    contribute,
    keep,
    kept,
    push,
    queue_of,
    value_now,
    value_of,
)
from hocket.runtime.weights import (
    Product,
    Weight,
    WgradQueue,
    current_queue,
    put,
    sum_of_products,
    weight_of,
    write_product,
)


def linear(x_TD: Tensor, p_FD: Tensor) -> Tensor:
    """`x @ p.T`, of shape [..., F]."""
    weight = weight_of(p_FD)
    if weight is None:
        return sinks.linear(x_TD, p_FD)
    return apply_managed(_Linear, x_TD, weight, x_TD.dtype)


def linears(x_TD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`linear` of every weight. On a GPU one product after another adds its part to the gradient of `x`."""
    weights = [weight_of(p) or p for p in params]
    if len(weights) == 1 or not _sums_itself(x_TD, weights):
        return tuple(linear(x_TD, p) for p in params)
    managed = [weight for weight in weights if isinstance(weight, Weight)]
    queue = queue_of(x_TD, managed[0]) if managed else None
    return _Linears.apply(x_TD, *weights, queue)


def score(x_TD: Tensor, p_ED: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, and `x @ p.T` in fp32 whatever the dtype of both, [T, E].

    The first result takes the place of `x`, so that one kernel adds the gradients of its readers and of the product.
    """
    weight = weight_of(p_ED)
    if _is_widened(x_TD, value_of(p_ED)):
        return apply(_Score, x_TD, p_ED)
    if weight is None:
        return x_TD, F.linear(x_TD.float(), p_ED.float())
    return x_TD, apply_managed(_Linear, x_TD, weight, torch.float32)


def grouped_linear(x_RD: Tensor, p_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """One product per expert: rows `offsets[e - 1]:offsets[e]` times `p[e]`. Returns [R, F].

    `offsets` is int32, on the device of `x`, ends at R; D and F must be multiples of 16 bytes. An expert
    without rows gets a zero gradient.
    """
    weight = weight_of(p_EDF)
    if weight is None:
        return grouped_mm(x_RD, p_EDF, offsets_E)
    return apply_managed(_GroupedLinear, x_RD, weight, offsets_E)


def scale(x_TD: Tensor, p_D: Tensor) -> Tensor:
    """`x * p`, elementwise over the last dimension."""
    weight = weight_of(p_D)
    if weight is None:
        return x_TD * p_D
    return apply_managed(_Scale, x_TD, weight)


def embedding(ids_T: Tensor, p_VD: Tensor) -> Tensor:
    """Rows `p[ids]`, of shape [..., D]."""
    weight = weight_of(p_VD)
    if weight is None:
        return table_rows.embedding(ids_T, p_VD)
    queue = current_queue()
    if queue is None:
        return F.embedding(ids_T, weight.tensor())
    return _Embedding.apply(queue.anchored(), ids_T, weight, queue)


def grouped_mm(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """`torch._grouped_mm` of rows and stacked weights, or one product per expert where there is no kernel."""
    if not x_RD.shape[0]:  # no launch takes a matrix without rows
        return x_RD @ w_EDF[0]
    if _has_grouped_kernel(x_RD):
        return torch._grouped_mm(x_RD, w_EDF, offs=offsets_E)
    parts = [x_RD[lo:hi] @ w_EDF[e] for e, (lo, hi) in enumerate(_bounds(offsets_E))]
    return torch.cat(parts)


def grouped_wgrad(
    x_RD: Tensor, g_RF: Tensor, offsets_E: Tensor, out_EDF: Tensor, add: bool = False, scale: float = 1.0
) -> None:
    """Write `scale * x[rows of e].T @ g[rows of e]` to `out[e]`, or add it, for every expert."""
    if _writes_itself(x_RD, g_RF, out_EDF, add):
        from hocket.kernels.grouped import weight_gradients

        weight_gradients(x_RD, g_RF, offsets_E, out_EDF, add, scale)
    elif not x_RD.shape[0]:  # no launch takes a matrix without rows
        if not add:
            out_EDF.zero_()
    elif _has_grouped_kernel(x_RD):
        put(torch._grouped_mm(x_RD.t(), g_RF, offs=offsets_E), out_EDF, add, scale)
    else:
        for e, (lo, hi) in enumerate(_bounds(offsets_E)):
            write_product(x_RD[lo:hi].t(), g_RF[lo:hi], out_EDF[e], add, scale)


def _writes_itself(x_RD: Tensor, g_RF: Tensor, out_EDF: Tensor, add: bool) -> bool:
    """Whether there is a kernel that leaves the experts' gradients where they belong, of bf16 operands."""
    exact = out_EDF.dtype is torch.float32 or not add
    return exact and usable(x_RD, g_RF, out_EDF) and x_RD.dtype == g_RF.dtype == torch.bfloat16


def _sums_itself(x_TD: Tensor, weights: Sequence[Weight | Tensor]) -> bool:
    """Whether nobody has to see or change the products of a GPU or their gradients."""
    values = [value_now(weight) for weight in weights]
    ordinary = [weight for weight in weights if isinstance(weight, Tensor)]
    return (
        usable(x_TD, *values)
        and len(ordinary) in (0, len(weights))
        and all(value.dtype == x_TD.dtype for value in values)
        and all(sinks.sink_of(param) is None or sinks.writes_itself(x_TD, param) for param in ordinary)
    )


def _is_widened(x_TD: Tensor, value_FD: Tensor) -> bool:
    """Whether tensor cores take both operands as they are. No launch takes a matrix without rows."""
    return usable(x_TD, value_FD) and x_TD.dtype == value_FD.dtype == torch.bfloat16 and x_TD.numel() > 0


def _wide_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The product of bf16 matrices in fp32."""
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def _has_grouped_kernel(x_RD: Tensor) -> bool:
    """CUDA has a kernel for bf16 alone."""
    return x_RD.device.type == "cpu" or x_RD.dtype is torch.bfloat16


def _bounds(offsets_E: Tensor) -> list[tuple[int, int]]:
    """(first, end) row of every expert, on the host. Stops the host until the device has caught up."""
    ends: list[int] = offsets_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _linear_wgrad(x: Tensor, g: Tensor, dtype: torch.dtype, out_FD: Tensor, add: bool, scale: float) -> None:
    g_TF, x_TD = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]).to(dtype)
    write_product(g_TF.t(), x_TD, out_FD, add, scale)


def _score_wgrad(x_TD: Tensor, g_TE: Tensor, out_ED: Tensor, add: bool, scale: float) -> None:
    from hocket.kernels.router import weight_gradient

    weight_gradient(g_TE, x_TD, out_ED, add, scale)


def _scale_wgrad(x: Tensor, g: Tensor, out_D: Tensor) -> None:
    torch.sum(g * x, list(range(x.dim() - 1)), out=out_D)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, queue: WgradQueue | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue, ctx.dtype = weight, queue, dtype
        return F.linear(x.to(dtype), weight.tensor().to(dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype

        write = partial(_linear_wgrad, x.detach(), g, dtype)
        # A gradient in a wider dtype than weights have is rounded to theirs before anything is added.
        push(ctx.queue, ctx.weight, Product(write) if dtype == x.dtype else partial(write, add=False, scale=1.0))
        return (g @ ctx.weight.tensor().to(dtype)).to(x.dtype), None, None, None


class _Linears(torch.autograd.Function):
    """Several products of one input. An ordinary weight is no saved tensor, and may have a sink: see `sinks.py`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_queue: Any) -> tuple[Tensor, ...]:
        *ctx.weights, ctx.queue = weights_queue
        ctx.versions = sinks.versions(ctx.weights)
        ctx.save_for_backward(x)
        return tuple(F.linear(x, value_now(weight)) for weight in ctx.weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        sinks.unchanged(ctx.weights, ctx.versions)
        (x,) = ctx.saved_tensors
        x_TD, gs = x.detach().reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            pairs = [(g, value_now(w)) for g, w in zip(gs, ctx.weights, strict=True)]
            pairs.sort(key=lambda pair: pair[0].shape[1])  # the largest sum is rounded once only
            dx = sum_of_products(pairs).view(x.shape)
        found: list[Tensor | None] = []
        for i, (g_TF, weight) in enumerate(zip(gs, ctx.weights, strict=True), 1):
            if isinstance(weight, Weight):
                push(ctx.queue, weight, Product(partial(write_product, g_TF.t(), x_TD)))
                found.append(None)
            else:
                found.append(sinks.contribute_product(ctx, i, weight, g_TF, x_TD))
        return dx, *found, None


class _Score(torch.autograd.Function):
    """A product of bf16 operands in fp32, beside its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight | Tensor, queue: WgradQueue | None) -> tuple[Tensor, Tensor]:
        return x, _wide_mm(x, keep(ctx, x, weight, queue).t())

    @staticmethod
    def backward(ctx: Any, g_x: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels.router import input_gradient

        x, w_ED = kept(ctx)
        dx = input_gradient(g, w_ED, g_x)
        return dx, contribute(ctx, w_ED, Product(partial(_score_wgrad, x.detach(), g))), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, queue: WgradQueue | None, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, offsets)
        ctx.weight, ctx.queue = weight, queue
        return grouped_mm(x, weight.tensor(), offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, offsets = ctx.saved_tensors
        g = g.contiguous()
        push(ctx.queue, ctx.weight, Product(partial(grouped_wgrad, x.detach(), g, offsets)))
        return grouped_mm(g, ctx.weight.tensor().transpose(1, 2), offsets), None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, queue: WgradQueue | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x * weight.tensor()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        push(ctx.queue, ctx.weight, partial(_scale_wgrad, x.detach(), g))
        return g * ctx.weight.tensor(), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, ids: Tensor, weight: Weight, queue: WgradQueue) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(ids, weight.tensor())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (ids,) = ctx.saved_tensors
        push(ctx.queue, ctx.weight, Product(partial(table_rows.write_rows, ids, g)))
        return None, None, None, None

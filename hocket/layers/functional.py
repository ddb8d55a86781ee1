"""The functions that read weights: linear, score, grouped linear, scale, shift, embedding; `norms.py` has the norms.

For an ordinary parameter each of them is the stock torch function. For a managed parameter only activations enter
autograd: the weight is looked up when forward runs and again when backward runs, and the weight gradient is left to the
segment's queue. `runtime/weights.py` tells them apart. On a CPU all ways compute the same bits, because the formulas
and their operand order are those of torch's own derivatives. On a GPU gradients that products add up are rounded less
often, and experts' weight gradients have a product of their own (`kernels/products.py`).

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

from hocket.kernels import refuse_graph, usable
from hocket.runtime.weights import (
    Destination,
    Product,
    Queued,
    apply,
    current_queue,
    destination,
    put,
    queued,
    save_input,
    saved_input,
    sum_of_products,
    value_of,
    weight_of,
    write_product,
)


def linear(x_TD: Tensor, p_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """`x @ p.T + bias`, of shape [..., F]. The bias of a managed weight is managed too."""
    weight, offset = weight_of(p_FD), None if bias_F is None else weight_of(bias_F)
    if weight is None:
        return F.linear(x_TD, p_FD, bias_F)
    assert bias_F is None or offset is not None, f"{weight.name} is managed and its bias is not"
    of_bias = None if offset is None else queued(x_TD, offset)
    return _Linear.apply(x_TD, queued(x_TD, weight), of_bias, x_TD.dtype)


def linears(x_TD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`linear` of every weight. On a GPU one product after another adds its part to the gradient of `x`."""
    values = [value_of(p) for p in params]
    if len(params) == 1 or not usable(x_TD, *values) or any(value.dtype != x_TD.dtype for value in values):
        return tuple(linear(x_TD, p) for p in params)
    wheres = [destination(x_TD, p) for p in params]
    return _Linears.apply(x_TD, *(where.given for where in wheres), wheres)


def score(x_TD: Tensor, p_ED: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, and `x @ p.T` in fp32 whatever the dtype of both, [T, E].

    The first result takes the place of `x`, so that one kernel adds the gradients of its readers and of the product.
    """
    weight = weight_of(p_ED)
    if _is_widened(x_TD, value_of(p_ED)):
        return apply(_Score, x_TD, p_ED)
    if weight is None:
        return x_TD, F.linear(x_TD.float(), p_ED.float())
    return x_TD, _Linear.apply(x_TD, queued(x_TD, weight), None, torch.float32)


def grouped_linear(x_RD: Tensor, p_EDF: Tensor, offsets_E: Tensor, turned: bool = False) -> Tensor:
    """One product per expert: rows `offsets[e - 1]:offsets[e]` times `p[e]`; weights that are `turned` are [E, F, D].

    Returns [R, F]. `offsets` is int32, on the device of `x`, ends at R; D and F must be multiples of 16 bytes. An
    expert without rows gets a zero gradient.
    """
    weight = weight_of(p_EDF)
    if weight is None:
        return grouped_mm(x_RD, p_EDF.transpose(1, 2) if turned else p_EDF, offsets_E)
    return _GroupedLinear.apply(x_RD, offsets_E, queued(x_RD, weight), turned)


def scale(x_TD: Tensor, p_D: Tensor, one: bool = False) -> Tensor:
    """`x * p`, elementwise over the last dimension; with `one`, `x * (1 + p)` with the sum in fp32."""
    if not one and weight_of(p_D) is None:
        return x_TD * p_D
    return apply(_Scale, x_TD, p_D, one)


def shift(x_TD: Tensor, p_D: Tensor) -> Tensor:
    """`x + p`, elementwise over the last dimension: a bias."""
    weight = weight_of(p_D)
    if weight is None:
        return x_TD + p_D
    return _Shift.apply(x_TD, queued(x_TD, weight))


def embedding(ids_T: Tensor, p_VD: Tensor, padding: int = -1) -> Tensor:
    """Rows `p[ids]`, of shape [..., D]. The row `padding` of a managed weight gets no gradient."""
    weight = weight_of(p_VD)
    queue = None if weight is None else current_queue()
    if weight is None or queue is None:
        return F.embedding(ids_T, value_of(p_VD))
    return _Embedding.apply(queue.anchored(), ids_T, Queued(weight, queue), padding)


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
    """Write `scale * x[rows of e].T @ g[rows of e]` to `out[e]`, or add it, for every expert.

    All of `out` is written: an expert without rows gets zeros. So gradients may be sent from memory that held others.
    """
    if _writes_itself(x_RD, g_RF, out_EDF, add):
        from hocket.kernels.products import weight_gradients

        weight_gradients(x_RD, g_RF, offsets_E, out_EDF, add, scale)
    elif not x_RD.shape[0]:  # no launch takes a matrix without rows
        if not add:
            out_EDF.zero_()
    elif _has_grouped_kernel(x_RD):
        product_EDF = torch._grouped_mm(x_RD.t(), g_RF, offs=offsets_E)
        # On Blackwell that of an expert without rows is no zero: github.com/pytorch/pytorch/issues/172439.
        none_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
        put(product_EDF.masked_fill_(none_E.view(-1, 1, 1), 0), out_EDF, add, scale)
    else:
        for e, (lo, hi) in enumerate(_bounds(offsets_E)):
            write_product(x_RD[lo:hi].t(), g_RF[lo:hi], out_EDF[e], add, scale)


def _writes_itself(x_RD: Tensor, g_RF: Tensor, out_EDF: Tensor, add: bool) -> bool:
    """Whether there is a kernel that leaves the experts' gradients where they belong, of bf16 operands."""
    exact = out_EDF.dtype is torch.float32 or not add
    return exact and usable(x_RD, g_RF, out_EDF) and x_RD.dtype == g_RF.dtype == torch.bfloat16


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
    write_product(_rows(g).t(), _as(_rows(x), dtype), out_FD, add, scale)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which costs the host a call even where it changes nothing."""
    return x if x.dtype is dtype else x.to(dtype)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _sum_wgrad(g_RF: Tensor, out_F: Tensor, add: bool, scale: float) -> None:
    put(g_RF.sum(0), out_F, add, scale)


def _score_wgrad(x_TD: Tensor, g_TE: Tensor, out_ED: Tensor, add: bool, scale: float) -> None:
    from hocket.kernels.products import weight_gradient

    weight_gradient(g_TE, x_TD, out_ED, add, scale)


def _scale_wgrad(x: Tensor, g: Tensor, out_D: Tensor) -> None:
    torch.sum(g * x, list(range(x.dim() - 1)), out=out_D)


def _shift_wgrad(g: Tensor, out_D: Tensor) -> None:
    out_D.copy_(g.sum(list(range(g.dim() - 1))))  # which may be wider, as logits are


class _Linear(torch.autograd.Function):
    """Of managed weights and biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Queued, of_bias: Queued | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.where, ctx.of_bias, ctx.dtype = where, of_bias, dtype
        return F.linear(_as(x, dtype), _as(where.value(), dtype), None if of_bias is None else of_bias.value())

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        if g is None:  # what its weight gets is no gradient either, which is not zeros
            return None, None, None, None
        (x,) = ctx.saved_tensors
        weight_FD = _as(ctx.where.value(), ctx.dtype)
        dx = _as(g @ weight_FD, x.dtype) if ctx.needs_input_grad[0] else None
        write = partial(_linear_wgrad, x.detach(), g, ctx.dtype)
        # A gradient in a wider dtype than weights have is rounded to theirs before anything is added.
        work = Product(write) if ctx.dtype == x.dtype else partial(write, add=False, scale=1.0)
        ctx.where.contribute(ctx, 1, work)
        if ctx.of_bias is not None:
            ctx.of_bias.contribute(ctx, 2, Product(partial(_sum_wgrad, _rows(g))))
        return dx, None, None, None


class _Linears(torch.autograd.Function):
    """Several products of one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given_wheres: Any) -> tuple[Tensor, ...]:
        ctx.wheres = given_wheres[-1]
        ctx.save_for_backward(x)
        return tuple(F.linear(x, where.value()) for where in ctx.wheres)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        values = [where.again() for where in ctx.wheres]
        (x,) = ctx.saved_tensors
        x_TD, gs = x.detach().reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            pairs = list(zip(gs, values, strict=True))
            pairs.sort(key=lambda pair: pair[0].shape[1])  # the largest sum is rounded once only
            dx = sum_of_products(pairs).view(x.shape)
        found = [
            where.contribute(ctx, i, Product(partial(write_product, g_TF.t(), x_TD)))
            for i, (g_TF, where) in enumerate(zip(gs, ctx.wheres, strict=True), 1)
        ]
        return dx, *found, None


class _Score(torch.autograd.Function):
    """A product of bf16 operands in fp32, beside its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination) -> tuple[Tensor, Tensor]:
        return x, _wide_mm(x, save_input(ctx, x, where).t())

    @staticmethod
    def backward(ctx: Any, g_x: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels.products import input_gradient

        x, w_ED = saved_input(ctx)
        dx = input_gradient(g, w_ED, g_x)
        return dx, ctx.where.contribute(ctx, 1, Product(partial(_score_wgrad, x.detach(), g))), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, where: Queued, turned: bool) -> Tensor:
        ctx.save_for_backward(x, offsets)
        ctx.where, ctx.turned = where, turned
        return grouped_mm(x, where.value().transpose(1, 2) if turned else where.value(), offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, offsets = ctx.saved_tensors
        g, x, value = g.contiguous(), x.detach(), ctx.where.value()
        operands = (g, x) if ctx.turned else (x, g)
        ctx.where.contribute(ctx, 1, Product(partial(grouped_wgrad, *operands, offsets)))
        return grouped_mm(g, value if ctx.turned else value.transpose(1, 2), offsets), None, None, None


class _Scale(torch.autograd.Function):
    """Ordinary weights come here with `one` alone: a sum in the activations' dtype would lose most of their bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination, one: bool) -> Tensor:
        ctx.one, p_D = one, save_input(ctx, x, where)
        return (x * (p_D.float() + 1)).to(x.dtype) if one else x * p_D

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        dw = ctx.where.contribute(ctx, 1, partial(_scale_wgrad, x.detach(), g))
        p_D = ctx.where.again()
        return (g * (p_D.float() + 1)).to(x.dtype) if ctx.one else g * p_D, dw, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Queued) -> Tensor:
        ctx.where = where
        return x + where.value()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.where.contribute(ctx, 1, partial(_shift_wgrad, g))
        return g, None


class _Embedding(torch.autograd.Function):
    """Of a managed weight. The anchor of its queue makes autograd call backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, where: Queued, padding: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.padding = padding
        return F.embedding(ids, save_input(ctx, ids, where))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        if g is not None:
            (ids,) = ctx.saved_tensors
            if ctx.padding >= 0:
                g = g.masked_fill((ids == ctx.padding).unsqueeze(-1), 0.0)
            ctx.where.contribute(ctx, 2, Product(partial(write_rows, ids, g)))
        return None, None, None, None


# ----------------------------------------------------------------------------------------------------------- table rows
#
# The gradient of a table's rows, written where the reduction reads it.
#
# Note: [Rows that nobody looked up]
# Autograd makes a gradient of the whole table: it clears it, adds up rows, and hands it on to be copied. Of a large
# vocabulary a microbatch looks up few rows, so that is three passes over zeros. Here rows are added up in a tensor as
# long as the tokens, where the rows of one id have one place, and these sums are put into the cleared destination. They
# are sums of `embedding_dense_backward`, which adds rows in the order of tokens wherever their place is: so are the
# bits.
#
# Shapes: T tokens, or any leading dimensions, V rows of the table, D width.


def dense_gradient(ids_T: Tensor, g_TD: Tensor, rows: int) -> Tensor:
    """The gradient of the whole table, as autograd makes it."""
    return torch.ops.aten.embedding_dense_backward(g_TD, ids_T, rows, -1, False)


def write_rows(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Write the gradient of the whole table, times `scale`, or add it. See `Note: [Rows that nobody looked up]`."""
    if out_VD.is_cuda and 0 < ids_T.numel() < len(out_VD):
        write_sums(ids_T, g_TD, out_VD, add, scale)
    else:
        put(dense_gradient(ids_T, g_TD, len(out_VD)), out_VD, add, scale)


def write_sums(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool, scale: float = 1.0) -> None:
    """Clear the table, and write the rows that were looked up; or add to these."""
    ids_T = ids_T.reshape(-1).long()
    rows_TD = sums_by_id(ids_T, g_TD.reshape(len(ids_T), -1))
    if scale != 1.0:
        rows_TD = rows_TD.to(out_VD.dtype) * scale
    if add:
        rows_TD = out_VD.index_select(0, ids_T).add_(rows_TD)
    else:
        out_VD.zero_()
    out_VD.index_copy_(0, ids_T, rows_TD.to(out_VD.dtype))  # tokens of one id write the same row


def sums_by_id(ids_T: Tensor, g_TD: Tensor) -> Tensor:
    """For every token the sum of the rows of all tokens with its id, [T, D]; no host waits for the number of ids."""
    order = ids_T.argsort(stable=True)
    in_order = ids_T[order]
    begins = torch.zeros_like(order)
    begins[1:] = in_order[1:] != in_order[:-1]
    place_T = torch.empty_like(order).scatter_(0, order, begins.cumsum(0))
    return dense_gradient(place_T, g_TD, len(ids_T)).index_select(0, place_T)


# --------------------------------------------------------------------------------------------------------------- biases
#
# A bias of each expert, added to its rows.
#
# Shapes: R rows grouped by expert, F width, E local experts.


def add_bias_by_expert(x_RF: Tensor, p_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """`x + p[e]` of the rows `offsets[e - 1]:offsets[e]` of every expert; the rows after the last one mean nothing.

    `offsets` is int32, on the device of `x`. On a GPU the result takes the memory of `x`. An expert without rows gets a
    zero gradient.
    """
    return apply(_AddBiasByExpert, x_RF, p_EF, offsets_E)


def sum_by_expert(g_RF: Tensor, offsets_E: Tensor, out_EF: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Write `scale` times the sum of every expert's rows to `out`, or add it."""
    if usable(g_RF, out_EF):
        from hocket.kernels.sums import row_sums

        row_sums(g_RF, offsets_E, out_EF, add, scale)
        return
    ends: list[int] = offsets_E.tolist()
    sums = [g_RF[lo:hi].sum(0) for lo, hi in zip([0, *ends[:-1]], ends, strict=True)]
    put(torch.stack(sums), out_EF, add, scale)


def owners(rows: int, offsets_E: Tensor) -> Tensor:
    """The expert of every row, int32 [R]; rows after the last one's have the last one."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets_E.device)
    found = torch.searchsorted(offsets_E, row, right=True, out_int32=True)
    return found.clamp_(max=len(offsets_E) - 1)


class _AddBiasByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.where, value_EF = where, where.value()
        if usable(x, value_EF):
            from hocket.kernels.sums import add_by_expert

            ctx.mark_dirty(x)
            return add_by_expert(x, value_EF, offsets)
        return x + value_EF[owners(len(x), offsets)]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (offsets,) = ctx.saved_tensors
        if g.is_cuda:
            refuse_graph()
        return g, ctx.where.contribute(ctx, 1, Product(partial(sum_by_expert, g.contiguous(), offsets))), None, None


# ---------------------------------------------------------------------------------------------------------------- delta
#
# What gated delta nets read weights for beside products: a causal convolution, and the decay of their memory.
#
# Both are computed in fp32.
#
# Shapes: B sequences, S sequence length, C channels, W tokens of a convolution, H heads.


def causal_convolution(x_BSC: Tensor, p_CW: Tensor, position_BS: Tensor | None = None) -> Tensor:
    """Of every channel by itself, the sum over the W tokens up to each of `x * p`, the last one the token itself.

    Before a sequence are zeros, and with positions of tokens in their documents before a document.
    """
    return apply(_Convolution, x_BSC, p_CW, position_BS)


def decay(x_BSH: Tensor, p_H: Tensor) -> Tensor:
    """`-exp(p) * x`, fp32."""
    return apply(_Decay, x_BSH, p_H)


def _before(x_BSC: Tensor, count: int, position_BS: Tensor | None) -> Tensor:
    """Each token's `count`-th one before; zeros where there is none."""
    if not count:
        return x_BSC
    moved_BSC = F.pad(x_BSC, (0, 0, count, 0))[:, : x_BSC.shape[1]]
    return moved_BSC if position_BS is None else moved_BSC.masked_fill((position_BS < count).unsqueeze(-1), 0)


def _after(g_BSC: Tensor, count: int, position_BS: Tensor | None) -> Tensor:
    """The gradient of `_before`."""
    if not count:
        return g_BSC
    if position_BS is not None:
        g_BSC = g_BSC.masked_fill((position_BS < count).unsqueeze(-1), 0)
    return F.pad(g_BSC, (0, 0, 0, count))[:, count:]


def _convolution_wgrad(x_BSC: Tensor, g_BSC: Tensor, position_BS: Tensor | None, out_CW: Tensor) -> None:
    x_BSC, g_BSC, width = x_BSC.float(), g_BSC.float(), out_CW.shape[1]
    found = [(g_BSC * _before(x_BSC, count, position_BS)).sum((0, 1)) for count in range(width)]
    out_CW.copy_(torch.stack(found[::-1], 1))


def _decay_wgrad(y_BSH: Tensor, g_BSH: Tensor, out_H: Tensor) -> None:
    out_H.copy_((g_BSH * y_BSH).sum((0, 1)))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination, position: Tensor | None) -> Tensor:
        ctx.position = position
        p_CW, x_BSC = save_input(ctx, x, where).float(), x.float()
        width = p_CW.shape[1]
        y_BSC = x_BSC * p_CW[:, -1]
        for count in range(1, width):
            y_BSC.addcmul_(_before(x_BSC, count, position), p_CW[:, width - 1 - count])
        return y_BSC.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        p_CW, g_BSC = ctx.where.again().float(), g.float()
        width = p_CW.shape[1]
        dx_BSC = g_BSC * p_CW[:, -1]
        for count in range(1, width):
            dx_BSC += _after(g_BSC * p_CW[:, width - 1 - count], count, ctx.position)
        dw = ctx.where.contribute(ctx, 1, partial(_convolution_wgrad, x.detach(), g, ctx.position))
        return dx_BSC.to(x.dtype), dw, None, None


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, where: Destination) -> Tensor:
        ctx.where = where
        y_BSH = x * -where.value().float().exp()
        ctx.save_for_backward(y_BSH)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (y_BSH,) = ctx.saved_tensors
        dw = ctx.where.contribute(ctx, 1, partial(_decay_wgrad, y_BSH.detach(), g))
        return g * -ctx.where.again().float().exp(), dw, None

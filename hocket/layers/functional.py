"""The functions that read weights: linear, score, grouped linear, scale, shift, embedding; `norms.py` has the norms.

For an ordinary parameter each of them is the stock torch function. For a managed parameter only activations enter
autograd: the weight is looked up when forward runs and again when backward runs, and its gradient is deferred to the
segment's queue (`runtime/weights.py`). On a CPU both give the same bits, because formulas and operand order are those
of torch's derivatives. On a GPU gradients accumulated by products are rounded less often, and experts' weight gradients
have their own product (`kernels/products.py`).

Note: [Only activations are saved]
A weight saved by autograd would pin its slot, and after a release the slot holds another layer's weights. So no
function here saves a weight; `Weight.tensor()` is called once per direction. Queued work holds its activation detached,
because a saved activation refers to the graph that made it, and would keep all of it alive until the queue is drained.

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
    """`linear` of every weight. On a GPU each product accumulates into the gradient of `x`."""
    values = [value_of(p) for p in params]
    if len(params) == 1 or not usable(x_TD, *values) or any(value.dtype != x_TD.dtype for value in values):
        return tuple(linear(x_TD, p) for p in params)
    dests = [destination(x_TD, p) for p in params]
    return _Linears.apply(x_TD, *(dest.autograd_input for dest in dests), dests)


def score(x_TD: Tensor, p_ED: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, and `x @ p.T` in fp32 whatever the dtype of both, [T, E].

    Callers use the first result in place of `x`, so that one kernel adds the gradients of its readers and the product.
    """
    weight = weight_of(p_ED)
    if _is_widened(x_TD, value_of(p_ED)):
        return apply(_Score, x_TD, p_ED)
    if weight is None:
        return x_TD, F.linear(x_TD.float(), p_ED.float())
    return x_TD, _Linear.apply(x_TD, queued(x_TD, weight), None, torch.float32)


def grouped_linear(x_RD: Tensor, p_EDF: Tensor, offsets_E: Tensor, turned: bool = False) -> Tensor:
    """One product per expert: rows `offsets[e - 1]:offsets[e]` times `p[e]`; with `turned` weights are [E, F, D].

    Returns [R, F]. `offsets` is int32, on the device of `x`, and ends at R; D and F must be multiples of 16 bytes. An
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
    if not x_RD.shape[0]:  # kernels cannot launch on zero rows
        return x_RD @ w_EDF[0]
    if _has_grouped_kernel(x_RD):
        return torch._grouped_mm(x_RD, w_EDF, offs=offsets_E)
    parts = [x_RD[lo:hi] @ w_EDF[e] for e, (lo, hi) in enumerate(_bounds(offsets_E))]
    return torch.cat(parts)


def grouped_wgrad(
    x_RD: Tensor, g_RF: Tensor, offsets_E: Tensor, out_EDF: Tensor, add: bool = False, scale: float = 1.0
) -> None:
    """Write `scale * x[rows of e].T @ g[rows of e]` to `out[e]`, or add it, for every expert.

    An expert without rows gets zeros, so all of `out` is written and may be sent without clearing it first.
    """
    if _writes_itself(x_RD, g_RF, out_EDF, add):
        from hocket.kernels.products import weight_gradients

        weight_gradients(x_RD, g_RF, offsets_E, out_EDF, add, scale)
    elif not x_RD.shape[0]:  # kernels cannot launch on zero rows
        if not add:
            out_EDF.zero_()
    elif _has_grouped_kernel(x_RD):
        product_EDF = torch._grouped_mm(x_RD.t(), g_RF, offs=offsets_E)
        # On Blackwell an expert without rows gets no zeros: github.com/pytorch/pytorch/issues/172439.
        none_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
        put(product_EDF.masked_fill_(none_E.view(-1, 1, 1), 0), out_EDF, add, scale)
    else:
        for e, (lo, hi) in enumerate(_bounds(offsets_E)):
            write_product(x_RD[lo:hi].t(), g_RF[lo:hi], out_EDF[e], add, scale)


def _writes_itself(x_RD: Tensor, g_RF: Tensor, out_EDF: Tensor, add: bool) -> bool:
    """Whether a kernel can write the experts' bf16 gradients in place."""
    exact = out_EDF.dtype is torch.float32 or not add
    return exact and usable(x_RD, g_RF, out_EDF) and x_RD.dtype == g_RF.dtype == torch.bfloat16


def _is_widened(x_TD: Tensor, value_FD: Tensor) -> bool:
    """Whether tensor cores take both operands as they are; they cannot launch on zero rows."""
    return usable(x_TD, value_FD) and x_TD.dtype == value_FD.dtype == torch.bfloat16 and x_TD.numel() > 0


def _wide_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The product of bf16 matrices in fp32."""
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def _has_grouped_kernel(x_RD: Tensor) -> bool:
    """CUDA's kernel takes bf16 only."""
    return x_RD.device.type == "cpu" or x_RD.dtype is torch.bfloat16


def _bounds(offsets_E: Tensor) -> list[tuple[int, int]]:
    """(first, end) row of every expert, on the host. Synchronizes with the device."""
    ends: list[int] = offsets_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _linear_wgrad(x: Tensor, g: Tensor, dtype: torch.dtype, out_FD: Tensor, add: bool, scale: float) -> None:
    write_product(_rows(g).t(), _as(_rows(x), dtype), out_FD, add, scale)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without the host's cost of a call that changes nothing."""
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
    """A product with a managed weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dest: Queued, of_bias: Queued | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.dest, ctx.of_bias, ctx.dtype = dest, of_bias, dtype
        return F.linear(_as(x, dtype), _as(dest.value(), dtype), None if of_bias is None else of_bias.value())

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        if g is None:  # then the weight gets no gradient either, rather than zeros
            return None, None, None, None
        (x,) = ctx.saved_tensors
        weight_FD = _as(ctx.dest.value(), ctx.dtype)
        dx = _as(g @ weight_FD, x.dtype) if ctx.needs_input_grad[0] else None
        write = partial(_linear_wgrad, x.detach(), g, ctx.dtype)
        # A gradient in a wider dtype than the weights' is rounded to theirs before anything is added.
        work = Product(write) if ctx.dtype == x.dtype else partial(write, add=False, scale=1.0)
        ctx.dest.contribute(ctx, 1, work)
        if ctx.of_bias is not None:
            ctx.of_bias.contribute(ctx, 2, Product(partial(_sum_wgrad, _rows(g))))
        return dx, None, None, None


class _Linears(torch.autograd.Function):
    """Several products of one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given_dests: Any) -> tuple[Tensor, ...]:
        ctx.dests = given_dests[-1]
        ctx.save_for_backward(x)
        return tuple(F.linear(x, dest.value()) for dest in ctx.dests)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        values = [dest.value_in_backward() for dest in ctx.dests]
        (x,) = ctx.saved_tensors
        x_TD, gs = x.detach().reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            pairs = list(zip(gs, values, strict=True))
            pairs.sort(key=lambda pair: pair[0].shape[1])  # the largest product last, so its sum is rounded once
            dx = sum_of_products(pairs).view(x.shape)
        found = [
            dest.contribute(ctx, i, Product(partial(write_product, g_TF.t(), x_TD)))
            for i, (g_TF, dest) in enumerate(zip(gs, ctx.dests, strict=True), 1)
        ]
        return dx, *found, None


class _Score(torch.autograd.Function):
    """A product of bf16 operands in fp32, and its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination) -> tuple[Tensor, Tensor]:
        return x, _wide_mm(x, save_input(ctx, x, dest).t())

    @staticmethod
    def backward(ctx: Any, g_x: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        from hocket.kernels.products import input_gradient

        x, w_ED = saved_input(ctx)
        dx = input_gradient(g, w_ED, g_x)
        return dx, ctx.dest.contribute(ctx, 1, Product(partial(_score_wgrad, x.detach(), g))), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, dest: Queued, turned: bool) -> Tensor:
        ctx.save_for_backward(x, offsets)
        ctx.dest, ctx.turned = dest, turned
        return grouped_mm(x, dest.value().transpose(1, 2) if turned else dest.value(), offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, offsets = ctx.saved_tensors
        g, x, value = g.contiguous(), x.detach(), ctx.dest.value()
        operands = (g, x) if ctx.turned else (x, g)
        ctx.dest.contribute(ctx, 1, Product(partial(grouped_wgrad, *operands, offsets)))
        return grouped_mm(g, value if ctx.turned else value.transpose(1, 2), offsets), None, None, None


class _Scale(torch.autograd.Function):
    """Also for ordinary weights with `one`: a sum in the activations' dtype would lose most of their bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, one: bool) -> Tensor:
        ctx.one, p_D = one, save_input(ctx, x, dest)
        return (x * (p_D.float() + 1)).to(x.dtype) if one else x * p_D

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        dw = ctx.dest.contribute(ctx, 1, partial(_scale_wgrad, x.detach(), g))
        p_D = ctx.dest.value_in_backward()
        return (g * (p_D.float() + 1)).to(x.dtype) if ctx.one else g * p_D, dw, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dest: Queued) -> Tensor:
        ctx.dest = dest
        return x + dest.value()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.dest.contribute(ctx, 1, partial(_shift_wgrad, g))
        return g, None


class _Embedding(torch.autograd.Function):
    """Lookup in a managed weight. The anchor of its queue makes autograd call backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, dest: Queued, padding: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.padding = padding
        return F.embedding(ids, save_input(ctx, ids, dest))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        if g is not None:
            (ids,) = ctx.saved_tensors
            if ctx.padding >= 0:
                g = g.masked_fill((ids == ctx.padding).unsqueeze(-1), 0.0)
            ctx.dest.contribute(ctx, 2, Product(partial(write_rows, ids, g)))
        return None, None, None, None


# ----------------------------------------------------------------------------------------------------------- table rows
#
# The gradient of a table's rows, written where the reduction reads it.
#
# Note: [Gradients of looked-up rows]
# Autograd's gradient is a whole table: it is cleared, rows are added, and the caller copies it. A microbatch looks up
# few rows of a large vocabulary, so that is mostly three passes over zeros. Here the gradients of rows with one id are
# summed in a tensor of as many rows as tokens, and the sums are written to the cleared destination. The sums are those
# of `embedding_dense_backward`, which adds rows in the order of tokens wherever they are stored, so the bits are equal.
#
# Shapes: T tokens, or any leading dimensions, V rows of the table, D width.


def dense_gradient(ids_T: Tensor, g_TD: Tensor, rows: int) -> Tensor:
    """The gradient of the whole table, as autograd computes it."""
    return torch.ops.aten.embedding_dense_backward(g_TD, ids_T, rows, -1, False)


def write_rows(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Write the gradient of the whole table, times `scale`, or add it. See `Note: [Gradients of looked-up rows]`."""
    if out_VD.is_cuda and 0 < ids_T.numel() < len(out_VD):
        write_sums(ids_T, g_TD, out_VD, add, scale)
    else:
        put(dense_gradient(ids_T, g_TD, len(out_VD)), out_VD, add, scale)


def write_sums(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool, scale: float = 1.0) -> None:
    """Clear the table and write the rows that were looked up, or add to these rows."""
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
    """For every token the sum of the rows of all tokens with its id, [T, D]; without a host wait for the id count."""
    order = ids_T.argsort(stable=True)
    in_order = ids_T[order]
    begins = torch.zeros_like(order)
    begins[1:] = in_order[1:] != in_order[:-1]
    place_T = torch.empty_like(order).scatter_(0, order, begins.cumsum(0))
    return dense_gradient(place_T, g_TD, len(ids_T)).index_select(0, place_T)


# --------------------------------------------------------------------------------------------------------------- biases
#
# A bias per expert, added to its rows.
#
# Shapes: R rows grouped by expert, F width, E local experts.


def add_bias_by_expert(x_RF: Tensor, p_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """`x + p[e]` for the rows `offsets[e - 1]:offsets[e]` of every expert; rows after the last one are undefined.

    `offsets` is int32, on the device of `x`. On a GPU the result reuses the memory of `x`. An expert without rows gets
    a zero gradient.
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
    """The expert of every row, int32 [R]; rows after the last expert's count as its own."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets_E.device)
    found = torch.searchsorted(offsets_E, row, right=True, out_int32=True)
    return found.clamp_(max=len(offsets_E) - 1)


class _AddBiasByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.dest, value_EF = dest, dest.value()
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
        return g, ctx.dest.contribute(ctx, 1, Product(partial(sum_by_expert, g.contiguous(), offsets))), None, None


# ---------------------------------------------------------------------------------------------------------------- delta
#
# Functions of gated delta nets with weights, besides products: a causal convolution, and the decay of their state.
#
# Both are computed in fp32.
#
# Shapes: B sequences, S sequence length, C channels, W tokens of a convolution, H heads.


def causal_convolution(x_BSC: Tensor, p_CW: Tensor, position_BS: Tensor | None = None) -> Tensor:
    """Per channel, the sum of `x * p` over the W tokens up to and including each token.

    Tokens before a sequence count as zeros; with `position`, tokens' positions in documents, those before a document.
    """
    return apply(_Convolution, x_BSC, p_CW, position_BS)


def decay(x_BSH: Tensor, p_H: Tensor) -> Tensor:
    """`-exp(p) * x`, fp32."""
    return apply(_Decay, x_BSH, p_H)


def _before(x_BSC: Tensor, count: int, position_BS: Tensor | None) -> Tensor:
    """The token `count` places before each token; zeros if there is none."""
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
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination, position: Tensor | None) -> Tensor:
        ctx.position = position
        p_CW, x_BSC = save_input(ctx, x, dest).float(), x.float()
        width = p_CW.shape[1]
        y_BSC = x_BSC * p_CW[:, -1]
        for count in range(1, width):
            y_BSC.addcmul_(_before(x_BSC, count, position), p_CW[:, width - 1 - count])
        return y_BSC.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        p_CW, g_BSC = ctx.dest.value_in_backward().float(), g.float()
        width = p_CW.shape[1]
        dx_BSC = g_BSC * p_CW[:, -1]
        for count in range(1, width):
            dx_BSC += _after(g_BSC * p_CW[:, width - 1 - count], count, ctx.position)
        dw = ctx.dest.contribute(ctx, 1, partial(_convolution_wgrad, x.detach(), g, ctx.position))
        return dx_BSC.to(x.dtype), dw, None, None


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor | None, dest: Destination) -> Tensor:
        ctx.dest = dest
        y_BSH = x * -dest.value().float().exp()
        ctx.save_for_backward(y_BSH)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (y_BSH,) = ctx.saved_tensors
        dw = ctx.dest.contribute(ctx, 1, partial(_decay_wgrad, y_BSH.detach(), g))
        return g * -ctx.dest.value_in_backward().float().exp(), dw, None

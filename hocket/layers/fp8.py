"""Products of linear layers in fp8: forward, input gradient and weight gradient, each with its own operands.

    forward          y  = x8 @ w8.T     scales: one per token of x, one per output feature of w
    input gradient   dx = g8 @ w8       g's columns are multiplied by w's scales first; one scale per token
    weight gradient  dw = g8.T @ x8     g's rows are multiplied by their scales and x's, over the largest of them

Note: [One cast for two products]
A product takes scales of the rows and columns of its result, not of the dimension that it sums over. But in backward x
and w are summed over another dimension than in forward, so forward's scales are not scales of rows or columns there. A
second cast along that dimension would read x and w again, and find every column's maximum first. Instead the other
operand, the gradient, which backward casts in any case, is multiplied by their scales first. So backward's copies of x
and w are forward's bytes, transposed. All scales are powers of two, so this rounds nothing, except for numbers of g.T
below 2^-9 of the largest factor's unit, 2^-17 of the largest number.

Note: [The formats]
All tensors are e4m3, gradients too. e5m2 is for gradients that share one scale, and has half as many mantissa bits.
Here each token has its own scale, of its current numbers rather than earlier ones, so a range of 2^17 between a token's
largest and smallest number is enough. Scales are powers of two because of the note above; e4m3 rounds to the same
number of bits at any exponent, so a power of two loses at most one bit of range.

In forward and input gradient tensor cores accumulate in their own format (`use_fast_accum`), which keeps 13 bits or
more of a running sum; e4m3 has 3. Weight gradients sum over all tokens, and into weights: they accumulate in fp32.

Note: [Lifetime of a weight's cast]
A managed weight's cast is stored with the weight's value. The first reader makes it, and it is dropped with the value:
so it is made once for each gathered copy, or once a step if values stay, however many microbatches read it. A value
gathered in fp8 is its own cast (`fsdp/planned/fp8_weights.py`). An ordinary weight is cast each time it is read.
Activations are kept for backward in fp8 instead of bf16.

Without fp8 tensor cores, on CPUs, torch's operations compute the same numbers, products in fp32.

Shapes: T tokens, D input width, F output width (of several weights together), M, N, K of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import refuse_graph, usable
from hocket.layers.functional import grouped_mm, grouped_wgrad, owners
from hocket.runtime.weights import (
    Destination,
    Product,
    Queued,
    destination,
    put,
    sum_of_products,
    write_product,
)

E4M3 = torch.float8_e4m3fn
LEAST = -60
"""Exponent of the least scale: the product of two is a normal number in fp32."""
UNIT = 16
"""Widths and tokens of a product in fp8 are multiples of this."""


@dataclass(frozen=True)
class Products:
    """Which products of a layer run in fp8."""

    forward: bool = True
    dgrad: bool = True
    wgrad: bool = True

    @property
    def all(self) -> bool:
        return self.forward and self.dgrad and self.wgrad


ALL = Products()


@dataclass(slots=True, eq=False)
class Rows:
    """A matrix in fp8, or a stack of them: `values * scale[..., None]`, and a transposed copy once made."""

    values: Tensor
    """e4m3 [..., R, W]."""
    scale: Tensor
    """fp32 [..., R], powers of two; nan if a row is not finite."""
    turned: Tensor | None = None

    def transposed(self) -> Tensor:
        """The values as [..., W, R], made once."""
        if self.turned is None:
            self.turned = transposed(self.values)
        return self.turned


# ------------------------------------------------------------------------------------------------------------- casts


def cast_rows(
    parts: Sequence[Tensor],
    fold: Tensor | None = None,
    owner_R: Tensor | None = None,
    count: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """Casts matrices [R, ...], concatenated along columns, to fp8.

    Columns are multiplied by `fold` first, or each row's by `fold[owner]`. `count`, int32 [1]: the number of valid
    rows. `into`: where to write values and scales.
    """
    if usable(*parts):
        from hocket.kernels import fp8

        return Rows(*fp8.cast_rows(parts, fold, owner_R, count, into))
    made = _rows(torch.cat([part.float() for part in parts], 1), fold, owner_R)
    if into is not None:
        into[0].copy_(made.values)
        into[1].copy_(made.scale)
    return made


def transposed(values: Tensor, factors_R: Tensor | None = None, limit: Tensor | None = None) -> Tensor:
    """[..., W, R] of [..., R, W]; with `factors`, powers of two, rows are scaled by factor / `limit`, the largest."""
    if _on_gpu(values):
        from hocket.kernels import fp8

        return fp8.transposed(values, factors_R, limit)
    if factors_R is not None and limit is not None:
        values = (values.float() * (factors_R / limit)[:, None]).to(E4M3)
    return values.view(torch.uint8).transpose(-1, -2).contiguous().view(E4M3)


def swiglu_rows(
    gate_up_RF: Tensor,
    fold: Tensor | None = None,
    owner_R: Tensor | None = None,
    count: Tensor | None = None,
    wide: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> Rows:
    """`silu(gate) * up` of the two halves in fp8, as `cast_rows`; also written to `wide`, without `fold`.

    With `weights`, fp32, each row is multiplied by its weight.
    """
    if usable(gate_up_RF):
        from hocket.kernels import fp8

        return Rows(*fp8.swiglu_rows(gate_up_RF, fold, owner_R, count, wide, weights_R))
    gate, up = gate_up_RF.float().chunk(2, 1)
    value = gate * torch.sigmoid(gate) * up
    if weights_R is not None:
        value *= weights_R[:, None]
    if wide is not None:
        wide.copy_(value)
    return _rows(value, fold, owner_R)


def swiglu_rows_backward(
    g_RF: Tensor,
    gate_up_RF: Tensor,
    fold: Tensor | None = None,
    count: Tensor | None = None,
    wide: Tensor | None = None,
    weights: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """The gradient of gate and up in fp8, as `cast_rows`; also written to `wide`, without `fold`.

    `weights`: the rows' weights, and where to write their gradients; both fp32 [R].
    """
    if usable(g_RF, gate_up_RF):
        from hocket.kernels import fp8

        return Rows(*fp8.swiglu_rows_backward(g_RF, gate_up_RF, fold, count, wide, weights))
    g, (gate, up) = g_RF.float(), gate_up_RF.float().chunk(2, 1)
    chance = torch.sigmoid(gate)
    if weights is not None:
        torch.sum(g * gate * chance * up, 1, out=weights[1])
        g = g * weights[0][:, None]
    value = torch.cat([g * up * chance * (1 + gate * (1 - chance)), g * gate * chance], 1)
    if wide is not None:
        wide.copy_(value)
    return _rows(value, fold)


def _rows(value: Tensor, fold: Tensor | None = None, owner_R: Tensor | None = None) -> Rows:
    """Casts a matrix from fp32 to fp8, each row by the least power of two with which it fits."""
    if fold is not None:
        value = value * (fold if owner_R is None else fold[owner_R])
    if not value.numel():
        return Rows(value.to(E4M3), value.new_ones(value.shape[0]))
    scale = scale_of(value.abs().amax(1))
    return Rows(cast_to(value, scale[:, None]), scale)


def scale_of(largest: Tensor) -> Tensor:
    """The least power of two with which numbers up to `largest`, fp32, fit; nan if that is not finite."""
    mantissa, exponent = torch.frexp(largest)
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=LEAST)  # 448 is 0.875 * 2^9
    exponent = torch.where(largest == 0, LEAST, exponent)
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), torch.nan)


def cast_to(value: Tensor, scale: Tensor) -> Tensor:
    """Casts fp32 numbers to fp8, by a scale with which they fit."""
    return (value / scale).to(E4M3)


def _on_gpu(values: Tensor) -> bool:
    return values.is_cuda and usable(values.view(torch.uint8))


# ---------------------------------------------------------------------------------------------------------- products


def product(
    a_MK: Tensor, b_NK: Tensor, scale_M: Tensor, scale_N: Tensor | None, dtype: torch.dtype, fast: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`a @ b.T` of fp8 matrices; rows of the result times `scale_M`, columns times `scale_N` if given."""
    if _on_gpu(a_MK):
        scale_N = ones(b_NK.shape[0], b_NK.device) if scale_N is None else scale_N
        scales = {"scale_a": scale_M.unsqueeze(1), "scale_b": scale_N.unsqueeze(0)}
        how: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast, **scales}
        if out is not None:
            how["out"] = out
        return torch._scaled_mm(a_MK, b_NK.t(), **how)
    y = (a_MK.float() @ b_NK.float().t()) * scale_M[:, None]
    y = (y if scale_N is None else y * scale_N).to(dtype)
    return y if out is None else out.copy_(y)


@lru_cache(maxsize=64)
def ones(count: int, device: torch.device) -> Tensor:
    """Ones, fp32 [count]; read only."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.ones(count, device=device)


# ----------------------------------------------------------------------------------------------------------- weights


def cast_weights(dests: Sequence[Destination], in_backward: bool = False) -> Rows:
    """Weights [F, D] stacked along F, or a stacked one, in fp8. See Note: [Lifetime of a weight's cast]."""
    weight = getattr(dests[0], "weight", None)
    if weight is not None and weight.cast is not None:
        return weight.cast
    values = [dest.value_in_backward() if in_backward else dest.value() for dest in dests]
    if weight is not None and values[0].dtype == E4M3:  # gathered in fp8
        weight.cast = Rows(_joined([value.view(torch.uint8) for value in values]).view(E4M3), _joined(_scales(dests)))
        return weight.cast
    counts, like = [len(value) for value in values], values[0]
    shape = (sum(counts), *like.shape[1:])
    made = Rows(like.new_empty(shape, dtype=E4M3), like.new_empty(shape[:-1], dtype=torch.float32))
    for value, bytes_FD, scale_F in zip(values, made.values.split(counts), made.scale.split(counts), strict=True):
        cast_rows([value.flatten(0, -2)], into=(bytes_FD.flatten(0, -2), scale_F.flatten()))
    if weight is not None:
        weight.cast = made
    return made


def _scales(dests: Sequence[Destination]) -> list[Tensor]:
    found = [dest.weight.scale for dest in dests if isinstance(dest, Queued)]
    return [scale for scale in found if scale is not None]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along dimension 0, without a copy if the parts are adjacent in memory."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


class _Factors:
    """Both operands of weight gradients of one input, in fp8, transposed once for all of its weights."""

    __slots__ = ("_fold", "_g", "_scale", "_turned", "_x")

    def __init__(self, g: Rows, x: Rows, fold: Tensor | None) -> None:
        self._g, self._x, self._fold = g, x, fold
        self._scale: Tensor | None = None
        self._turned: Tensor | None = None

    def write(self, low: int, high: int, dtype: torch.dtype, out_FD: Tensor, add: bool, scale: float) -> None:
        """Write the gradient of the weight with output features `low:high`, or add it."""
        if self._turned is None or self._scale is None:
            factors_T = self._g.scale * self._x.scale
            limit = factors_T.amax()
            self._turned = transposed(self._g.values, factors_T, limit)
            width = self._g.values.shape[1]
            self._scale = limit.expand(width).contiguous() if self._fold is None else limit / self._fold
        operands = self._turned[low:high], self._x.transposed(), self._scale[low:high], None
        if out_FD.dtype == dtype and not add and scale == 1.0:
            product(*operands, dtype, fast=False, out=out_FD)
        else:
            put(product(*operands, dtype, fast=False), out_FD, add, scale)


# --------------------------------------------------------------------------------------------------------- functions


def fp8_linears(x_TD: Tensor, params: Sequence[Tensor], products: Products = ALL) -> tuple[Tensor, ...]:
    """`x @ p.T` of every weight, [..., F], with products in fp8. Widths and tokens are multiples of `UNIT`."""
    dests = [destination(x_TD, p) for p in params]
    return _Linears.apply(x_TD, *(dest.autograd_input for dest in dests), dests, products)


def fp8_mlp(x_TD: Tensor, p_gate_up: Tensor, p_down: Tensor) -> Tensor:
    """SwiGLU between two linear layers, all products in fp8; no intermediate is written in a wider format."""
    dests = [destination(x_TD, p_gate_up), destination(x_TD, p_down)]
    return _Mlp.apply(x_TD, *(dest.autograd_input for dest in dests), *dests)


def _bounds(dests: Sequence[Destination]) -> list[tuple[int, int]]:
    """First and end output feature of each weight among all."""
    found, low = [], 0
    for dest in dests:
        high = low + dest.value_in_backward().shape[0]
        found.append((low, high))
        low = high
    return found


class _Linears(torch.autograd.Function):
    """Several products of one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *_, dests, products = given
        x_TD, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
        ctx.dests, ctx.products = dests, products
        rows = cast_rows([x_TD]) if products.forward or products.wgrad else None
        if products.forward:
            assert rows is not None
            w, values, scale = cast_weights(dests), rows.values, rows.scale
            ys = [product(values, w.values[i:j], scale, w.scale[i:j], x.dtype) for i, j in _bounds(dests)]
        else:
            ys = [F.linear(x_TD, dest.value()) for dest in dests]
        ctx.save_for_backward(*((rows.values, rows.scale) if rows is not None and products.wgrad else (x,)))
        ctx.x_shape = x.shape
        return tuple(y.view(*shape, -1) for y in ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        dests, products, dtype = ctx.dests, ctx.products, grads[0].dtype
        gs = [g.reshape(-1, g.shape[-1]) for g in grads]
        w = cast_weights(dests, in_backward=True) if products.dgrad else None
        fold = None if w is None else w.scale
        rows = cast_rows(gs, fold) if products.dgrad or products.wgrad else None
        dx = None
        if ctx.needs_input_grad[0]:
            if w is not None:
                assert rows is not None
                dx = product(rows.values, w.transposed(), rows.scale, None, dtype)
            else:
                dx = sum_of_products([(g, dest.value_in_backward()) for g, dest in zip(gs, dests, strict=True)])
            dx = dx.view(ctx.x_shape)
        if products.wgrad:
            assert rows is not None
            factors = _Factors(rows, Rows(*ctx.saved_tensors), fold)
            works = [Product(partial(factors.write, low, high, dtype)) for low, high in _bounds(dests)]
        else:
            x_TD = ctx.saved_tensors[0].detach().reshape(-1, ctx.x_shape[-1])
            works = [Product(partial(write_product, g.t(), x_TD)) for g in gs]
        found = [dest.contribute(ctx, i, work) for i, (dest, work) in enumerate(zip(dests, works, strict=True), 1)]
        return dx, *found, None, None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Any, given_down: Any, dest: Destination, dest_down: Destination) -> Tensor:
        ctx.dest, ctx.dest_down, ctx.shape = dest, dest_down, x.shape
        rows, w, down = cast_rows([x.reshape(-1, x.shape[-1])]), cast_weights([dest]), cast_weights([dest_down])
        gate_up = product(rows.values, w.values, rows.scale, w.scale, x.dtype)
        inner = swiglu_rows(gate_up)
        y = product(inner.values, down.values, inner.scale, down.scale, x.dtype)
        ctx.save_for_backward(rows.values, rows.scale, gate_up, inner.values, inner.scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        values, scale, gate_up, inner_values, inner_scale = ctx.saved_tensors
        dest, dest_down, dtype = ctx.dest, ctx.dest_down, g.dtype
        w, down = cast_weights([dest], in_backward=True), cast_weights([dest_down], in_backward=True)
        rows = cast_rows([g.reshape(-1, g.shape[-1])], down.scale)
        g_inner = product(rows.values, down.transposed(), rows.scale, None, dtype)
        factors = _Factors(rows, Rows(inner_values, inner_scale), down.scale)
        work_down = Product(partial(factors.write, 0, rows.values.shape[1], dtype))
        rows = swiglu_rows_backward(g_inner, gate_up, w.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product(rows.values, w.transposed(), rows.scale, None, dtype).view(ctx.shape)
        factors = _Factors(rows, Rows(values, scale), w.scale)
        work = Product(partial(factors.write, 0, rows.values.shape[1], dtype))
        dw_down = dest_down.contribute(ctx, 2, work_down)
        return dx, dest.contribute(ctx, 1, work), dw_down, None, None


# ---------------------------------------------------------------------------------------------------------- fp8 experts
#
# Experts in fp8: SwiGLU between two grouped products, forward and input gradient. Weight gradients run in bf16.
#
# Stacked weights are [E, D, F], so each scale belongs to a row of D, the dimension that forward sums over. So in the
# input gradient their scales are those of the result's columns, and forward, which reads the same bytes transposed,
# multiplies them into its rows: the reverse of the above, with the scales of each row's own expert. Weight gradients of
# grouped rows would sum over a number of rows that only the device knows, while fp8 products take multiples of 16. So
# they run as they do without fp8 (`kernels/products.py`), from rows kept in bf16.
#
# Shapes: R rows grouped by expert, D input width, F output width, E local experts.


def fp8_experts(
    x_RD: Tensor,
    p_gate_up: Tensor,
    p_down: Tensor,
    offsets_E: Tensor,
    of_rows: tuple[Tensor | None, Tensor | None],
    products: Products,
) -> Tensor:
    """SwiGLU of each expert on its rows: [R, D]. `offsets` as in `grouped_linear`; `of_rows` are count and weights for
    `swiglu`.
    """
    dests = destination(x_RD, p_gate_up), destination(x_RD, p_down)
    return _Experts.apply(x_RD, *(dest.autograd_input for dest in dests), offsets_E, *of_rows, dests, products)


def grouped_product(a: Rows, b_ENK: Tensor, scale_EN: Tensor | None, offsets_E: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b[e].T` of each expert's rows, in fp8; columns of the result times `scale[e]` if given."""
    if scale_EN is None:
        scale_EN = ones(b_ENK.shape[0] * b_ENK.shape[1], b_ENK.device).view(b_ENK.shape[:2])
    values, scale = a.values, a.scale
    if not values.shape[0]:  # kernels cannot launch on zero rows
        return torch.empty(0, b_ENK.shape[1], dtype=dtype, device=values.device)
    if values.is_cuda and usable(scale, scale_EN):
        how: dict[str, Any] = {"offs": offsets_E, "out_dtype": dtype, "use_fast_accum": True}
        return torch._scaled_grouped_mm(values, b_ENK.transpose(1, 2), scale, scale_EN, **how)
    out, low = torch.zeros(values.shape[0], b_ENK.shape[1], dtype=dtype, device=values.device), 0
    for e, high in enumerate(offsets_E.tolist()):
        y = (values[low:high].float() @ b_ENK[e].float().t()) * scale[low:high, None] * scale_EN[e]
        out[low:high] = y.to(dtype)
        low = high
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: Any, given_down: Any, offsets: Tensor, count: Tensor | None, *how: Any
    ) -> Tensor:
        weights, (dest, dest_down), products = how
        ctx.dest, ctx.dest_down, ctx.products = dest, dest_down, products
        dtype = x.dtype
        inner = x.new_empty(x.shape[0], dest_down.value().shape[1])
        if products.forward:
            owner_R = owners(x.shape[0], offsets)
            w, down = cast_weights([dest]), cast_weights([dest_down])
            rows = cast_rows([x], w.scale, owner_R, count)
            gate_up = grouped_product(rows, w.transposed(), None, offsets, dtype)
            rows = swiglu_rows(gate_up, down.scale, owner_R, count, inner, weights)
            y = grouped_product(rows, down.transposed(), None, offsets, dtype)
        else:
            gate_up = grouped_mm(x, dest.value(), offsets)
            swiglu_rows(gate_up, count=count, wide=inner, weights_R=weights)
            y = grouped_mm(inner, dest_down.value(), offsets)
        ctx.save_for_backward(x, gate_up, inner, offsets, count, weights)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        x, gate_up, inner, offsets, count, weights = ctx.saved_tensors
        g_weights = None if weights is None else torch.empty_like(weights)
        both = None if g_weights is None else (weights, g_weights)
        dest, dest_down, g = ctx.dest, ctx.dest_down, g.contiguous()
        g_gate_up = torch.empty_like(gate_up)
        if ctx.products.dgrad:
            w, down = cast_weights([dest], in_backward=True), cast_weights([dest_down], in_backward=True)
            g_inner = grouped_product(cast_rows([g], count=count), down.values, down.scale, offsets, g.dtype)
            rows = swiglu_rows_backward(g_inner, gate_up, None, count, g_gate_up, both)
            dx = grouped_product(rows, w.values, w.scale, offsets, g.dtype)
        else:
            g_inner = grouped_mm(g, dest_down.value_in_backward().transpose(1, 2), offsets)
            swiglu_rows_backward(g_inner, gate_up, None, count, g_gate_up, both)
            dx = grouped_mm(g_gate_up, dest.value_in_backward().transpose(1, 2), offsets)
        work = Product(partial(grouped_wgrad, x.detach(), g_gate_up, offsets))
        work_down = Product(partial(grouped_wgrad, inner, g, offsets))
        dw_down = dest_down.contribute(ctx, 2, work_down)
        return dx, dest.contribute(ctx, 1, work), dw_down, None, None, g_weights, None, None

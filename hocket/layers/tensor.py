"""Tensor parallelism: linear layers with weights split over ranks, between activations with tokens split over ranks.

Outside these layers each of P tensor-parallel ranks has S of a microbatch's T = P * S tokens (sequence parallelism), on
which norms, residuals, routers and experts work. A *column* layer needs all tokens and has some of the output features
of its weights: it gathers, then multiplies. A *row* layer has some of the input features: it multiplies, then sums over
ranks, and each rank keeps its tokens. So between a column and a row layer everything is local: a rank's heads, or its
columns of an MLP.

            forward                         input gradient                  weight gradient
    column  gather x [T, D], y = x @ w.T    g @ w [T, D], sum over ranks    gather x again, g.T @ x
    row     x @ w.T [T, D], sum over ranks  gather g [T, D], g @ w          g.T @ x

A `Way` says how the communication and the product of a cell overlap:

    off       no overlap
    ring      gather in pieces; multiply each piece while the next one is in flight
    pipeline  multiply in pieces; send each result while the next one is computed
    bulk      overlap the second gather of x with the product of the input gradient

Weights are managed (`runtime/weights.py`): gathered x or g is kept until the weight gradients are computed.

Note: [Pieces alternate between two queues]
A product runs in waves of tiles, as many at a time as the GPU has SMs, and the last wave of a piece is rarely full. On
one queue the next piece would begin after that wave. So every other piece runs on a second queue: its first tiles fill
the SMs that the previous piece's last wave leaves free. The transfer of a piece is ordered after its own product alone,
and both queues join before results are read or memory is freed.

Shapes: P ranks, S tokens of this rank, T = P * S, D input width, F output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.config import Config
from hocket.config.overlap import DIRECTIONS, ROLES, Method
from hocket.predict.tensor_costs import LIKE, pieces, splits_of
from hocket.runtime.comm import Group
from hocket.runtime.lanes import SideStream
from hocket.runtime.tokens import CopiedTokens, Spread, Tokens
from hocket.runtime.weights import (
    Product,
    Queued,
    queued,
    save_input,
    sum_of_products,
    weight_of,
    write_product,
)


@dataclass(frozen=True)
class Way:
    """How one layer communicates, forward and backward.

    `splits`: per direction, a divisor of the number of ranks, which is about the number of pieces; 0: all ranks.
    """

    forward: Method = "off"
    backward: Method = "off"
    splits: tuple[int, int] = (0, 0)


def ways_of(config: Config) -> dict[str, Way]:
    """The `Way` of every role of a resolved configuration; empty without tensor parallelism."""
    if config.mesh.tp == 1:
        return {}
    ways = {}
    for role in ROLES:
        forward, backward = (config.overlap.tp.way(role, direction) for direction in DIRECTIONS)
        splits = splits_of(config, role, "forward"), splits_of(config, role, "backward")
        ways[role] = Way(forward, backward, splits)
    return {**ways, **{role: ways[like] for role, like in LIKE.items()}}


class Arriving:
    """A tensor that is still being written: `get` makes the current queue wait for it. Keeps its source alive."""

    __slots__ = ("_kept", "_tensor", "_waits")

    def __init__(self, tensor: Tensor, waits: Sequence[Callable[[], object]] = (), kept: object = None) -> None:
        self._tensor, self._waits, self._kept = tensor, waits, kept

    def get(self) -> Tensor:
        for wait in self._waits:
            wait()
        self._waits, self._kept = (), None
        return self._tensor


@dataclass(frozen=True)
class TensorParallel:
    """One rank's view of its tensor-parallel group."""

    group: Group
    side: SideStream
    """The queue of communication that overlaps with products."""
    second_queue: SideStream
    """The queue of every other piece's product: see Note: [Pieces alternate between two queues]."""
    tokens: Tokens | None = None
    """Moves pieces; None: no overlap by pieces."""

    @classmethod
    def of(cls, group: Group, device: torch.device) -> TensorParallel:
        """Tensor parallelism with a group's capabilities."""
        tokens = group.tokens()
        side = tokens.side if isinstance(tokens, CopiedTokens) else SideStream(device)
        return cls(group, side, SideStream(device, priority=0), tokens)

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @contextmanager
    def alternate(self) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
        """Yields a function from piece number to queue. See Note: [Pieces alternate between two queues]."""
        self.second_queue.fork()
        try:
            yield lambda number: self.second_queue.on() if number % 2 else nullcontext()
        finally:  # after an error too, since memory that is read there is freed
            self.second_queue.mark()()

    def gather(self, x_SD: Tensor) -> Tensor:
        """The tokens of all ranks: [T, D]."""
        out_TD = x_SD.new_empty(self.size * x_SD.shape[0], *x_SD.shape[1:])
        self.group.all_gather(out_TD, x_SD.contiguous()).wait()
        return out_TD

    def sum(self, partial_TD: Tensor) -> Tensor:
        """The sum over ranks of partial sums; this rank's tokens: [S, D]."""
        out_SD = partial_TD.new_empty(partial_TD.shape[0] // self.size, *partial_TD.shape[1:])
        self.group.sum_parts(partial_TD, out_SD).wait()
        return out_SD

    def begin_gather(self, x_SD: Tensor) -> Arriving:
        """Begin a gather on the side stream."""
        out_TD = x_SD.new_empty(self.size * x_SD.shape[0], *x_SD.shape[1:])
        if self.tokens is not None and x_SD.is_cuda:
            spread = self.tokens.spread(x_SD)
            return Arriving(out_TD, (spread.whole(out_TD), spread.end))
        x_SD = x_SD.contiguous()
        with self.side.forked():
            pending = self.group.all_gather(out_TD, x_SD)
        return Arriving(out_TD, (pending.wait, self.side.mark()), x_SD)

    def begin_total(self, values: Tensor) -> Arriving:
        """Begin the sum over ranks, in place, on the side stream."""
        with self.side.forked():
            pending = self.group.all_reduce(values)
        return Arriving(values, (pending.wait, self.side.mark()))


def column_linear(x_SD: Tensor, params: Sequence[Tensor], parallel: TensorParallel, way: Way) -> tuple[Tensor, ...]:
    """`x @ p.T` for every weight [F, D], over all ranks' x: tensors of shape [T, F]."""
    return _Column.apply(x_SD, parallel, way, [_queued(x_SD, p) for p in params])


def row_linear(x_TF: Tensor, param_DF: Tensor, parallel: TensorParallel, way: Way) -> Tensor:
    """The sum over ranks of `x @ p.T`; this rank's tokens: [S, D]."""
    return _Row.apply(x_TF, parallel, way, _queued(x_TF, param_DF))


def gathered_tokens(x_SD: Tensor, parallel: TensorParallel) -> Tensor:
    """All ranks' x, [T, D], for layers whose features every rank reads; the gradient is the sum over ranks."""
    return _Moved.apply(x_SD, parallel.gather, parallel.sum)


def summed_tokens(x_TD: Tensor, parallel: TensorParallel) -> Tensor:
    """The sum over ranks of x; this rank's tokens, [S, D]. The gradient is that of all tokens."""
    return _Moved.apply(x_TD, parallel.sum, parallel.gather)


def _queued(x: Tensor, param: Tensor) -> Queued:
    weight = weight_of(param)
    assert weight is not None, "weights that are spread over tensor-parallel ranks are managed"
    return queued(x, weight)


def _wgrad(x: Arriving, g: Arriving, out_FD: Tensor, add: bool, scale: float) -> None:
    write_product(g.get().t(), x.get(), out_FD, add, scale)


def _products(a: Tensor, others: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    for b, out in zip(others, outs, strict=True):
        torch.mm(a, b, out=out)


def gathered_products(
    x_SD: Tensor, others: Sequence[Tensor], parallel: TensorParallel, splits: int, keep: bool = False
) -> tuple[list[Tensor], Arriving | None]:
    """`x @ b` over all ranks' x for every b [D, F], in pieces; and all ranks' x with `keep`."""
    assert parallel.tokens is not None
    tokens, width = x_SD.shape[0], len(others)
    outs = [x_SD.new_empty(parallel.size * tokens, b.shape[1]) for b in others]
    spread: Spread = parallel.tokens.spread(x_SD)
    order = pieces(parallel.rank, parallel.size, splits)
    whole = x_SD.new_empty(parallel.size * tokens, x_SD.shape[1]) if keep else None
    kept = None
    with parallel.alternate() as queue_of:
        for i, (low, high) in enumerate(order):
            with queue_of(i):
                a = spread.take(low, high) if i else x_SD
                if whole is not None and i == len(order) - 1:  # all received: the copy overlaps with the last product
                    kept = Arriving(whole, (spread.whole(whole),), spread)
                _products(a, others, [outs[k][low * tokens : high * tokens] for k in range(width)])
    spread.end()
    return outs, kept


def summed_products(pairs: Sequence[tuple[Tensor, Tensor]], parallel: TensorParallel, splits: int) -> Tensor:
    """The sum over ranks of `sum of a @ b`, a [T, F], b [F, D], in pieces; this rank's tokens: [S, D]."""
    assert parallel.tokens is not None
    first_TF, first_FD = pairs[0]
    tokens = first_TF.shape[0] // parallel.size
    out_SD = first_TF.new_empty(tokens, first_FD.shape[1])
    collect = parallel.tokens.collect(out_SD)
    order = pieces(parallel.rank, parallel.size, splits)[::-1]  # its own last, while the others travel
    with parallel.alternate() as queue_of:
        for i, (low, high) in enumerate(order):
            rows = slice(low * tokens, high * tokens)
            with queue_of(i):
                place, here = collect.place(low, high), [(a[rows], b) for a, b in pairs]
                sum_of_products(here, place)
                collect.send(low, high)
    collect.sum(out_SD)
    return out_SD


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel, way: Way, dests: Sequence[Queued]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.parallel, ctx.way, ctx.dests = parallel, way, dests
        x_SD, values = x.reshape(-1, x.shape[-1]), [dest.value().t() for dest in dests]
        if way.forward == "ring":
            return tuple(gathered_products(x_SD, values, parallel, way.splits[0])[0])
        x_TD = parallel.gather(x_SD)
        return tuple(x_TD @ value for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        parallel, way = ctx.parallel, ctx.way
        x_SD = x.detach().reshape(-1, x.shape[-1])
        pairs = [(g.contiguous(), dest.value_in_backward()) for g, dest in zip(grads, ctx.dests, strict=True)]
        again = parallel.begin_gather(x_SD) if way.backward != "off" else None  # overlaps with the products below
        if way.backward == "pipeline":
            dx = summed_products(pairs, parallel, way.splits[1])
        else:
            dx = parallel.sum(sum_of_products(pairs))
        if again is None:
            again = Arriving(parallel.gather(x_SD))
        for dest, (g, _) in zip(ctx.dests, pairs, strict=True):
            dest.contribute(ctx, 3, Product(partial(_wgrad, again, Arriving(g))))
        return dx.view(x.shape), None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel, way: Way, dest: Queued) -> Tensor:
        ctx.parallel, ctx.way = parallel, way
        x_TF, value_FD = x.reshape(-1, x.shape[-1]), save_input(ctx, x, dest).t()
        if way.forward == "pipeline":
            return summed_products([(x_TF, value_FD)], parallel, way.splits[0])
        return parallel.sum(x_TF @ value_FD)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        parallel, way = ctx.parallel, ctx.way
        g_SD, value_DF = g.reshape(-1, g.shape[-1]), ctx.dest.value_in_backward()
        if way.backward == "ring":
            (dx,), g_TD = gathered_products(g_SD, [value_DF], parallel, way.splits[1], keep=True)
            assert g_TD is not None
        else:
            whole_TD = parallel.gather(g_SD)
            dx, g_TD = whole_TD @ value_DF, Arriving(whole_TD)
        x_TF = Arriving(x.detach().reshape(-1, x.shape[-1]))
        ctx.dest.contribute(ctx, 3, Product(partial(_wgrad, x_TF, g_TD)))
        return dx.view(x.shape), None, None, None


class _Moved(torch.autograd.Function):
    """A gather of tokens whose backward is the sum, or vice versa."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.back(g.contiguous()), None, None


# ---------------------------------------------------------------------------------------------------------- split norms
#
# Root-mean-square norms over features that are split over tensor-parallel ranks.
#
# A token needs one number from each rank: in forward the sum of its squares, in backward the sum of the products of
# values and gradients. Both are summed over ranks. If neighbours have the same features, as they do with shared key
# heads, both sums count each feature equally often, and so does the number of features. Gradients are then partial sums
# over those neighbours, like all gradients of shared features.
#
# Shapes: B sequences, S sequence length, F features of one rank.


def split_norms(xs_BSF: Sequence[Tensor], parallel: TensorParallel, eps: float) -> tuple[Tensor, ...]:
    """Each input divided by its root mean square over the features of all ranks."""
    return _SplitNorms.apply(parallel, eps, *xs_BSF)


class _SplitNorms(torch.autograd.Function):
    """One sum over ranks in each direction, whatever the number of inputs."""

    @staticmethod
    def forward(ctx: Any, parallel: TensorParallel, eps: float, *xs: Tensor) -> tuple[Tensor, ...]:
        inverse = [torch.rsqrt(mean + eps) for mean in _means(parallel, xs, xs)]
        ys = tuple((x.float() * r).to(x.dtype) for x, r in zip(xs, inverse, strict=True))
        ctx.parallel = parallel
        ctx.save_for_backward(*ys, *inverse)
        return ys

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ys, inverse = ctx.saved_tensors[: len(gs)], ctx.saved_tensors[len(gs) :]
        parts = zip(gs, ys, inverse, _means(ctx.parallel, gs, ys), strict=True)
        return None, None, *(((g.float() - y.float() * mean) * r).to(g.dtype) for g, y, r, mean in parts)


def _means(parallel: TensorParallel, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Per pair, the mean product over the features of all ranks, fp32 [B, S, 1]."""
    sums = torch.stack([(x.float() * y.float()).sum(-1, keepdim=True) for x, y in zip(xs, ys, strict=True)])
    total = parallel.begin_total(sums).get()
    return [one / (x.shape[-1] * parallel.size) for one, x in zip(total, xs, strict=True)]

"""Tensor parallelism: linear layers whose weights are spread over ranks, between activations whose tokens are.

Outside of these layers each of P tensor-parallel ranks has S of a microbatch's T = P * S tokens (sequence parallelism):
norms, residuals, routers and experts work on them as ever. A *column* layer needs all tokens and has some of the output
features of its weights: gather, then products. A *row* layer has some of the input features: a product, then the sum
over ranks, of which each keeps its tokens. So between a column and a row layer everything is local: a rank's heads, or
its columns of an MLP.

            forward                         input gradient                  weight gradient
    column  gather x [T, D], y = x @ w.T    g @ w [T, D], sum over ranks    gather x again, g.T @ x
    row     x @ w.T [T, D], sum over ranks  gather g [T, D], g @ w          g.T @ x

How the two halves of a cell are put beside each other is a `Way`:

    off       one after the other
    ring      gather piece by piece, and multiply what has arrived while the next is on its way
    pipeline  multiply piece by piece, and hand each result out while the next is computed
    bulk      beside other things: the second gather of x beside the product of the input gradient

Weights are managed ones (`runtime/weights.py`): gathered x or g is kept until their gradients are computed.

Note: [Pieces take turns on two queues]
A product is done in waves of tiles, as many at a time as the GPU has processors, and the last wave of a piece is rarely
full. On one queue the next piece begins when that wave has ended. So every other piece is on a queue of its own: its
first tiles run where the last wave of the piece before leaves processors free. What moves a piece is ordered after its
own product alone, and both queues are one again before anybody reads results, or memory is given back.

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

    `splits`, for each direction, is a divisor of the number of ranks, and about as many pieces; 0 means all of them.
    """

    forward: Method = "off"
    backward: Method = "off"
    splits: tuple[int, int] = (0, 0)


def ways_of(config: Config) -> dict[str, Way]:
    """How every role of a resolved configuration communicates; empty without tensor parallelism."""
    if config.mesh.tp == 1:
        return {}
    ways = {}
    for role in ROLES:
        forward, backward = (config.overlap.tp.way(role, direction) for direction in DIRECTIONS)
        splits = splits_of(config, role, "forward"), splits_of(config, role, "backward")
        ways[role] = Way(forward, backward, splits)
    return {**ways, **{role: ways[like] for role, like in LIKE.items()}}


class Arriving:
    """A tensor that is being written beside what runs: `get` has the current queue wait for it. Keeps what is read."""

    __slots__ = ("_kept", "_tensor", "_waits")

    def __init__(self, tensor: Tensor, waits: Sequence[Callable[[], object]] = (), kept: object = None) -> None:
        self._tensor, self._waits, self._kept = tensor, waits, kept

    def get(self) -> Tensor:
        for wait in self._waits:
            wait()
        self._waits, self._kept = (), None
        return self._tensor


@dataclass(frozen=True)
class Tensors:
    """The tensor-parallel ranks of a microbatch, as one of them sees them."""

    group: Group
    side: SideStream
    """Where communication runs that a product runs beside."""
    twin: SideStream
    """Where every other piece's product runs: see Note: [Pieces take turns on two queues]."""
    tokens: Tokens | None = None
    """How pieces are moved. Without it nothing can be done piece by piece."""

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Tensors:
        """What a group can do."""
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
    def turns(self) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
        """Inside, gives the queue of every piece, by number. See Note: [Pieces take turns on two queues]."""
        self.twin.fork()
        try:
            yield lambda number: self.twin.on() if number % 2 else nullcontext()
        finally:  # after an error, too: memory that is read there is given back
            self.twin.mark()()

    def gather(self, x_SD: Tensor) -> Tensor:
        """The tokens of all ranks: [T, D]."""
        out_TD = x_SD.new_empty(self.size * x_SD.shape[0], *x_SD.shape[1:])
        self.group.all_gather(out_TD, x_SD.contiguous()).wait()
        return out_TD

    def sum(self, partial_TD: Tensor) -> Tensor:
        """The sum over ranks of partial sums, of which this rank keeps its tokens: [S, D]."""
        out_SD = partial_TD.new_empty(partial_TD.shape[0] // self.size, *partial_TD.shape[1:])
        self.group.sum_parts(partial_TD, out_SD).wait()
        return out_SD

    def begin_gather(self, x_SD: Tensor) -> Arriving:
        """Gather on the side."""
        out_TD = x_SD.new_empty(self.size * x_SD.shape[0], *x_SD.shape[1:])
        if self.tokens is not None and x_SD.is_cuda:
            spread = self.tokens.spread(x_SD)
            return Arriving(out_TD, (spread.whole(out_TD), spread.end))
        x_SD = x_SD.contiguous()
        with self.side.forked():
            pending = self.group.all_gather(out_TD, x_SD)
        return Arriving(out_TD, (pending.wait, self.side.mark()), x_SD)

    def begin_total(self, values: Tensor) -> Arriving:
        """The sum over ranks, in place, on the side."""
        with self.side.forked():
            pending = self.group.all_reduce(values)
        return Arriving(values, (pending.wait, self.side.mark()))


def column_linear(x_SD: Tensor, params: Sequence[Tensor], tensors: Tensors, way: Way) -> tuple[Tensor, ...]:
    """`x @ p.T` for every weight [F, D], of all ranks' x: tensors of shape [T, F]."""
    return _Column.apply(x_SD, tensors, way, [_queued(x_SD, p) for p in params])


def row_linear(x_TF: Tensor, param_DF: Tensor, tensors: Tensors, way: Way) -> Tensor:
    """The sum over ranks of their `x @ p.T`, of which each keeps its tokens: [S, D]."""
    return _Row.apply(x_TF, tensors, way, _queued(x_TF, param_DF))


def gathered_tokens(x_SD: Tensor, tensors: Tensors) -> Tensor:
    """All ranks' x, [T, D], of which each rank reads all features; the gradient is the sum over ranks."""
    return _Moved.apply(x_SD, tensors.gather, tensors.sum)


def summed_tokens(x_TD: Tensor, tensors: Tensors) -> Tensor:
    """The sum over ranks of x, of which each rank keeps its tokens, [S, D]; the gradient is that of all tokens."""
    return _Moved.apply(x_TD, tensors.sum, tensors.gather)


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
    x_SD: Tensor, others: Sequence[Tensor], tensors: Tensors, splits: int, keep: bool = False
) -> tuple[list[Tensor], Arriving | None]:
    """`x @ b` of all ranks' x for every b [D, F], piece by piece; and all ranks' x, if that is to be kept."""
    assert tensors.tokens is not None
    tokens, width = x_SD.shape[0], len(others)
    outs = [x_SD.new_empty(tensors.size * tokens, b.shape[1]) for b in others]
    spread: Spread = tensors.tokens.spread(x_SD)
    order = pieces(tensors.rank, tensors.size, splits)
    whole = x_SD.new_empty(tensors.size * tokens, x_SD.shape[1]) if keep else None
    kept = None
    with tensors.turns() as queue_of:
        for i, (low, high) in enumerate(order):
            with queue_of(i):
                a = spread.take(low, high) if i else x_SD
                if whole is not None and i == len(order) - 1:  # all is here: the copy runs beside the last product
                    kept = Arriving(whole, (spread.whole(whole),), spread)
                _products(a, others, [outs[k][low * tokens : high * tokens] for k in range(width)])
    spread.end()
    return outs, kept


def summed_products(pairs: Sequence[tuple[Tensor, Tensor]], tensors: Tensors, splits: int) -> Tensor:
    """The sum over ranks of `sum of a @ b`, a [T, F], b [F, D], piece by piece; this rank's tokens of it: [S, D]."""
    assert tensors.tokens is not None
    first_TF, first_FD = pairs[0]
    tokens = first_TF.shape[0] // tensors.size
    out_SD = first_TF.new_empty(tokens, first_FD.shape[1])
    collect = tensors.tokens.collect(out_SD)
    order = pieces(tensors.rank, tensors.size, splits)[::-1]  # its own last: the others' travel meanwhile
    with tensors.turns() as queue_of:
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
    def forward(ctx: Any, x: Tensor, tensors: Tensors, way: Way, wheres: Sequence[Queued]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.tensors, ctx.way, ctx.wheres = tensors, way, wheres
        x_SD, values = x.reshape(-1, x.shape[-1]), [where.value().t() for where in wheres]
        if way.forward == "ring":
            return tuple(gathered_products(x_SD, values, tensors, way.splits[0])[0])
        x_TD = tensors.gather(x_SD)
        return tuple(x_TD @ value for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        tensors, way = ctx.tensors, ctx.way
        x_SD = x.detach().reshape(-1, x.shape[-1])
        pairs = [(g.contiguous(), where.again()) for g, where in zip(grads, ctx.wheres, strict=True)]
        again = tensors.begin_gather(x_SD) if way.backward != "off" else None  # beside the products that follow
        if way.backward == "pipeline":
            dx = summed_products(pairs, tensors, way.splits[1])
        else:
            dx = tensors.sum(sum_of_products(pairs))
        if again is None:
            again = Arriving(tensors.gather(x_SD))
        for where, (g, _) in zip(ctx.wheres, pairs, strict=True):
            where.contribute(ctx, 3, Product(partial(_wgrad, again, Arriving(g))))
        return dx.view(x.shape), None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: Tensors, way: Way, where: Queued) -> Tensor:
        ctx.tensors, ctx.way = tensors, way
        x_TF, value_FD = x.reshape(-1, x.shape[-1]), save_input(ctx, x, where).t()
        if way.forward == "pipeline":
            return summed_products([(x_TF, value_FD)], tensors, way.splits[0])
        return tensors.sum(x_TF @ value_FD)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        tensors, way = ctx.tensors, ctx.way
        g_SD, value_DF = g.reshape(-1, g.shape[-1]), ctx.where.again()
        if way.backward == "ring":
            (dx,), g_TD = gathered_products(g_SD, [value_DF], tensors, way.splits[1], keep=True)
            assert g_TD is not None
        else:
            whole_TD = tensors.gather(g_SD)
            dx, g_TD = whole_TD @ value_DF, Arriving(whole_TD)
        x_TF = Arriving(x.detach().reshape(-1, x.shape[-1]))
        ctx.where.contribute(ctx, 3, Product(partial(_wgrad, x_TF, g_TD)))
        return dx.view(x.shape), None, None, None


class _Moved(torch.autograd.Function):
    """A gather of tokens, whose backward is the sum, or the sum, whose backward is the gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.back(g.contiguous()), None, None


# ---------------------------------------------------------------------------------------------------------- split norms
#
# Root-mean-square norms over features of which each tensor-parallel rank has some.
#
# A token needs one number of each rank, the sum of its squares: forward adds these up, and backward the products of
# values and gradients. Where neighbours have the same features, as they share heads of keys, both sums count each
# feature as often, and so does the number of features; gradients are then parts of sums over those neighbours, as all
# of theirs are.
#
# Shapes: B sequences, S sequence length, F features of one rank.


def split_norms(xs_BSF: Sequence[Tensor], tensors: Tensors, eps: float) -> tuple[Tensor, ...]:
    """Each input divided by the root of its mean square over the features of all ranks."""
    return _SplitNorms.apply(tensors, eps, *xs_BSF)


class _SplitNorms(torch.autograd.Function):
    """One sum over ranks in each direction, whatever the number of inputs."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensors, eps: float, *xs: Tensor) -> tuple[Tensor, ...]:
        inverse = [torch.rsqrt(mean + eps) for mean in _means(tensors, xs, xs)]
        ys = tuple((x.float() * r).to(x.dtype) for x, r in zip(xs, inverse, strict=True))
        ctx.tensors = tensors
        ctx.save_for_backward(*ys, *inverse)
        return ys

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ys, inverse = ctx.saved_tensors[: len(gs)], ctx.saved_tensors[len(gs) :]
        parts = zip(gs, ys, inverse, _means(ctx.tensors, gs, ys), strict=True)
        return None, None, *(((g.float() - y.float() * mean) * r).to(g.dtype) for g, y, r, mean in parts)


def _means(tensors: Tensors, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Of each pair the mean product over the features of all ranks, fp32 [B, S, 1]."""
    sums = torch.stack([(x.float() * y.float()).sum(-1, keepdim=True) for x, y in zip(xs, ys, strict=True)])
    total = tensors.begin_total(sums).get()
    return [one / (x.shape[-1] * tensors.size) for one, x in zip(total, xs, strict=True)]

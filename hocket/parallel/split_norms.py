"""Root-mean-square norms over features of which each tensor-parallel rank has some.

A token needs one number of each rank, the sum of its squares: forward adds these up, and backward the products of
values and gradients. Where neighbours have the same features, as they share heads of keys, both sums count each feature
as often, and so does the number of features; gradients are then parts of sums over those neighbours, as all of theirs
are.

Shapes: B sequences, S sequence length, F features of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.parallel.tensor import Tensors


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

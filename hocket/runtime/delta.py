"""What gated delta nets read weights for beside products: a causal convolution, and the decay of their memory.

Weights are read as in `functional.py`. Both are computed in fp32.

Shapes: B sequences, S sequence length, C channels, W tokens of a convolution, H heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.runtime.destinations import Destination, apply, keep


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


def _behind(g_BSC: Tensor, count: int, position_BS: Tensor | None) -> Tensor:
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
        p_CW, x_BSC = keep(ctx, x, where).float(), x.float()
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
            dx_BSC += _behind(g_BSC * p_CW[:, width - 1 - count], count, ctx.position)
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

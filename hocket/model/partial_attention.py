"""Attention to some of the keys that count, with what it takes to put such results together, and its gradients.

A result is the output of a softmax over the keys that were there, and `lse`, the logarithm of the sum of exponentials.
Two results for disjoint keys make one (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"):

    total = log(exp(lse) + exp(lse2))        out = out * exp(lse - total) + out2 * exp(lse2 - total)

Backward takes the gradient, output and `lse` of the whole, whichever keys it is asked about: the weight of a key is
`exp(score - lse)`, and the gradient of its score that weight times (gradient of the weight - sum of gradient * output).
So gradients of parts need no correction, and those of the queries add up.

Shapes: T tokens, H query heads, K key and value heads, N width of a head, B sequences, S sequence length, G query heads
of a key head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.model.documents import Seen, has_flash

Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, N], keys and values [T, K, N], or their gradients."""


class Met(Protocol):
    """Which keys queries meet: those of `Seen`, or a part of them."""

    @property
    def batch(self) -> int: ...
    def within(self, window: int) -> Tensor | None:
        """[1, 1, queries, keys]; None: all."""
        ...


def found(qkv: Triple, seen: Seen, window: int) -> tuple[Tensor, Tensor]:
    """What queries find in the last `window` tokens, or with 0 in all: [T, H, N], and its lse [T, H], fp32 at least."""
    return (_flash if has_flash(qkv[0]) else plain)(qkv, seen, window)


def gradients(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen, window: int) -> Triple:
    """Gradients of these queries, keys and values, from those of the whole, and its output and lse."""
    return (_flash_backward if has_flash(g) else plain_backward)(g, qkv, out, total_TH, seen, window)


# ---------------------------------------------------------------------------------------------------------- the kernel


def _how(seen: Seen, window: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Lengths, dropout and whether attention is causal; and windows."""
    lengths = (seen.ends, seen.key_ends, seen.longest, seen.key_longest)
    return (*lengths, 0.0, True), {"window_size_left": window - 1, "window_size_right": 0}


def _flash(qkv: Triple, seen: Seen, window: int) -> tuple[Tensor, Tensor]:
    how, windows = _how(seen, window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*qkv, *how, False, **windows)
    return out, lse.t()


def _flash_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen, window: int) -> Triple:
    how, windows = _how(seen, window)
    unused = torch.zeros(2, dtype=torch.uint64, device=g.device)  # of random numbers, for dropout
    given = (g, *qkv, out, total_TH.t().contiguous())
    return torch.ops.aten._flash_attention_backward(*given, *how, unused, unused, **windows)


# --------------------------------------------------------------------------------------------------------- the formula


def _heads(x_THN: Tensor, seen: Met, keys: int) -> Tensor:
    """[B, K, G, S, N], in fp32 at least; K is `keys`."""
    x_BSKGN = x_THN.reshape(seen.batch, x_THN.shape[0] // seen.batch, keys, -1, x_THN.shape[-1])
    return x_BSKGN.permute(0, 2, 3, 1, 4).to(torch.promote_types(x_THN.dtype, torch.float32))


def _tokens(x_BKGSN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, N] again."""
    return x_BKGSN.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).to(dtype)


def _scores(q_BKGSN: Tensor, k_BK1SN: Tensor, seen: Met, window: int) -> Tensor:
    scores, met = q_BKGSN @ k_BK1SN.mT * q_BKGSN.shape[-1] ** -0.5, seen.within(window)
    return scores if met is None else scores.masked_fill(~met.to(scores.device).unsqueeze(1), -torch.inf)


def plain(qkv: Triple, seen: Met, window: int) -> tuple[Tensor, Tensor]:
    """What `found` does, in fp32 on any device."""
    keys = qkv[1].shape[1]
    q, k, v = (_heads(x, seen, keys) for x in qkv)
    scores = _scores(q, k, seen, window)
    lse_BKGS1 = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse_BKGS1).exp() @ v
    return _tokens(out, qkv[0].dtype), _tokens(lse_BKGS1, lse_BKGS1.dtype).squeeze(-1)


def plain_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Met, window: int) -> Triple:
    keys, dtype = qkv[1].shape[1], g.dtype
    along_TH1 = (g.to(total_TH.dtype) * out).sum(-1, keepdim=True)
    q, k, v, g, total, along = (_heads(x, seen, keys) for x in (*qkv, g, total_TH.unsqueeze(-1), along_TH1))
    weights = (_scores(q, k, seen, window) - total).exp()
    g_scores = weights * (g @ v.mT - along) * q.shape[-1] ** -0.5
    dk, dv = (g_scores.mT @ q).sum(2, keepdim=True), (weights.mT @ g).sum(2, keepdim=True)
    dq, dk, dv = (_tokens(x, dtype) for x in (g_scores @ k, dk, dv))
    return dq, dk, dv

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

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hocket.model.documents import Seen, has_flash

Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, N], keys and values [T, K, N], or their gradients."""


@dataclass(frozen=True)
class Meeting:
    """A stretch of queries and one of keys that stand before all of them in the same document, or are their own."""

    queries: range
    """Among the tokens of the rank."""
    keys: range
    """Among the rows that came."""
    apart: int = 0
    """Tokens from the end of the keys to that of the queries; it matters with a window alone."""
    own: bool = False
    """Whether keys are those of the queries' tokens: each query sees those up to its own."""

    batch = 1

    def ahead(self, window: int) -> int:
        """How many keys before the one at its own place, if both are aligned at their ends, a query still meets."""
        return window - 1 - self.apart

    def split(self, window: int) -> tuple[Meeting, ...]:
        """The queries that meet all of the keys, and those that meet some: these are fewer than the keys."""
        all_, some = len(self.queries), max(0, len(self.keys) - 1 - self.ahead(window))
        if not 0 < some < all_:
            return (self,)
        at, first = self.queries.stop - some, self.queries.start
        return Meeting(range(first, at), self.keys, self.apart - some), replace(self, queries=range(at, at + some))

    def within(self, window: int) -> Tensor | None:
        """Which keys a query meets, [1, 1, queries, keys]; None: all."""
        if self.own:
            return torch.ones(len(self.queries), len(self.keys), dtype=torch.bool).tril().view(1, 1, -1, len(self.keys))
        if not window:
            return None
        met = torch.ones(len(self.queries), len(self.keys), dtype=torch.bool)
        return met.triu(len(self.keys) - len(self.queries) - self.ahead(window)).view(1, 1, *met.shape)


def found(qkv: Triple, seen: Seen | Meeting, window: int) -> tuple[Tensor, Tensor]:
    """What queries find in the last `window` tokens, or with 0 in all: [T, H, N], and its lse [T, H], fp32 at least."""
    return (_flash if has_flash(qkv[0]) else _plain)(qkv, seen, window)


def gradients(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen | Meeting, window: int) -> Triple:
    """Gradients of these queries, keys and values, from those of the whole, and its output and lse."""
    return (_flash_backward if has_flash(g) else _plain_backward)(g, qkv, out, total_TH, seen, window)


# ---------------------------------------------------------------------------------------------------------- the kernel


def _how(seen: Seen | Meeting, window: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Lengths, dropout and whether attention is causal; and windows. Of a meeting both are whole sequences of a batch
    of one: no lengths have to be brought to the device.

    The kernel takes a right window without an end for one of as many tokens as there are keys. That is too few for
    more queries than keys, unless no window counts at all: see `Meeting.split`.
    """
    if isinstance(seen, Meeting):
        queries, keys = len(seen.queries), len(seen.keys)
        left = seen.ahead(window) if window and seen.ahead(window) < keys - 1 else -1
        assert left < 0 or queries <= keys, f"{queries} queries and {keys} keys with a window"
        return (None, None, queries, keys, 0.0, seen.own), {"window_size_left": left}
    lengths = (seen.ends, seen.key_ends, seen.longest, seen.key_longest)
    return (*lengths, 0.0, True), {"window_size_left": window - 1, "window_size_right": 0}


def _flash(qkv: Triple, seen: Seen | Meeting, window: int) -> tuple[Tensor, Tensor]:
    how, windows = _how(seen, window)
    alone = isinstance(seen, Meeting)
    given = (x.unsqueeze(0) for x in qkv) if alone else qkv
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, *how, False, **windows)
    return (out[0], lse[0].t()) if alone else (out, lse.t())


def _flash_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen | Meeting, window: int) -> Triple:
    how, windows = _how(seen, window)
    unused = torch.zeros(2, dtype=torch.uint64, device=g.device)  # of random numbers, for dropout
    given = (g, *qkv, out, total_TH.t().contiguous())
    if not isinstance(seen, Meeting):
        return torch.ops.aten._flash_attention_backward(*given, *how, unused, unused, **windows)
    alone = (x.unsqueeze(0) for x in given)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*alone, *how, unused, unused, **windows)
    return dq[0], dk[0], dv[0]


# --------------------------------------------------------------------------------------------------------- the formula


def _heads(x_THN: Tensor, seen: Seen | Meeting, keys: int) -> Tensor:
    """[B, K, G, S, N], in fp32 at least; K is `keys`."""
    x_BSKGN = x_THN.reshape(seen.batch, x_THN.shape[0] // seen.batch, keys, -1, x_THN.shape[-1])
    return x_BSKGN.permute(0, 2, 3, 1, 4).to(torch.promote_types(x_THN.dtype, torch.float32))


def _tokens(x_BKGSN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, N] again."""
    return x_BKGSN.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).to(dtype)


def _scores(q_BKGSN: Tensor, k_BK1SN: Tensor, seen: Seen | Meeting, window: int) -> Tensor:
    scores, met = q_BKGSN @ k_BK1SN.mT * q_BKGSN.shape[-1] ** -0.5, seen.within(window)
    return scores if met is None else scores.masked_fill(~met.to(scores.device).unsqueeze(1), -torch.inf)


def _plain(qkv: Triple, seen: Seen | Meeting, window: int) -> tuple[Tensor, Tensor]:
    """What `_flash` computes, in fp32."""
    keys = qkv[1].shape[1]
    q, k, v = (_heads(x, seen, keys) for x in qkv)
    scores = _scores(q, k, seen, window)
    lse_BKGS1 = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse_BKGS1).exp() @ v
    return _tokens(out, qkv[0].dtype), _tokens(lse_BKGS1, lse_BKGS1.dtype).squeeze(-1)


def _plain_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen | Meeting, window: int) -> Triple:
    keys, dtype = qkv[1].shape[1], g.dtype
    along_TH1 = (g.to(total_TH.dtype) * out).sum(-1, keepdim=True)
    q, k, v, g, total, along = (_heads(x, seen, keys) for x in (*qkv, g, total_TH.unsqueeze(-1), along_TH1))
    weights = (_scores(q, k, seen, window) - total).exp()
    g_scores = weights * (g @ v.mT - along) * q.shape[-1] ** -0.5
    dk, dv = (g_scores.mT @ q).sum(2, keepdim=True), (weights.mT @ g).sum(2, keepdim=True)
    dq, dk, dv = (_tokens(x, dtype) for x in (g_scores @ k, dk, dv))
    return dq, dk, dv

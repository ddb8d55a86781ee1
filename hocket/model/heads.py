"""Attention of heads to keys and values, over whole or context-parallel sequences, for any implementation of heads.

Shapes: B sequences, S sequence length, T tokens of this rank, U tokens of all ranks, D hidden, H query heads, K key and
value heads, N width of a head, F features of all heads, X elements of an exchanged row.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import usable
from hocket.model.context import in_order, in_ranks, token_range
from hocket.model.documents import Context, Documents, Packing, Seen, Span, attend, has_flash, whole_sequences
from hocket.runtime.weights import Destination, Product, destination, put

# -- partial attention -------------------------------------------------------------------------------------------------
# Attention to some of the keys, the merge of such partial results, and its gradients.
#
# A partial result is the output of a softmax over some keys, and `lse`, the logarithm of the sum of exponentials. Two
# results for disjoint keys merge into one (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"):
#
#     total = log(exp(lse) + exp(lse2))        out = out * exp(lse - total) + out2 * exp(lse2 - total)
#
# Backward takes the gradient, output and `lse` of the merged result, for any subset of the keys. The weight of a key is
# `exp(score - lse)`; the gradient of its score is that weight times (gradient of the weight - sum of gradient *
# output). So gradients of parts need no correction, and those of the queries are summed.
#
# Shapes: T tokens, H query heads, K key and value heads, N width of a head, B sequences, S sequence length, G query
# heads of a key head.

Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, N], keys and values [T, K, N], or their gradients."""


def attend_partially(qkv: Triple, seen: Seen, window: int) -> tuple[Tensor, Tensor]:
    """Attention to the last `window` tokens, or with 0 to all: [T, H, N], and its lse [T, H], fp32 at least."""
    return (_flash if has_flash(qkv[0]) else plain)(qkv, seen, window)


def gradients(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen, window: int) -> Triple:
    """Gradients of queries, keys and values, from the gradient, output and lse of the merged result."""
    return (_flash_backward if has_flash(g) else plain_backward)(g, qkv, out, total_TH, seen, window)


# ---------------------------------------------------------------------------------------------------------- the kernel


def _how(seen: Seen, window: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Arguments of flash attention: lengths, dropout and causality; and windows."""
    lengths = (seen.ends, seen.key_ends, seen.longest, seen.key_longest)
    return (*lengths, 0.0, True), {"window_size_left": window - 1, "window_size_right": 0}


def _flash(qkv: Triple, seen: Seen, window: int) -> tuple[Tensor, Tensor]:
    how, windows = _how(seen, window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*qkv, *how, False, **windows)
    return out, lse.t()


def _flash_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen, window: int) -> Triple:
    how, windows = _how(seen, window)
    unused = torch.zeros(2, dtype=torch.uint64, device=g.device)  # random state of dropout
    given = (g, *qkv, out, total_TH.t().contiguous())
    return torch.ops.aten._flash_attention_backward(*given, *how, unused, unused, **windows)


# --------------------------------------------------------------------------------------------------------- the formula


def _heads(x_THN: Tensor, seen: Seen | _Part, keys: int) -> Tensor:
    """[B, K, G, S, N], in fp32 at least; K is `keys`."""
    x_BSKGN = x_THN.reshape(seen.batch, x_THN.shape[0] // seen.batch, keys, -1, x_THN.shape[-1])
    return x_BSKGN.permute(0, 2, 3, 1, 4).to(torch.promote_types(x_THN.dtype, torch.float32))


def _tokens(x_BKGSN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, N] again."""
    return x_BKGSN.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).to(dtype)


def _scores(q_BKGSN: Tensor, k_BK1SN: Tensor, seen: Seen | _Part, window: int) -> Tensor:
    scores, met = q_BKGSN @ k_BK1SN.mT * q_BKGSN.shape[-1] ** -0.5, seen.within(window)
    return scores if met is None else scores.masked_fill(~met.to(scores.device).unsqueeze(1), -torch.inf)


def plain(qkv: Triple, seen: Seen | _Part, window: int) -> tuple[Tensor, Tensor]:
    """`attend_partially` in fp32, on any device."""
    keys = qkv[1].shape[1]
    q, k, v = (_heads(x, seen, keys) for x in qkv)
    scores = _scores(q, k, seen, window)
    lse_BKGS1 = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse_BKGS1).exp() @ v
    return _tokens(out, qkv[0].dtype), _tokens(lse_BKGS1, lse_BKGS1.dtype).squeeze(-1)


def plain_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, seen: Seen | _Part, window: int) -> Triple:
    keys, dtype = qkv[1].shape[1], g.dtype
    along_TH1 = (g.to(total_TH.dtype) * out).sum(-1, keepdim=True)
    q, k, v, g, total, along = (_heads(x, seen, keys) for x in (*qkv, g, total_TH.unsqueeze(-1), along_TH1))
    weights = (_scores(q, k, seen, window) - total).exp()
    g_scores = weights * (g @ v.mT - along) * q.shape[-1] ** -0.5
    dk, dv = (g_scores.mT @ q).sum(2, keepdim=True), (weights.mT @ g).sum(2, keepdim=True)
    dq, dk, dv = (_tokens(x, dtype) for x in (g_scores @ k, dk, dv))
    return dq, dk, dv


# -- sinks -------------------------------------------------------------------------------------------------------------
# Attention with a sink: a logit of each query head that takes part in the softmax and has no value.
#
# A sink takes a share of the softmax from the keys (gpt-oss; Xiao et al. 2023, "Efficient Streaming Language Models
# with Attention Sinks", for the idea). With `lse`, the logarithm of the sum of exponentials over keys, it gives
#
#     lse'  = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')
#
# so any kernel that returns `lse` can be used. Its backward is unchanged too, since it takes output and `lse` of the
# whole (see above): `out'` and `lse'` are those of the softmax with the sink. The sink is one more score, whose weight
# `exp(sink - lse')` has no value: its gradient is that weight times minus the sum of gradient * out'.
#
# Shapes: T tokens, H query heads, K key and value heads, N width of a head.


def attend_with_sinks(
    q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, param_H: Tensor, documents: Seen, window: int = 0
) -> Tensor:
    """`documents.attend` with a sink for each query head: [T, H, N]."""
    dest = destination(q_THN, param_H)
    return _Sinks.apply(q_THN, k_TKN, v_TKN, dest.autograd_input, dest, (documents, window))


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        given: Tensor | None,
        dest: Destination,
        seen: tuple[Seen, int],
    ) -> Tensor:
        out, lse_TH = attend_partially((q, k, v), *seen)
        sink_H = dest.value().to(lse_TH.dtype)
        total_TH = torch.logaddexp(lse_TH, sink_H)
        out.mul_((lse_TH - total_TH).exp_().unsqueeze(-1))
        ctx.save_for_backward(q, k, v, out, total_TH, (sink_H - total_TH).exp_())
        ctx.dest, ctx.seen = dest, seen
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, out, total_TH, share_TH = ctx.saved_tensors
        along_TH = (g.to(total_TH.dtype) * out).sum(-1)
        dq, dk, dv = gradients(g, (q, k, v), out, total_TH, *ctx.seen)
        sinks = ctx.dest.contribute(ctx, 3, Product(partial(sink_gradient, share_TH * along_TH, g.dtype)))
        return dq, dk, dv, sinks, None, None


def sink_gradient(shares_TH: Tensor, dtype: torch.dtype, out_H: Tensor, add: bool, scale: float) -> None:
    """Write the gradient of sinks from each token's contribution."""
    put(-shares_TH.sum(0).to(dtype), out_H, add, scale)


# -- stretches ---------------------------------------------------------------------------------------------------------
# Attention of the last tokens of a sequence to all of it, in two parts: to the tokens before them, and to themselves.
#
# With fewer queries than keys, causal attention aligns both at their ends. cuDNN's attention, which is faster on Hopper
# than flash attention of documents, aligns them at their starts. But it supports each part: in the first all queries
# attend to all keys, and the second is square. The formulas above merge the results and give the gradients of the
# parts. cuDNN makes a plan for each pair of lengths. Chunks of whole sequences have few pairs; those of documents have
# ever new ones, so they use flash attention.
#
# Shapes: T queries, U keys, the last T of which are those of the queries' tokens, H query heads, K key and value heads,
# N width of a head.


@dataclass(frozen=True)
class _Part:
    """Queries with keys that all of them attend to; or with their `own` keys, causally."""

    queries: int
    keys: int
    own: bool

    batch = 1

    def within(self, window: int) -> Tensor | None:
        """Which keys a query attends to, [1, 1, queries, keys]; None: all."""
        return torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool).tril() if self.own else None


def attend_stretch(
    q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor, span: Span, whole: bool, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention of a chunk's queries to its stretch of keys, inside each document: as `attend`, [T, H, N].

    `whole`: each document is a whole sequence.
    """
    plain = whole and not window and scale in (None, q_THN.shape[-1] ** -0.5)
    if plain and has_flash(q_THN) and cudnn_supports(q_THN, k_UKN, v_UKN):
        return InParts.apply(q_THN, k_UKN, v_UKN)  # pyrefly: ignore[bad-return]
    return attend(q_THN, k_UKN, v_UKN, span, window, scale)


def attend_spans(
    q_THN: Tensor,
    k_UKN: Tensor,
    v_UKN: Tensor,
    context: Context,
    window: int = 0,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a rank's queries to the keys of all ranks, inside documents: [T, H, N]."""
    found = []
    for span in context.spans:
        q, k, v = token_range(q_THN, span.queries), token_range(k_UKN, span.keys), token_range(v_UKN, span.keys)
        if sinks is None:
            found.append(attend_stretch(q, k, v, span, context.of_sequences, window, scale))
        else:
            found.append(attend_with_sinks(q, k, v, sinks, span, window))
    return torch.cat(found)


def cudnn_supports(q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor) -> bool:
    """Whether cuDNN's attention supports both parts, and `F.scaled_dot_product_attention` would use it."""
    widths, ahead = {x.shape[-1] for x in (q_THN, k_UKN, v_UKN)}, len(k_UKN) - len(q_THN)
    if len(widths) > 1 or not widths <= {64, 128} or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and len(q_THN) > 1 and ahead != 1  # cuDNN needs more than one key


class InParts(torch.autograd.Function):
    """Attention of a document's last tokens, in two parts."""

    @staticmethod
    def forward(ctx: Any, q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor) -> Tensor:
        own, *others = _parts(q_THN, k_UKN, v_UKN)
        out_THN, lse_TH = _cudnn(*own)
        for other in others:
            out_THN, lse_TH = merged(out_THN, lse_TH, *_cudnn(*other))
        ctx.save_for_backward(q_THN, k_UKN, v_UKN, out_THN, lse_TH)
        return out_THN

    @staticmethod
    def backward(ctx: Any, g_THN: Tensor) -> Triple:  # pyrefly: ignore[bad-override]
        q, k, v, out_THN, total_TH = ctx.saved_tensors
        dk, dv, dqs = torch.empty_like(k), torch.empty_like(v), list[Tensor]()
        for given, part in _parts(q, k, v):
            dq, more_k, more_v = _cudnn_backward(g_THN, given, out_THN, total_TH, part)
            here = slice(len(k) - len(q), None) if part.own else slice(len(k) - len(q))
            dk[here], dv[here] = more_k, more_v
            dqs.append(dq)
        return (dqs[0] if len(dqs) == 1 else dqs[0] + dqs[1]), dk, dv


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Triple, _Part]]:
    """Queries with the keys of their own tokens, and with those of earlier tokens, if any."""
    queries, ahead = len(q), len(k) - len(q)
    own = ((q, k[ahead:], v[ahead:]), _Part(queries, queries, own=True))
    return [own, ((q, k[:ahead], v[:ahead]), _Part(queries, ahead, own=False))] if ahead else [own]


def merged(one_THN: Tensor, lse_TH: Tensor, other_THN: Tensor, other_lse_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys: output [T, H, N] and lse [T, H]."""
    if usable(one_THN, lse_TH) and lse_TH.dtype == torch.float32:
        from hocket.kernels.sums import merge

        lse_HT, other_lse_HT = lse_TH.t().contiguous(), other_lse_TH.t().contiguous()
        out_THN, total_HT = merge(one_THN.contiguous(), lse_HT, other_THN.contiguous(), other_lse_HT)
        return out_THN, total_HT.t()
    total_TH = torch.logaddexp(lse_TH, other_lse_TH)
    share, other_share = ((lse - total_TH).exp().unsqueeze(-1) for lse in (lse_TH, other_lse_TH))
    return (one_THN * share + other_THN * other_share).to(one_THN.dtype), total_TH


# ------------------------------------------------------------------------------------------------------- cuDNN's kernel

_unused: dict[torch.device, tuple[Tensor, Tensor]] = {}
"""cuDNN's random seed and offset of dropout, which backward needs although there is no dropout."""


def _batched(x_THN: Tensor) -> Tensor:
    """[1, H, T, N]."""
    return x_THN.transpose(0, 1).unsqueeze(0)


def _cudnn(qkv: Triple, part: _Part) -> tuple[Tensor, Tensor]:
    if not qkv[0].is_cuda:
        return plain(qkv, part, 0)
    given = (*map(_batched, qkv), None, True, 0.0, part.own)
    out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(*given)
    _unused[out.device] = seed, offset
    return out[0].transpose(0, 1), lse.view(lse.shape[1:3]).t()


def _cudnn_backward(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, part: _Part) -> Triple:
    if not g.is_cuda:
        return plain_backward(g, qkv, out, total_TH, part, 0)
    lengths = None, None, part.queries, part.keys
    total_1HT1 = total_TH.t().contiguous()[None, ..., None]
    given = (*map(_batched, (g, *qkv, out)), total_1HT1, *_unused[g.device], None, *lengths, 0.0, part.own)
    dq, dk, dv = (x[0].transpose(0, 1) for x in torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given))
    return dq, dk, dv


# -- heads -------------------------------------------------------------------------------------------------------------


class Heads(metaclass=ABCMeta):
    """Causal attention of heads, once queries, keys and values are made, and the output projection."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """The most keys that a query attends to; 0: all before it."""
    sinks: Tensor | None

    @abstractmethod
    def made(self, names: str, h_BSD: Tensor, documents: Packing | None) -> tuple[list[Tensor], Tensor | None]:
        """The named ones of queries `q`, keys `k` and values `v`, [B, S, heads, N], and gates of queries or None.

        They are normed, and rotated by positions in whole sequences; or by those in `documents`, then [1, T, heads, N].
        """

    @abstractmethod
    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        """The output projection of heads' results and gates: the summand of the residual stream."""

    def forward(self, h_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention of every position to itself and earlier ones of its sequence, in the shape of `h`.

        With `documents`, of its document; the sequences are then treated as one of B * S tokens.
        """
        made, gate = self.made("qkv", h_BSD, documents)
        batch = made[0].shape[0] if documents is None else documents.batch
        q_THN, k_TKN, v_TKN = (x.flatten(0, 1) for x in made)
        return self.projected(self.whole(q_THN, k_TKN, v_TKN, batch, documents).flatten(1), gate, batch)

    def keys(self, h_BSD: Tensor, context: Context) -> Tensor:
        """Keys and values of a rank's tokens, concatenated for the gather: [T, 2 * K * N]."""
        kv_1TKN, _ = self.made("kv", h_BSD, context)
        return torch.cat([x.flatten(2)[0] for x in kv_1TKN], -1)

    def queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries of a rank's tokens, [T, H, N], and their gates."""
        (q_1THN,), gate = self.made("q", h_BSD, context)
        return q_1THN[0], gate

    def whole(self, q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, batch: int, documents: Documents | None) -> Tensor:
        """Attention of some heads in `batch` sequences with all tokens on this rank: [T, H, N]."""
        seq = len(q_THN) // batch
        window = self.window if self.window < seq else 0
        if documents is not None or window or self.sinks is not None:
            documents = documents or whole_sequences(batch, seq, q_THN.device)
            return self._attend(q_THN, k_TKN, v_TKN, documents, window)
        q, k, v = (x.unflatten(0, (batch, seq)).transpose(1, 2) for x in (q_THN, k_TKN, v_TKN))
        grouped = self.kv_heads != self.heads
        o_BHSN = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o_BHSN.transpose(1, 2).flatten(0, 1)

    def by_head(self, kv_TX: Tensor) -> Tensor:
        """The result of `keys` by head, each head's keys next to its values: [T, K, 2, N]."""
        return kv_TX.unflatten(1, (2, self.kv_heads, -1)).transpose(1, 2)

    def attended(self, kv_UX: Tensor, q_THN: Tensor, gate_BSF: Tensor | None, context: Context, batch: int) -> Tensor:
        """Attention to the gathered keys and values, and output projection, for `batch` rows."""
        kv_U2KN = in_order(kv_UX, context).view(-1, 2, self.kv_heads, self.head_dim)
        k_UKN, v_UKN = kv_U2KN.unbind(1)
        window = self.window if self.window < context.length else 0
        found_THN = attend_spans(q_THN, k_UKN, v_UKN, context, window, sinks=self.sinks)
        return self.projected(found_THN.flatten(1), gate_BSF, batch)

    def of_own_heads(self, kv_UX: Tensor, q_UX: Tensor, context: Context) -> Tensor:
        """Attention of this rank's heads over all tokens, [U, X], from their keys and values, and queries, [U, X].

        All three are sorted by the rank of the tokens.
        """
        width = self.head_dim
        k_UKN, v_UKN = in_order(kv_UX, context).view(len(kv_UX), -1, 2, width).unbind(2)
        q_UHN = in_order(q_UX, context).view(len(q_UX), -1, width)
        o_UHN = self.whole(q_UHN, k_UKN, v_UKN, len(q_UHN) // context.length, context.documents)
        return in_ranks(o_UHN.flatten(1), context)

    def projected(self, o_TF: Tensor, gate_BSF: Tensor | None, batch: int) -> Tensor:
        """The output projection of heads' results for `batch` rows."""
        o_BSF = o_TF.unflatten(0, (batch, -1))
        return self.out(o_BSF, gate_BSF if gate_BSF is None else gate_BSF.reshape(o_BSF.shape))

    def _attend(self, q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, seen: Seen, window: int) -> Tensor:
        if self.sinks is None:
            return attend(q_THN, k_TKN, v_TKN, seen, window)
        return attend_with_sinks(q_THN, k_TKN, v_TKN, self.sinks, seen, window)

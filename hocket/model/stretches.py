"""Attention of the last tokens of a sequence to all of it, in two parts: to the tokens before them, and to themselves.

Queries that are fewer than their keys are causal with both aligned at their ends. cuDNN's attention, on Hopper faster
than flash attention of documents, aligns them at their beginnings. But each part is one that it has: all queries see
all keys of the first one, and the second one is square. `partial_attention.py` has the formulas by which two results
make one, and gradients of parts. cuDNN makes a plan for each pair of lengths that it meets: chunks of whole sequences
have few, and those of documents ever others, which go by flash attention.

Shapes: T queries, U keys, the last T of which are those of the queries' tokens, H query heads, K key and value heads, N
width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import usable
from hocket.model.context import Span
from hocket.model.documents import attend, has_flash
from hocket.model.partial_attention import Triple, plain, plain_backward


@dataclass(frozen=True)
class _Part:
    """So many queries, and keys that all of them meet; or their `own` keys, which each meets up to its own token."""

    queries: int
    keys: int
    own: bool

    batch = 1

    def within(self, window: int) -> Tensor | None:
        """Which keys a query meets, [1, 1, queries, keys]; None: all."""
        return torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool).tril() if self.own else None


def attend_stretch(
    q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor, span: Span, whole: bool, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention of a chunk's queries to its stretch of keys, inside of each document: as `attend`, [T, H, N].

    `whole` says that documents are whole sequences.
    """
    plain = whole and not window and scale in (None, q_THN.shape[-1] ** -0.5)
    if plain and has_flash(q_THN) and served(q_THN, k_UKN, v_UKN):
        return InParts.apply(q_THN, k_UKN, v_UKN)  # pyrefly: ignore[bad-return]
    return attend(q_THN, k_UKN, v_UKN, span, window, scale)


def served(q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor) -> bool:
    """Whether cuDNN's attention serves both parts: as `F.scaled_dot_product_attention` would take it."""
    widths, ahead = {x.shape[-1] for x in (q_THN, k_UKN, v_UKN)}, len(k_UKN) - len(q_THN)
    if len(widths) > 1 or not widths <= {64, 128} or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and len(q_THN) > 1 and ahead != 1  # it has none for a single key


class InParts(torch.autograd.Function):
    """Queries of the last tokens of a document."""

    @staticmethod
    def forward(ctx: Any, q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor) -> Tensor:
        own, *others = _parts(q_THN, k_UKN, v_UKN)
        out_THN, lse_TH = _found(*own)
        for other in others:
            out_THN, lse_TH = merged(out_THN, lse_TH, *_found(*other))
        ctx.save_for_backward(q_THN, k_UKN, v_UKN, out_THN, lse_TH)
        return out_THN

    @staticmethod
    def backward(ctx: Any, g_THN: Tensor) -> Triple:  # pyrefly: ignore[bad-override]
        q, k, v, out_THN, total_TH = ctx.saved_tensors
        dk, dv, dqs = torch.empty_like(k), torch.empty_like(v), list[Tensor]()
        for given, part in _parts(q, k, v):
            dq, more_k, more_v = _gradients(g_THN, given, out_THN, total_TH, part)
            here = slice(len(k) - len(q), None) if part.own else slice(len(k) - len(q))
            dk[here], dv[here] = more_k, more_v
            dqs.append(dq)
        return (dqs[0] if len(dqs) == 1 else dqs[0] + dqs[1]), dk, dv


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Triple, _Part]]:
    """Queries with keys of their own tokens, and with those before, if there are any."""
    queries, ahead = len(q), len(k) - len(q)
    own = ((q, k[ahead:], v[ahead:]), _Part(queries, queries, own=True))
    return [own, ((q, k[:ahead], v[:ahead]), _Part(queries, ahead, own=False))] if ahead else [own]


def merged(one_THN: Tensor, lse_TH: Tensor, other_THN: Tensor, other_lse_TH: Tensor) -> tuple[Tensor, Tensor]:
    """What queries find in two disjoint sets of keys, [T, H, N], and its lse, [T, H], from what they find in each."""
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
"""Two numbers that cuDNN's forward has for a dropout, of which there is none, and that its backward is given."""


def _batched(x_THN: Tensor) -> Tensor:
    """[1, H, T, N]."""
    return x_THN.transpose(0, 1).unsqueeze(0)


def _found(qkv: Triple, part: _Part) -> tuple[Tensor, Tensor]:
    if not qkv[0].is_cuda:
        return plain(qkv, part, 0)
    given = (*map(_batched, qkv), None, True, 0.0, part.own)
    out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(*given)
    _unused[out.device] = seed, offset
    return out[0].transpose(0, 1), lse.view(lse.shape[1:3]).t()


def _gradients(g: Tensor, qkv: Triple, out: Tensor, total_TH: Tensor, part: _Part) -> Triple:
    if not g.is_cuda:
        return plain_backward(g, qkv, out, total_TH, part, 0)
    lengths = None, None, part.queries, part.keys
    total_1HT1 = total_TH.t().contiguous()[None, ..., None]
    given = (*map(_batched, (g, *qkv, out)), total_1HT1, *_unused[g.device], None, *lengths, 0.0, part.own)
    dq, dk, dv = (x[0].transpose(0, 1) for x in torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given))
    return dq, dk, dv

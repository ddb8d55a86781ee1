"""Attention of the last tokens of a document to all of it, in two parts: to the tokens before them, and to themselves.

Queries that are fewer than their keys are causal with both aligned at their ends. cuDNN's attention, on Hopper faster
than flash attention of documents, aligns them at their beginnings. But each part is one that it has: all queries see
all keys of the first one, and the second one is square. `partial_attention.py` has the formulas by which two results
make one, and gradients of parts.

Shapes: T queries, U keys, the last T of which are those of the queries' tokens, H query heads, K key and value heads, N
width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.kernels.usable import usable
from hocket.model.context import Span
from hocket.model.documents import attend, has_flash
from hocket.model.partial_attention import Meeting, Triple, found, gradients, takes_parts


def attend_stretch(
    q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor, span: Span, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention of a chunk's queries to its stretch of keys, inside of each document: as `attend`, [T, H, N]."""
    whole = len(span.ends) == 2 and not window and scale in (None, q_THN.shape[-1] ** -0.5)
    if whole and has_flash(q_THN) and takes_parts(q_THN, k_UKN, v_UKN):
        return InParts.apply(q_THN, k_UKN, v_UKN)  # pyrefly: ignore[bad-return]
    return attend(q_THN, k_UKN, v_UKN, span, window, scale)


class InParts(torch.autograd.Function):
    """Queries of the last tokens of one document."""

    @staticmethod
    def forward(ctx: Any, q_THN: Tensor, k_UKN: Tensor, v_UKN: Tensor) -> Tensor:
        parts = _parts(q_THN, k_UKN, v_UKN)
        out_THN, lse_TH = found(*parts[0], 0)
        for part in parts[1:]:
            out_THN, lse_TH = merged(out_THN, lse_TH, *found(*part, 0))
        ctx.save_for_backward(q_THN, k_UKN, v_UKN, out_THN, lse_TH)
        return out_THN

    @staticmethod
    def backward(ctx: Any, g_THN: Tensor) -> Triple:  # pyrefly: ignore[bad-override]
        q, k, v, out_THN, total_TH = ctx.saved_tensors
        (own, others), ahead = _halves(_parts(q, k, v)), len(k) - len(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dq, dk[ahead:], dv[ahead:] = gradients(g_THN, own[0], out_THN, total_TH, own[1], 0)
        if others is not None:
            more, dk[:ahead], dv[:ahead] = gradients(g_THN, others[0], out_THN, total_TH, others[1], 0)
            dq = dq + more
        return dq, dk, dv


_Part = tuple[Triple, Meeting]


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[_Part]:
    """Queries with keys of their own tokens, and with those before, if there are any."""
    queries, ahead = range(len(q)), len(k) - len(q)
    own = ((q, k[ahead:], v[ahead:]), Meeting(queries, queries, own=True))
    return [own, ((q, k[:ahead], v[:ahead]), Meeting(queries, range(ahead)))] if ahead else [own]


def _halves(parts: list[_Part]) -> tuple[_Part, _Part | None]:
    return parts[0], parts[1] if len(parts) > 1 else None


def merged(one_THN: Tensor, lse_TH: Tensor, other_THN: Tensor, other_lse_TH: Tensor) -> tuple[Tensor, Tensor]:
    """What queries find in two disjoint sets of keys, [T, H, N], and its lse, [T, H], from what they find in each."""
    if usable(one_THN, lse_TH) and lse_TH.dtype == torch.float32:
        from hocket.kernels.merging import merge

        lse_HT = (x.t().contiguous() for x in (lse_TH, other_lse_TH))
        out_THN, total_HT = merge(one_THN.contiguous(), next(lse_HT), other_THN.contiguous(), next(lse_HT))
        return out_THN, total_HT.t()
    total_TH = torch.logaddexp(lse_TH, other_lse_TH)
    shares = ((lse - total_TH).exp().unsqueeze(-1) for lse in (lse_TH, other_lse_TH))
    return (one_THN * next(shares) + other_THN * next(shares)).to(one_THN.dtype), total_TH

"""Attention of models of transformers to keys and values of other ranks that come in stages (`model/ring.py`).

All exchanges start ahead of attention to the rank's own keys, so each travels beside attention to those before. In
backward gradients of a stage's keys go back beside backward of the stages before it, and the rank whose keys they are
adds them up. It is one function of autograd, so recomputation drops what came and asks for it again.

Shapes: T tokens of this rank, U rows that come in a stage, H query heads, K key and value heads, N width of one, X
elements of a row of keys and values, 2 * K * N.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.model.context import Context, among
from hocket.model.ring import Stage, back, find, met_in, met_own, nothing, stage_of
from hocket.program.transformer import STAGES
from hocket.runtime.transports import exchange_flat


def attend_in_stages(
    q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, context: Context, group: dist.ProcessGroup, window: int, scale: float
) -> Tensor:
    """Attention of the rank's own queries to keys and values of all ranks, [T, H, N]."""
    usual, window = q_THN.shape[-1] ** -0.5, window if window < context.length else 0
    q_THN = q_THN if scale == usual else q_THN * (scale / usual)
    kv_TX = torch.cat([k_TKN.flatten(1), v_TKN.flatten(1)], 1)
    return _Ring.apply(q_THN, kv_TX, context, group, window)  # pyrefly: ignore[bad-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, context: Context, group: dist.ProcessGroup, window: int) -> Tensor:  # pyrefly: ignore[bad-override]
        stages, coming = _stages(context, window), list[_Rows]()
        for stage in stages:
            sent = torch.cat([kv[:0], *(among(kv, each) for each in stage.sent)])
            coming.append(_Rows(sent, stage.rows, context.rank, group))
        out_THN, lse_TH = nothing(q)
        find(q, kv, out_THN, lse_TH, met_own(context, window), window)
        came = []
        for stage, rows in zip(stages, coming, strict=True):
            came.append(rows.wait())
            find(q, came[-1], out_THN, lse_TH, met_in(stage), window)
        found = out_THN.to(q.dtype)
        ctx.save_for_backward(q, kv, found, lse_TH, *came)
        ctx.context, ctx.group, ctx.window = context, group, window
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, kv, found, lse_TH, *came = ctx.saved_tensors
        context, window = ctx.context, ctx.window
        stages, going = _stages(context, window), list[tuple[Stage, _Rows]]()
        exact = torch.promote_types(q.dtype, torch.float32)
        sum_q, sum_kv = (torch.zeros_like(x, dtype=exact) for x in (q, kv))
        for stage, rows in reversed(list(zip(stages, came, strict=True))):
            dq, d_rows = back(g, q, rows, (found, lse_TH), met_in(stage), window)
            sum_q += dq
            taken = tuple(zip(*stage.rows, strict=True))
            going.append((stage, _Rows(d_rows, taken, context.rank, ctx.group)))
        dq, dkv = back(g, q, kv, (found, lse_TH), met_own(context, window), window)
        sum_q += dq
        sum_kv += dkv
        for stage, rows in going:
            came_back, first = rows.wait(), 0
            for tokens in stage.sent:
                among(sum_kv, tokens).add_(came_back[first : first + len(tokens)])
                first += len(tokens)
        return sum_q.to(q.dtype), sum_kv.to(kv.dtype), None, None, None


def _stages(context: Context, window: int) -> list[Stage]:
    count = min(STAGES, len(context.chunks) - 1)
    return [stage_of(context, window, count, number) for number in range(1, count + 1)]


class _Rows:
    """Rows on their way: `table[s][d]` from rank s to rank d of the group. Where none travel there is no call."""

    def __init__(self, sent: Tensor, table: tuple[tuple[int, ...], ...], rank: int, group: dist.ProcessGroup) -> None:
        send, receive = list(table[rank]), [line[rank] for line in table]
        self._sent = sent.contiguous()  # lives as long as it travels
        self._came = sent.new_empty(sum(receive), *sent.shape[1:])
        self._work: dist.Work | None = None
        if any(map(any, table)):
            self._work = exchange_flat(self._came, self._sent, receive, send, group=group, async_op=True)

    def wait(self) -> Tensor:
        """What came."""
        if self._work is not None:
            self._work.wait()
        return self._came

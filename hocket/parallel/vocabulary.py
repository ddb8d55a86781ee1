"""Embedding and cross-entropy where each tensor-parallel rank has a range of the vocabulary.

The embedding looks up the tokens of its range, and the sum over ranks, in which all other terms are zero, puts each
token's row where its sequence goes on. The loss needs two numbers per token and rank, the logarithm of the sum of
exponentials and the target's logit if it is the rank's, and never a whole row of logits.

Shapes: P ranks, T tokens of all ranks, S = T / P, D hidden, V vocabulary of one rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.kernels.usable import refuse_graph, usable
from hocket.parallel.tensor import Tensors
from hocket.runtime.weights import Weight, WgradQueue, current_queue, weight_of


def split_embedding(ids_T: Tensor, param_VD: Tensor, tensors: Tensors) -> Tensor:
    """Rows of the tokens of this rank: [S, D]. `ids` are those of all ranks."""
    weight = weight_of(param_VD)
    assert weight is not None, "an embedding that is spread over ranks is managed"
    queue = current_queue()
    if queue is None or not torch.is_grad_enabled():
        return tensors.sum(_look_up(ids_T, weight, tensors))
    return _SplitEmbedding.apply(queue.anchored(), ids_T, weight, tensors, queue)


def split_cross_entropy(logits_TV: Tensor, targets_T: Tensor, tensors: Tensors) -> Tensor:
    """Mean cross-entropy over the tokens whose target is not `IGNORED`, fp32: the same on all ranks.

    Like `kernels/loss.py` it consumes the logits. A target outside of the vocabulary makes it infinite.
    """
    return _SplitCrossEntropy.apply(logits_TV, targets_T, tensors)


def _local(ids_T: Tensor, width: int, rank: int) -> tuple[Tensor, Tensor]:
    """Which tokens are in this rank's range, and their numbers there; 0 for others."""
    mine_T = ids_T - rank * width
    inside_T = (mine_T >= 0) & (mine_T < width)
    return inside_T, mine_T.masked_fill(~inside_T, 0)


def _look_up(ids_T: Tensor, weight: Weight, tensors: Tensors) -> Tensor:
    value_VD = weight.tensor()
    inside_T, local_T = _local(ids_T, value_VD.shape[0], tensors.rank)
    return F.embedding(local_T, value_VD).masked_fill_(~inside_T.unsqueeze(-1), 0)


def _wgrad(ids_T: Tensor, g_TD: Tensor, rank: int, out_VD: Tensor) -> None:
    inside_T, local_T = _local(ids_T, out_VD.shape[0], rank)
    mine_TD = g_TD.masked_fill(~inside_T.unsqueeze(-1), 0)
    torch.ops.aten.embedding_dense_backward.out(mine_TD, local_T, out_VD.shape[0], -1, False, out=out_VD)


class _SplitEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, ids_T: Tensor, weight: Weight, tensors: Tensors, queue: WgradQueue
    ) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.weight, ctx.tensors, ctx.queue = weight, tensors, queue
        return tensors.sum(_look_up(ids_T, weight, tensors))

    @staticmethod
    def backward(ctx: Any, g_SD: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (ids_T,) = ctx.saved_tensors
        g_TD = ctx.tensors.gather(g_SD)
        ctx.queue.push(ctx.weight, partial(_wgrad, ids_T, g_TD, ctx.tensors.rank))
        return None, None, None, None, None


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, tensors: Tensors) -> Tensor:
        logits_TV = logits_TV.contiguous()
        tokens, width = logits_TV.shape
        inside_T, local_T = _local(targets_T, width, tensors.rank)
        mine_2T = torch.empty(2, tokens, dtype=torch.float32, device=logits_TV.device)
        mine_2T[0] = _log_sums(logits_TV)
        hit_T = logits_TV.gather(1, local_T.unsqueeze(1)).squeeze(1).float()
        mine_2T[1] = hit_T.masked_fill(~inside_T, -torch.inf)
        every_P2T = tensors.gather(mine_2T.unsqueeze(0))
        sums_T = every_P2T[:, 0].logsumexp(0)
        counts_T = targets_T != IGNORED
        losses_T = (sums_T - every_P2T[:, 1].amax(0)).masked_fill(~counts_T, 0)
        count = counts_T.sum().clamp(min=1)
        ctx.save_for_backward(logits_TV, torch.where(inside_T, local_T, -1), counts_T, sums_T, count)
        return losses_T.sum() / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        logits_TV, local_T, counts_T, sums_T, count = ctx.saved_tensors
        factor = g.float() / count
        if usable(logits_TV):
            from hocket.kernels.loss import turn_into_gradient

            targets_T = local_T.masked_fill(~counts_T, IGNORED)
            return turn_into_gradient(logits_TV, targets_T, sums_T, factor), None, None
        chance_TV = (logits_TV.float() - sums_T.unsqueeze(1)).exp()
        rows_N = (local_T >= 0).nonzero().squeeze(1)
        chance_TV[rows_N, local_T[rows_N]] -= 1.0
        return (chance_TV * (factor * counts_T).unsqueeze(1)).to(logits_TV.dtype), None, None


def _log_sums(logits_TV: Tensor) -> Tensor:
    if usable(logits_TV):
        from hocket.kernels.loss import log_sums

        return log_sums(logits_TV)
    return logits_TV.float().logsumexp(1)

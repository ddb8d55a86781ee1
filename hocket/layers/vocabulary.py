"""Embedding and cross-entropy with the vocabulary split over tensor-parallel ranks.

Each rank looks up the tokens of its range. The sum over ranks, whose other terms are zero, delivers each token's row to
the rank of the token. The loss exchanges two numbers per token and rank, never a row of logits: the logarithm of the
sum of exponentials, and the target's logit on the rank that has it.

Shapes: P ranks, T tokens of all ranks, S = T / P, D hidden, V vocabulary of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import IGNORED, refuse_graph, usable
from hocket.layers.functional import embedding
from hocket.layers.tensor import TensorParallel, summed_tokens
from hocket.runtime.weights import (
    Destination,
    Product,
    destination,
    put,
    write_product,
)


def split_embedding(ids_T: Tensor, param_VD: Tensor, parallel: TensorParallel) -> Tensor:
    """Rows of this rank's tokens: [S, D]. `ids` are those of all ranks."""
    inside_T, local_T = _local(ids_T, param_VD.shape[0], parallel.rank)
    return summed_tokens(embedding(local_T, param_VD).masked_fill(~inside_T.unsqueeze(-1), 0), parallel)


def split_cross_entropy(logits_TV: Tensor, targets_T: Tensor, parallel: TensorParallel) -> Tensor:
    """Mean cross-entropy over the tokens whose target is not `IGNORED`, fp32: the same on all ranks.

    Consumes the logits, like `kernels/loss.py`. A target outside the vocabulary makes the loss infinite.
    """
    return _SplitCrossEntropy.apply(logits_TV, targets_T, parallel)


def _local(ids_T: Tensor, width: int, rank: int) -> tuple[Tensor, Tensor]:
    """A mask of tokens in this rank's range, and their indices in it; 0 for others."""
    mine_T = ids_T - rank * width
    inside_T = (mine_T >= 0) & (mine_T < width)
    return inside_T, mine_T.masked_fill(~inside_T, 0)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, parallel: TensorParallel) -> Tensor:
        logits_TV = logits_TV.contiguous()
        tokens, width = logits_TV.shape
        inside_T, local_T = _local(targets_T, width, parallel.rank)
        mine_2T = torch.empty(2, tokens, dtype=torch.float32, device=logits_TV.device)
        mine_2T[0] = _log_sums(logits_TV)
        hit_T = logits_TV.gather(1, local_T.unsqueeze(1)).squeeze(1).float()
        mine_2T[1] = hit_T.masked_fill(~inside_T, -torch.inf)
        every_P2T = parallel.gather(mine_2T.unsqueeze(0))
        sums_T = every_P2T[:, 0].logsumexp(0)
        counts_T = targets_T != IGNORED
        losses_T = (sums_T - every_P2T[:, 1].amax(0)).masked_fill(~counts_T, 0)
        count = counts_T.sum().clamp(min=1)
        mine_T = torch.where(inside_T, local_T, -1).masked_fill(~counts_T, IGNORED)
        ctx.save_for_backward(logits_TV, mine_T, sums_T, count)
        return losses_T.sum() / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        logits_TV, local_T, sums_T, count = ctx.saved_tensors
        return _gradient(logits_TV, local_T, sums_T, g.float() / count), None, None


def _log_sums(logits_TV: Tensor) -> Tensor:
    if usable(logits_TV):
        from hocket.kernels.loss import log_sums

        return log_sums(logits_TV)
    return logits_TV.float().logsumexp(1)


# ------------------------------------------------------------------------------------------------------- loss in pieces
#
# Cross-entropy without all logits in memory: tokens pass through the head in pieces (`plan.loss_pieces`).
#
# Forward keeps one number per token besides the head's input. Backward makes a piece's logits again, turns them into
# their gradient, and multiplies it with the weights and with the input: so the head has four products instead of three.
# The weight gradient is summed over pieces in fp32 and held until its wgrad op. It cannot be deferred: it needs logits,
# and so the weights, which may be released before that op.
#
# Shapes: T tokens, D hidden, V vocabulary.


def loss_in_pieces(h_TD: Tensor, param_VD: Tensor, targets_T: Tensor, pieces: int) -> Tensor:
    """Mean cross-entropy over the targets that are not `IGNORED`, fp32; 0 if there is none."""
    dest = destination(h_TD, param_VD)
    return _Pieces.apply(h_TD, dest.autograd_input, dest, targets_T, pieces)  # pyrefly: ignore[bad-return]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, given: Tensor | None, dest: Destination, targets_T: Tensor, pieces: int
    ) -> Tensor:
        weight_VD, losses, sums = dest.value(), list[Tensor](), list[Tensor]()
        for h, targets in _pairs(h_TD, targets_T, pieces):
            loss, of_tokens = _loss_and_sums(h @ weight_VD.mT, targets)
            losses.append(loss)
            sums.append(of_tokens)
        count = (targets_T != IGNORED).sum().clamp(min=1)
        ctx.save_for_backward(h_TD, targets_T, torch.cat(sums), count)
        ctx.dest, ctx.pieces = dest, pieces
        return torch.stack(losses).sum() / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        h_TD, targets_T, sums_T, count = ctx.saved_tensors
        weight_VD, factor = ctx.dest.value_in_backward(), g.float() / count
        dh_TD = torch.empty_like(h_TD)
        dw_VD = torch.empty(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        several = zip(_pairs(h_TD, targets_T, ctx.pieces), sums_T.chunk(ctx.pieces), strict=True)
        into = dh_TD.chunk(ctx.pieces)
        for number, ((h, targets), sums) in enumerate(several):
            g_logits = _gradient(h @ weight_VD.mT, targets, sums, factor)
            torch.mm(g_logits, weight_VD, out=into[number])
            write_product(g_logits.mT, h, dw_VD, add=number > 0)
        return dh_TD, ctx.dest.contribute(ctx, 1, Product(partial(put, dw_VD))), None, None, None


def _pairs(h_TD: Tensor, targets_T: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and targets of each piece of tokens."""
    return zip(h_TD.chunk(pieces), targets_T.chunk(pieces), strict=True)


def _loss_and_sums(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses, and the logarithm of each token's sum of exponentials, fp32 [T]."""
    if usable(logits_TV):
        from hocket.kernels.loss import losses_and_sums

        losses_T, sums_T = losses_and_sums(logits_TV, targets_T)
        return losses_T.sum(), sums_T
    exact_TV = logits_TV.float()
    sums_T = exact_TV.logsumexp(1)
    known_T = targets_T != IGNORED
    own_T = exact_TV.gather(1, targets_T.where(known_T, 0).unsqueeze(1)).squeeze(1)
    return (sums_T - own_T).where(known_T, 0).sum(), sums_T


def _gradient(logits_TV: Tensor, targets_T: Tensor, sums_T: Tensor, factor: Tensor) -> Tensor:
    """The gradient of logits, which it overwrites on a GPU. A target of -1 is on another rank."""
    if usable(logits_TV):
        from hocket.kernels.loss import turn_into_gradient

        return turn_into_gradient(logits_TV, targets_T, sums_T, factor)
    here_T = targets_T >= 0
    found_TV = (logits_TV.float() - sums_T.unsqueeze(1)).exp_()
    found_TV.scatter_add_(1, targets_T.clamp(min=0).unsqueeze(1), -here_T.to(found_TV.dtype).unsqueeze(1))
    return found_TV.mul_(((targets_T != IGNORED) * factor).unsqueeze(1)).to(logits_TV.dtype)

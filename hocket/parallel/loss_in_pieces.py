"""Cross-entropy whose logits are never all in memory: tokens go through the head in pieces (`plan.loss_pieces`).

Forward keeps one number for each token beside the head's input. Backward makes a piece's logits once more, turns them
into their gradient, and multiplies it with the weights and with the input: so the head has four products in place of
three. The weight gradient is added up over pieces in fp32, and waits as such for the op that writes it where it
belongs: by then the weights may be gone, of which it would need logits again.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.kernels.usable import refuse_graph, usable
from hocket.runtime.destinations import Destination, destination
from hocket.runtime.weights import Product, put, write_product


def loss_in_pieces(h_TD: Tensor, param_VD: Tensor, targets_T: Tensor, pieces: int) -> Tensor:
    """Mean cross-entropy over the targets that are not `IGNORED`, fp32; 0 if there is none."""
    where = destination(h_TD, param_VD)
    return _Pieces.apply(h_TD, where.given, where, targets_T, pieces)  # pyrefly: ignore[bad-return]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, given: Tensor | None, where: Destination, targets_T: Tensor, pieces: int
    ) -> Tensor:
        weight_VD, losses, sums = where.value(), list[Tensor](), list[Tensor]()
        for h, targets in _pairs(h_TD, targets_T, pieces):
            loss, of_tokens = _loss_and_sums(h @ weight_VD.mT, targets)
            losses.append(loss)
            sums.append(of_tokens)
        count = (targets_T != IGNORED).sum().clamp(min=1)
        ctx.save_for_backward(h_TD, targets_T, torch.cat(sums), count)
        ctx.where, ctx.pieces = where, pieces
        return torch.stack(losses).sum() / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        refuse_graph()
        h_TD, targets_T, sums_T, count = ctx.saved_tensors
        weight_VD, factor = ctx.where.again(), g.float() / count
        dh_TD = torch.empty_like(h_TD)
        dw_VD = torch.empty(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        several = zip(_pairs(h_TD, targets_T, ctx.pieces), sums_T.chunk(ctx.pieces), strict=True)
        into = dh_TD.chunk(ctx.pieces)
        for number, ((h, targets), sums) in enumerate(several):
            g_logits = _gradient(h @ weight_VD.mT, targets, sums, factor)
            torch.mm(g_logits, weight_VD, out=into[number])
            write_product(g_logits.mT, h, dw_VD, add=number > 0)
        return dh_TD, ctx.where.contribute(ctx, 1, Product(partial(put, dw_VD))), None, None, None


def _pairs(h_TD: Tensor, targets_T: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and targets of each piece of tokens."""
    return zip(h_TD.chunk(pieces), targets_T.chunk(pieces), strict=True)


def _loss_and_sums(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses, and of every token the logarithm of its sum of exponentials, fp32 [T]."""
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
    """The gradient of logits, which are gone."""
    if usable(logits_TV):
        from hocket.kernels.loss import turn_into_gradient

        return turn_into_gradient(logits_TV, targets_T, sums_T, factor)
    known_T = targets_T != IGNORED
    found_TV = (logits_TV.float() - sums_T.unsqueeze(1)).exp_()
    found_TV.scatter_add_(1, targets_T.where(known_T, 0).unsqueeze(1), -known_T.to(found_TV.dtype).unsqueeze(1))
    return found_TV.mul_((known_T * factor).unsqueeze(1)).to(logits_TV.dtype)

"""Losses of a router beside the load-balancing loss of a microbatch, which `routing.py` has.

They are made of logits by plain autograd, and attached to the weights of the chosen experts: that backward adds their
gradient.

Note: [What a balance loss is over]
The load-balancing loss is `E * sum over experts of f * p`: f an expert's share of the rows, which has no gradient, and
p its mean score. What they are taken over is `model.aux_loss_over`.

- microbatch: both over the tokens of one microbatch of one data-parallel rank (Fedus et al. 2021).
- sequence: both over one sequence, and the mean over the step's sequences (DeepSeek-AI 2024, "DeepSeek-V3", eq. 17 to
  20).
- batch: both over all tokens of a step, of all microbatches and data-parallel ranks (Qiu et al. 2025, "Demons in the
  detail").

Padding has no part in any of them. The last two, and the z-loss, are sums over what weighs the same wherever it is in
the step: see Note: [The mean over the tokens of a step] in `model/documents.py`.

For the gradient of `batch` f has to be known in the first backward of a step, before later microbatches have been
routed. No single pass has it. Qiu et al. add up what has been routed so far in the step, over ranks: one more
all-reduce in each layer and microbatch, and a first microbatch that balances itself alone. Here f is that of the step
before: loads of a whole step are summed over ranks anyway, when it ends (`engine/balance.py`). So nothing more is
communicated, f is over a whole batch in every microbatch, and it is one update old. In a run's first step it is even,
which has no gradient. The gradient is exact for that f.

Shapes: T tokens, E experts, K top_k, B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.parallel.routing import Routing

Weighs = tuple[Tensor | float, Tensor | float]


def attach_losses(
    probs_TK: Tensor,
    logits_TE: Tensor,
    routing: Routing,
    config: ModelConfig,
    load_E: Tensor | None,
    tokens: tuple[Tensor | None, int, Weighs],
) -> Tensor:
    """`probs` with the router's other losses attached.

    `load_E` are shares of a step's rows, for the loss over a batch. `tokens` are (which of these are no padding, None:
    all; how many sequences they are; what each token, and each sequence, weighs in means over the step).
    """
    if not torch.is_grad_enabled():
        return probs_TK
    real_T, sequences, weighs = tokens
    losses = []
    if config.z_loss:
        losses.append(config.z_loss * z_loss(logits_TE, real_T, weighs[0]))
    if config.aux_loss and config.aux_loss_over != "microbatch":
        shares_TE = shares_of(logits_TE, config)
        if real_T is not None:
            shares_TE = shares_TE * real_T.unsqueeze(1)
        if config.aux_loss_over == "batch":
            assert load_E is not None
            balance = (shares_TE.sum(0) * load_E).sum() * config.experts * weighs[0]
        else:
            balance = _by_sequence(shares_TE, routing, real_T, sequences) * weighs[1]
        losses.append(config.aux_loss * balance)
    return _AttachLoss.apply(probs_TK, torch.stack(losses).sum()) if losses else probs_TK


def over_batch(config: ModelConfig) -> bool:
    """Whether routers need to know the loads of the step before."""
    return config.aux_loss > 0 and config.aux_loss_over == "batch"


def shares_of(logits_TE: Tensor, config: ModelConfig) -> Tensor:
    """Scores, those of a token summing to 1."""
    if config.router == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)


def z_loss(logits_TE: Tensor, real_T: Tensor | None, weighs: Tensor | float) -> Tensor:
    """The sum over tokens, each of which `weighs` so much, of the square of the log of the softmax's denominator.

    Zoph et al. 2022, "ST-MoE", eq. 5.
    """
    squares_T = logits_TE.logsumexp(-1).square()
    if real_T is not None:
        squares_T = squares_T * real_T
    return squares_T.sum() * weighs


def _by_sequence(shares_TE: Tensor, routing: Routing, real_T: Tensor | None, sequences: int) -> Tensor:
    """The sum over sequences of the load-balancing loss of each."""
    assert routing.chosen_TK is not None
    experts, top_k = shares_TE.shape[1], routing.top_k
    real_T1 = torch.ones_like(shares_TE[:, :1]) if real_T is None else real_T.unsqueeze(1).to(shares_TE.dtype)
    rows_TE = torch.zeros_like(shares_TE).scatter_(1, routing.chosen_TK.long(), real_T1.expand(-1, top_k).contiguous())
    by_sequence = [x.view(sequences, -1, x.shape[1]).sum(1) for x in (rows_TE, shares_TE, real_T1)]
    rows_BE, sums_BE, tokens_B1 = by_sequence
    return ((rows_BE * sums_BE).sum(1) * experts / (top_k * tokens_B1.squeeze(1).square()).clamp(min=1)).sum()


class _AttachLoss(torch.autograd.Function):
    """Identity on weights whose backward also begins that of a loss."""

    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return probs_TK.view_as(probs_TK)

    @staticmethod
    def backward(ctx: Any, g_TK: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        return g_TK, ctx.like

"""Routing: which experts a token goes to, with which weights, and in which order its rows leave the rank.

Rows in *sent* order stand by global expert, then token, so they are already split by destination; *slots* number
token t's choice j as t * top_k + j. `dispatch.py` moves rows by what is decided here.

Shapes: T tokens, E global experts, K top_k, R rows (T * K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels.usable import usable
from hocket.parallel.per_rank import Pairs, pair


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the tokens of one microbatch go. Holds integers and a logged number, nothing with a graph."""

    inverse_R: Tensor
    """Row of every slot among rows by global expert, then token; int32. With one copy per expert the sent row."""
    counts_E: Tensor
    """Rows for every global expert, int64, on the device."""
    tokens: int
    top_k: int
    aux: Tensor | None = None
    """The load-balancing loss, before its coefficient: 1 when the load is even. None without one."""
    pairs: Pairs | None = None
    """The rows that are sent, if they are one per token and rank; otherwise there is one for every slot."""
    chosen_TK: Tensor | None = None
    """The experts of every token, in the order of its slots: what a routing must know to be kept."""
    counted_E: Tensor | None = None
    """`counts_E` without the rows of padding; None if there is none."""

    @property
    def load_E(self) -> Tensor:
        """Rows for every global expert that count for its load, int64."""
        return self.counts_E if self.counted_E is None else self.counted_E

    def by_rank(self, ranks: int) -> Routing:
        """The same choices, with one copy of a token per expert-parallel rank that has some of them."""
        return replace(self, pairs=pair(self.inverse_TK, self.counts_E, ranks))

    @property
    def inverse_TK(self) -> Tensor:
        """`inverse_R` by token and choice."""
        return self.inverse_R.view(self.tokens, self.top_k)

    @property
    def room(self) -> int:
        """Rows of the tensor of sent rows."""
        return self.tokens * self.top_k if self.pairs is None else self.pairs.room


def route(
    logits_TE: Tensor,
    config: ModelConfig,
    bias_E: Tensor | None = None,
    aux_scale: float = 1.0,
    kept: Routing | None = None,
    real_T: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """Choose `top_k` experts per token. Returns their weights, fp32 [T, K], and the routing.

    Scores are a softmax or sigmoid of fp32 logits. `bias_E` is added to the scores for the choice only
    (Wang et al. 2024, "Auxiliary-loss-free load balancing"). The load-balancing loss (Fedus et al. 2021,
    "Switch Transformers", eq. 4) is attached to the returned weights: their backward adds its gradient, times
    `config.aux_loss * aux_scale`. Give `aux_scale = 1 / microbatches`, the factor of the main loss. With `kept`, a
    routing of the same tokens, nothing is chosen: the weights of its choices are computed once more; likewise where
    `config.routing` is even, and the choice no score's. Tokens that are not in `real_T` are padding: they are routed,
    and not counted.
    """
    assert logits_TE.dtype is torch.float32, "router scores are computed in fp32"
    if config.routing == "even" and kept is None:
        kept = _even(len(logits_TE), config, logits_TE.device, real_T)
    if usable(logits_TE) and len(logits_TE) and real_T is None:
        from hocket.kernels.routing import choose, weigh

        factor = config.aux_loss * aux_scale
        if kept is not None:
            assert kept.chosen_TK is not None
            return weigh(logits_TE, kept.chosen_TK.int(), kept.counts_E, config, factor), kept
        probs_TK, inverse_R, counts_E, chosen_TK, aux = choose(logits_TE, bias_E, config, factor)
        aux = aux if config.aux_loss else None
        return probs_TK, Routing(inverse_R, counts_E, len(logits_TE), config.top_k, aux, chosen_TK=chosen_TK)
    scores_TE = logits_TE.softmax(-1) if config.router == "softmax" else logits_TE.sigmoid()
    if kept is None:
        choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
        kept = placed(choice_TE.topk(config.top_k, dim=-1).indices, config.experts, real_T)
    assert kept.chosen_TK is not None
    probs_TK: Tensor = _Select.apply(scores_TE, kept.chosen_TK)
    if config.normalize_top_k:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
    if config.route_scale != 1.0:
        probs_TK = probs_TK * config.route_scale
    if config.aux_loss:
        aux = _balance_loss(scores_TE, kept.load_E, config, real_T)
        probs_TK = _AttachLoss.apply(probs_TK, aux, config.aux_loss * aux_scale)
        kept = replace(kept, aux=aux.detach())
    return probs_TK, kept


def _even(tokens: int, config: ModelConfig, device: torch.device, real_T: Tensor | None) -> Routing:
    """The routing that gives every expert as many rows, and a token's to experts that are far apart."""
    if real_T is None:
        return _even_once(tokens, config, device)
    return placed(_spread(tokens, config, device), config.experts, real_T)


@cache
def _even_once(tokens: int, config: ModelConfig, device: torch.device) -> Routing:
    """Kept for good: recorded steps read it again in each replay."""
    return placed(_spread(tokens, config, device), config.experts)


def _spread(tokens: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Experts [T, K], distinct ones for each token."""
    first_T1 = torch.arange(tokens, device=device).unsqueeze(1)
    apart_K = torch.arange(config.top_k, device=device) * (config.experts // config.top_k)
    return (first_T1 + apart_K) % config.experts


def placed(chosen_TK: Tensor, experts: int, real_T: Tensor | None = None) -> Routing:
    """The routing that sends every token to the experts chosen for it, of so many."""
    sorted_R, order_R = chosen_TK.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts + 1, device=chosen_TK.device)
    counts_E, counted_E = torch.searchsorted(sorted_R, bounds).diff(), None
    if real_T is not None:
        counted_R = chosen_TK.masked_fill(~real_T.unsqueeze(1), experts).flatten().sort().values
        counted_E = torch.searchsorted(counted_R, bounds).diff()
    inverse_R = inverse_of(order_R)
    tokens, top_k = chosen_TK.shape
    return Routing(inverse_R, counts_E, tokens, top_k, chosen_TK=chosen_TK, counted_E=counted_E)


def _balance_loss(scores_TE: Tensor, counts_E: Tensor, config: ModelConfig, real_T: Tensor | None) -> Tensor:
    """Experts times the sum over experts of (share of the rows) times (mean score, scores summing to 1).

    Of tokens that are no padding; 0 if all are.
    """
    if config.router == "sigmoid":
        scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    tokens, experts = scores_TE.shape
    if not tokens:
        return scores_TE.sum()  # 0, and no gradient, where a mean would be no number
    if real_T is not None:
        count = real_T.sum().clamp(min=1)
        mean_E = (scores_TE * real_T.unsqueeze(1)).sum(0) / count
        return (mean_E * (counts_E.float() / (count * config.top_k))).sum() * experts
    share_E = counts_E.float() / (tokens * config.top_k)
    return (scores_TE.mean(0) * share_E).sum() * experts


def balance_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The next bias: `rate` more for experts that got fewer rows than the mean, `rate` less for the others.

    `counts_E` are the rows of a whole step, summed over microbatches and data-parallel ranks.
    """
    below_E = counts_E.sum() - counts_E * len(counts_E)  # of the mean, in whole numbers: it may be no fp32 number
    return bias_E + rate * torch.sign(below_E).to(bias_E.dtype)


def inverse_of(order_R: Tensor) -> Tensor:
    """Where each number from 0 on stands in `order`, a permutation of them; int32."""
    inverse_R = torch.empty(order_R.shape, dtype=torch.int32, device=order_R.device)
    inverse_R[order_R] = torch.arange(order_R.numel(), dtype=torch.int32, device=order_R.device)
    return inverse_R


class _Select(torch.autograd.Function):
    """Scores of the chosen experts. They are distinct, so backward scatters without adding."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, expert_TK: Tensor) -> Tensor:
        ctx.save_for_backward(expert_TK)
        ctx.experts = scores_TE.shape[1]
        return scores_TE.gather(1, expert_TK)

    @staticmethod
    def backward(ctx: Any, g_TK: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (expert_TK,) = ctx.saved_tensors
        return g_TK.new_zeros(g_TK.shape[0], ctx.experts).scatter_(1, expert_TK, g_TK), None


class _AttachLoss(torch.autograd.Function):
    """Identity on `x` whose backward also gives `loss` the gradient `factor`: `x` carries the loss along."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return g, torch.full((), ctx.factor, dtype=torch.float32, device=g.device), None

"""Routing: which experts a token goes to, with which weights, and in which order its rows leave the rank.

Rows in *sent* order are sorted by global expert, then token, so they are already split by destination. *Slots* number
token t's choice j as t * top_k + j. `dispatch.py` moves rows accordingly.

Shapes: T tokens, E global experts, K top_k, R rows (T * K).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels import usable
from hocket.layers.rows import Pairs, pair
from hocket.layers.tensor import Arriving


class CountExchange(Protocol):
    """The methods of a group of expert-parallel ranks that the exchange of counts needs."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def all_counts(self, counts: Tensor) -> Tensor:
        """All-gather the counts [P, ...] of rows that each rank sends to each: [P, P, ...]."""
        ...


class Sharers(NamedTuple):
    """The ranks that share the tokens of a microbatch."""

    total: Callable[[Tensor], Arriving] = Arriving
    """Begins the sum over these ranks of integers that each has for its own tokens; the argument is not changed."""
    count: int = 1


ALONE = Sharers()


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the tokens of one microbatch go. Holds integers and sums of scores, without a graph."""

    inverse_R: Tensor
    """Row of every slot among rows by global expert, then token; int32. With one copy per expert the sent row."""
    counts_E: Tensor
    """Rows for every global expert, int64, on the device."""
    tokens: int
    top_k: int
    pairs: Pairs | None = None
    """The sent rows, if there is one per token and rank; None: one per slot."""
    chosen_TK: Tensor | None = None
    """The experts of every token, in the order of its slots. Needed to reuse the routing."""
    counted_E: Tensor | None = None
    """`counts_E` without padding; None if there is none."""
    total_E: Arriving | None = None
    """`load_E` summed over `Sharers`, for the load-balancing loss; None if that has no gradient."""
    scores_E: Tensor | None = None
    """Sums of this rank's scores, normalized to 1 per token, fp32: the other factor of that loss."""

    @property
    def aux(self) -> Tensor | None:
        """A rank's part of the load-balancing loss, before its coefficient; None if it has no gradient.

        Experts times the sum over experts of (share of the rows) times (mean score). Over all ranks, 1 if balanced.
        """
        if self.total_E is None or self.scores_E is None:
            return None
        rows_E = self.total_E.get().float()
        rows = rows_E.sum().clamp(min=1)
        return (self.scores_E * rows_E).sum() * (len(rows_E) * self.top_k) / rows.square()

    def settle(self) -> None:
        """Make the current queue wait for `total_E`. The op that routed must call this before it ends."""
        if self.total_E is not None:
            self.total_E.get()

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
        """Allocated rows of the sent tensor."""
        return self.tokens * self.top_k if self.pairs is None else self.pairs.room


def route(
    logits_TE: Tensor,
    config: ModelConfig,
    bias_E: Tensor | None = None,
    aux_scale: float = 1.0,
    kept: Routing | None = None,
    real_T: Tensor | None = None,
    sharers: Sharers = ALONE,
) -> tuple[Tensor, Routing]:
    """Choose `top_k` experts per token. Returns their weights, fp32 [T, K], and the routing.

    Scores are a softmax or sigmoid of fp32 logits. `bias_E` is added to the scores for the choice only, also of groups
    (Wang et al. 2024, "Auxiliary-loss-free load balancing"). The load-balancing loss (Fedus et al. 2021, "Switch
    Transformers", eq. 4) is attached to the returned weights: their backward adds its gradient, times
    `config.aux_loss * aux_scale`. Pass `aux_scale = 1 / microbatches`, the factor of the main loss. The loss is over
    all tokens of a microbatch, which `sharers` share: the sum of their rows begins here, and the caller must call
    `Routing.settle` before its op ends. Other losses are attached by `attach_losses`.

    With `kept`, an earlier routing of the same tokens, only the weights of its choices are computed; likewise if
    `config.routing` is even. Tokens not in `real_T` are padding: they are routed, but not counted.
    """
    assert logits_TE.dtype is torch.float32, "router scores are computed in fp32"
    if config.routing == "even" and kept is None:
        kept = _even(len(logits_TE), config, logits_TE.device, real_T)
    factor = config.aux_loss * aux_scale if config.aux_loss_over == "microbatch" else 0.0
    balanced = factor > 0 and torch.is_grad_enabled()
    if usable(logits_TE) and len(logits_TE) and real_T is None:
        return _by_kernels(logits_TE, config, bias_E, factor if balanced else 0.0, kept, sharers)
    scores_TE = logits_TE.softmax(-1) if config.router == "softmax" else logits_TE.sigmoid()
    if kept is None:
        choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
        choice_TE = _within_groups(choice_TE, config)
        kept = placed(choice_TE.topk(config.top_k, dim=-1).indices, config.experts, real_T)
    total_E = sharers.total(kept.load_E) if balanced else None
    assert kept.chosen_TK is not None
    probs_TK: Tensor = _Select.apply(scores_TE, kept.chosen_TK)
    if config.normalize_top_k:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
    if config.route_scale != 1.0:
        probs_TK = probs_TK * config.route_scale
    if total_E is not None:
        shares_TE = scores_TE if config.router == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True)
        probs_TK = _AttachBalance.apply(probs_TK, shares_TE, total_E, real_T, factor * config.top_k)
        counted_TE = shares_TE.detach() if real_T is None else shares_TE.detach() * real_T.unsqueeze(1)
        kept = replace(kept, total_E=total_E, scores_E=counted_TE.sum(0))
    return probs_TK, kept


def _within_groups(choice_TE: Tensor, config: ModelConfig) -> Tensor:
    """Scores for the choice of experts: those outside a token's best groups become -inf.

    A group's score is its best one (DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2), or the sum of its best two
    (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    """
    if config.route_groups == config.route_top_groups:
        return choice_TE
    grouped_TGE = choice_TE.unflatten(1, (config.route_groups, -1))
    best = 2 if config.route_group_score == "best_two" else 1
    rating_TG = grouped_TGE.topk(best, dim=-1).values.sum(-1)
    chosen_TG = rating_TG.topk(config.route_top_groups, dim=-1).indices
    out_TG = torch.ones_like(rating_TG, dtype=torch.bool).scatter_(1, chosen_TG, False)
    return grouped_TGE.masked_fill(out_TG.unsqueeze(-1), float("-inf")).flatten(1)


def _by_kernels(
    logits_TE: Tensor, config: ModelConfig, bias_E: Tensor | None, factor: float, kept: Routing | None, sharers: Sharers
) -> tuple[Tensor, Routing]:
    """`route` on a GPU, without padding."""
    from hocket.kernels.routing import choose, weigh

    begin = sharers.total if factor else Arriving
    if kept is not None:
        assert kept.chosen_TK is not None
        total_E = begin(kept.load_E)
        probs_TK = weigh(logits_TE, kept.chosen_TK.int(), total_E, config, factor, sharers.count)
        return probs_TK, replace(kept, total_E=total_E)
    chosen = choose(logits_TE, bias_E, config, factor, begin, sharers.count)
    probs_TK, inverse_R, counts_E, chosen_TK, scores_E, total_E = chosen
    routing = Routing(inverse_R, counts_E, len(logits_TE), config.top_k, chosen_TK=chosen_TK)
    return probs_TK, replace(routing, total_E=total_E, scores_E=scores_E) if factor else routing


def _even(tokens: int, config: ModelConfig, device: torch.device, real_T: Tensor | None) -> Routing:
    """A routing with equally many rows per expert, and distant experts for each token."""
    if real_T is None:
        return _even_once(tokens, config, device)
    return placed(_spread(tokens, config, device), config.experts, real_T)


@cache
def _even_once(tokens: int, config: ModelConfig, device: torch.device) -> Routing:
    """Cached for ever, because recorded steps read it in each replay."""
    return placed(_spread(tokens, config, device), config.experts)


def _spread(tokens: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Experts [T, K], distinct for each token."""
    first_T1 = torch.arange(tokens, device=device).unsqueeze(1)
    apart_K = torch.arange(config.top_k, device=device) * (config.experts // config.top_k)
    return (first_T1 + apart_K) % config.experts


def placed(chosen_TK: Tensor, experts: int, real_T: Tensor | None = None) -> Routing:
    """The routing of tokens to given experts, of so many."""
    sorted_R, order_R = chosen_TK.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts + 1, device=chosen_TK.device)
    counts_E, counted_E = torch.searchsorted(sorted_R, bounds).diff(), None
    if real_T is not None:
        counted_R = chosen_TK.masked_fill(~real_T.unsqueeze(1), experts).flatten().sort().values
        counted_E = torch.searchsorted(counted_R, bounds).diff()
    inverse_R = inverse_of(order_R)
    tokens, top_k = chosen_TK.shape
    return Routing(inverse_R, counts_E, tokens, top_k, chosen_TK=chosen_TK, counted_E=counted_E)


def balance_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The next bias: `rate` more for experts with fewer rows than the mean, `rate` less for the others.

    `counts_E` are the rows of a whole step, summed over microbatches and data-parallel ranks.
    """
    below_E = counts_E.sum() - counts_E * len(counts_E)  # below the mean, in integers: fp32 might not hold the mean
    return bias_E + rate * torch.sign(below_E).to(bias_E.dtype)


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse of the permutation `order`, int32."""
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


class _AttachBalance(torch.autograd.Function):
    """Identity on weights whose backward also gives scores, summing to 1, the gradient of the load-balancing loss.

    Only backward reads the rows of all ranks' tokens, so forward need not wait for them.
    """

    @staticmethod
    def forward(
        ctx: Any, probs_TK: Tensor, shares_TE: Tensor, total_E: Arriving, real_T: Tensor | None, factor: float
    ) -> Tensor:
        ctx.tokens, ctx.total_E, ctx.real_T, ctx.factor = shares_TE.shape[0], total_E, real_T, factor
        return probs_TK.view_as(probs_TK)

    @staticmethod
    def backward(ctx: Any, g_TK: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        rows_E = ctx.total_E.get().float()
        rows = rows_E.sum().clamp(min=1)
        g_TE = (rows_E * (ctx.factor * len(rows_E)) / rows.square()).expand(ctx.tokens, -1)
        return g_TK, g_TE if ctx.real_T is None else g_TE * ctx.real_T.unsqueeze(1), None, None, None


# -------------------------------------------------------------------------------------------------------- router losses
#
# Losses of a router besides the load-balancing loss of a microbatch.
#
# Plain autograd computes them from logits. They are attached to the weights of the chosen experts, whose backward adds
# their gradient.
#
# Note: [The scope of the balance loss]
# The load-balancing loss is `E * sum over experts of f * p`: f is an expert's share of the rows, without a gradient,
# and p its mean score. `model.aux_loss_over` selects the tokens of both.
#
# - microbatch: the tokens of one microbatch of one data-parallel rank (Fedus et al. 2021).
# - sequence: one sequence; the loss is the mean over the step's sequences (DeepSeek-AI 2024, "DeepSeek-V3", eq. 17 to
#   20).
# - batch: all tokens of a step, of all microbatches and data-parallel ranks (Qiu et al. 2025, "Demons in the detail").
#
# Padding is excluded from all of them. The last two, and the z-loss, are sums with weights that are equal throughout
# the step: see Note: [The mean over the tokens of a step] in `model/documents.py`.
#
# The gradient of `batch` needs f in the first backward of a step, before later microbatches have been routed. Qiu et
# al. use the sum over ranks of what the step has routed so far: one more all-reduce per layer and microbatch, and a
# first microbatch balanced by itself. Here f is that of the previous step, whose loads are summed over ranks at its end
# anyway (`engine/experts.py`). So no communication is added, f is over a whole batch in every microbatch, and it is one
# update old. In a run's first step it is even, which has no gradient. The gradient is exact for that f.
#
# Shapes: T tokens, E experts, K top_k, B sequences.


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

    `load_E` are the shares of a step's rows, for the loss over a batch. `tokens` are (mask of tokens that are not
    padding, None: all; number of sequences; the weights of each token and each sequence in means over the step).
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
    """Whether routers need the loads of the previous step."""
    return config.aux_loss > 0 and config.aux_loss_over == "batch"


def shares_of(logits_TE: Tensor, config: ModelConfig) -> Tensor:
    """Scores, normalized to 1 per token."""
    if config.router == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)


def z_loss(logits_TE: Tensor, real_T: Tensor | None, weighs: Tensor | float) -> Tensor:
    """The sum over tokens, weighted by `weighs`, of the square of the log of the softmax's denominator.

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
    """Identity on weights whose backward also starts that of a loss."""

    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return probs_TK.view_as(probs_TK)

    @staticmethod
    def backward(ctx: Any, g_TK: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        return g_TK, ctx.like

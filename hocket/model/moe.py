"""The mixture-of-experts layer, cut at the seams where rows leave and enter the rank.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, E global experts, L local experts,
F width of an expert, K experts per token, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.model.documents import Documents
from hocket.model.layers import Mlp, attention_of, gated
from hocket.model.parameters import new_weight
from hocket.parallel.dispatch import Splits, exchange_counts, from_experts, send_rows, to_experts, unpermute
from hocket.parallel.linears import WHOLE, Linears
from hocket.parallel.placed import PlacedSplits
from hocket.parallel.routing import Routing, route
from hocket.runtime.biases import add_bias_by_expert
from hocket.runtime.functional import grouped_linear, score, shift
from hocket.runtime.norms import add_rms_norm


@dataclass(frozen=True)
class ExpertPlace:
    """Which of a layer's experts are here, and how rows get to the others."""

    size: int = 1
    """Expert-parallel ranks."""
    rank: int = 0
    """This one's number among them."""
    per_rank: bool = False
    """Rows are sent once per token and rank, not once per expert (`parallel/per_rank.py`)."""


ONLY = ExpertPlace()
"""All experts are here."""


class Router(nn.Module):
    """Scores tokens against experts, in fp32 whatever the compute dtype: a close choice must not flip by rounding."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = new_weight(config.experts, config.hidden)
        self.b_logits = new_weight(config.experts) if config.router_bias else None
        # Set by the trainer between steps (`parallel.routing.balance_bias`), never by a gradient.
        bias = torch.zeros(config.experts, dtype=torch.float32, device="meta") if config.bias_rate else None
        self.register_buffer("bias", bias)

    def forward(self, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """`h`, for those who read it next, and logits, fp32 [T, E]."""
        h_TD, logits_TE = score(h_TD, self.weight)
        return h_TD, logits_TE if self.b_logits is None else shift(logits_TE, self.b_logits)


class Experts(nn.Module):
    """The experts that live on this rank, stacked as the grouped GEMM wants them: input width before output width."""

    def __init__(self, config: ModelConfig, local: int) -> None:
        super().__init__()
        self.config = config
        self.w_gate_up = new_weight(local, config.hidden, 2 * config.expert_ffn)
        self.w_down = new_weight(local, config.expert_ffn, config.hidden)
        self.b_gate_up = new_weight(local, 2 * config.expert_ffn) if config.expert_bias else None
        self.b_down = new_weight(local, config.hidden) if config.expert_bias else None

    def forward(self, rows_RD: Tensor, offsets_L: Tensor, count: Tensor | None = None) -> Tensor:
        """SwiGLU of each expert on its rows, given and returned in grouped order; the first `count`, or all."""
        gate_up_RF = grouped_linear(rows_RD, self.w_gate_up, offsets_L)
        if self.b_gate_up is not None:
            gate_up_RF = add_bias_by_expert(gate_up_RF, self.b_gate_up, offsets_L)
        out_RD = grouped_linear(gated(gate_up_RF, self.config, count), self.w_down, offsets_L)
        return out_RD if self.b_down is None else add_bias_by_expert(out_RD, self.b_down, offsets_L)


class MoELayer(nn.Module):
    """A transformer layer with routed experts.

    Its parts are `forward_attn`, `forward_experts` and `forward_unpermute`; between the first two and the
    last two the rows travel to their experts' ranks and back. `aux_scale` multiplies the coefficient of the
    load-balancing loss, to match the factor of the main loss (1 / microbatches).
    """

    def __init__(
        self, config: ModelConfig, ep: ExpertPlace, aux_scale: float, linears: Linears = WHOLE, number: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.ep = ep
        self.aux_scale = aux_scale
        self.attn_norm = new_weight(config.hidden)
        self.attn = attention_of(config, linears, number)
        self.ffn_norm = new_weight(config.hidden)
        self.shared = Mlp(config, config.shared_ffn, linears, shared=True) if config.shared_ffn else None
        self.router = Router(config)
        self.experts = Experts(config, config.experts // ep.size)

    def forward_attn(
        self, x_BSD: Tensor, documents: Documents | None = None, kept: Routing | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Routing]:
        """Attention, norm, shared expert, router and permutation.

        Returns (rows [R, D] in sent order, residual [B, S, D], shared [B, S, D] or None, probs [T, K] or None if they
        are in the rows, routing). The normed hidden state has three readers, whose order fixes the bits of its
        gradient: shared expert, router, permutation. When forward runs once more, `kept` is the first one's routing.
        """
        c = self.config
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.attn_norm, c.norm_eps)
        x1_BSD, h_BSD = add_rms_norm(x_BSD, self.attn(h_BSD, documents), self.ffn_norm, c.norm_eps)
        shared_BSD = self.shared(h_BSD) if self.shared is not None else None
        h_TD, real_T = h_BSD.flatten(0, 1), documents.real_T if documents is not None else None
        if real_T is not None:
            real_T = self.attn.linears.own(real_T)
        h_TD, logits_TE = self.router(h_TD)
        probs_TK, routing = route(logits_TE, c, self.router.bias, self.aux_scale, kept, real_T, self.attn.linears)
        if self.ep.per_rank and kept is None:
            routing = routing.by_rank(self.ep.size)
        rows, probs = send_rows(h_TD, probs_TK, routing)
        routing.settle()
        return rows, x1_BSD, shared_BSD, probs, routing

    def forward_experts(self, rows_RD: Tensor, splits: Splits | PlacedSplits) -> Tensor:
        """The local experts on the rows received, given and returned in received order."""
        grouped_RD, weights = to_experts(rows_RD, splits)
        return from_experts(self.experts(grouped_RD, splits.offsets_L, splits.count), weights, splits)

    def forward_unpermute(
        self,
        rows_RD: Tensor,
        residual_BSD: Tensor,
        shared_BSD: Tensor | None,
        probs_TK: Tensor | None,
        routing: Routing,
    ) -> Tensor:
        """Weighted sum of the rows that came back, in sent order, plus shared expert and residual."""
        return unpermute(rows_RD, probs_TK, residual_BSD, shared_BSD, routing)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        assert self.ep.size == 1, "with experts on other ranks, a plan must move the rows between the parts"
        rows_RD, residual_BSD, shared_BSD, probs_TK, routing = self.forward_attn(x_BSD, documents)
        rows_RD = self.forward_experts(rows_RD, exchange_counts(routing, None))
        return self.forward_unpermute(rows_RD, residual_BSD, shared_BSD, probs_TK, routing)

"""The mixture-of-experts layer, cut at the seams where rows leave and enter the rank.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, E global experts, L local experts,
F width of an expert, K experts per token, R rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.layers.dispatch import exchange_counts
from hocket.layers.functional import add_bias_by_expert, grouped_linear, score, shift
from hocket.layers.linears import WHOLE, Linears, new_weight
from hocket.layers.norms import add_rms_norm
from hocket.layers.routing import Routing, Sharers, Weighs, attach_losses, over_batch, route
from hocket.layers.tensor import Arriving
from hocket.model.documents import Documents, Packing
from hocket.model.layers import Mlp, TransformerLayer, gated
from hocket.model.parts import ExpertPlace, Routed, RoutedParts


class Router(nn.Module):
    """Scores tokens against experts, in fp32 whatever the compute dtype: rounding must not flip a close choice."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = new_weight(config.experts, config.hidden)
        self.b_logits = new_weight(config.experts) if config.router_bias else None
        # Updated by the engine between steps (`layers.routing.balance_bias`), never by a gradient.
        bias = torch.zeros(config.experts, dtype=torch.float32, device="meta") if config.bias_rate else None
        self.register_buffer("bias", bias)
        self.over_batch = over_batch(config)
        self.share: Tensor | None = None
        """Each expert's share of the previous step's rows, fp32 [E], for the load-balancing loss over a batch."""

    def forward(self, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """`h`, which later readers must use, and logits, fp32 [T, E]."""
        h_TD, logits_TE = score(h_TD, self.weight)
        return h_TD, logits_TE if self.b_logits is None else shift(logits_TE, self.b_logits)


class Experts(nn.Module):
    """The local experts, stacked for the grouped GEMM: input width before output width."""

    def __init__(self, config: ModelConfig, local: int, linears: Linears = WHOLE) -> None:
        super().__init__()
        self.config, self.linears = config, linears
        self.w_gate_up = new_weight(local, config.hidden, 2 * config.expert_ffn)
        self.w_down = new_weight(local, config.expert_ffn, config.hidden)
        self.b_gate_up = new_weight(local, 2 * config.expert_ffn) if config.expert_bias else None
        self.b_down = new_weight(local, config.hidden) if config.expert_bias else None

    def forward(
        self, rows_RD: Tensor, offsets_L: Tensor, count: Tensor | None = None, weights_R: Tensor | None = None
    ) -> Tensor:
        """SwiGLU of each expert on its rows, in grouped order; only the first `count` rows, or all.

        With `weights`, fp32, each row is multiplied by its weight.
        """
        gate = partial(gated, config=self.config)
        if self.b_gate_up is None or self.b_down is None:
            return self.linears.experts(rows_RD, self.w_gate_up, self.w_down, offsets_L, (count, weights_R), gate)
        assert weights_R is None, "a bias after the second product is weighted too"
        gate_up_RF = add_bias_by_expert(grouped_linear(rows_RD, self.w_gate_up, offsets_L), self.b_gate_up, offsets_L)
        inner_RF = gate(gate_up_RF, count)
        return add_bias_by_expert(grouped_linear(inner_RF, self.w_down, offsets_L), self.b_down, offsets_L)


class MoELayer(RoutedParts, TransformerLayer):
    """A transformer layer with routed experts.

    Its parts are `forward_attn`, `forward_experts` and `forward_unpermute`; rows travel to their experts' ranks after
    the first and return after the second. `aux_scale` multiplies the coefficient of the load-balancing loss, to match
    the factor of the main loss (1 / microbatches).
    """

    def __init__(
        self, config: ModelConfig, ep: ExpertPlace, aux_scale: float, linears: Linears = WHOLE, number: int = 0
    ) -> None:
        super().__init__(config, linears, number)
        self.ep = ep
        self.weighted = ep.weighted and not config.expert_bias
        self.aux_scale = aux_scale
        self.shared = Mlp(config, config.shared_ffn, linears, shared=True) if config.shared_ffn else None
        self.router = Router(config)
        self.experts = Experts(config, config.experts // ep.size, linears)

    def added(self, x_BSD: Tensor, more_BSD: Tensor, documents: Packing | None, kept: Routing | None = None) -> Routed:
        """Norm, shared expert, router and permutation, from the residual stream and attention's output.

        The normed hidden state has three readers, whose order determines the bits of its gradient: shared expert,
        router, permutation.
        """
        c, sharing = self.config, 1 if self.group is None else self.group.size
        x1_BSD, h_BSD = add_rms_norm(x_BSD, more_BSD, self.ffn_norm, *self.norm)
        shared_BSD = self.shared(h_BSD) if self.shared is not None else None
        h_TD, real_T = h_BSD.flatten(0, 1), documents.real_T if documents is not None else None
        if real_T is not None:
            real_T = self.attn.linears.own(real_T)
        h_TD, logits_TE = self.router(h_TD)
        # Gradients are averaged over context-parallel ranks, as over data-parallel ones.
        sharers = Sharers(self.total, self.attn.linears.size * sharing)
        probs_TK, routing = route(logits_TE, c, self.router.bias, self.aux_scale * sharing, kept, real_T, sharers)
        if c.z_loss or c.aux_loss_over != "microbatch":
            weighs = self._weighs(documents, len(h_TD) * self.attn.linears.size, len(x_BSD))
            tokens = real_T, len(x_BSD), weighs
            probs_TK = attach_losses(probs_TK, logits_TE, routing, c, self.router.share, tokens)
        rows, weights, probs, routing = self.sent(h_TD, probs_TK, routing, kept)
        routing.settle()
        return rows, x1_BSD, shared_BSD, weights, probs, routing

    def total(self, rows_E: Tensor) -> Arriving:
        """Begins the sum of rows over all ranks with tokens of the microbatch; `rows` is not changed."""
        total_E = self.attn.linears.total(rows_E)
        if self.group is None:
            return total_E
        shared_E = total_E.get().clone()
        return Arriving(shared_E, (self.group.all_reduce(shared_E).wait,))

    def _weighs(self, documents: Packing | None, tokens: int, sequences: int) -> Weighs:
        """The weights of each of a microbatch's tokens, and of its sequences, in means over the step."""
        if documents is not None and documents.weights_2 is not None:
            return documents.weights_2[0], documents.weights_2[1]
        assert documents is None or documents.real_T is None or not torch.is_grad_enabled(), "padding was not counted"
        return self.aux_scale / tokens, self.aux_scale / sequences

    def computed(self, rows_RD: Tensor, splits: Any, weights_R: Tensor | None) -> Tensor:
        return self.experts(rows_RD, splits.offsets_L, splits.count, weights_R)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        assert self.ep.size == 1, "with experts on other ranks, a plan must move the rows between the parts"
        rows_RD, residual_BSD, shared_BSD, weights_R, probs_TK, routing = self.forward_attn(x_BSD, documents)
        rows_RD = self.forward_experts(rows_RD, weights_R, exchange_counts(routing, None))
        return self.forward_unpermute(rows_RD, residual_BSD, shared_BSD, probs_TK, routing)

"""Layers whose sequences context-parallel ranks share, cut where keys and values are gathered.

Keys and values are made first. While they travel, queries are made; attention then has all of its document. In backward
the gradients of all ranks' keys and values are summed, each rank's part where it belongs, while those of queries go on.

Shapes: B sequences, S tokens of each on this rank, T tokens of this rank (B * S), U tokens of all ranks, D hidden,
X elements of keys and values that travel, H query heads, N width of one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.model.context import Context
from hocket.model.layers import DenseLayer
from hocket.model.moe import ExpertPlace, MoELayer
from hocket.model.transformer import Chunk, Layer
from hocket.parallel.linears import Linears
from hocket.parallel.routing import Routing
from hocket.runtime.comm import Group, Pending
from hocket.runtime.norms import add_rms_norm, rms_norm


class _Cut:
    """The parts before attention, of either kind of layer."""

    config: ModelConfig
    group: Group
    attn: Any
    attn_norm: nn.Parameter

    def forward_keys(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What travels, [T, X], the input of attention and the residual stream, [B, S, D]."""
        if self.config.norms == "after":
            return self.attn.keys(x_BSD, context), x_BSD, x_BSD
        norm = self.config.norm_eps, self.config.norm_plus_one
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.attn_norm, *norm)
        return self.attn.keys(h_BSD, context), h_BSD, x_BSD

    def forward_kv(self, kv_TX: Tensor) -> tuple[Tensor, Pending]:
        """Those of all ranks, rank after rank: [U, X]."""
        out_UX = kv_TX.new_empty(self.group.size * kv_TX.shape[0], kv_TX.shape[1])
        return out_UX, self.group.all_gather(out_UX.view(-1), kv_TX.view(-1))

    def backward_kv(self, grad_UX: Tensor) -> tuple[Tensor, Pending]:
        """The sum over ranks of this rank's part: [T, X]."""
        out_TX = grad_UX.new_empty(grad_UX.shape[0] // self.group.size, grad_UX.shape[1])
        return out_TX, self.group.sum_parts(grad_UX, out_TX)

    def forward_queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, N], and their gates or None."""
        return self.attn.queries(h_BSD, context)

    def _attended(self, kv_UX: Tensor, q_THN: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context) -> Tensor:
        return self.attn.attended(kv_UX, q_THN, gate, context, x_BSD.shape[0])


class CutDenseLayer(_Cut, DenseLayer):
    """A dense layer on context-parallel ranks."""

    def __init__(self, config: ModelConfig, linears: Linears, number: int, group: Group) -> None:
        super().__init__(config, linears, number)
        self.config, self.group = config, group

    def forward_attn(  # pyrefly: ignore[bad-override]
        self, kv_UX: Tensor, q_THN: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context
    ) -> Tensor:
        """The residual stream behind attention."""
        out_BSD = self._attended(kv_UX, q_THN, gate, x_BSD, context)
        return x_BSD + (rms_norm(out_BSD, self.attn_norm, *self.norm) if self.after else out_BSD)


class CutMoELayer(_Cut, MoELayer):
    """A layer with routed experts on context-parallel ranks."""

    def __init__(
        self, config: ModelConfig, ep: ExpertPlace, aux_scale: float, linears: Linears, number: int, group: Group
    ) -> None:
        super().__init__(config, ep, aux_scale, linears, number)
        self.group = group

    def forward_attn(  # pyrefly: ignore[bad-override]
        self,
        kv_UX: Tensor,
        q_THN: Tensor,
        gate: Tensor | None,
        x_BSD: Tensor,
        context: Context,
        kept: Routing | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Routing]:
        """As that of `MoELayer`."""
        return self.routed(x_BSD, self._attended(kv_UX, q_THN, gate, x_BSD, context), context, kept)


class SharedChunk(Chunk):
    """A chunk whose sequences the ranks of a group share."""

    def __init__(self, group: Group, *sizes: Any, **how: Any) -> None:
        """All but `group` is as for `Chunk`."""
        self._group = group
        super().__init__(*sizes, **how)

    def _layer(self, number: int, experts: tuple[ExpertPlace, float] | None, linears: Linears) -> Layer:
        if experts is not None:
            return CutMoELayer(self.config, *experts, linears, number, self._group)
        return CutDenseLayer(self.config, linears, number, self._group)

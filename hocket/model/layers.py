"""Attention, the gated MLP, and the dense layer made of them.

Shapes: B sequences, S sequence length, D hidden, H query heads, K key and value heads, N width of a head,
F width of an MLP.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.kernels import usable
from hocket.layers.functional import linear, shift
from hocket.layers.linears import WHOLE, Linears, Role, new_weight
from hocket.layers.norms import add_rms_norm, norm_rotate, rms_norm, rotate
from hocket.layers.routing import Routing
from hocket.model.delta_net import DeltaNet
from hocket.model.documents import Documents, Packing
from hocket.model.heads import Heads
from hocket.model.latent_attention import LatentAttention
from hocket.model.parts import LayerParts
from hocket.model.rotary import rope_of, table_of


class Attention(Heads, nn.Module):
    """Causal grouped-query attention with rotary positions, without norm and residual."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE, number: int = 0) -> None:
        """`number` is the layer's."""
        super().__init__()
        self.config, self.linears, self.rope = config, linears, rope_of(config, number)
        self.window = config.windows()[number]
        self.heads, self.head_dim = config.heads // linears.size, config.head_dim
        self.kv_heads = max(1, config.kv_heads // linears.size)
        queries, keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        made = 2 * queries if config.attn_gate else queries
        self.wq = new_weight(made, config.hidden)
        """With a gate, each head's queries come before its gates."""
        self.wk = new_weight(keys, config.hidden)
        self.wv = new_weight(keys, config.hidden)
        self.wo = new_weight(config.hidden, queries)
        if config.qk_norm:
            if config.qk_norm_over == "whole":
                self.q_wide_norm, self.k_wide_norm = new_weight(queries), new_weight(keys)
            else:
                self.q_norm, self.k_norm = new_weight(config.head_dim), new_weight(config.head_dim)
        if config.qkv_bias:
            self.bq, self.bk, self.bv = new_weight(made), new_weight(keys), new_weight(keys)
        if config.o_bias:
            self.bo = new_weight(config.hidden)
        self.sinks = new_weight(self.heads) if config.sinks else None

    def made(self, names: str, h_BSD: Tensor, documents: Packing | None) -> tuple[list[Tensor], Tensor | None]:
        c, norm = self.config, (self.config.norm_eps, self.config.norm_plus_one)
        weights, turning = [getattr(self, f"w{x}") for x in names], names.replace("v", "")
        made = dict(zip(names, self.linears.columns("qkv", h_BSD, weights), strict=True))
        gate = None
        if c.qkv_bias:
            made = {x: shift(value, getattr(self, f"b{x}")) for x, value in made.items()}
        if c.attn_gate and "q" in made:
            both = made["q"].unflatten(2, (self.heads, 2, c.head_dim)).unbind(3)
            made["q"], gate = (x.flatten(2) for x in both)
        if c.qk_norm and c.qk_norm_over == "whole":
            scales = [getattr(self, f"{x}_wide_norm") for x in turning]
            made |= zip(turning, self.linears.norms([made[x] for x in turning], scales, *norm), strict=True)
        batch, seq = made[names[0]].shape[:2]
        sizes = (batch, seq) if documents is None else (1, batch * seq)  # either may be 0, so -1 could not be inferred
        made = {x: v.reshape(*sizes, v.shape[-1] // c.head_dim, c.head_dim) for x, v in made.items()}
        table = self._table(seq, documents, h_BSD.device)
        for x in turning:
            scale = getattr(self, f"{x}_norm") if c.qk_norm and c.qk_norm_over == "head" else None
            made[x] = _turned(made[x], scale, norm, table)
        return list(made.values()), gate

    def _table(self, seq: int, documents: Packing | None, device: torch.device) -> Tensor | None:
        """Cosines and sines of the tokens' positions; None without positions."""
        return None if self.rope is None else table_of(self.rope, seq, documents, device)

    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        if gate_BSF is not None:
            o_BSF = o_BSF * gate_BSF.sigmoid()
        out_BSD = self.linears.row("proj", o_BSF, self.wo)
        return shift(out_BSD, self.bo) if self.config.o_bias else out_BSD


def _turned(x_BSHN: Tensor, scale_N: Tensor | None, norm: tuple[float, bool], table: Tensor | None) -> Tensor:
    """Heads with their norm and rotary positions, if they have them."""
    if table is None:
        return x_BSHN if scale_N is None else rms_norm(x_BSHN, scale_N, *norm)
    return rotate(x_BSHN, table) if scale_N is None else norm_rotate(x_BSHN, scale_N, norm[0], table, norm[1])


def attention_of(
    config: ModelConfig, linears: Linears = WHOLE, number: int = 0
) -> Attention | LatentAttention | DeltaNet:
    """The attention of a model's layer, or its replacement."""
    if config.deltas()[number]:
        return DeltaNet(config, linears)
    return (LatentAttention if config.latent else Attention)(config, linears, number)


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(h)) * up(h))`, gate and up stacked in one weight."""

    def __init__(self, config: ModelConfig, width: int, linears: Linears = WHOLE, shared: bool = False) -> None:
        super().__init__()
        self.config, self.linears = config, linears
        self.roles: tuple[Role, Role] = ("shared_fc1", "shared_fc2") if shared else ("fc1", "fc2")
        width //= linears.size
        self.w_gate_up = new_weight(2 * width, config.hidden)
        self.w_down = new_weight(config.hidden, width)
        self.w_gate = new_weight(1, config.hidden) if shared and config.shared_gate else None

    def forward(self, h_BSD: Tensor) -> Tensor:
        out_BSD = self.linears.mlp(self.roles, h_BSD, self.w_gate_up, self.w_down, partial(gated, config=self.config))
        return out_BSD if self.w_gate is None else out_BSD * linear(h_BSD, self.w_gate).sigmoid()


def gated(
    gate_up: Tensor, count: Tensor | None = None, weights: Tensor | None = None, *, config: ModelConfig
) -> Tensor:
    """The activation of a model's gates and ups, the two halves of the last dimension: `silu(gate) * up`, or limited.

    Only the first `count` rows, int32 [1], are valid; None: all. With `weights`, fp32, each row is multiplied by its
    weight.
    """
    return swiglu(gate_up, count, config.swiglu_limit, config.swiglu_alpha, weights)


def swiglu(
    gate_up: Tensor,
    count: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """`silu(gate) * up`; with a limit above 0 `gate * sigmoid(alpha * gate) * (up + 1)` of clamped gates and ups.

    The latter is gpt-oss's: gates are clamped to at most `limit`, ups to plus and minus it. See `gated` for the rest.
    """
    if usable(gate_up):
        from hocket.kernels.swiglu import swiglu

        return swiglu(gate_up, count, limit, alpha, weights)
    gate, up = gate_up.chunk(2, -1)
    if limit:
        # On a view, because the bits of torch's CPU sigmoid depend on an element's position in contiguous memory.
        bounded = gate_up.clamp(max=limit)
        gate, up = (alpha * bounded).chunk(2, -1)[0], bounded.chunk(2, -1)[1].clamp(min=-limit)
        out = F.silu(gate) * (up + 1) / alpha
    else:
        out = F.silu(gate) * up
    return out if weights is None else (out * weights.unsqueeze(-1)).to(out.dtype)


class TransformerLayer(LayerParts, nn.Module):
    """Attention and norms, which layers with a dense MLP and with experts share."""

    def __init__(self, config: ModelConfig, linears: Linears, number: int) -> None:
        super().__init__()
        self.config = config
        self.norm, self.after = (config.norm_eps, config.norm_plus_one), config.norms == "after"
        self.attn_norm = new_weight(config.hidden)
        self.attn = attention_of(config, linears, number)
        self.ffn_norm = new_weight(config.hidden)

    def normed(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        if self.after:
            return x_BSD, x_BSD
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.attn_norm, *self.norm)
        return h_BSD, x_BSD


class DenseLayer(TransformerLayer):
    """A transformer layer with a dense MLP. Its parts are `forward_attn` and `forward_mlp`."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE, number: int = 0) -> None:
        super().__init__(config, linears, number)
        self.mlp = Mlp(config, config.ffn, linears)

    def added(self, x_BSD: Tensor, more_BSD: Tensor, documents: Packing | None, kept: Routing | None = None) -> Tensor:
        """`x + attention(norm(x))`, or `x + norm(attention(x))`."""
        return x_BSD + (rms_norm(more_BSD, self.attn_norm, *self.norm) if self.after else more_BSD)

    def forward_mlp(self, x_BSD: Tensor) -> Tensor:
        """`x + mlp(norm(x))`, or `x + norm(mlp(x))`."""
        if self.after:
            return x_BSD + rms_norm(self.mlp(x_BSD), self.ffn_norm, *self.norm)
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.ffn_norm, *self.norm)
        return x_BSD + self.mlp(h_BSD)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        return self.forward_mlp(self.forward_attn(x_BSD, documents))

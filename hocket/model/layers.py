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
from hocket.layers.linears import WHOLE, Linears, Role
from hocket.layers.norms import add_rms_norm, norm_rotate, rms_norm, rotate
from hocket.model.cache import KeyValueCache
from hocket.model.context import Context
from hocket.model.delta_net import DeltaNet
from hocket.model.documents import Documents
from hocket.model.heads import Heads
from hocket.model.latent_attention import LatentAttention
from hocket.model.parameters import new_weight
from hocket.model.rotary import rope_of, rotary_table


class Attention(nn.Module, Heads):
    """Causal grouped-query attention with rotary positions, without norm and residual."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE, number: int = 0) -> None:
        """`number` is that of the layer."""
        super().__init__()
        self.config, self.linears, self.rope = config, linears, rope_of(config, number)
        self.window = config.windows()[number]
        self.heads, self.head_dim = config.heads // linears.size, config.head_dim
        self.kv_heads = max(1, config.kv_heads // linears.size)
        queries, keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        made = 2 * queries if config.attn_gate else queries
        self.wq = new_weight(made, config.hidden)
        """With a gate each head's queries stand before its gates."""
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
        self.cache: KeyValueCache | None = None
        """Of the tokens before, while text is generated; None where a sequence is whole."""

    def remember(self) -> None:
        """Begin to keep keys and values for the tokens behind, in an empty cache."""
        self.cache = KeyValueCache()

    def forward(self, h_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention of every position to itself and those before it in its sequence, in the shape of `h`.

        With `documents`, to those in its document; then the sequences are taken for one of B * S tokens up to there.
        """
        c = self.config
        q, k, v = self.linears.columns("qkv", h_BSD, (self.wq, self.wk, self.wv))
        if c.qkv_bias:
            q, k, v = shift(q, self.bq), shift(k, self.bk), shift(v, self.bv)
        q, gate = self._gated(q)
        if c.qk_norm and c.qk_norm_over == "whole":
            q, k = self.linears.norms((q, k), (self.q_wide_norm, self.k_wide_norm), c.norm_eps, c.norm_plus_one)
        batch, seq, _ = q.shape
        sizes = (batch, seq) if documents is None else (1, batch * seq)
        q_BSHN = q.view(*sizes, self.heads, c.head_dim)
        k_BSKN, v_BSKN = (x.view(*sizes, self.kv_heads, c.head_dim) for x in (k, v))
        first = self.cache.length if self.cache is not None else 0
        position_T = None if documents is None else documents.position_T
        q_BSHN, k_BSKN = self._turned(seq, position_T, first, q=q_BSHN, k=k_BSKN)
        if self.cache is not None:
            given = (x.squeeze(0) for x in (q_BSHN, k_BSKN, v_BSKN))
            o_SHN = self.cache.attend(*given, window=self.window, sink_H=self.sinks)
            return self.out(o_SHN.flatten(1).unsqueeze(0), gate)
        q_THN, k_TKN, v_TKN = (x.flatten(0, 1) for x in (q_BSHN, k_BSKN, v_BSKN))
        o_THN = self.whole(q_THN, k_TKN, v_TKN, batch, documents)
        return self.out(o_THN.reshape(batch, seq, self.heads * c.head_dim), gate)

    def keys(self, h_BSD: Tensor, context: Context) -> Tensor:
        """Keys and values of a rank's tokens, side by side: what is gathered, [T, 2 * K * N]."""
        c = self.config
        k, v = self.linears.columns("qkv", h_BSD, (self.wk, self.wv))
        if c.qkv_bias:
            k, v = shift(k, self.bk), shift(v, self.bv)
        if c.qk_norm and c.qk_norm_over == "whole":
            (k,) = self.linears.norms((k,), (self.k_wide_norm,), c.norm_eps, c.norm_plus_one)
        k_1TKN = k.reshape(1, -1, self.kv_heads, c.head_dim)
        (k_1TKN,) = self._turned(context.length, context.position_T, k=k_1TKN)
        return torch.cat([k_1TKN.flatten(2)[0], v.flatten(0, 1)], -1)

    def queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries of a rank's tokens, [T, H, N], and the gates of what they find."""
        c = self.config
        (q,) = self.linears.columns("qkv", h_BSD, (self.wq,))
        q, gate = self._gated(shift(q, self.bq) if c.qkv_bias else q)
        if c.qk_norm and c.qk_norm_over == "whole":
            (q,) = self.linears.norms((q,), (self.q_wide_norm,), c.norm_eps, c.norm_plus_one)
        q_1THN = q.reshape(1, -1, self.heads, c.head_dim)
        (q_1THN,) = self._turned(context.length, context.position_T, q=q_1THN)
        return q_1THN[0], gate

    def _gated(self, q_BSF: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, and the gates that stand behind those of each head."""
        if not self.config.attn_gate:
            return q_BSF, None
        q, gate = (x.flatten(2) for x in q_BSF.unflatten(2, (self.heads, 2, self.config.head_dim)).unbind(3))
        return q, gate

    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        """What attention adds to the residual stream."""
        if gate_BSF is not None:
            o_BSF = o_BSF * gate_BSF.sigmoid()
        out_BSD = self.linears.row("proj", o_BSF, self.wo)
        return shift(out_BSD, self.bo) if self.config.o_bias else out_BSD

    def _turned(self, seq: int, position_T: Tensor | None, first: int = 0, **heads_BSHN: Tensor) -> tuple[Tensor, ...]:
        """Queries `q` or keys `k` with positions and norms: `position_T` among `seq`, or all behind `first`."""
        c, rope, table = self.config, self.rope, None
        if rope is not None:
            device = next(iter(heads_BSHN.values())).device
            table = rotary_table(first + seq, rope.width, rope.theta, device, rope.settings)[:, first:]
            table = table if position_T is None else table.index_select(1, position_T)
        if not (c.qk_norm and c.qk_norm_over == "head"):
            return tuple(x if table is None else rotate(x, table) for x in heads_BSHN.values())
        scales, eps, one = {"q": self.q_norm, "k": self.k_norm}, c.norm_eps, c.norm_plus_one
        if table is None:
            return tuple(rms_norm(x, scales[name], eps, one) for name, x in heads_BSHN.items())
        return tuple(norm_rotate(x, scales[name], eps, table, one) for name, x in heads_BSHN.items())


def attention_of(
    config: ModelConfig, linears: Linears = WHOLE, number: int = 0
) -> Attention | LatentAttention | DeltaNet:
    """The attention of a model's layer, or what it has in place of it."""
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
    """What a model makes of gates and ups, the two halves of the last dimension: `silu(gate) * up`, or with a limit.

    Rows beyond the first `count`, int32 [1], mean nothing; None: all rows count. With `weights`, fp32, each row is
    multiplied by its own.
    """
    return swiglu(gate_up, count, config.swiglu_limit, config.swiglu_alpha, weights)


def swiglu(
    gate_up: Tensor,
    count: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """`silu(gate) * up`; above a limit of 0 `gate * sigmoid(alpha * gate) * (up + 1)` of gates and ups within it.

    The latter is gpt-oss's: gates are at most `limit`, and ups within plus and minus of it. See `gated` for the rest.
    """
    if usable(gate_up):
        from hocket.kernels.swiglu import swiglu

        return swiglu(gate_up, count, limit, alpha, weights)
    gate, up = gate_up.chunk(2, -1)
    if limit:
        # Of a view, for on CPUs the bits of torch's sigmoid depend on the place of an element in memory without gaps.
        bounded = gate_up.clamp(max=limit)
        gate, up = (alpha * bounded).chunk(2, -1)[0], bounded.chunk(2, -1)[1].clamp(min=-limit)
        out = F.silu(gate) * (up + 1) / alpha
    else:
        out = F.silu(gate) * up
    return out if weights is None else (out * weights.unsqueeze(-1)).to(out.dtype)


class DenseLayer(nn.Module):
    """A transformer layer with a dense MLP. Its parts are `forward_attn` and `forward_mlp`."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE, number: int = 0) -> None:
        super().__init__()
        self.norm, self.after = (config.norm_eps, config.norm_plus_one), config.norms == "after"
        self.attn_norm = new_weight(config.hidden)
        self.attn = attention_of(config, linears, number)
        self.ffn_norm = new_weight(config.hidden)
        self.mlp = Mlp(config, config.ffn, linears)

    def forward_attn(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """`x + attention(norm(x))`, or `x + norm(attention(x))`."""
        if self.after:
            return x_BSD + rms_norm(self.attn(x_BSD, documents), self.attn_norm, *self.norm)
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.attn_norm, *self.norm)
        return x_BSD + self.attn(h_BSD, documents)

    def forward_mlp(self, x_BSD: Tensor) -> Tensor:
        """`x + mlp(norm(x))`, or `x + norm(mlp(x))`."""
        if self.after:
            return x_BSD + rms_norm(self.mlp(x_BSD), self.ffn_norm, *self.norm)
        x_BSD, h_BSD = add_rms_norm(x_BSD, None, self.ffn_norm, *self.norm)
        return x_BSD + self.mlp(h_BSD)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        return self.forward_mlp(self.forward_attn(x_BSD, documents))

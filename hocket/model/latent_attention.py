"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): keys and values from a narrow latent.

    queries    wq_b(norm(wq_a(h))), or wq(h) without a latent
    latent     wkv_a(h) = [rotating key R, latent C]: the rotating part of a key is shared by all heads
    keys       [rotating key R, N], with [N, V] of every head = wkv_b(norm(latent))
    output     wo(softmax(q . k * scale) v)

Rotating elements come first, and a pair is (i, i + R / 2). In files of Hugging Face they come last, and a pair is (2i,
2i + 1): `pretrained/weights.py` permutes rows.

Tensor parallelism splits heads: `wq`, `wq_b` and `wkv_b` by columns, `wo` by rows. The weights that make latents are
whole on every rank, and process the rank's own tokens; tokens are gathered after the norms, where they are narrow.

Shapes: B sequences, S sequence length, D hidden, H query heads of a rank, C width of the latent, R rotating elements of
a head, N the other ones of a key, V width of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.layers.functional import linear, linears
from hocket.layers.linears import WHOLE, Linears, new_weight
from hocket.layers.norms import rms_norm, rotate
from hocket.model.context import in_order, token_range
from hocket.model.documents import Context, Documents, Packing, Seen, attend, has_flash
from hocket.model.rotary import mscale, rope_of, table_of

EPS = 1e-6
"""Epsilon of the norms of latents, independent of the other norms'."""


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, without norm and residual."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE, number: int = 0) -> None:
        """`number` is the layer's."""
        super().__init__()
        c = self.config = config
        self.rope = rope_of(config, number)
        self.linears, self.heads = linears, config.heads // linears.size
        queries, latent = self.heads * c.key_width, c.kv_lora_rank
        if c.q_lora_rank:
            self.wq_a = new_weight(c.q_lora_rank, c.hidden)
            self.q_a_norm = new_weight(c.q_lora_rank)
            self.wq_b = new_weight(queries, c.q_lora_rank)
        else:
            self.wq = new_weight(queries, c.hidden)
        self.wkv_a = new_weight(c.qk_rope_head_dim + latent, c.hidden)
        self.kv_a_norm = new_weight(latent)
        self.wkv_b = new_weight(self.heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
        self.wo = new_weight(c.hidden, self.heads * c.v_head_dim)

    def forward(self, h_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention of every position to itself and earlier ones of its sequence, in the shape of `h`.

        With `documents`, of its document; the sequences are then treated as one of B * S tokens.
        """
        c = self.config
        q, kv, turning = self._projected(h_BSD)
        batch, seq, _ = q.shape
        sizes = (batch, seq) if documents is None else (1, batch * seq)
        q_BSHX, k_BS1R = q.view(*sizes, self.heads, -1), turning.reshape(*sizes, 1, -1)
        q_BSHX, k_BS1R = (self._turned(x, seq, documents) for x in (q_BSHX, k_BS1R))
        k_BSHN, v_BSHV = kv.view(*sizes, self.heads, -1).split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_BSHX = torch.cat([k_BS1R.expand(-1, -1, self.heads, -1), k_BSHN], -1)
        o_BSHV = attention(q_BSHX, k_BSHX, v_BSHV, softmax_scale(c), documents)
        return self.linears.row("proj", o_BSHV.reshape(batch, seq, -1), self.wo)

    def keys(self, h_BSD: Tensor, context: Context) -> Tensor:
        """The tensor that context-parallel ranks gather: this rank's rotated keys and normed latents, [T, R + C]."""
        turning_BSR, latent_BSC = linear(h_BSD, self.wkv_a).split(self._made, -1)
        k_1T1R = self._turned(turning_BSR.reshape(1, -1, 1, turning_BSR.shape[-1]), 0, context)
        return torch.cat([k_1T1R[0, :, 0], rms_norm(latent_BSC, self.kv_a_norm, EPS).flatten(0, 1)], -1)

    def queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, None]:
        """Queries of a rank's tokens, [T, H, R + N]; there are no gates."""
        if self.config.q_lora_rank:
            made = rms_norm(linear(h_BSD, self.wq_a), self.q_a_norm, EPS)
            (q,) = self.linears.columns("qkv", made, (self.wq_b,))
        else:
            (q,) = self.linears.columns("qkv", h_BSD, (self.wq,))
        return self._turned(q.reshape(1, -1, self.heads, self.config.key_width), 0, context)[0], None

    def attended(self, kv_UX: Tensor, q_THX: Tensor, gate: None, context: Context, batch: int) -> Tensor:
        """Attention and output projection for `batch` rows. Each rank makes keys from all latents."""
        c = self.config
        turning_UR, latent_UC = in_order(kv_UX, context).split(self._made, -1)
        (kv,) = self.linears.columns("qkv", latent_UC.unsqueeze(0), (self.wkv_b,))
        k_UHN, v_UHV = kv[0].unflatten(-1, (self.heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_UHX = torch.cat([turning_UR.unsqueeze(1).expand(-1, self.heads, -1), k_UHN], -1)
        found: list[Tensor] = []
        for span in context.spans:
            k, v = (token_range(x, span.keys).unsqueeze(0) for x in (k_UHX, v_UHV))
            found.append(attention(token_range(q_THX, span.queries).unsqueeze(0), k, v, softmax_scale(c), span))
        return self.linears.row("proj", torch.cat(found, 1)[0].flatten(1).unflatten(0, (batch, -1)), self.wo)

    @property
    def _made(self) -> list[int]:
        """R and C."""
        return [self.config.qk_rope_head_dim, self.config.kv_lora_rank]

    def _turned(self, x_BSHX: Tensor, seq: int, documents: Packing | None) -> Tensor:
        """Applies rotary positions."""
        return x_BSHX if self.rope is None else rotate(x_BSHX, table_of(self.rope, seq, documents, x_BSHX.device))

    def _projected(self, h_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H * (R + N)], keys and values [B, S, H * (N + V)], rotating keys [B, S, R]: of all tokens."""
        c = self.config
        if c.q_lora_rank:
            made, both = linears(h_BSD, (self.wq_a, self.wkv_a))
            (q,) = self.linears.columns("qkv", rms_norm(made, self.q_a_norm, EPS), (self.wq_b,))
        else:
            (q,) = self.linears.columns("qkv", h_BSD, (self.wq,))
            both = linear(h_BSD, self.wkv_a)
        turning_BSR, latent_BSC = both.split(self._made, -1)
        (kv,) = self.linears.columns("qkv", rms_norm(latent_BSC, self.kv_a_norm, EPS), (self.wkv_b,))
        return q, kv, self.linears.gathered(turning_BSR)


def softmax_scale(config: ModelConfig) -> float:
    """The factor of scores; with yarn it includes that of `mscale_all_dim`.

    The latter is squared, since DeepSeek's models apply it to queries and keys alike.
    """
    rope = config.rope
    grown = mscale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" else 1.0
    return config.key_width**-0.5 * grown**2


def attention(q_BSHX: Tensor, k_BSHX: Tensor, v_BSHV: Tensor, scale: float, documents: Seen | None = None) -> Tensor:
    """Causal attention whose values may have another width than its keys: [B, S, H, V].

    Flash attention takes one width for all three: narrower ones are padded with zeros, which add nothing.
    """
    width, values = q_BSHX.shape[-1], v_BSHV.shape[-1]
    if has_flash(q_BSHX):
        width = max(width, values)
        q_BSHX, k_BSHX, v_BSHV = (F.pad(x, (0, width - x.shape[-1])) for x in (q_BSHX, k_BSHX, v_BSHV))
    if documents is not None:
        return attend(q_BSHX[0], k_BSHX[0], v_BSHV[0], documents, scale=scale)[None, ..., :values]
    q, k, v = (x.transpose(1, 2) for x in (q_BSHX, k_BSHX, v_BSHV))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)[..., :values]
